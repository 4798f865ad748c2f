"""Where users' schedules come from: a file, or a function that a package offers by name.

That function is an entry point of the group ``pipectl.schedules``. It takes the numbers of ranks,
stages and micro-batches, and gives the actions of every rank, as in a file.
"""

from __future__ import annotations

from importlib.metadata import entry_points
from pathlib import Path

from pipectl.errors import UsageError
from pipectl.schedule.listed import Listed
from pipectl.schedule.registry import NAMES

_GROUP = "pipectl.schedules"


def packaged_names() -> frozenset[str]:
    """Names of the schedules that installed packages offer."""
    return frozenset(entry_points(group=_GROUP).names)


def read_listed(path: Path, name: str) -> Listed:
    """The schedule in a file; messages and plans call it by ``name``.

    Raises:
        ScheduleError: naming line and action.
        UsageError: the file cannot be read.
    """
    try:
        return Listed.read(path.read_text(encoding="utf-8-sig"), name)
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(
            f"{path}: cannot be read: {error}", cure="name a CSV file of actions, a line per rank"
        ) from None


def make_listed(name: str, ranks: int, stages: int, micro_batches: int) -> Listed:
    """The schedule that an entry point makes.

    Raises:
        UsageError: there is none of this name, or it fails.
        ScheduleError: what it makes is no schedule.
    """
    entries = entry_points(group=_GROUP, name=name)
    if not entries:
        known = ", ".join((*NAMES, *sorted(packaged_names())))
        raise UsageError(
            f"there is no schedule {name!r}", cure=f"one of: {known}, or a file that ends in .csv"
        )
    try:
        lists = next(iter(entries)).load()(ranks, stages, micro_batches)
        rows = (each if isinstance(each, str) else ",".join(map(str, each)) for each in lists)
        text = "\n".join(rows)
    except Exception as error:
        raise UsageError(
            f"schedule {name}: its function fails: {type(error).__name__}: {error}",
            cure="it takes (ranks, stages, micro_batches) and gives a list of actions per rank",
        ) from error
    return Listed.read(text, name)
