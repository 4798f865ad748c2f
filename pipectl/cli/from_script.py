"""What `pipectl init --script` tells of a script, and writes into the job file."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table

from pipectl.cli.console import note, plain, show
from pipectl.errors import CaptureError
from pipectl.files import escape_path, escape_words
from pipectl.spec import SpecFile

if TYPE_CHECKING:
    from pipectl.script.findings import Finding, Findings
    from pipectl.script.later import Compared
    from pipectl.script.parts import Parts

_HEADINGS = {"taken": "found", "left": "not taken over", "differs": "differs"}


@dataclass(frozen=True)
class Taken:
    """What was taken from a script.

    Args:
        parts: of it.
        found: in them.
        compared: its first steps with what was recorded.
        values: for the template of the job file.
        began: when it was read.
    """

    parts: Parts
    found: Findings
    compared: Compared
    values: dict[str, Any]
    began: float


def take_script(file: Path, arguments: Sequence[str], directory: Path) -> Taken:
    """Run a script up to its first optimizer step, compare the next ones, print what was found, and
    return it.

    Args:
        directory: of the job file, from which paths in it count.

    Raises:
        CaptureError: the script fails, or does what no pipeline can follow.
    """
    from pipectl.profiler.script_steps import compare_in_process
    from pipectl.script.findings import findings_of
    from pipectl.script.parts import Parts
    from pipectl.script.run import Command

    began = time.time()
    note(f"running {file} up to its first optimizer step")
    here = Path.cwd()
    command = Command(str(file.resolve()), tuple(arguments), str(here))
    with _output_of_script():
        parts = Parts.of(command)
        note("comparing its first steps with what was recorded")
        compared = compare_in_process(command)
        found = findings_of(parts, compared)
    show(_table(found, file))
    optimizer = [line for line in found.taken if line.what in ("optimizer", "schedule")]
    values = {
        "file": _seen_from(directory, file.resolve()),
        "arguments": [escape_words(text) for text in arguments],  # the shell has expanded them
        "directory": "" if here == file.resolve().parent else _seen_from(directory, here),
        "drawn_between_epochs": found.drawn_between_epochs,
        "training": found.training,
        "sections": {"data": found.data, "loss": found.loss, "evaluation": found.evaluation},
        "micro_batches": found.micro_batches or "auto",
        "guessed": found.guessed,
        "comments": [f"Its {line.what}: {line.value}" for line in optimizer],
    }
    return Taken(parts, found, compared, values, began)


def try_script(taken: Taken, job: Path) -> None:
    """See whether the job of a script can train as it is written.

    Args:
        job: its file, which stays to be corrected.

    Raises:
        CaptureError: it cannot.
    """
    from pipectl.jobs.profiles import keep_comparison
    from pipectl.profiler.script_steps import try_capture, uncompared_of
    from pipectl.script.findings import unfollowed

    note("capturing the model")
    spec = SpecFile.read(job).spec()
    try:
        if (refusal := unfollowed(taken.parts, taken.found, taken.compared)) is not None:
            raise refusal
        with _output_of_script():
            try_capture(spec, taken.parts)
        keep_comparison(spec, uncompared_of(taken.compared), taken.began)
    except CaptureError as error:
        hint = f"{error.hint}\n" if error.hint else ""
        hint += f"{job} is written: edit it, or correct the script and call init with --force"
        raise CaptureError(error.message, hint=hint) from error


@contextmanager
def _output_of_script() -> Iterator[None]:
    """Let the script print to the standard error: the standard output has the table."""
    with redirect_stdout(sys.stderr):
        yield


def _seen_from(directory: Path, path: Path) -> str:
    """A path as written in a job in a directory."""
    text = escape_path(os.path.relpath(path, directory.resolve()))
    return text if text.startswith("..") else f"./{text}"


def _table(found: Any, file: Path) -> Table:
    table = Table(box=None, pad_edge=False, show_header=False, expand=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    table.add_column(no_wrap=True)
    for kind, heading in _HEADINGS.items():
        lines: list[Finding] = getattr(found, kind)
        if lines:
            table.add_row(plain(heading, "bold"))
        for line in lines:
            place = "" if not line.place or not line.place[0] else _short(line.place, file)
            table.add_row(*(plain(cell) for cell in (f"  {line.what}", line.value, place)))
    return table


def _short(place: tuple[str, int], script: Path) -> str:
    if Path(place[0]) == script.resolve():
        return f"{script.name}:{place[1]}"
    return f"{os.path.relpath(place[0])}:{place[1]}"
