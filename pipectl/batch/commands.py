"""What Slurm and PBS share: a script is handed over to a command, whose answer may be lost."""

from __future__ import annotations

import os
import re
from abc import abstractmethod
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import ClassVar

from pipectl.batch import process
from pipectl.batch.protocol import JobRequest, Scheduler
from pipectl.errors import SchedulerError
from pipectl.files import make_private_directory
from pipectl.units import parse_duration

QUEUES_TIMEOUT_S = 20.0
"""For questions about partitions and queues, which somebody waits for."""


class BatchCommands(Scheduler):
    """A batch system whose commands are run one by one.

    Args:
        timeout_s: after which a command is given up.
    """

    title: ClassVar[str]
    """The batch system's name for people."""
    submit_command: ClassVar[tuple[str, ...]]
    """Its words before the script."""
    id_pattern: ClassVar[re.Pattern[str]]
    """Of a line with the job's id, which is its first group."""
    list_command: ClassVar[str]
    """Lists jobs with their tags."""
    overrides: ClassVar[tuple[str, ...]]
    """Beginnings of variables that change what the commands do, over the job script's own
    directives, or come from a job around this one: the commands do not see them."""
    kept: ClassVar[frozenset[str]] = frozenset()
    """Those of them that the commands see all the same."""
    unsure: ClassVar[Sequence[str]]
    """Parts of messages, in small letters, after which the job may have been submitted."""
    advice: ClassVar[Sequence[tuple[str, str]]]
    """What to do, by parts of messages in small letters; the first that fits counts."""

    def __init__(self, timeout_s: float = process.TIMEOUT_S) -> None:
        self._timeout_s = timeout_s

    @abstractmethod
    def _describe_tag(self, tag: str) -> str:
        """How a job with a tag is recognised, in words."""

    def _run(self, *argv: str, **variables: str) -> process.Completed:
        """Run a command of the batch system.

        Args:
            variables: of its environment, beside ours.
        """
        env = {
            name: value
            for name, value in os.environ.items()
            if name in self.kept or not name.startswith(self.overrides)
        }
        cure = (
            f"run this where the commands of {self.title} are installed, or set "
            "launch.scheduler: local"
        )
        return process.run(argv, cure=cure, env={**env, **variables}, timeout_s=self._timeout_s)

    def _ask(
        self, *argv: str, harmless: Collection[int] = (0,), **variables: str
    ) -> process.Completed:
        """Run a command that should not fail.

        Args:
            harmless: exit codes that are none of a failure.

        Raises:
            SchedulerError: it fails.
        """
        done = self._run(*argv, **variables)
        if done.returncode not in harmless:
            command = " ".join(argv) if len(argv) == 2 else argv[0]  # the job, if it is one
            raise SchedulerError(f"{command}: {done.message}", cure="try again in a minute")
        return done

    def submit(self, script: Path, request: JobRequest) -> str:
        """The job's id; if the answer is lost, of the job that is found by its tag.

        Without its log directory a job fails or hangs and leaves no output, so it is made here.

        Raises:
            SchedulerError: the batch system refuses the job.
            NoAnswerError: it gave no id, and no job is found, which does not prove that none comes.
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
            elif not any(phrase in done.stderr.lower() for phrase in self.unsure):
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
        """What the command said of a script, and what to do."""
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
