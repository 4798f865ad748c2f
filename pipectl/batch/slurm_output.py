"""What Slurm's commands print: states of jobs, partitions and forecasts."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import replace
from datetime import datetime
from typing import NamedTuple

from pipectl.batch.limits import NodeKind, Queue
from pipectl.batch.reasons import is_held, slurm_hint
from pipectl.batch.scheduler import JobState, JobStatus, groups_of_user, number_of, parse_limit

SQUEUE_FORMAT = "%i|%T|%j|%S|%e|%N|%k|%r"
SACCT_FORMAT = "JobID,State,ExitCode,Submit,Start,End,NodeList"
SINFO_FORMAT = "%P|%l|%D|%c|%m|%G|%a|%s|%r|%g"
# slurm_protocol_defs.c and job_state_codes.shtml: base states, then the flags shown instead.
_STATES = {
    word: state
    for state, words in {
        JobState.QUEUED: "PENDING CONFIGURING POWER_UP_NODE REQUEUED REQUEUE_FED EXPEDITING",
        JobState.HELD: "REQUEUE_HOLD SPECIAL_EXIT RESV_DEL_HOLD",
        JobState.RUNNING: "RUNNING RESIZING SIGNALING",
        JobState.SUSPENDED: "SUSPENDED STOPPED",
        JobState.COMPLETING: "COMPLETING STAGE_OUT",
        JobState.COMPLETED: "COMPLETED",
        JobState.FAILED: "FAILED",
        JobState.CANCELLED: "CANCELLED REVOKED",
        JobState.TIMEOUT: "TIMEOUT DEADLINE",
        JobState.NODE_FAIL: "NODE_FAIL BOOT_FAIL",
        JobState.PREEMPTED: "PREEMPTED",
        JobState.OUT_OF_MEMORY: "OUT_OF_MEMORY",
    }.items()
    for word in words.split()
}
_BOOTING = frozenset({"CONFIGURING", "POWER_UP_NODE"})
_RUNS = frozenset({JobState.RUNNING, JobState.SUSPENDED})
# In these states Slurm still gives the reason for which the job waited.
_REASON_IS_STALE = frozenset({JobState.COMPLETED, JobState.CANCELLED})
_NO_REASON = frozenset({"None", "(null)", ""})
_CLUSTER = re.compile(r"CLUSTER: (\S+)")
_WAITING = re.compile(r"([0-9]{1,18})_\[([0-9,-]{1,9999})(?:%[0-9]+)?\]")
_SECONDS = re.compile(r"[1-9][0-9]{0,10}")
_GPUS = re.compile(r"\bgpu(?::[^:,()]+){0,2}:(\d{1,6})\b")
_GPU_TYPES = re.compile(r"\bgpu:([^:,()]+):")
_COUNT = re.compile(r"(\d{1,9}(?:\.\d{1,9})?)([KM]?)")
_START = re.compile(r" to start at (\S+)")
_FIELD = re.compile(r"(\w+)=(\S*)")
_UNSET_BYTES = 64 * 2**20
"""Slurm reports 1 MB for nodes whose memory is not configured."""


class Listed(NamedTuple):
    """A row of squeue or sacct."""

    job_id: str
    status: JobStatus
    comment: str = ""
    name: str = ""
    submitted_at: float | None = None


def parse_squeue(stdout: str, cluster: str | None = "") -> Iterator[Listed]:
    """Parse ``squeue -h -o SQUEUE_FORMAT``, with times in seconds since the epoch.

    Args:
        cluster: of the jobs, for their ids, until a line names another; None if only such lines
            tell. Empty for the default.
    """
    for line in stdout.splitlines():
        if named := _CLUSTER.fullmatch(line.strip()):
            cluster = named[1]
        fields = line.split("|", 6)
        comment, bar, reason = fields[-1].rpartition("|")  # a comment may contain one
        if len(fields) == 7 and bar and cluster is not None:
            job_ids, word, name, start, end, nodes, _ = fields
            status = _status(word, start, end, nodes, reason=reason)
            for job_id in _job_ids(job_ids):
                if status.state.waits:
                    held = status.state is JobState.HELD
                    hint = slurm_hint(status.reason, job_id, cluster, held=held)
                    status = replace(status, hint=hint)
                yield Listed(with_cluster(job_id, cluster), status, comment, name)


def parse_sacct(stdout: str, cluster: str = "") -> Iterator[Listed]:
    """Parse ``sacct -n -P -o SACCT_FORMAT``: a row per attempt of a job, oldest first."""
    for fields in (line.split("|") for line in stdout.splitlines()):
        if len(fields) >= 7:
            job_ids, word, code, submit, start, end, nodes = fields[:7]
            status = _status(word, start, end, nodes, code=code, source="accounting")
            for job_id in _job_ids(job_ids):
                listed = with_cluster(job_id, cluster)
                yield Listed(listed, status, submitted_at=_time(submit))


def with_cluster(job_id: str, cluster: str) -> str:
    """Return a job's id as ``sbatch --parsable`` writes it; jobs of two clusters may have one
    number."""
    return f"{job_id};{cluster}" if cluster else job_id


def numbers_of(ids: Iterable[str]) -> list[str]:
    """Return ids without their cluster, each once."""
    return list(dict.fromkeys(job_id.partition(";")[0] for job_id in ids))


def _job_ids(listed: str) -> Iterator[str]:
    """Yield the jobs of a row; waiting jobs of an array share one, such as ``35_[2-3,7%2]``."""
    waiting = _WAITING.fullmatch(listed)
    if waiting is None:
        yield listed
        return
    for part in waiting[2].split(","):
        first, _, last = part.partition("-")
        if first and len(first) < 7 and len(last) < 7:
            yield from (f"{waiting[1]}_{i}" for i in range(int(first), int(last or first) + 1))


def parse_state(text: str) -> JobState:
    """Parse ``RUNNING``, ``CANCELLED by 1000``, ``CANCELLED+`` or a list of states.

    Of several states, the one that is not final counts; unknown words are UNKNOWN.
    """
    words = (part.split()[0].rstrip("+") for part in text.split(",") if part.strip())
    states = [_STATES.get(word, JobState.UNKNOWN) for word in words]
    states = [state for state in states if state is not JobState.UNKNOWN]
    return min(states, key=lambda state: state.final, default=JobState.UNKNOWN)


def _status(
    word: str,
    start: str,
    end: str,
    nodes: str,
    *,
    reason: str = "",
    code: str = "",
    source: str = "queue",
) -> JobStatus:
    """Return a job's status; of the code ``code:signal``, a signal becomes 128 + signal."""
    state = parse_state(word)
    if state is JobState.UNKNOWN:
        reason = f"Slurm calls its state {word!r}"
    elif word in _BOOTING:
        reason = "nodes are booting"
    elif reason in _NO_REASON or state in _REASON_IS_STALE:
        reason = ""
    if state is JobState.QUEUED and is_held(reason):
        state = JobState.HELD
    exit_code = 0 if state is JobState.COMPLETED else None
    if state.final and (match := re.fullmatch(r"([0-9]{1,9}):([0-9]{1,9})", code)):
        signal = int(match[2])
        exit_code = int(match[1]) or (128 + signal if signal else exit_code)
    return JobStatus(
        state,
        reason=reason,
        exit_code=exit_code,
        nodes="" if nodes in {"None assigned", "(null)"} else nodes,
        start=_time(start),
        end=_time(end) if state.final else None,
        source=source,
        deadline=_time(end) if state in _RUNS else None,
    )


def parse_sinfo(stdout: str) -> tuple[Queue, ...]:
    """Parse ``sinfo -h -e -o SINFO_FORMAT``: the partitions, the default first.

    There is a line per kind of node.
    """
    partitions: dict[str, Queue] = {}
    for line in stdout.splitlines():
        fields = line.split("|")
        if len(fields) not in (8, 10):
            continue
        name, limit, nodes, cores, memory, gres, state, job_size, *access = fields
        size = number_of(memory) * 2**20
        kind = NodeKind(
            nodes=_count(nodes),
            cores=_count(cores),
            memory_bytes=size if size >= _UNSET_BYTES else None,
            gpus=sum(map(int, _GPUS.findall(gres))),
            gpu=",".join(_GPU_TYPES.findall(gres)),
        )
        queue = Queue(
            name.removesuffix("*"),
            default=name.endswith("*"),
            open=state == "up",
            for_user=not access or _is_for_user(*access),
            walltime_s=parse_limit(limit),
            min_nodes=_count(job_size),
            max_nodes=_count(job_size.rpartition("-")[2]) or None,
        )
        queue = partitions.get(queue.name, queue)
        partitions[queue.name] = replace(queue, kinds=(*queue.kinds, kind))
    return tuple(sorted(partitions.values(), key=lambda queue: not queue.default))


def parse_closed(stdout: str, account: str | None, qos: str) -> set[str]:
    """Parse ``scontrol -o show partition``: the partitions that an account or QOS may not use.

    Args:
        account, qos: of a job; those that it does not name are not known.
    """
    closed = set[str]()
    for line in stdout.splitlines():
        fields = dict(_FIELD.findall(line))
        for kind, own in (("Accounts", account), ("Qos", qos)):
            allowed, denied = (
                fields.get(f"{verb}{kind}", "").lower().split(",") for verb in ("Allow", "Deny")
            )
            is_allowed = allowed in ([""], ["all"]) or (own or "").lower() in allowed
            if own and "PartitionName" in fields and (not is_allowed or own.lower() in denied):
                closed.add(fields["PartitionName"])
    return closed


def _is_for_user(root_only: str, groups: str) -> bool:
    """Return whether this user may use a partition, from sinfo's ``%r`` and ``%g``."""
    own = groups_of_user()
    return root_only != "yes" and (groups == "all" or not own.isdisjoint(groups.split(",")))


def _count(text: str) -> int:
    """Return a number as sinfo writes it, or the minimum of a range; 0 if there is none.

    1024 is ``1K``, and 1536 ``1.50K``.
    """
    match = _COUNT.match(text)
    return round(float(match[1]) * 1024 ** " KM".index(match[2] or " ")) if match else 0


def _time(text: str) -> float | None:
    """Return seconds since the epoch; None for ``N/A``, ``Unknown`` and the like."""
    return float(text) if _SECONDS.fullmatch(text) else None


def parse_start(said: str) -> float | None:
    """Return the time in the words of ``sbatch --test-only``, in seconds since the epoch; None if
    it names none. A program of the site may hide the variable for its form."""
    found = _START.search(said)
    if found is None:
        return None
    if (known := _time(found[1])) is not None:
        return known
    try:
        return datetime.strptime(found[1], "%Y-%m-%dT%H:%M:%S").timestamp()
    except ValueError:
        return None
