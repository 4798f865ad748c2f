"""What Slurm and PBS share: a script is handed over to a command, whose answer may be lost."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import ClassVar

from pipectl.batch import process
from pipectl.batch.protocol import JobRequest
from pipectl.errors import SchedulerError
from pipectl.files import make_private_directory
from pipectl.units import parse_duration

QUEUES_TIMEOUT_S = 20.0
"""For questions about partitions and queues, which somebody waits for."""


class BatchCommands(ABC):
    """A batch system whose commands are run one by one.

    Args:
        timeout_s: after which a command is given up.
    """

    submit_command: ClassVar[tuple[str, ...]]
    """Its words before the script."""
    unsure: ClassVar[Sequence[str]]
    """Parts of messages, in small letters, after which the job may have been submitted."""
    advice: ClassVar[Sequence[tuple[str, str]]]
    """What to do, by parts of messages in small letters; the first that fits counts."""
    id_pattern: ClassVar[re.Pattern[str]]
    """Of a line with the job's id, which is its first group."""
    look: ClassVar[str]
    """A command that lists jobs with their tags."""

    def __init__(self, timeout_s: float = process.TIMEOUT_S) -> None:
        self._timeout_s = timeout_s

    @abstractmethod
    def find(self, tag: str) -> str | None:
        """See :class:`~pipectl.batch.protocol.Scheduler`."""

    @abstractmethod
    def _run(self, *argv: str) -> process.Completed:
        """Run a command of the batch system."""

    @abstractmethod
    def _mark(self, tag: str) -> str:
        """How a job with a tag is known, in words."""

    def _ask(self, *argv: str, harmless: Collection[int] = (0,)) -> process.Completed:
        """Run a command that should not fail.

        Args:
            harmless: exit codes that are none of a failure.

        Raises:
            SchedulerError: it fails.
        """
        done = self._run(*argv)
        if done.returncode not in harmless:
            command = " ".join(argv) if len(argv) == 2 else argv[0]  # the job, if it is one
            raise SchedulerError(f"{command}: {done.message}", cure="try again in a minute")
        return done

    def submit(self, script: Path, request: JobRequest) -> str:
        """The job's id; if the answer is lost, of the job that is found by its tag.

        Without its log directory a job fails or hangs and leaves no output, so it is made here.

        Raises:
            SchedulerError: the batch system refuses the job.
            NoAnswerError: it gave no id, and no job is found.
        """
        make_private_directory(request.run_directory / "logs")
        try:
            done = self._run(*self.submit_command, str(script))
        except process.NoAnswerError as error:
            return self._recover(request.tag, error.message)
        if done.returncode == 0:
            # A banner of the site may come before the id.
            lines = [line.strip() for line in reversed(done.stdout.splitlines())]
            ids = [match[1] for match in map(self.id_pattern.fullmatch, lines) if match]
            return ids[0] if ids else self._recover(request.tag, done.message)
        if any(phrase in done.stderr.lower() for phrase in self.unsure):
            return self._recover(request.tag, done.message)
        raise self._refusal(script, done)

    def _refusal(self, script: Path, done: process.Completed) -> SchedulerError:
        """What the command said of a script, and what to do."""
        text = done.message.lower()
        fallback = "correct the job spec as the message says"
        cure = next((cure for phrase, cure in self.advice if phrase in text), fallback)
        return SchedulerError(
            f"{self.submit_command[0]} refuses {script}:\n{done.message}", cure=cure
        )

    def _recover(self, tag: str, message: str) -> str:
        """The job that was made before the answer was lost.

        Raises:
            NoAnswerError: none is found, which does not prove that none comes.
        """
        try:
            job_id = self.find(tag)
        except SchedulerError as error:
            job_id, message = None, f"{message}; {error.message}"
        if job_id is None:
            raise process.NoAnswerError(
                f"{self.submit_command[0]} gave no job id, and no job {self._mark(tag)} is listed: "
                f"{message}",
                cure=f"look with `{self.look}` before you submit again",
            )
        return job_id


def job_number(job_id: str) -> int:
    """A number by which the latest job is the largest; ids of arrays begin with it, too."""
    digits = re.match("[0-9]{1,18}", job_id)
    return int(digits[0]) if digits else -1


def digits(text: str) -> int:
    """The number that a text begins with; 0 if it begins with none."""
    match = re.match(r"\d{1,15}", text)
    return int(match[0]) if match else 0


def parse_limit(text: str) -> int | None:
    """Seconds of a limit such as ``2-00:00:00``, ``1:00:00`` or ``30:00``; None for none."""
    try:
        return parse_duration(f"0:{text}" if re.fullmatch(r"\d+:\d{1,2}", text) else text) or None
    except ValueError:
        return None
