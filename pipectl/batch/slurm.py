"""Slurm through its command line tools: sbatch, squeue, sacct, scancel and sinfo.

Their text formats are stable. The JSON formats are not: ``squeue --json`` changed the type of
``job_state`` between releases, and ``sacct --json`` of 22.05 reports success for failed jobs.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import datetime, timedelta
from math import inf
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

from pipectl.batch import process, refusals
from pipectl.batch.findings import Finding, assess
from pipectl.batch.limits import Demand, Misfit, Queue, check_limits, find_misfit
from pipectl.batch.request import JobRequest
from pipectl.batch.scheduler import (
    CLOCK_SKEW_S,
    Allocation,
    CommandLineScheduler,
    JobState,
    JobStatus,
    failure,
    name_suffix,
    number_of,
)
from pipectl.batch.script import render_script
from pipectl.batch.slurm_bookings import Bookings, Expected
from pipectl.batch.slurm_output import (
    BOOKINGS_FORMAT,
    NODES_FORMAT,
    SACCT_FORMAT,
    SINFO_FORMAT,
    SQUEUE_FORMAT,
    numbers_of,
    parse_bookings,
    parse_closed,
    parse_requeue_pause,
    parse_sacct,
    parse_sinfo,
    parse_squeue,
    parse_start,
    with_cluster,
)
from pipectl.directives import SBATCH, Value, find_option
from pipectl.errors import SchedulerError, UsageError

if TYPE_CHECKING:
    from pipectl.spec import JobSpec
    from pipectl.spec.launch import Launch

_SQUEUE = ("-h", "-r", "-t", "all", "-o", SQUEUE_FORMAT)
_NOT_OVER = "PD,CF,R,S,CG"
"""States of jobs that have nodes, or may get some."""
_TIMES: Mapping[str, str | None] = {"SLURM_TIME_FORMAT": "%s"}
_CLUSTERS = "SLURM_CLUSTERS"
_SIGNALLED = 128
"""Exit codes of scripts that a signal has ended are larger."""
_MOMENT_S = 3.0
_LIFTING = ("--qos -q", "--reservation")
"""Options with which other limits may hold than those of a partition."""
_HARMLESS = ("--clusters -M", "--comment", "--mail-type", "--mail-user", "--nice", "--wckey")
"""Options that do not matter for where a job can run."""
_SIZE = re.compile(r"([0-9]{1,15})([KMGT]?)B?")
_ID = re.compile(r"[0-9]{1,18}(_[0-9]{1,9})?(;[A-Za-z0-9_.-]+)?")
"""Of a job, as a record has it."""


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
    _bookings: Mapping[str, Bookings | None] = MappingProxyType({})
    """By cluster, once they are asked for."""
    _pauses_s: Mapping[str, float] = MappingProxyType({})
    """For how long requeued jobs are held back, likewise."""

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
        request = replace(request, after=tuple(numbers_of(request.after)))
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
        mib = number_of(os.environ.get("SLURM_MEM_PER_NODE", ""))
        mib = mib or number_of(os.environ.get("SLURM_MEM_PER_CPU", "")) * min(cores, default=0)
        memory = mib * 2**20 or None
        return Allocation(job_id, tuple(nodes), tasks, is_on_node, tuple(cores), memory)

    def memory_of_rank(self, spec: JobSpec) -> int | None:
        options, resources = spec.slurm.options, spec.resources
        if size := _bytes_of(options.get("mem", "")):
            return size // resources.tasks_per_node
        if options.get("exclusive") is True:  # which has all cores of a node
            return None
        cores = 1 if "cpus-per-task" in options else resources.cpus_per_task
        return _bytes_of(options.get("mem-per-cpu", "")) * cores or None

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
        return with_cluster(job_id, cluster)

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
        ids = [job_id for job_id in ids if _ID.fullmatch(job_id)]
        if not ids:
            return {}
        # squeue fails for a single unknown id, but not for a repeated one.
        jobs = numbers_of(map(self.array_id, ids))
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
            if queued is None and not account.state.alive:
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
        self._ask("scancel", *options, *numbers_of([job_id]), variables=variables)

    def task_id(self, array_id: str, index: int) -> str:
        number, _, cluster = array_id.partition(";")
        return with_cluster(f"{number}_{index}", cluster)

    def array_id(self, task_id: str) -> str:
        number, _, cluster = task_id.partition(";")
        return with_cluster(number.partition("_")[0], cluster)

    def estimate(self, script: str) -> str | None:
        """Return the forecast of ``sbatch --test-only``, which ignores partition time limits."""
        return self._test(script, {})

    def forecast(self, request: JobRequest, queue: Queue, now: float) -> float | None:
        """See :meth:`Scheduler.forecast`.

        ``sbatch --test-only`` knows all rules, but takes jobs that wait as if they had started when
        they were submitted. Where these have an expected start, the nodes of all jobs say more; the
        later start counts where they do not say all.
        """
        start = parse_start(self._test(self.render(request), _TIMES) or "")
        if start is None:
            return None
        expected = self._expect(request, queue, now)
        if expected is None:
            return start
        is_sure = expected.is_sure and self.walltime_of(request) is not None and _is_simple(request)
        return expected.start if is_sure else max(start, expected.start)

    def forecast_again(
        self, request: JobRequest, queue: Queue, now: float, start: float, ended: float
    ) -> float:
        """See :meth:`Scheduler.forecast_again`.

        Slurm holds a job back for a while that it has requeued. Where jobs that wait have an
        expected start, it comes after those.
        """
        clusters = self.clusters_of(request)
        if clusters not in self._pauses_s:
            self._pauses_s = {**self._pauses_s, clusters: self._ask_requeue_pause(clusters)}
        earliest = ended + self._pauses_s[clusters]
        expected = self._expect(request, queue, now, earliest)
        return max(earliest, ended + start - now) if expected is None else expected.start

    def _expect(
        self, request: JobRequest, queue: Queue, now: float, earliest: float = 0.0
    ) -> Expected | None:
        """Return when a job would start by the nodes of those that have an expected start."""
        clusters = self.clusters_of(request)
        if _are_several(clusters):
            return None
        if clusters not in self._bookings:
            self._bookings = {**self._bookings, clusters: self._ask_bookings(clusters)}
        bookings = self._bookings[clusters]
        if bookings is None:
            return None
        demand = _demand(request, self.walltime_of(request) or queue.walltime_s)
        is_whole = request.slurm.options.get("exclusive") is True
        return bookings.expect(queue.name, demand, now, earliest, is_whole=is_whole)

    def _ask_requeue_pause(self, clusters: str) -> float:
        """Return for how long Slurm holds requeued jobs back."""
        where, variables = ([], {}) if _are_several(clusters) else self._on(clusters)
        config = ""
        with suppress(SchedulerError):  # no scontrol, or no answer
            done = self._run("scontrol", *where, "show", "config", variables=variables)
            config = "" if done.returncode else done.stdout
        return parse_requeue_pause(config)

    def _ask_bookings(self, clusters: str) -> Bookings | None:
        """Return who has the nodes of a cluster; None if that cannot be told."""
        where, variables = self._on(clusters)
        variables = {**_TIMES, **variables}

        def said(*command: str) -> str | None:
            done = self._run(command[0], *where, *command[1:], variables=variables)
            return None if done.returncode else done.stdout

        try:
            jobs = said("squeue", "-h", "-a", "-t", _NOT_OVER, "-o", BOOKINGS_FORMAT)
            nodes = said("sinfo", "-h", "-a", "-N", "-o", NODES_FORMAT)
            if not jobs or not nodes:
                return None
            reservations = said("scontrol", "-o", "show", "reservation")
            return parse_bookings(jobs, nodes, reservations, said("scontrol", "show", "config"))
        except SchedulerError:
            return None

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
        return None if found is not None and found.is_rule and _lifts_limits(request) else found

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
        names = [name for name in (request.slurm.partition or "").split(",") if name]
        return check_limits(
            queues,
            names,
            _demand(request, self.walltime_of(request)),
            key="slurm.partition",
            exception="if it has a QOS that lifts the limit, name that in slurm.options.qos",
            is_sure=not _lifts_limits(request),
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
        jobs = ",".join(numbers_of(map(self.array_id, ids)))
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


def _is_simple(request: JobRequest) -> bool:
    """Return whether only its size and partition decide where and when a job can run."""
    options = {name: value for name, value in request.slurm.options.items() if value is not False}
    is_whole_or_shared = options.pop("exclusive", True) is True
    is_single = not request.after and request.array is None
    return (
        is_whole_or_shared
        and is_single
        and all(find_option(SBATCH, {name: value}, _HARMLESS) for name, value in options.items())
    )


def _bytes_of(value: Value) -> int:
    """Return the bytes that an option of sbatch asks for; 0 if they are not known, which also
    sbatch takes as all that there are."""
    match = _SIZE.fullmatch(value.strip().upper()) if isinstance(value, str) else None
    return 0 if match is None else int(match[1]) * 1024 ** " KMGT".index(match[2] or "M")


def _are_several(clusters: str) -> bool:
    return "," in clusters or clusters == "all"


def _words_for(clusters: str) -> str:
    return f"cluster {clusters.replace(',', ' or ')}" if clusters else "the default cluster"


def _lifts_limits(request: JobRequest) -> bool:
    """Return whether other limits may hold for a job than those of its partition."""
    return find_option(SBATCH, request.slurm.options, _LIFTING) is not None
