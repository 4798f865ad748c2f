"""What batch systems have in common: their interface and its data, and how commands are run."""

from __future__ import annotations

import os
import re
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import ClassVar

from pipectl.batch import process
from pipectl.batch.request import JobRequest
from pipectl.errors import SchedulerError
from pipectl.files import make_private_directory
from pipectl.units import parse_duration

CHECKPOINTED = 75
"""Exit code of a job script whose ranks stopped at a checkpoint before they were done."""
QUEUES_TIMEOUT_S = 20.0
"""Time limit of questions about partitions and queues: a user waits for the answer."""


class JobState(StrEnum):
    """The state of a job, the same words for every batch system."""

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
        """Whether the job has yet to start, maybe once more."""
        return self in {JobState.QUEUED, JobState.HELD}

    @property
    def final(self) -> bool:
        """Whether the job is over for good; UNKNOWN is not."""
        return not self.waits and self not in _NOT_OVER

    @property
    def alive(self) -> bool:
        """Whether the job still waits or runs; UNKNOWN does not count."""
        return not self.final and self is not JobState.UNKNOWN


_NOT_OVER = {JobState.RUNNING, JobState.SUSPENDED, JobState.COMPLETING, JobState.UNKNOWN}


@dataclass(frozen=True)
class JobStatus:
    """What is known about one job.

    Args:
        reason: why it is in this state, in the source's words; empty if it gives none.
        exit_code: of the job script, if known.
        nodes: host list in the batch system's notation; empty before the start.
        start, end: seconds since the epoch; before the start ``start`` is a forecast, and ``end``
            is there for final states only.
        source: who says so: ``queue``, ``accounting``, ``process``, ``run directory``,
            ``heartbeat``, ``record`` or ``none``.
    """

    state: JobState
    reason: str = ""
    exit_code: int | None = None
    nodes: str = ""
    start: float | None = None
    end: float | None = None
    source: str = "queue"


@dataclass(frozen=True)
class Queue:
    """A partition of Slurm or queue of PBS; None and 0 stand for what is not known.

    Args:
        default: whether jobs that name none go there.
        open: whether it takes jobs and runs them.
        walltime_s: the longest walltime of a job.
        nodes: in all.
        cores, memory_bytes, gpus: per node; the smallest, if they differ.
    """

    name: str
    default: bool = False
    open: bool = True
    walltime_s: int | None = None
    nodes: int = 0
    cores: int = 0
    memory_bytes: int | None = None
    gpus: int = 0


class Scheduler(ABC):
    """A batch system. Every method raises SchedulerError when the system fails or refuses."""

    name: ClassVar[str]
    title: ClassVar[str]
    """Its name for people."""
    programs: ClassVar[tuple[str, ...]] = ()
    """Which are on PATH if the system is installed here."""
    node_variables: ClassVar[frozenset[str]] = frozenset()
    """Which are set on its compute nodes."""
    resubmits: ClassVar[bool] = False
    """Whether job scripts submit themselves again, instead of being requeued."""

    def ping(self) -> None:  # noqa: B027
        """Ask for something that costs the system little, to see whether it answers."""

    def render(self, request: JobRequest) -> str:
        """The job script, of the template called as the system.

        Raises:
            PipectlError: see :func:`pipectl.batch.script.render_script`.
        """
        from pipectl.batch.script import render_script

        return render_script(
            f"{self.name}.sh.j2", request, self.name, **self._template_values(request)
        )

    def _template_values(self, request: JobRequest) -> Mapping[str, str]:  # noqa: ARG002
        """Further variables of the template; refuses what the system cannot run."""
        return {}

    @abstractmethod
    def submit(self, script: Path, request: JobRequest) -> str:
        """Hand the script over and return the job's id."""

    @abstractmethod
    def task_id(self, array_id: str, index: int) -> str:
        """The id of one job of an array, from the id that ``submit`` or ``find`` returned."""

    def array_id(self, task_id: str) -> str:
        """The id by which ``cancel`` ends all jobs of an array; else that of the job itself."""
        return task_id

    def dependency_id(self, task_id: str) -> str:
        """The id by which other jobs wait for the end of this one: that of its whole array, if
        nothing can wait for one job of it."""
        return task_id

    @abstractmethod
    def query(self, ids: Sequence[str], *, since: float | None = None) -> Mapping[str, JobStatus]:
        """States by id; ids that the system does not know are absent, which proves nothing.

        Args:
            since: earliest submission among the jobs, seconds since the epoch; keeps an old job
                with a recycled id from being taken for ours.
        """

    @abstractmethod
    def cancel(self, job_id: str) -> None:
        """Ask for the end of a job; ids that are already gone are no error."""

    def estimate(self, script: Path) -> str | None:  # noqa: ARG002
        """When the job would start, in the system's words; None if it cannot tell."""
        return None

    @abstractmethod
    def find(self, tag: str) -> str | None:
        """The id of the job submitted with this tag, for submissions that were interrupted."""

    def queues(self) -> tuple[Queue, ...]:
        """Partitions or queues, the default first; none if the system has none."""
        return ()


class CommandLineScheduler(Scheduler):
    """A batch system whose commands are run one by one."""

    submit_command: ClassVar[tuple[str, ...]]
    """The command that submits a script, without the script."""
    id_pattern: ClassVar[re.Pattern[str]]
    """Matches the line of its output with the job's id, which is the first group."""
    list_command: ClassVar[str]
    """Lists jobs with their tags."""
    hidden_variables: ClassVar[tuple[str, ...]]
    """Prefixes of environment variables that are removed for the commands, since they override
    directives of the job script, or belong to the job that pipectl itself runs in."""
    visible_variables: ClassVar[frozenset[str]] = frozenset()
    """Variables with such a prefix that are not removed, by full name."""
    unsure_messages: ClassVar[Sequence[str]]
    """Parts of error messages, in lower case, after which the job may have been submitted."""
    advice: ClassVar[Sequence[tuple[str, str]]]
    """Parts of error messages, in lower case, each with what to do; the first match counts."""

    @abstractmethod
    def _describe_tag(self, tag: str) -> str:
        """How to recognise a job with this tag, for messages."""

    def _run(self, *argv: str, **variables: str) -> process.Completed:
        """Run a command, with further variables of its environment."""
        env = {
            name: value
            for name, value in os.environ.items()
            if name in self.visible_variables or not name.startswith(self.hidden_variables)
        }
        cure = (
            f"run this where the commands of {self.title} are installed, or set "
            "launch.scheduler: local"
        )
        return process.run(argv, cure=cure, env={**env, **variables})

    def _ask(
        self, *argv: str, harmless: Collection[int] = (0,), **variables: str
    ) -> process.Completed:
        """As :meth:`_run`; other exit codes than the harmless ones are SchedulerErrors."""
        done = self._run(*argv, **variables)
        if done.returncode not in harmless:
            command = " ".join(argv) if len(argv) == 2 else argv[0]  # the job, if it is one
            message = done.message.removeprefix(f"{argv[0]}: ")
            raise SchedulerError(f"{command}: {message}", cure="try again in a minute")
        return done

    def submit(self, script: Path, request: JobRequest) -> str:
        """Submit the script and return the job's id; if the command gives none, find it by the tag.

        This makes the log directory, without which a job fails or hangs and leaves no output.

        Raises:
            SchedulerError: the batch system refuses the job.
            NoAnswerError: the command gave no id, and no job has the tag; one may still appear.
        """
        make_private_directory(request.run_directory / "logs")
        job_id = None
        try:
            done = self._run(*self.submit_command, str(script))
        except process.NoAnswerError as error:
            message = error.message
        else:
            message = done.message
            if done.returncode == 0:  # a banner of the site may come before the id
                lines = (line.strip() for line in reversed(done.stdout.splitlines()))
                ids = (match[1] for match in map(self.id_pattern.fullmatch, lines) if match)
                job_id = next(ids, None)
            elif not any(phrase in done.stderr.lower() for phrase in self.unsure_messages):
                raise self._refusal(script, done)
        try:
            job_id = job_id or self.find(request.tag)
        except SchedulerError as error:
            message = f"{message}; {error.message}"
        if job_id is None:
            raise process.NoAnswerError(
                f"{self.submit_command[0]} gave no job id, and no job "
                f"{self._describe_tag(request.tag)} is listed: {message}",
                cure=f"look with `{self.list_command}` before you submit again",
            )
        return job_id

    def _refusal(self, script: Path, done: process.Completed) -> SchedulerError:
        """The error for a script that the command refuses, with what to do."""
        text = done.message.lower()
        fallback = "correct the job spec as the message says"
        cure = next((cure for phrase, cure in self.advice if phrase in text), fallback)
        return SchedulerError(
            f"{self.submit_command[0]} refuses {script}:\n{done.message}", cure=cure
        )


def number_of(text: str) -> int:
    """The number that a text begins with; 0 if it begins with none.

    Ids of jobs and arrays begin with one, the largest with that of the latest.
    """
    match = re.match(r"[0-9]{1,18}", text)
    return int(match[0]) if match else 0


def parse_limit(text: str) -> int | None:
    """Seconds of a limit such as ``2-00:00:00``, ``1:00:00`` or ``30:00``; None for none."""
    try:
        return parse_duration(f"0:{text}" if re.fullmatch(r"\d+:\d{1,2}", text) else text) or None
    except ValueError:
        return None
