"""Job scripts that a person edits: printed by a dry run, and submitted with a run directory."""

from __future__ import annotations

import re
import shlex
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from pipectl.batch import process
from pipectl.batch.request import IN_JOB, JobRequest
from pipectl.batch.scheduler import name_suffix
from pipectl.errors import UsageError

DRY_RUN = "dry-run"
"""Last word of the tag in a script that was not submitted."""
_MARK = "# pipectl: "
_DIRECTORY = re.compile(r"^export PIPECTL_RUN_DIRECTORY=(.+)$", re.MULTILINE)
_STEM = re.compile(r"\d{8}-\d{6}-.+")
_PARTS = (
    (
        r"#(SBATCH|PBS) ",
        "yours to edit, except files, comment, name, and numbers of nodes and tasks:",
    ),
    (r"set -uo pipefail$", "not yours:"),
    (r"export OMP_NUM_THREADS=", "yours to edit, with commands to run before the ranks start:"),
    (r"with_variables\(\) ", "not yours:"),
    (r"run_ranks ", "yours to edit:"),
)
"""Patterns of lines, and what stands before the first of each kind."""


def mark_for_editing(script: str, submission: str) -> str:
    """Return a script with comments that say which lines are a person's, and how to submit it.

    The batch system refuses it without that: its first line starts no interpreter. By itself it
    would fail without a log, because the run directory is not there.

    Args:
        submission: the command that submits it.
    """
    lines = [
        f"{_MARK}to be read and edited. A batch system cannot run it alone, because its run",
        f"{_MARK}directory is not there yet. With the same options as now, this makes that and",
        f"{_MARK}submits the script:",
        f"{_MARK}    {submission}",
    ]
    parts = list(_PARTS)
    for line in script.splitlines():
        if parts and (number := _find(parts, line)) is not None:
            lines.append(_MARK + parts[number][1])
            del parts[: number + 1]
        lines.append(line)
    return "".join(f"{line}\n" for line in lines)


def _find(parts: list[tuple[str, str]], line: str) -> int | None:
    """Return the part that begins with a line."""
    return next((i for i, (pattern, _) in enumerate(parts) if re.match(pattern, line)), None)


@dataclass(frozen=True)
class Edited:
    """The script of a dry run, as a person has edited it.

    Args:
        file: where it was read, for messages.
    """

    file: str
    text: str

    def adopt(self, request: JobRequest, ours: str) -> str:
        """Return it for the run directory and the tag of a submission.

        Args:
            ours: the script as pipectl writes it.

        Raises:
            UsageError: it is no such script, or of another job.
        """
        text = re.sub(rf"(?m)^{_MARK}.*\n", "", self.text)
        run, tag = request.run_directory, request.tag
        before = self._directory_of(text)
        if before.parent != run.parent:
            where = f"its run directory is in {before.parent}, and that of this job in"
            raise self._fault(f"{where} {run.parent}")
        text = text.replace(before.name, run.name).replace(f"{run.name} {DRY_RUN}", tag)
        suffix = re.escape(name_suffix(DRY_RUN))
        text = re.sub(rf"(?m)^(#(?:SBATCH|PBS) .*){suffix}", rf"\1{name_suffix(tag)}", text)
        unique = name_suffix(tag)[1:]
        if unique in ours and unique not in text:
            raise self._fault(
                "the line with the job's comment or name was changed; pipectl finds its jobs by it"
            )
        if IN_JOB in ours and IN_JOB not in text:
            raise self._fault("it needs a plan, and there is none that is up to date")
        if fault := process.fault_of_bash(text):
            raise UsageError(f"{self.file}: not valid bash: {fault}", hint="correct it")
        return text

    def _directory_of(self, text: str) -> Path:
        """Return the run directory in the text, as the dry run has named it."""
        found, words = _DIRECTORY.search(text), list[str]()
        with suppress(ValueError):
            words = shlex.split(found[1]) if found else []
        if len(words) != 1 or not _STEM.fullmatch(Path(words[0]).name):
            raise self._fault("not a script that --dry-run has printed")
        return Path(words[0])

    def _fault(self, what: str) -> UsageError:
        return UsageError(f"{self.file}: {what}", hint="print it again with --dry-run")
