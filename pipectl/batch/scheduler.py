"""The interface of batch systems, and the states of their jobs."""

from __future__ import annotations

import grp
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import inf
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, ClassVar

from pipectl.batch import process
from pipectl.batch.findings import Finding, assess
from pipectl.batch.limits import Demand, Misfit, Queue, find_misfit
from pipectl.batch.refusals import Advice, is_refusal
from pipectl.batch.request import JobRequest
from pipectl.batch.script import render_script
from pipectl.errors import SchedulerError
from pipectl.older_python import StrEnum
from pipectl.units import parse_duration

if TYPE_CHECKING:
    from pipectl.spec import JobSpec
    from pipectl.spec.launch import Launch

CLOCK_SKEW_S = 60.0
"""Maximum difference between the clocks of this machine, of batch systems and of file servers."""
QUEUES_TIMEOUT_S = 20.0
"""Time limit for queries of partitions and queues, for which a user waits."""
_OF_ONE_JOB = ("scancel", "qdel")
"""Commands whose errors need the job that they were called for."""


class OtherSystemError(SchedulerError):
    """The commands belong to a batch system that pipectl does not know."""


class JobState(StrEnum):
    """The state of a job, for all batch systems."""

    QUEUED = "QUEUED"
    HELD = "HELD"
    RUNNING = "RUNNING"
    SUSPENDED = "SUSPENDED"
    COMPLETING = "COMPLETING"
    COMPLETED = "COMPLETED"
    FAILED = "FAILED"
    CANCELLED = "CANCELLED"
    TIMEOUT = "TIMEOUT"
    OUT_OF_MEMORY = "OUT_OF_MEMORY"
    NODE_FAIL = "NODE_FAIL"
    PREEMPTED = "PREEMPTED"
    UNKNOWN = "UNKNOWN"

    @property
    def waits(self) -> bool:
        """Whether the job waits for its first or next start."""
        return self in {JobState.QUEUED, JobState.HELD}

    @property
    def final(self) -> bool:
        """Whether the job has ended; UNKNOWN is not final."""
        return not self.waits and self not in _NOT_OVER

    @property
    def alive(self) -> bool:
        """Whether the job waits or runs; UNKNOWN is not alive."""
        return not self.final and self is not JobState.UNKNOWN


_NOT_OVER = {JobState.RUNNING, JobState.SUSPENDED, JobState.COMPLETING, JobState.UNKNOWN}


@dataclass(frozen=True)
class JobStatus:
    """The status of a job.

    Args:
        reason: why the job is in this state, in the words of the source; may be empty.
        hint: what to do about it; may be empty.
        exit_code: exit code of the job script, if known.
        nodes: host list in the batch system's notation; empty before the start.
        start, end: seconds since the epoch; before the start, ``start`` is a forecast. ``end`` is
            set for final states only. Without it, a job that completed is taken at its word, though
            its script never began.
        deadline: when the walltime of a job that runs is over.
        source: ``queue``, ``accounting``, ``process``, ``run directory``, ``heartbeat``,
            ``record`` or ``none``.
    """

    state: JobState
    reason: str = ""
    exit_code: int | None = None
    nodes: str = ""
    start: float | None = None
    end: float | None = None
    source: str = "queue"
    hint: str = ""
    deadline: float | None = None


@dataclass(frozen=True)
class Allocation:
    """The job of a batch system in which a shell runs.

    Args:
        job_id: its id.
        nodes: names of its nodes, the first one first.
        tasks_per_node: what it was asked for.
        is_on_node: whether this machine is one of its nodes.
        cores: what it has on each of its nodes; empty if that is not known.
        memory_bytes: what it has on each node; None if that is not known.
    """

    job_id: str
    nodes: tuple[str, ...]
    tasks_per_node: int
    is_on_node: bool
    cores: tuple[int, ...] = ()
    memory_bytes: int | None = None


class Scheduler(ABC):
    """A batch system. Methods raise SchedulerError if the system fails or refuses."""

    name: ClassVar[str]
    title: ClassVar[str]
    """Name in messages."""
    programs: ClassVar[tuple[str, ...]] = ()
    """Programs that are all on PATH where the system is installed; without one, ``auto`` is never
    this system."""
    node_variables: ClassVar[frozenset[str]] = frozenset()
    """Environment variables that are all set on its compute nodes."""
    submit_options: ClassVar[frozenset[str]] = frozenset()
    """Options of `pipectl submit` that set keys of this system."""
    queue_key: ClassVar[str] = ""
    """The key that names a queue in the system's section of a job; empty if there is none."""
    unreachable_hint: ClassVar[str] = "ask the site"
    """What to do if it does not answer."""
    resubmits: ClassVar[bool] = False
    """Whether job scripts submit themselves again instead of being requeued."""
    takes_range: ClassVar[bool] = False
    """Whether jobs can ask for a range of nodes."""
    runs_in_shell: ClassVar[bool] = False
    """Whether jobs have the environment of the shell that submits them."""
    timeout_s: float = process.TIMEOUT_S
    """Time limit of each command of the system."""
    exit_codes: Mapping[str, int] = MappingProxyType({})
    """Exit codes that jobs have written, by id: a query need not wait for the records of these."""

    def ping(self) -> None:  # noqa: B027
        """Check with a cheap query that the system answers."""

    def examine(self, launch: Launch | None) -> Iterator[Finding]:  # noqa: ARG002
        """Check, for `pipectl doctor`, that the system answers and has what jobs need.

        Args:
            launch: launch settings of a job; None for the defaults.

        Raises:
            SchedulerError: it does not answer.
        """
        self.ping()
        yield assess(self.title, "answers")

    def render(self, request: JobRequest) -> str:
        """Render the job script.

        Raises:
            PipectlError: the job cannot run here; see also
                :func:`pipectl.batch.script.render_script`.
        """
        return render_script(f"{self.name}.sh.j2", request, self.name)

    def allocation(self) -> Allocation | None:
        """Return the job in which this shell runs; None outside of one, or if the system cannot
        tell.

        Raises:
            SchedulerError: its nodes cannot be listed.
        """
        return None

    @property
    def system_of_nodes(self) -> str:
        """Name of the batch system whose nodes the jobs run on."""
        return self.name

    def memory_of_rank(self, spec: JobSpec) -> int | None:  # noqa: ARG002
        """Return the bytes of a rank of a job, as far as others than ``resources.memory_per_node``
        say how many: options of the system, or an allocation. None if they do not."""
        return None

    def memory_of_node(self, allocation: Allocation) -> int | None:
        """Return the bytes that an allocation has on each node; None if that is not known."""
        return allocation.memory_bytes

    @abstractmethod
    def submit(self, script: Path, request: JobRequest) -> str:
        """Submit the script and return the job's id; the run directory contains ``logs``."""

    @abstractmethod
    def task_id(self, array_id: str, index: int) -> str:
        """Return the id of one job of an array, given the id from ``submit`` or ``find``."""

    def array_id(self, task_id: str) -> str:
        """Return the id with which ``cancel`` ends the whole array; of other jobs, their own."""
        return task_id

    def dependency_id(self, task_id: str) -> str:
        """Return the id for dependencies on a job; if the system has none on one job of an array,
        the id of the array."""
        return task_id

    @abstractmethod
    def query(self, ids: Sequence[str], *, since: float | None = None) -> Mapping[str, JobStatus]:
        """Return the status by id. Ids that the system does not know are absent; the job may have
        ended or not.

        Args:
            since: earliest submission of the jobs, seconds since the epoch; older jobs with the
                same ids are ignored.
        """

    @abstractmethod
    def cancel(self, job_id: str) -> None:
        """Cancel a job; unknown ids are no error."""

    def estimate(self, script: str) -> str | None:  # noqa: ARG002
        """Describe when a job would start, given the text of its script; None if the system does
        not say. For the time, see :meth:`forecast`."""
        return None

    def check(self, request: JobRequest) -> str:  # noqa: ARG002
        """Compare a job with the limits of the system before it is submitted.

        Returns:
            A warning if it may never run; else empty, also if the system does not answer.

        Raises:
            SchedulerError: it can never run.
        """
        return ""

    @abstractmethod
    def find(self, tag: str) -> str | None:
        """Return the id of the job with this tag, after an interrupted submission."""

    def find_all(self, tags: Collection[str], clusters: str = "") -> Mapping[str, str]:  # noqa: ARG002
        """Return the ids of jobs by tag, of the tags that have one.

        Args:
            clusters: where to look; see :meth:`clusters_of`.
        """
        found = {tag: self.find(tag) for tag in tags}
        return {tag: job_id for tag, job_id in found.items() if job_id is not None}

    def walltime_of(self, request: JobRequest) -> int | None:
        """Return the walltime that a job asks for, in seconds; None if the site sets it."""
        return request.resources.walltime

    def clusters_of(self, request: JobRequest) -> str:  # noqa: ARG002
        """Return what the request or the environment names as the place to submit to: clusters of
        Slurm, or a server of PBS; empty for the default."""
        return ""

    def cluster_of(self, job_id: str) -> str:  # noqa: ARG002
        """Return the cluster or server in a job's id; empty for the default."""
        return ""

    def queues(self) -> tuple[Queue, ...]:
        """Return the partitions or queues, the default first."""
        return ()

    def queues_for(self, request: JobRequest) -> tuple[Queue, ...]:  # noqa: ARG002
        """Return those where the request is submitted, with what is known of who may use them."""
        return self.queues()

    def misfit(self, queue: Queue, request: JobRequest) -> Misfit | None:
        """Return why a request can never run in a partition or queue; None if it can, as far as
        known."""
        return find_misfit(queue, Demand(request.resources.max_nodes, self.walltime_of(request)))

    def forecast(self, request: JobRequest, queue: Queue, now: float) -> float | None:  # noqa: ARG002
        """Return when a job would start if it was submitted now; None if the system does not say.

        Args:
            queue: the partition or queue that the request names, or the default one.
            now: seconds since the epoch, as is the answer.

        Raises:
            SchedulerError: it refuses the job.
        """
        return None

    def forecast_again(
        self,
        request: JobRequest,  # noqa: ARG002
        queue: Queue,  # noqa: ARG002
        now: float,
        start: float,
        ended: float,
    ) -> float:
        """Return when a job would start again that is put back into the queue.

        Here, it waits as long as for its first start.

        Args:
            queue, now: as for :meth:`forecast`.
            start: its answer.
            ended: when the job ends the start before, in seconds since the epoch.
        """
        return ended + start - now


class CommandLineScheduler(Scheduler):
    """A batch system used through its command line tools."""

    submit_command: ClassVar[tuple[str, ...]]
    """Command that submits a script, without the script."""
    id_patterns: ClassVar[Sequence[re.Pattern[str]]]
    """Patterns of the output line with the job's id, its first group; the first that matches a
    line counts. A second group is the cluster."""
    list_command: ClassVar[str]
    """Command that lists jobs with their tags, for messages."""
    hidden_variables: ClassVar[tuple[str, ...]]
    """Prefixes of environment variables hidden from the commands: they override directives, or
    belong to the job in which pipectl itself runs."""
    visible_variables: ClassVar[frozenset[str]] = frozenset()
    """Variables with such a prefix that are not hidden."""
    refusals: ClassVar[Sequence[str]]
    """What the submit command says if it refuses a job; see :mod:`pipectl.batch.refusals`."""
    unsent_message: ClassVar[str] = ""
    """Part of what it says, in lower case, if there is nobody to whom it could send a job."""
    advice: ClassVar[Advice]

    @abstractmethod
    def _describe_tag(self, tag: str) -> str:
        """Describe a job with this tag, for messages."""

    @abstractmethod
    def _states(
        self, ids: Sequence[str], cluster: str, since: float | None
    ) -> Mapping[str, JobStatus]:
        """Return the states of at least those of the jobs that a cluster knows."""

    @abstractmethod
    def find_all(self, tags: Collection[str], clusters: str = "") -> Mapping[str, str]:
        """Return the ids of this user's latest job or array with each tag."""

    def find(self, tag: str) -> str | None:
        """Return the id of this user's latest job or array with the tag."""
        return self.find_all([tag]).get(tag)

    def query(self, ids: Sequence[str], *, since: float | None = None) -> Mapping[str, JobStatus]:
        """See :meth:`Scheduler.query`; each cluster is asked about its own jobs."""
        states: dict[str, JobStatus] = {}
        for cluster in dict.fromkeys(map(self.cluster_of, ids)):
            members = [job_id for job_id in ids if self.cluster_of(job_id) == cluster]
            states.update(self._states(members, cluster, since))
        return {job_id: states[job_id] for job_id in ids if job_id in states}

    def _run(
        self,
        *argv: str,
        stdin: str = "",
        max_s: float = inf,
        variables: Mapping[str, str | None] = MappingProxyType({}),
    ) -> process.Completed:
        """Run a command with a text as its standard input and other environment variables.

        Args:
            max_s: time limit, if it is shorter than that of the system.
            variables: None hides a variable.
        """
        env = {
            name: value
            for name, value in os.environ.items()
            if name in self.visible_variables or not name.startswith(self.hidden_variables)
        }
        hint = (
            f"run this where the commands of {self.title} are installed, or set "
            "launch.scheduler: local"
        )
        return process.run(
            argv,
            hint=hint,
            env={name: text for name, text in {**env, **variables}.items() if text is not None},
            timeout_s=min(self.timeout_s, max_s),
            stdin=stdin,
        )

    def _ask(
        self,
        *argv: str,
        harmless: Collection[int] = (0,),
        variables: Mapping[str, str | None] = MappingProxyType({}),
    ) -> process.Completed:
        """Run a command; raise SchedulerError for exit codes that are not harmless."""
        done = self._run(*argv, variables=variables)
        if done.returncode not in harmless:
            raise failure(argv, done)
        return done

    def submit(self, script: Path, request: JobRequest) -> str:
        """Submit the script and return the job's id.

        Only a known refusal of the job is one. After any other answer, the job is looked for by its
        tag: busy controllers lose answers, and sites have words of their own.

        Raises:
            SchedulerError: the batch system refuses the job, or there is none.
            NoAnswerError: the job may have been accepted; none with the tag is listed yet.
        """
        clusters = self.clusters_of(request)
        try:
            done = self._hand_over(script, self._on(clusters)[0])
        except process.NoAnswerError as error:
            said = error.message
        else:
            said = done.message
            if not done.returncode and (job_id := self._read_id(done.stdout, clusters)):
                return job_id
            if done.returncode > 0 and self._is_refused(done):
                raise self._refusal(done)
        listed = f"no job {self._describe_tag(request.tag)} is listed yet"
        try:
            if job_id := self.find_all([request.tag], clusters).get(request.tag):
                return job_id
        except SchedulerError as error:
            listed = f"the jobs cannot be listed: {error.message}"
        first, _, rest = self.list_command.partition(" ")
        hint = f"`{' '.join([first, *self._on(clusters)[0], rest])}` shows your jobs"
        if advice := self._advice_on(said):
            hint = f"as to its words: {advice}"
        message = f"{self.submit_command[0]} gave no job id:\n{said}\n{listed}"
        raise process.NoAnswerError(message, hint=hint, said=said)

    def _hand_over(self, script: Path, options: Sequence[str]) -> process.Completed:
        """Run the command that submits a script."""
        return self._run(*self.submit_command, *options, str(script))

    def _on(self, clusters: str) -> tuple[tuple[str, ...], Mapping[str, str | None]]:  # noqa: ARG002
        """Return the options and environment variables with which a command goes to clusters."""
        return (), {}

    def _read_id(self, stdout: str, clusters: str) -> str | None:
        """Return the id in the answer to a submission, with its cluster.

        Lines of the site may come before and after it. None if there is none, or if several could
        be it.
        """
        lines = [line.strip() for line in stdout.splitlines()]
        for pattern in self.id_patterns:
            found = [match for match in map(pattern.fullmatch, lines) if match]
            ids = {self._place(match[1], match[2] or "", clusters) for match in found}
            if ids:
                return ids.pop() if len(ids) == 1 else None
        return None

    def _place(self, job_id: str, cluster: str, clusters: str) -> str | None:  # noqa: ARG002
        """Return a job's id with its cluster, given those that the submission named; None if it
        may be one of several."""
        return job_id

    def _is_refused(self, done: process.Completed) -> bool:
        """Return whether a command that has failed says that the job was not accepted."""
        said = f"{done.stderr}\n{done.stdout}"
        is_unsent = bool(self.unsent_message) and self.unsent_message in said.lower()
        return is_unsent or is_refusal(said, self.refusals, self.advice)

    def _refusal(self, done: process.Completed) -> SchedulerError:
        """Return the error for a script that was not submitted, with what to do."""
        what = f"{self.submit_command[0]} refuses the job script"
        if self.unsent_message and self.unsent_message in done.message.lower():
            what = f"{self.title} does not answer"
        hint = self._advice_on(done.message) or "correct the job spec as the message says"
        return SchedulerError(f"{what}:\n{done.message}", hint=hint)

    def _advice_on(self, said: str) -> str:
        """Return what to do if a text refuses a job; empty if it is not known."""
        return next((hint for phrase, hint in self.advice if phrase in said.lower()), "")


def failure(argv: Sequence[str], done: process.Completed) -> SchedulerError:
    """Return the error for a command that has failed."""
    command = " ".join(argv) if argv[0] in _OF_ONE_JOB else argv[0]
    message = done.message.removeprefix(f"{argv[0]}: ")
    return SchedulerError(f"{command}: {message}", hint="try again in a minute")


def name_suffix(tag: str) -> str:
    """Return the end of the names of jobs with this tag, if they have it in their name."""
    return f".{tag.rpartition(' ')[2]}"


def groups_of_user() -> set[str]:
    """Return the names of the groups of this user."""
    own = set()
    for number in {os.getegid(), *os.getgroups()}:
        with suppress(KeyError):  # a group without a name
            own.add(grp.getgrgid(number).gr_name)
    return own


def number_of(text: str) -> int:
    """Return the number at the beginning of a text, such as a job id; 0 if there is none."""
    match = re.match(r"[0-9]{1,18}", text)
    return int(match[0]) if match else 0


def parse_limit(text: str) -> int | None:
    """Return the seconds of a limit such as ``2-00:00:00`` or ``30:00``; None for no limit."""
    try:
        return parse_duration(text) or None
    except ValueError:
        return None
