"""`pipectl logs`: the output of runs."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from math import inf
from pathlib import Path

import typer

from pipectl.batch import CHECKPOINTED, JobState
from pipectl.cli import options as opt
from pipectl.cli.console import note
from pipectl.errors import UnknownRunError, UsageError
from pipectl.files import read_limited
from pipectl.jobs.state import fault_of_reading
from pipectl.runs import (
    Line,
    Logs,
    RunDirectory,
    find_runs,
    last_lines,
    name_in_shell,
    read_exit_code,
)
from pipectl.runs.logs import check_ranks
from pipectl.units import printable

_MAX_SCRIPT = 2**22
_PATIENCE_S = 60.0
"""How long to follow a run of unknown state."""


def command(
    context: typer.Context,
    names: list[str] | None = opt.RUN_NAMES,
    script: bool = opt.flag("Print the job script instead.", "--script"),
    follow: bool = opt.flag("Print new lines until the run ends.", "-f", "--follow"),
    rank: list[int] | None = opt.count(
        "Print only this rank's lines; may be repeated.", "--rank", min=0
    ),
    tail: int | None = opt.count("Print only the last N lines.", "--tail", "-n", min=0),
    directory: Path = opt.DIRECTORY,
) -> None:
    if script:
        opt.refuse(context, "--follow --rank --tail", "is not used with --script")
    runs = find_runs(directory, names or ["last"])
    if follow and len(runs) > 1:
        raise UsageError("-f: follows one run", hint="name one, or leave -f out")
    for number, run in enumerate(runs):
        if fault := fault_of_reading(run):
            raise UsageError(f"{run.name}: {fault}")
        if len(runs) > 1:
            sys.stdout.write(f"{chr(10) if number else ''}==> {run.name} <==\n")
        if script:
            try:
                text = read_limited(run.script, _MAX_SCRIPT).decode("utf-8", "replace")
            except OSError as error:
                raise UsageError(
                    f"{run.script}: cannot be read: {error.strerror}",
                    hint="look at the run's job.log",
                ) from None
            sys.stdout.write(printable(text))
        else:
            _print_logs(run, frozenset(rank or ()), tail, follow=follow)


def _print_logs(
    run: RunDirectory, ranks: frozenset[int], tail: int | None, *, follow: bool
) -> None:
    """Print the log of a run.

    Args:
        ranks: ranks whose lines are printed; empty for all lines.
        tail: number of last lines to start with; None for all.
        follow: whether to print new lines until the run is over.
    """
    logs, unknown, printed = Logs(run), None, 0

    def is_wanted(line: Line) -> bool:
        return not ranks or line.rank in ranks

    def show(lines: Iterable[Line]) -> None:
        nonlocal printed
        for line in filter(is_wanted, lines):
            sys.stdout.write(f"{printable(line.text)}\n")
            printed += 1
        sys.stdout.flush()

    check_ranks(run, ranks)
    if follow:
        show(logs.read_lines() if tail is None else logs.read_last_lines(tail, is_wanted))
        unknown, tail = _follow(run, logs, show), None
    show(last_lines(run, logs, ranks, tail))
    if not printed and tail != 0:
        who = f"rank {', '.join(map(str, sorted(ranks)))}" if ranks else "the run"
        note(f"{run.name}: {who} has printed nothing; see: pipectl status {name_in_shell(run)}")
    if unknown is not None:
        raise UnknownRunError(
            f"{run.name}: the log has stopped, and it is unknown whether the run is alive: "
            f"{unknown or 'no source knows its job'}",
            hint=f"to follow it again: pipectl logs -f {name_in_shell(run)}",
        )


def _follow(run: RunDirectory, logs: Logs, show: Callable[[Iterable[Line]], None]) -> str | None:
    """Show new lines until the run is over.

    Returns:
        Why its state is unknown, if there were no new lines for long; else None.
    """
    from pipectl.jobs.state import POLL_S, poll

    bytes_before, silent_s = logs.bytes_read, 0.0
    for status in poll(run, max_unknown_s=inf):
        if read_exit_code(status.start) not in (None, CHECKPOINTED):  # a checkpointed run may go on
            break
        show(logs.read_lines())
        silent_s += POLL_S
        if status.job.state is not JobState.UNKNOWN or logs.bytes_read != bytes_before:
            bytes_before, silent_s = logs.bytes_read, 0.0
        elif silent_s > _PATIENCE_S:
            return status.job.reason
    return None
