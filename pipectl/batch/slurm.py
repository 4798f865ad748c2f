"""Slurm through its command line tools: sbatch, squeue, sacct, scancel and sinfo.

Their text formats are stable. The JSON formats are not: ``squeue --json`` changed the type of
``job_state`` between releases, and ``sacct --json`` of 22.05 reports success for failed jobs.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from math import inf
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

from pipectl.batch import process, refusals
from pipectl.batch.findings import Finding, assess
from pipectl.batch.limits import Demand, Misfit, NodeKind, Queue, check_limits, find_misfit
from pipectl.batch.reasons import is_held, slurm_hint
from pipectl.batch.request import JobRequest
from pipectl.batch.scheduler import (
    CLOCK_SKEW_S,
    Allocation,
    CommandLineScheduler,
    JobState,
    JobStatus,
    failure,
    groups_of_user,
    name_suffix,
    number_of,
    parse_limit,
)
from pipectl.batch.script import render_script
from pipectl.directives import SBATCH, find_option
from pipectl.errors import SchedulerError, UsageError

if TYPE_CHECKING:
    from pipectl.spec.launch import Launch

SQUEUE_FORMAT = "%i|%T|%j|%S|%e|%N|%k|%r"
SACCT_FORMAT = "JobID,State,ExitCode,Submit,Start,End,NodeList"
SINFO_FORMAT = "%P|%l|%D|%c|%m|%G|%a|%s|%r|%g"
_SQUEUE = ("-h", "-r", "-t", "all", "-o", SQUEUE_FORMAT)
_TIMES: Mapping[str, str | None] = {"SLURM_TIME_FORMAT": "%s"}
_CLUSTERS = "SLURM_CLUSTERS"
_SIGNALLED = 128
"""Exit codes of scripts that a signal has ended are larger."""
_MOMENT_S = 3.0


class SlurmScheduler(CommandLineScheduler):
    """Slurm 20.02 or later."""

    name, title = "slurm", "Slurm"
    programs = ("sbatch",)
    # The shell of salloc on a login node has only SLURM_JOB_ID.
    node_variables = frozenset({"SLURM_JOB_ID", "SLURMD_NODENAME"})
    submit_options = frozenset({"--partition", "--account", "--gres"})
    queue_key = "partition"
    takes_range = True
    unreachable_hint = "ask the site, or set SLURM_CONF"
    submit_command = ("sbatch", "--parsable")
    id_patterns = (
        re.compile(r"Submitted batch job ([0-9]{1,18})(?: on cluster ([A-Za-z0-9_.-]+))?"),
        re.compile(r"([0-9]{1,18});([A-Za-z0-9_.-]+)"),
        re.compile(r"([0-9]{1,18})()"),
    )
    list_command = "squeue --me -o '%i %j %k'"
    hidden_variables = ("SBATCH_", "SLURM_", "SQUEUE_", "SACCT_", "SCANCEL_", "SINFO_")
    visible_variables = frozenset(
        {"SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_CLUSTERS", "SLURM_JWT"}
    )
    refusals, advice = refusals.SLURM, refusals.SLURM_ADVICE
    unsent_message = "configuration source"

    def ping(self) -> None:
        self._ask("squeue", *_SQUEUE, "--me", variables=_TIMES)

    def examine(self, launch: Launch | None) -> Iterator[Finding]:
        """Check that Slurm answers, and that ``srun --mpi`` accepts the value of the job."""
        from pipectl.batch.launchers import AUTO, knows_pmi, list_pmis

        release = self._ask("sinfo", "--version").stdout
        partitions = self._ask("sinfo", "-h", "-o", "%P").stdout.split()
        yield assess(self.title, f"{release}; partitions {', '.join(partitions) or 'none'}")
        kinds = list_pmis()
        mpi = AUTO if launch is None or launch.launcher != "srun" else launch.mpi
        text = f"srun --mpi: {', '.join(kind for kind in kinds if kind != 'none') or 'none'}"
        if mpi != AUTO and not knows_pmi(kinds, mpi):
            hint = "set launch.mpi to the one that your MPI needs"
            yield Finding("PMI", "fail", f"{text}; the job wants {mpi}", hint)
        else:
            yield assess("PMI", text)

    def render(self, request: JobRequest) -> str:
        """The tag is the comment of a job, or the end of its name if the comment is the user's."""
        name = request.name
        if "comment" in request.slurm.options:
            name += name_suffix(request.tag)
        request = replace(request, after=tuple(_numbers(request.after)))
        return render_script("slurm.sh.j2", request, self.name, job_name=name)

    def allocation(self) -> Allocation | None:
        job_id, names = os.environ.get("SLURM_JOB_ID"), os.environ.get("SLURM_JOB_NODELIST")
        if not job_id or not names:
            return None
        nodes = self._ask("scontrol", "show", "hostnames", names).stdout.split()
        tasks = number_of(os.environ.get("SLURM_TASKS_PER_NODE", "")) or 1
        counts = os.environ.get("SLURM_JOB_CPUS_PER_NODE", "")  # such as 8(x2),4
        found = re.findall(r"(\d+)(?:\(x(\d+)\))?", counts)
        cores = [int(count) for count, times in found for _ in range(int(times or 1))]
        is_on_node = "SLURMD_NODENAME" in os.environ
        return Allocation(job_id, tuple(nodes), tasks, is_on_node, tuple(cores))

    def _describe_tag(self, tag: str) -> str:
        return f"with the tag {tag!r} in its comment or name"

    def clusters_of(self, request: JobRequest) -> str:
        """See :meth:`Scheduler.clusters_of`; a job can only wait for jobs of its own cluster."""
        named = self._option(request, "--clusters -M")
        named = named or request.cluster or os.environ.get(_CLUSTERS, "")
        for cluster in {self.cluster_of(job_id) for job_id in request.after}:
            if cluster != named and cluster not in named.split(",") and named != "all":
                there = f"set slurm.options.clusters: {cluster}"
                raise UsageError(
                    f"--after: the job to wait for is on {_words_for(cluster)}, and this one goes "
                    f"to {_words_for(named)}",
                    hint=f"{there if cluster else 'name no cluster'}, or wait for its end",
                )
            named = cluster
        return named

    def walltime_of(self, request: JobRequest) -> int | None:
        is_ours = request.slurm.options.keys().isdisjoint(SBATCH.replacements["time"])
        return request.resources.walltime if is_ours else None

    def cluster_of(self, job_id: str) -> str:
        return job_id.partition(";")[2]

    def _place(self, job_id: str, cluster: str, clusters: str) -> str | None:
        cluster = cluster or ("" if _are_several(clusters) else clusters)
        if clusters and not cluster:
            return None
        return _with_cluster(job_id, cluster)

    def _on(self, clusters: str) -> tuple[tuple[str, ...], Mapping[str, str | None]]:
        # As a variable too, for programs of the site that stand for Slurm's.
        return ("-M", clusters) if clusters else (), {_CLUSTERS: clusters or None}

    def _states(
        self, ids: Sequence[str], cluster: str, since: float | None
    ) -> Mapping[str, JobStatus]:
        """Ask squeue, and the accounting for jobs that have ended or are not listed.

        A job that has written its exit code is known, unless a signal ended it: the accounting may
        know why, and has a moment to say so.
        """
        # A damaged record must not hide the other jobs.
        ids = [job_id for job_id in ids if _ASKED.fullmatch(job_id)]
        if not ids:
            return {}
        # squeue fails for a single unknown id, but not for a repeated one.
        jobs = _numbers(map(self.array_id, ids))
        options, variables = self._on(cluster)
        command = ("squeue", *options, *_SQUEUE, "-j", ",".join([*jobs, jobs[0]]))
        done = self._ask(*command, variables={**_TIMES, **variables})
        states = {row.job_id: row.status for row in parse_squeue(done.stdout, cluster)}
        over = [job_id for job_id in ids if job_id not in states or states[job_id].state.final]
        codes = self.exit_codes
        over = [job_id for job_id in over if codes.get(job_id, _SIGNALLED) >= _SIGNALLED]
        max_s = _MOMENT_S if codes.keys() >= {*over} else inf
        try:
            accounts = self._accounting(over, cluster, since, max_s) if over else {}
        except SchedulerError as error:
            reason = f"no longer listed, and the accounting does not answer: {error.message}"
            unknown = JobStatus(JobState.UNKNOWN, reason=reason, source="none")
            return {**{job_id: unknown for job_id in over if job_id not in codes}, **states}
        for job_id in accounts.keys() & set(over):
            account, queued = accounts[job_id], states.get(job_id)
            if queued is None and account.state.final:
                states[job_id] = account
            elif queued is None:
                reason = f"no longer listed, though the accounting still says {account.state}"
                states[job_id] = replace(account, state=JobState.UNKNOWN, reason=reason)
            elif account.state is queued.state:  # the accounting may lag
                states[job_id] = replace(queued, exit_code=account.exit_code)
        return states

    def _hand_over(self, script: Path, options: Sequence[str]) -> process.Completed:
        done = super()._hand_over(script, options)
        if done.returncode and "--parsable" in done.stderr:  # a wrapper that does not know it
            done = self._run("sbatch", *options, str(script))
        return done

    def cancel(self, job_id: str) -> None:
        options, variables = self._on(self.cluster_of(job_id))
        # It is silent on unknown ids.
        self._ask("scancel", *options, *_numbers([job_id]), variables=variables)

    def task_id(self, array_id: str, index: int) -> str:
        number, _, cluster = array_id.partition(";")
        return _with_cluster(f"{number}_{index}", cluster)

    def array_id(self, task_id: str) -> str:
        number, _, cluster = task_id.partition(";")
        return _with_cluster(number.partition("_")[0], cluster)

    def estimate(self, script: str) -> str | None:
        """Return the forecast of ``sbatch --test-only``, which ignores partition time limits."""
        return self._test(script, {})

    def forecast(self, request: JobRequest, queue: Queue, now: float) -> float | None:  # noqa: ARG002
        """See :meth:`Scheduler.forecast`. Slurm counts the jobs that run, and those that wait in
        the same partition."""
        said = self._test(self.render(request), _TIMES)
        found = _START.search(said or "")
        return None if found is None else _time(found[1]) or _local_time(found[1])

    def _test(self, script: str, variables: Mapping[str, str | None]) -> str | None:
        """Return the line of ``sbatch --test-only`` with the start; None if there is none."""
        names_clusters = re.search(r"^#SBATCH (--cluster|-M)", script, re.MULTILINE)
        # The variable would overrule the script.
        hidden: dict[str, str | None] = {_CLUSTERS: None} if names_clusters else {}
        done = self._run("sbatch", "--test-only", stdin=script, variables={**hidden, **variables})
        if done.returncode != 0:
            raise self._refusal(done)
        lines = f"{done.stderr}\n{done.stdout}".splitlines()
        forecasts = (line for line in lines if " to start at " in line)
        return next((line.removeprefix("sbatch: ") for line in forecasts), None)

    def find_all(self, tags: Collection[str], clusters: str = "") -> Mapping[str, str]:
        options, variables = self._on(clusters)
        # Only with headers, several clusters say which jobs are whose.
        form = _SQUEUE[1:] if clusters else _SQUEUE
        command = ("squeue", *options, *form, "--me")
        done = self._run(*command, variables={**_TIMES, **variables})
        found: dict[str, str] = {}
        for row in parse_squeue(done.stdout, None if _are_several(clusters) else clusters):
            for tag in tags:
                if row.comment == tag or row.name.endswith(name_suffix(tag)):
                    ids = (self.array_id(row.job_id), found.get(tag, ""))
                    found[tag] = max(ids, key=number_of)
        if done.returncode and not found:  # one of several clusters may not answer
            raise failure(command, done)
        return found

    def queues(self) -> tuple[Queue, ...]:
        return self._sinfo()

    def queues_for(self, request: JobRequest) -> tuple[Queue, ...]:
        """See :meth:`Scheduler.queues_for`; sinfo knows groups, but neither accounts nor QOS.

        Raises:
            UsageError: the job may go to several clusters.
        """
        clusters = self.clusters_of(request)
        if _are_several(clusters):
            raise UsageError(
                f"the job may go to {_words_for(clusters)}, and partitions are of one cluster",
                hint="name one: slurm.options.clusters",
            )
        where, variables = self._on(clusters)
        queues = self._sinfo(*where, "-a", variables=variables)
        command = ("scontrol", *where, "-a", "-o", "show", "partition")
        try:
            done = self._run(*command, variables=variables)
        except SchedulerError:
            return queues
        closed = parse_closed(done.stdout, request.slurm.account, self._option(request, "--qos -q"))
        return tuple(
            replace(queue, for_user=queue.for_user and queue.name not in closed) for queue in queues
        )

    def misfit(self, queue: Queue, request: JobRequest) -> Misfit | None:
        """See :meth:`Scheduler.misfit`; a QOS or a reservation may lift rules of a partition."""
        found = find_misfit(queue, _demand(request, self.walltime_of(request)))
        is_lifted = find_option(SBATCH, request.slurm.options, _LIFTING) is not None
        return None if found is not None and found.is_rule and is_lifted else found

    @staticmethod
    def _option(request: JobRequest, name: str) -> str:
        """Return the value of an option of the user, such as ``--qos -q``; empty if it has none."""
        options = request.slurm.options
        value = options.get(find_option(SBATCH, options, [name]) or "", "")
        return value[-1] if isinstance(value, tuple) else value if isinstance(value, str) else ""

    def check(self, request: JobRequest) -> str:
        clusters = self.clusters_of(request)
        if _are_several(clusters):
            return ""  # their partitions may have the same names
        try:
            where, variables = self._on(clusters)
            # Nodes in a cloud that are off are hidden without `-a`.
            queues = self._sinfo(*where, "-a", variables=variables)
        except SchedulerError:
            return ""
        options = request.slurm.options
        is_lifted = find_option(SBATCH, options, _LIFTING) is not None
        names = [name for name in (request.slurm.partition or "").split(",") if name]
        return check_limits(
            queues,
            names,
            _demand(request, self.walltime_of(request)),
            key="slurm.partition",
            exception="if it has a QOS that lifts the limit, name that in slurm.options.qos",
            is_sure=not is_lifted,
        )

    def _sinfo(
        self, *selection: str, variables: Mapping[str, str | None] = MappingProxyType({})
    ) -> tuple[Queue, ...]:
        """Return the partitions; ``-e`` lists nodes that differ apart."""
        command = ("sinfo", "-h", "-e", *selection, "-o", SINFO_FORMAT)
        return parse_sinfo(self._ask(*command, variables=variables).stdout)

    def _accounting(
        self, ids: Sequence[str], cluster: str, since: float | None, max_s: float
    ) -> dict[str, JobStatus]:
        """Return the latest attempts; empty if the site has no accounting.

        Raises:
            SchedulerError: it does not answer.
        """
        jobs = ",".join(_numbers(map(self.array_id, ids)))
        options, variables = self._on(cluster)
        command = ["sacct", *options, "-X", "-D", "-n", "-P", "-j", jobs, "-o", SACCT_FORMAT]
        if since is not None:
            command += ["-S", f"{datetime.fromtimestamp(since) - timedelta(days=1):%Y-%m-%d}"]
        if shutil.which("sacct") is None:
            return {}
        done = self._run(*command, max_s=max_s, variables={**_TIMES, **variables})
        if done.returncode and "disabled" not in done.message:
            raise SchedulerError(done.error_line)
        oldest = (since or 0.0) - CLOCK_SKEW_S  # older jobs have reused ids
        accounts = parse_sacct(done.stdout, cluster)
        rows = [row for row in accounts if (row.submitted_at or inf) >= oldest]
        rows.sort(key=lambda row: inf if row.status.start is None else row.status.start)
        return {row.job_id: row.status for row in rows}


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
_LIFTING = ("--qos -q", "--reservation")
"""Options with which other limits may hold than those of a partition."""
_ASKED = re.compile(r"[0-9]{1,18}(_[0-9]{1,9})?(;[A-Za-z0-9_.-]+)?")
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
                yield Listed(_with_cluster(job_id, cluster), status, comment, name)


def parse_sacct(stdout: str, cluster: str = "") -> Iterator[Listed]:
    """Parse ``sacct -n -P -o SACCT_FORMAT``: a row per attempt of a job, oldest first."""
    for fields in (line.split("|") for line in stdout.splitlines()):
        if len(fields) >= 7:
            job_ids, word, code, submit, start, end, nodes = fields[:7]
            status = _status(word, start, end, nodes, code=code, source="accounting")
            for job_id in _job_ids(job_ids):
                listed = _with_cluster(job_id, cluster)
                yield Listed(listed, status, submitted_at=_time(submit))


def _with_cluster(job_id: str, cluster: str) -> str:
    """Return a job's id as ``sbatch --parsable`` writes it; jobs of two clusters may have one
    number."""
    return f"{job_id};{cluster}" if cluster else job_id


def _numbers(ids: Iterable[str]) -> list[str]:
    """Return ids without their cluster, each once."""
    return list(dict.fromkeys(job_id.partition(";")[0] for job_id in ids))


def _are_several(clusters: str) -> bool:
    return "," in clusters or clusters == "all"


def _words_for(clusters: str) -> str:
    return f"cluster {clusters.replace(',', ' or ')}" if clusters else "the default cluster"


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


def _demand(request: JobRequest, walltime_s: int | None) -> Demand:
    """Return what a job asks for, as far as its options do not ask for something else."""
    resources, options = request.resources, request.slurm.options

    def has(*table: str) -> bool:
        return find_option(SBATCH, options, table) is not None

    table = SBATCH.replacements
    replaced = {key for key, names in table.items() if options.keys() & {*names}}
    cores: int | None = resources.tasks_per_node * resources.cpus_per_task
    if replaced & {"cpus-per-task", "ntasks-per-node"} or has("--overcommit -O"):
        cores = None
    mib = request.memory_per_node_mib
    return Demand(
        nodes=resources.min_nodes,
        walltime_s=None if has("--time-min") else walltime_s,
        cores=cores,
        memory_bytes=None if "mem" in replaced or mib is None else mib * 2**20,
        gpus=None if "gpus-per-node" in replaced else resources.gpus_per_node,
        single_process=request.single_process,
    )


def _time(text: str) -> float | None:
    """Return seconds since the epoch; None for ``N/A``, ``Unknown`` and the like."""
    return float(text) if _SECONDS.fullmatch(text) else None


def _local_time(text: str) -> float | None:
    """Return seconds since the epoch of a time as Slurm writes it by itself: a program of the site
    may hide the variable for its form."""
    try:
        return datetime.strptime(text, "%Y-%m-%dT%H:%M:%S").timestamp()
    except ValueError:
        return None
