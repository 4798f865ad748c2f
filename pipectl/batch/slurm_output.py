"""What Slurm's commands print: states of jobs, partitions, forecasts, and the nodes of jobs."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from itertools import product
from math import inf
from typing import NamedTuple

from pipectl.batch.limits import NodeKind, Queue
from pipectl.batch.reasons import is_held, slurm_hint
from pipectl.batch.scheduler import JobState, JobStatus, groups_of_user, number_of, parse_limit
from pipectl.batch.slurm_bookings import Booking, Bookings, Node, Reservation

SQUEUE_FORMAT = "%i|%T|%j|%S|%e|%N|%k|%r"
SACCT_FORMAT = "JobID,State,ExitCode,Submit,Start,End,NodeList"
SINFO_FORMAT = "%P|%l|%D|%c|%m|%G|%a|%s|%r|%g"
BOOKINGS_FORMAT = "%T|%P|%S|%e|%C|%N|%Y|%h|%r"
NODES_FORMAT = "%N|%R|%T|%c|%m|%G|%h|%p"
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
        JobState.CANCELLED: "CANCELLED",
        JobState.TIMEOUT: "TIMEOUT DEADLINE",
        JobState.NODE_FAIL: "NODE_FAIL BOOT_FAIL",
        JobState.PREEMPTED: "PREEMPTED",
        JobState.OUT_OF_MEMORY: "OUT_OF_MEMORY",
    }.items()
    for word in words.split()
}
_BOOTING = frozenset({"CONFIGURING", "POWER_UP_NODE"})
_REVOKED = "revoked, because another cluster of its federation has started it"
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
_SETTING = re.compile(r"(\w+) *= (.*)")
_EXPIRES = re.compile(r"\bcred_expire=(\d+)")
_EXPIRES_S = 120
"""What Slurm takes for cred_expire if that is not set."""
_HOSTS = re.compile(r"(?:[^,\[\]]|\[[^\]]*\])+")
_RANGES = re.compile(r"\[([0-9]{1,9}(?:[,-][0-9]{1,9})*)\]")
_NO_HOSTS = frozenset({"", "(null)", "n/a", "None assigned"})
_USABLE = re.compile(
    "(allocated|blocked|completing|idle|maint|mixed|planned|power\\w*|reboot\\w*|reserved)[^*\\w]*"
)
"""States of nodes that take new jobs, at once or later; a ``*`` is for those that do not answer."""
_SHARED = re.compile("FORCE(?!:1$)")
_PRIVATE = frozenset({"jobs", "nodes", "partitions", "reservations"})
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
        reason = _REVOKED if word == "REVOKED" else f"Slurm calls its state {word!r}"
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


def parse_requeue_pause(config: str) -> float:
    """Return for how long requeued jobs are held back (``cred_expire`` in slurm.conf(5)).

    Args:
        config: ``scontrol show config``.
    """
    found = _EXPIRES.search(dict(_SETTING.findall(config)).get("AuthInfo", ""))
    return float(found[1] if found else _EXPIRES_S) + 1


def parse_bookings(jobs: str, nodes: str, reservations: str | None, config: str | None) -> Bookings:
    """Parse what is known of nodes and of who has them, with times in seconds since the epoch.

    Args:
        jobs: ``squeue -h -o BOOKINGS_FORMAT``, of jobs that are not over.
        nodes: ``sinfo -h -N -o NODES_FORMAT``.
        reservations: ``scontrol -o show reservation``; None if that fails.
        config: ``scontrol show config``; None if that fails.
    """
    settings = dict(_SETTING.findall(config or ""))
    select = f"{settings.get('SelectType', 'cons')} {settings.get('SelectTypeParameters')}".lower()
    known, tiers, whole = _parse_nodes(nodes)
    if "cons" not in select:  # select/linear
        whole = frozenset(tiers)
    private = settings.get("PrivateData", "jobs").strip().split(",")
    found, is_complete = list[Booking](), reservations is not None and _PRIVATE.isdisjoint(private)
    for fields in (line.split("|", 8) for line in jobs.splitlines()):
        if len(fields) < 9 or (fields[0] == "PENDING" and is_held(fields[8])):
            continue
        booking = _parse_booking(fields, known, whole)
        found += [booking] if booking.nodes else []
        # When a suspended job goes on is not known, nor what nodes are that sinfo does not list.
        is_suspended = parse_state(fields[0]) is JobState.SUSPENDED
        is_complete &= not is_suspended and known.keys() >= {*booking.nodes}
    return Bookings(
        known,
        tuple(found),
        tiers,
        whole,
        tuple(_parse_reservations(reservations or "")),
        shares_memory="memory" in select,
        preempts=not settings.get("PreemptType", "none").strip().endswith("none"),
        is_complete=is_complete,
    )


def _parse_nodes(stdout: str) -> tuple[dict[str, Node], dict[str, int], frozenset[str]]:
    """Return the nodes, the tiers of their partitions, and those whose jobs have whole nodes."""
    nodes, tiers, whole = dict[str, Node](), dict[str, int](), set[str]()
    for fields in (line.split("|") for line in stdout.splitlines()):
        if len(fields) != 8:
            continue
        name, partition, state, cores, memory, gres, oversubscribes, tier = fields
        tiers[partition] = number_of(tier)
        if oversubscribes == "EXCLUSIVE":
            whole.add(partition)
        size, partitions = number_of(memory) * 2**20, frozenset[str]()
        if name in nodes:
            partitions = nodes[name].partitions
        # Where several jobs get the same cores, those do not tell how many are free.
        nodes[name] = Node(
            partitions if _SHARED.match(oversubscribes) else partitions | {partition},
            _count(cores),
            size if size >= _UNSET_BYTES else None,
            sum(map(int, _GPUS.findall(gres))),
            _USABLE.fullmatch(state) is not None,
        )
    return nodes, tiers, frozenset(whole)


def _parse_booking(
    fields: Sequence[str], nodes: Mapping[str, Node], whole: frozenset[str]
) -> Booking:
    """Return what a line of BOOKINGS_FORMAT says; a job without an expected start has no nodes."""
    word, partitions = fields[0], tuple(fields[1].split(","))
    start, end = _time(fields[2]) or 0.0, _time(fields[3]) or inf
    waits = parse_state(word).waits and word not in _BOOTING
    names = tuple(expand_hosts(fields[6] if waits else fields[5]))
    largest = max((nodes[name].cores for name in names if name in nodes), default=0)
    cores = -(-_count(fields[4]) // max(1, len(names)))
    is_whole = fields[7] == "NO" or cores >= largest or not whole.isdisjoint(partitions)
    return Booking(names, None if is_whole else cores, start, end, partitions, waits)


def _parse_reservations(stdout: str) -> Iterator[Reservation]:
    for line in stdout.splitlines():
        fields = dict(_FIELD.findall(line))
        if names := frozenset(expand_hosts(fields.get("Nodes", ""))):
            start, end = (_time(fields.get(f"{name}Time", "")) for name in ("Start", "End"))
            yield Reservation(names, start or 0.0, end or inf)


def expand_hosts(hosts: str) -> Iterator[str]:
    """Yield the names in a list such as ``login,node[01-03,7]``."""
    for part in () if hosts in _NO_HOSTS else _HOSTS.findall(hosts):
        # Texts and ranges take turns.
        choices = [
            list(_numbers(piece)) if index % 2 else [piece]
            for index, piece in enumerate(_RANGES.split(part))
        ]
        yield from map("".join, product(*choices))


def _numbers(ranges: str) -> Iterator[str]:
    """Yield the numbers of ``01-03,7``; all of a range have the width of the first."""
    for each in ranges.split(","):
        first, _, last = each.partition("-")
        for number in range(int(first), int(last or first) + 1):
            yield f"{number:0{len(first)}}"


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
