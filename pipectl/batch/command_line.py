"""Batch systems whose commands are run one by one: how a job is submitted and its id found out."""

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
"""Time limit of questions about partitions and queues: a user waits for the answer."""


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
