"""Handing a script to a batch system, whose answer may be lost."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from pipectl.batch import process
from pipectl.batch.protocol import JobRequest
from pipectl.errors import SchedulerError
from pipectl.files import make_private_directory

Run = Callable[..., process.Completed]
Find = Callable[[str], str | None]


class Program(NamedTuple):
    """The command of a batch system that submits scripts.

    Args:
        command: its words before the script.
        submitted_id: the job's id in what it prints.
        unsure: parts of messages, in small letters, upon which the job may have been submitted.
        advice: what to do, by parts of messages in small letters; the first that fits counts.
        marked: how a job with a tag is known, in words.
        look: a command that lists such jobs.
    """

    command: tuple[str, ...]
    submitted_id: Callable[[str], str | None]
    unsure: Sequence[str]
    advice: Sequence[tuple[str, str]]
    marked: Callable[[str], str]
    look: str

    def submit(self, script: Path, request: JobRequest, run: Run, find: Find) -> str:
        """The job's id; if the answer is lost, of the job that is found by its tag.

        Without its log directory a job fails or hangs and leaves no output, so it is made here.

        Args:
            run: runs a command.
            find: a job by its tag.

        Raises:
            SchedulerError: it refuses.
            NoAnswerError: it gave no id, and no job is found.
        """
        make_private_directory(request.run_directory / "logs")
        try:
            done = run(*self.command, str(script))
        except process.NoAnswerError as error:
            return self._recover(request.tag, error.message, find)
        if done.returncode != 0 and not _holds(self.unsure, done.stderr):
            raise self.refusal(script, done)
        job_id = self.submitted_id(done.stdout) if done.returncode == 0 else None
        return job_id or self._recover(request.tag, done.said, find)

    def refusal(self, script: Path, done: process.Completed) -> SchedulerError:
        """What it said of a script, and what to do."""
        text = done.said.lower()
        fallback = "correct the job spec as the message says"
        advice = next((cure for phrase, cure in self.advice if phrase in text), fallback)
        return SchedulerError(f"{self.command[0]} refuses {script}:\n{done.said}", cure=advice)

    def _recover(self, tag: str, said: str, find: Find) -> str:
        """The job that it may have made before its answer was lost.

        Raises:
            NoAnswerError: none is found, which does not prove that none comes.
        """
        try:
            job_id = find(tag)
        except SchedulerError as error:
            job_id, said = None, f"{said}; {error.message}"
        if job_id is None:
            raise process.NoAnswerError(
                f"{self.command[0]} gave no job id, and no job {self.marked(tag)} is listed: "
                f"{said}",
                cure=f"look with `{self.look}` before you submit again",
            )
        return job_id


def job_number(job_id: str) -> int:
    """By which the latest job is the largest; ids of arrays begin with it, too."""
    digits = re.match("[0-9]{1,18}", job_id)
    return int(digits[0]) if digits else -1


def _holds(phrases: Sequence[str], text: str) -> bool:
    return any(phrase in text.lower() for phrase in phrases)
