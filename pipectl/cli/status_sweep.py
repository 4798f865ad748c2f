"""The points of a sweep, one a row, with what they came to."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from rich.text import Text

from pipectl.cli.console import output, plain, say, say_json
from pipectl.cli.rows import Rows
from pipectl.cli.status_json import status_json
from pipectl.cli.status_words import state_text
from pipectl.cli.sweep_values import short_keys, shown
from pipectl.jobs.best import best_of
from pipectl.jobs.status import RunStatus, statuses
from pipectl.runs import SweepDirectory

_HEADS = ("run", "state", "step", "loss", "best")


def show_sweep(sweep: SweepDirectory, *, as_json: bool) -> list[RunStatus]:
    """Print how the runs of a sweep are, and return it."""
    found = statuses(sweep.runs(), time.time())
    if as_json:
        say_json(sweep_json(sweep, found))
    else:
        console = output()
        say(headline(sweep, found), "bold")
        console.print(points_table(sweep, found, console.width))
    return found


def sweep_json(sweep: SweepDirectory, found: Sequence[RunStatus]) -> dict[str, Any]:
    """Everything about a sweep, for programs."""
    best = best_of(found)
    return {
        "sweep": sweep.name,
        "directory": str(sweep.path),
        "best": None if best is None else best.run.name,
        "runs": [status_json(status) for status in found],
    }


def headline(sweep: SweepDirectory, found: Sequence[RunStatus]) -> str:
    """Its name, and how many runs are in which state."""
    states = Counter(status.job.state.value for status in found)
    told = ", ".join(f"{count} {state}" for state, count in states.items())
    return f"{sweep.name}  {len(found)} runs: {told}"


def points_table(
    sweep: SweepDirectory, runs: Sequence[RunStatus], width: int, rows: int | None = None
) -> Rows:
    """One row per point: its place, values, state and figures; the best is marked.

    Args:
        width: columns there are; values go last if they do not fit.
        rows: at most so many, those that are over last of all.
    """
    best = best_of(runs)
    found = sorted(runs, key=lambda status: status.job.state.final) if rows else runs
    found = found[:rows]
    keys = short_keys([key for status in found for key in _values(status)], taken=_HEADS)
    names = list(dict.fromkeys(name for status in found for name in status.measured.evaluation))
    columns: dict[str, list[Text]] = {"run": [plain(_place(sweep, status)) for status in found]}
    for key, short in keys.items():
        columns[short] = [plain(shown(_values(status), key)) for status in found]
    columns["state"] = [state_text(status) for status in found]
    columns["step"] = [plain(f"{s.measured.step}/{s.steps or '?'}") for s in found]
    columns["loss"] = [plain(_figure(status.measured.last_loss)) for status in found]
    for name in names:
        columns[f"evaluation {name}"] = [
            plain(_figure(status.measured.evaluation.get(name))) for status in found
        ]
    if best is not None:
        columns["best"] = [plain("*" if status is best else "", "green") for status in found]
    optional = ("step", *reversed(list(keys.values())))
    return Rows(columns, set(columns) - {"run", "state"}, optional=optional, room=width)


def _values(status: RunStatus) -> Mapping[str, Any]:
    record = status.record
    return {} if record is None or record.sweep is None else record.sweep.values


def _place(sweep: SweepDirectory, status: RunStatus) -> str:
    return status.run.name.removeprefix(f"{sweep.name}-")


def _figure(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"
