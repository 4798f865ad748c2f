"""PBS Pro and OpenPBS through their command line tools: qsub, qstat, qselect, qdel and pbsnodes.

The output of ``qstat -f`` is read as lines ``name = value``. Its JSON form may be invalid if a
job's environment contains quotes, and some releases print only the first of several jobs.
"""

from __future__ import annotations

import getpass
import os
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from pipectl.batch import process, refusals
from pipectl.batch.findings import Finding, assess
from pipectl.batch.limits import Demand, Misfit, NodeKind, Queue, check_limits, find_misfit
from pipectl.batch.reasons import pbs_hint
from pipectl.batch.request import JobRequest
from pipectl.batch.scheduler import (
    Allocation,
    CommandLineScheduler,
    JobState,
    JobStatus,
    OtherSystemError,
    groups_of_user,
    name_suffix,
    number_of,
    parse_limit,
)
from pipectl.batch.script import render_script
from pipectl.directives import PBS_GPUS, SELECT_COUNT, options_of
from pipectl.errors import InvalidInputError, SchedulerError

if TYPE_CHECKING:
    from pipectl.spec import JobSpec
    from pipectl.spec.launch import Launch

_UNKNOWN_ID, _FINISHED, _REJECTED_BY_HOOK = 153, 35, 32
"""Exit codes: PBS's error numbers modulo 256."""
_NAME_LENGTH = 200
_VERSION_S = 5.0
_OTHER_SYSTEMS = {
    "Torque": re.compile(r"^Version: \d|qsub: submit error \(", re.MULTILINE),
    "Grid Engine": re.compile(
        r"^\w*GE \d|unable to run job|^error: unknown option|invalid option argument"
        "|-h(?:elp)? for help",
        re.MULTILINE | re.IGNORECASE,
    ),
}
"""Parts of what the commands print: for their version, or of an option that they do not know."""
OF_OTHER_SYSTEMS = "qsub is that of {} here, for which pipectl cannot write jobs"
HINT_OF_OTHER_SYSTEMS = (
    "submit a job script of your own for one node, with the line\n"
    "pipectl submit JOB.yaml --scheduler local --wait"
)


class PbsScheduler(CommandLineScheduler):
    """PBS Pro from version 13, or OpenPBS. (Torque is another system.)"""

    name, title = "pbs", "PBS"
    programs = ("qsub", "qselect")
    node_variables = frozenset({"PBS_JOBID", "PBS_NODEFILE"})
    submit_options = frozenset({"--queue", "--account"})
    queue_key = "queue"
    unreachable_hint = "ask the site, or set PBS_SERVER"
    resubmits = True
    submit_command = ("qsub", "-C", "#PBS")
    id_patterns = (
        re.compile(r"([0-9]{1,18}(?:\[[0-9]*\])?\.[A-Za-z0-9._-]+)()"),
        re.compile(r"([0-9]{1,18}(?:\[[0-9]*\])?)()"),
    )
    list_command = "qstat -x -u $USER -w"
    hidden_variables = ("PBS_DPREFIX", "PBS_JOBID", "PBS_ENVIRONMENT", "PBS_NODEFILE")
    refusals, advice = refusals.PBS, refusals.PBS_ADVICE
    # Answers that hold for all questions of a command.
    _last_starts: Mapping[str, float | None] | None = None
    _idle: tuple[NodeKind, ...] | None = None

    def ping(self) -> None:
        try:
            self._ask("qselect", "-u", getpass.getuser())
        except SchedulerError as error:
            raise self._fault_of_system(error.message) or error from None

    def examine(self, launch: Launch | None) -> Iterator[Finding]:  # noqa: ARG002
        """Check that PBS answers, and that jobs may submit themselves again."""
        version = self._run("qstat", "--version")
        if system := other_system(version.message):
            what = OF_OTHER_SYSTEMS.format(system)
            yield Finding(self.title, "fail", what, HINT_OF_OTHER_SYSTEMS)
            return
        release = version.stdout or version.stderr
        server = self._ask("qstat", "-B", "-f").stdout
        hint = "" if release else "ask the site whether this is PBS: pipectl knows no other qsub"
        yield assess(self.title, release or "`qstat --version` prints nothing", hint)
        if not re.search(r"^\s*flatuid\s*=\s*True\s*$", server, re.MULTILINE | re.IGNORECASE):
            text = "flatuid is not set: jobs may not be able to submit themselves again"
            hint = "ask the site for `set server flatuid = True`; else continue with pipectl resume"
            yield assess("PBS requeue", text, hint)

    def submit(self, script: Path, request: JobRequest) -> str:
        # Other systems refuse a script with `-l select`.
        if request.pbs.select is False and (fault := self._fault_of_system("")):
            raise fault
        return super().submit(script, request)

    def _is_refused(self, done: process.Completed) -> bool:
        # Hooks have words of their own.
        is_of_hook = done.returncode == _REJECTED_BY_HOOK
        said = f"{done.stderr}\n{done.stdout}"
        return is_of_hook or super()._is_refused(done) or other_system(said) is not None

    def _refusal(self, done: process.Completed) -> SchedulerError:
        return self._fault_of_system(done.message) or super()._refusal(done)

    def _fault_of_system(self, said: str) -> SchedulerError | None:
        """Return an error if ``qsub`` belongs to another batch system.

        Args:
            said: what it has printed.
        """
        if (system := other_system(said)) is None:
            with suppress(SchedulerError):
                version = self._run("qstat", "--version", max_s=_VERSION_S)
                system = other_system(version.message)
        if system is None:
            return None
        what = OF_OTHER_SYSTEMS.format(system)
        return OtherSystemError(f"{what}: {said}" if said else what, hint=HINT_OF_OTHER_SYSTEMS)

    def render(self, request: JobRequest) -> str:
        directory = str(request.run_directory)
        if ":" in directory:
            raise InvalidInputError(
                f"output.directory: {directory!r} contains a colon, after which PBS expects a path",
                hint="choose a directory without one",
            )
        if request.array is not None and len(request.array.runs) == 1:
            raise InvalidInputError(
                "sweep: PBS accepts no array of one job",
                hint="add a point to the sweep, or set its value in the job itself",
            )
        # PBS has no field for comments, and names may have more than 200 characters.
        first = "" if request.name[:1].isalpha() else "j"
        name = f"{first}{request.name[:_NAME_LENGTH]}{name_suffix(request.tag)}"
        resources = _resources(request)
        return render_script("pbs.sh.j2", request, self.name, job_name=name, resources=resources)

    def allocation(self) -> Allocation | None:
        job_id, file = os.environ.get("PBS_JOBID"), os.environ.get("PBS_NODEFILE")
        if not job_id or not file:
            return None
        try:
            lines = Path(file).read_text(encoding="utf-8").split()
        except OSError as error:
            raise SchedulerError(
                f"{file} (PBS_NODEFILE): {error.strerror}",
                hint="use the shell that `qsub -I` has started, on the first node of the job",
            ) from None
        nodes = tuple(dict.fromkeys(lines))
        return Allocation(job_id, nodes, lines.count(nodes[0]), is_on_node=True) if nodes else None

    def memory_of_rank(self, spec: JobSpec) -> int | None:
        """See :meth:`Scheduler.memory_of_rank`; totals are those of all nodes."""
        own, resources = spec.pbs.select, spec.resources
        lists = [own] if own else []
        if own is False:
            lists = [text for _, text in options_of("l", spec.pbs.options.get("l", False)) if text]
        found = (re.search(r"(?:^|[:,])mem=([^:,+]+)", text, re.IGNORECASE) for text in lists)
        size = next((_bytes_of(match[1]) for match in found if match), None)
        return size and size // (resources.ranks if own is False else resources.tasks_per_node)

    def memory_of_node(self, allocation: Allocation) -> int | None:
        with suppress(SchedulerError):
            jobs = parse_blocks(self._ask("qstat", "-f", allocation.job_id).stdout)
            size = next(
                (_bytes_of(job.get("Resource_List.mem", "")) for job in jobs.values()), None
            )
            return size and size // len(allocation.nodes)
        return None

    def _describe_tag(self, tag: str) -> str:
        return f"whose name ends in {name_suffix(tag)!r}"

    def clusters_of(self, request: JobRequest) -> str:
        server = (request.pbs.queue or "").partition("@")[2]
        return server or os.environ.get("PBS_SERVER", "") or os.environ.get("PBS_DEFAULT", "")

    def cluster_of(self, job_id: str) -> str:
        return job_id.partition(".")[2]

    def _states(
        self,
        ids: Sequence[str],
        cluster: str,  # noqa: ARG002 - it is part of the ids, by which qstat asks the server
        since: float | None,  # noqa: ARG002 - ids are not reused while history is kept
    ) -> Mapping[str, JobStatus]:
        """Ask qstat, also for ended jobs if the server keeps a history."""
        jobs = list(dict.fromkeys(map(self.array_id, ids)))
        expanded = ["-t"] if jobs != list(ids) else []
        done = self._run("qstat", "-x", *expanded, "-f", *jobs)
        states = parse_qstat(done.stdout)
        if not states and done.returncode not in {0, _UNKNOWN_ID, _FINISHED}:
            raise SchedulerError(f"qstat: {done.message}", hint="try again in a minute")
        by_number = {job_id.partition(".")[0]: job_id for job_id in states}
        # Names of servers may be shortened or left out.
        names = {ours: by_number.get(ours.partition(".")[0], "") for ours in ids}
        alike = {
            ours: states[its] for ours, its in names.items() if its and _is_same_server(ours, its)
        }
        return {**alike, **states}

    def cancel(self, job_id: str) -> None:
        self._ask("qdel", job_id, harmless={0, _UNKNOWN_ID, _FINISHED})

    def task_id(self, array_id: str, index: int) -> str:
        return array_id.replace("[]", f"[{index}]")

    def array_id(self, task_id: str) -> str:
        return re.sub(r"\[[0-9]+\]", "[]", task_id)

    def dependency_id(self, task_id: str) -> str:
        return self.array_id(task_id)

    def find_all(self, tags: Collection[str], clusters: str = "") -> Mapping[str, str]:
        where = ("-q", f"@{clusters}") if clusters else ()
        listed = self._ask("qselect", "-x", "-u", getpass.getuser(), *where).stdout
        ids = [line for line in listed.split() if self._read_id(line, "")]
        jobs = parse_blocks(self._run("qstat", "-x", "-f", *ids).stdout) if ids else {}
        found: dict[str, str] = {}
        for job_id in sorted(jobs, key=number_of):
            name = jobs[job_id].get("Job_Name", "")
            found.update((tag, job_id) for tag in tags if name.endswith(name_suffix(tag)))
        return found

    def queues(self) -> tuple[Queue, ...]:
        commands = (("qstat", "-Q", "-f"), ("qstat", "-B", "-f"), ("pbsnodes", "-a"))
        return parse_queues(*(self._ask(*command).stdout for command in commands))

    def misfit(self, queue: Queue, request: JobRequest) -> Misfit | None:
        """See :meth:`Scheduler.misfit`; of totals, PBS chooses the nodes."""
        if request.pbs.select is False:
            queue = _of_totals(queue)
        return find_misfit(queue, _demand(request))

    def forecast(self, request: JobRequest, queue: Queue, now: float) -> float | None:
        """See :meth:`Scheduler.forecast`. PBS has estimates of jobs that wait, if the site wants
        them, and a new job is taken to start after all of its queue; at once if none waits and
        enough nodes are idle."""
        if self._last_starts is None:
            self._last_starts = self._ask_last_starts()
        if queue.name in self._last_starts:
            return self._last_starts[queue.name]
        if self._idle is None:
            self._idle = parse_nodes(self._ask("pbsnodes", "-a").stdout, idle=True)
        is_free = self._idle and self.misfit(replace(queue, kinds=self._idle), request) is None
        return now if is_free else None

    def _ask_last_starts(self) -> Mapping[str, float | None]:
        """Return the latest start that is expected of a waiting job, by queue; None if PBS does not
        expect one of each."""
        waiting = parse_waiting(self._ask("qstat", "-T", "-w").stdout)
        last_ids = {queue: ids[-1] for queue, ids in waiting.items() if ids and all(ids)}
        jobs = self._ask("qstat", "-f", *last_ids.values()).stdout if last_ids else ""
        starts = {job_id: status.start for job_id, status in parse_qstat(jobs).items()}
        return {queue: starts.get(last_ids.get(queue, "")) for queue in waiting}

    def check(self, request: JobRequest) -> str:
        """See :meth:`Scheduler.check`. A list of all nodes may take long, so none is asked for:
        PBS says in a job's comment that they can never run it."""
        try:
            queues, server = (self._ask("qstat", option, "-f").stdout for option in ("-Q", "-B"))
        except SchedulerError:
            return ""
        listed = parse_queues(queues, server, "")
        if request.pbs.select is False:
            listed = tuple(map(_of_totals, listed))
        return check_limits(
            listed,
            [request.pbs.queue] if request.pbs.queue else [],
            _demand(request),
            key="pbs.queue",
        )


def _is_same_server(*ids: str) -> bool:
    """Whether the server in one of two ids begins with that in the other."""
    short, long = sorted((job_id.lower().partition(".")[2] for job_id in ids), key=len)
    return not short or f"{long}.".startswith(f"{short}.")


def other_system(said: str) -> str | None:
    """Return the name of the batch system that has printed this, if it has commands with the names
    of those of PBS; None for PBS itself."""
    return next((name for name, words in _OTHER_SYSTEMS.items() if words.search(said)), None)


def _of_totals(queue: Queue) -> Queue:
    """Return a queue for a job that asks for totals: PBS counts those of all nodes as one."""
    return replace(queue, min_nodes=0, max_nodes=None)


def _demand(request: JobRequest) -> Demand:
    """Return what a job asks for, as far as its own resource lists do not ask for something else;
    of totals, all that the job has is on one node.
    """
    resources, own = request.resources, request.pbs.select
    nodes, cores = (
        resources.max_nodes,
        None if own else resources.tasks_per_node * resources.cpus_per_task,
    )
    if own is False:
        totals = dict(text.split("=", 1) for text in _resources(request))
        nodes, cores = 1, number_of(totals.get("ncpus", "")) or None
    return Demand(nodes, resources.walltime, cores, single_process=request.single_process)


def _resources(request: JobRequest) -> list[str]:
    """Return what the job asks for of its nodes, each for one ``-l``.

    There is one chunk per node, to which ``pbs.select`` adds, or which it replaces. If it is false,
    the totals of the job are asked for, except those that the user's ``-l`` has.
    """
    own, resources = request.pbs.select, request.resources
    if own and (count := SELECT_COUNT.match(own)):  # a profile has fewer nodes than its job
        return [f"select={resources.max_nodes}{own.removeprefix(count[1])}"]
    total = own is False
    lists = [text for _, text in options_of("l", request.pbs.options.get("l", False)) if text]
    given = ",".join(lists) if total else own or ""
    nodes, mib = resources.max_nodes if total else 1, request.memory_per_node_mib
    wanted = {
        "ncpus": nodes * resources.tasks_per_node * resources.cpus_per_task,
        "mpiprocs": 0 if total else resources.tasks_per_node,
        "ompthreads": 0 if total else request.threads,
        "ngpus": 0 if PBS_GPUS.search(given) else nodes * resources.gpus_per_node,
        "mem": f"{nodes * mib}mb" if mib else 0,
    }
    if total:
        names = {part.partition("=")[0].lower() for part in given.split(",")}
        return [f"{name}={size}" for name, size in wanted.items() if size and name not in names]
    parts = [f"select={resources.max_nodes}"]
    parts += [f"{name}={size}" for name, size in wanted.items() if size]
    return [":".join([*parts, *([own.lstrip(":")] if own else [])])]


_LIVE = {
    letter: state
    for letters, state in {
        "QWT": JobState.QUEUED,
        "H": JobState.HELD,
        "RB": JobState.RUNNING,
        "SU": JobState.SUSPENDED,
        "E": JobState.COMPLETING,
    }.items()
    for letter in letters
}
_OVER = frozenset("FXC")
_DELETED, _DONE, _MOVED = 91, 92, 94
"""Substates of ended jobs (src/include/job.h)."""
_SIGNALLED = 256
"""Exit status of a job ended by a signal, minus the signal's number."""
_OF_PBS = {
    -29: (JobState.TIMEOUT, "over its walltime"),
    -28: (JobState.TIMEOUT, "over its processor time"),
    -27: (JobState.OUT_OF_MEMORY, "over its memory"),
    -26: (JobState.OUT_OF_MEMORY, "over its virtual memory"),
    -25: (JobState.FAILED, "used more cores than it asked for"),
    -24: (JobState.FAILED, "used more cores than it asked for"),
    -20: (JobState.NODE_FAIL, "its first node was lost"),
}
_HEAD = re.compile(r"(?:Job Id: |Queue: |Server: )?([][A-Za-z0-9_.-]+)")
_FIELD = re.compile(r" +([A-Za-z_.]+) = (.*)")
_QUEUE, _STATE = 2, 9
"""Columns of ``qstat -T``; that of the estimate is the next one."""
_HOST = re.compile(r"([^/+()\s]+)/")
_DOWN = {"down", "offline", "state-unknown", "stale"}
_SIZE = re.compile(r"(\d{1,15})([kmgt]?)b?")


def parse_blocks(stdout: str) -> dict[str, dict[str, str]]:
    """Parse blocks of PBS: a name without indentation, then indented lines ``field = value``.

    Of fields with the same name the first counts: later ones may be part of a job's environment.
    """
    blocks: dict[str, dict[str, str]] = {}
    fields: dict[str, str] = {}
    last = ""
    for line in stdout.splitlines():
        if head := _HEAD.fullmatch(line.rstrip()):
            fields = blocks.setdefault(head[1], {})
        elif field := _FIELD.fullmatch(line):
            last = field[1]
            fields.setdefault(last, field[2].strip())
        elif line.startswith("\t") and last in fields:
            fields[last] += line.strip()
    return blocks


def parse_qstat(stdout: str) -> dict[str, JobStatus]:
    """Parse the output of ``qstat -x -f``: jobs by id."""
    jobs = parse_blocks(stdout).items()
    return {job_id: _status(job_id, fields) for job_id, fields in jobs if "job_state" in fields}


def _status(job_id: str, fields: Mapping[str, str]) -> JobStatus:
    """Return a job's status; a signal becomes the exit code that a shell reports."""
    code = _number(fields.get("Exit_status"))
    state, reason = _state(fields["job_state"], _number(fields.get("substate")), code)
    hint = ""
    if state is JobState.HELD and fields.get("depend"):
        reason = f"waits for {fields['depend']}"
    elif state.waits:
        reason = fields.get("comment", "").removeprefix("Not Running: ")
        hold = fields.get("Hold_Types", "") if state is JobState.HELD else ""
        hint = pbs_hint(reason, hold, job_id)
    if code is not None and code > _SIGNALLED:
        code += 128 - _SIGNALLED
    start = _time(fields.get("stime"))
    limit = parse_limit(fields.get("Resource_List.walltime", ""))
    ends = start + limit if start and limit and state is JobState.RUNNING else None
    return JobStatus(
        state,
        reason=reason,
        exit_code=code if code is not None and code >= 0 and state.final else None,
        nodes=",".join(dict.fromkeys(_HOST.findall(fields.get("exec_host", "")))),
        start=start or _time(fields.get("estimated.start_time")),
        end=_time(fields.get("mtime")) if state.final else None,
        hint=hint,
        deadline=ends,
    )


def _state(letter: str, substate: int | None, code: int | None) -> tuple[JobState, str]:
    """State and reason."""
    if letter in _LIVE:
        return _LIVE[letter], ""
    if letter == "M" or substate == _MOVED:
        return JobState.UNKNOWN, "moved to another server"
    if letter not in _OVER:
        return JobState.UNKNOWN, f"PBS calls its state {letter!r}"
    if substate == _DELETED:
        return JobState.CANCELLED, ""
    if code is None and letter == "X":
        return JobState.UNKNOWN, "over; PBS keeps no exit code of jobs of an array"
    if code is None and substate == _DONE:
        return JobState.CANCELLED, "never ran: a job that it depended on failed"
    if code is None:
        return JobState.FAILED, "over, and left no exit code"
    if code < 0:
        return _OF_PBS.get(code, (JobState.FAILED, f"PBS could not run it (status {code})"))
    if code > _SIGNALLED:
        return JobState.FAILED, f"ended by signal {code - _SIGNALLED}"
    return (JobState.FAILED, f"exit code {code}") if code else (JobState.COMPLETED, "")


def parse_queues(queues: str, server: str, nodes: str) -> tuple[Queue, ...]:
    """Parse the output of ``qstat -Q -f``, ``qstat -B -f`` and ``pbsnodes -a``: the queues, the
    default first."""
    servers = parse_blocks(server).values()
    default = next((fields.get("default_queue") for fields in servers), None)
    kinds = parse_nodes(nodes)
    parsed = [
        Queue(
            name,
            default=name == default,
            open=_takes_jobs(fields),
            for_user=_is_for_user(fields),
            walltime_s=parse_limit(fields.get("resources_max.walltime", "")),
            min_nodes=number_of(fields.get("resources_min.nodect", "")),
            max_nodes=number_of(fields.get("resources_max.nodect", "")) or None,
            max_cores=number_of(fields.get("resources_max.ncpus", "")) or None,
            kinds=kinds,
        )
        for name, fields in parse_blocks(queues).items()
        if "queue_type" in fields
    ]
    return tuple(sorted(parsed, key=lambda queue: not queue.default))


def parse_nodes(nodes: str, *, idle: bool = False) -> tuple[NodeKind, ...]:
    """Parse ``pbsnodes -a``: the nodes that are up, or only those on which nothing runs."""
    hosts = [
        fields
        for fields in parse_blocks(nodes).values()
        if not _DOWN & (states := set(re.split(r"[,\s]+", fields.get("state", ""))))
        and not (idle and (states != {"free"} or fields.get("jobs")))
    ]
    return tuple(
        NodeKind(
            1,
            number_of(host.get("resources_available.ncpus", "")),
            _memory(host) or None,
            number_of(host.get("resources_available.ngpus", "")),
        )
        for host in hosts
    )


def parse_waiting(stdout: str) -> dict[str, list[str]]:
    """Parse ``qstat -T -w``: ids of the jobs that wait, by queue; jobs with an estimate come first,
    by its time. The ids of others are empty."""
    waiting: dict[str, list[str]] = {}
    for words in map(str.split, stdout.splitlines()):
        if len(words) > _STATE + 1 and words[0][:1].isdigit() and words[_STATE] == "Q":
            ids = waiting.setdefault(words[_QUEUE], [])
            ids.append("" if words[_STATE + 1] == "--" else words[0])
    return waiting


def _takes_jobs(queue: Mapping[str, str]) -> bool:
    """Whether a queue accepts jobs from users, not only from other queues, and passes them on."""
    is_open = queue.get("enabled") == "True" and queue.get("started") == "True"
    return is_open and queue.get("from_route_only") != "True"


def _is_for_user(queue: Mapping[str, str]) -> bool:
    """Whether the lists of users and groups of a queue, such as ``ann@*,-bob@*``, allow this
    user."""
    for kind, own in (("user", {getpass.getuser()}), ("group", groups_of_user())):
        if queue.get(f"acl_{kind}_enable") == "True":
            entries = [text.partition("@")[0] for text in queue.get(f"acl_{kind}s", "").split(",")]
            allowed = {name.removeprefix("+") for name in entries if not name.startswith("-")}
            denied = {name.removeprefix("-") for name in entries if name.startswith("-")}
            if own.isdisjoint(allowed) or own & denied:
                return False
    return True


def _memory(fields: dict[str, str]) -> int | None:
    return _bytes_of(fields.get("resources_available.mem", ""))


def _bytes_of(text: str) -> int | None:
    """Return the bytes of a size of PBS; None if it is none."""
    size = _SIZE.fullmatch(text.lower())
    return None if size is None else int(size[1]) * 1024 ** "bkmgt".index(size[2] or "b")


def _number(text: str | None) -> int | None:
    return int(text) if text is not None and re.fullmatch("-?[0-9]{1,9}", text) else None


def _time(text: str | None) -> float | None:
    """Return the seconds since the epoch of a time such as ``Fri Nov 20 16:34:21 2026``."""
    try:
        return datetime.strptime(text or "", "%a %b %d %H:%M:%S %Y").timestamp()
    except ValueError:
        return None
