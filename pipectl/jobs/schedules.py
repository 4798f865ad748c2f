"""Users' own schedules: files, and functions that a package offers by name.

A package offers one as an entry point of the group ``pipectl.schedules``: a function of the numbers
of ranks, stages and micro-batches that gives, for every rank, its actions, as in a file.
"""

from __future__ import annotations

from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING

from pipectl.errors import InvalidInputError, UsageError
from pipectl.schedule import NAMES
from pipectl.schedule.listed import Listed
from pipectl.spec import SCHEDULES_GROUP

if TYPE_CHECKING:
    from pipectl.spec import JobSpec


def schedule_of_job(spec: JobSpec) -> Listed | None:
    """A job's own schedule; None if it uses a built-in one.

    Raises:
        InvalidInputError: the schedule cannot be used, or the job contradicts it.
    """
    pipeline = spec.pipeline
    name: str | None = pipeline.schedule
    if name is None or name in NAMES:
        return None
    if spec.schedule_file is not None:
        listed = read_listed(spec.schedule_file, name)
    else:
        if pipeline.micro_batches is None:
            raise InvalidInputError(
                f"pipeline.schedule: {name} is made for a number of micro-batches",
                cure="set pipeline.micro_batches",
            )
        ranks = spec.resources.ranks
        listed = make_listed(name, ranks, pipeline.stages or ranks, pipeline.micro_batches)
    for key in ("stages", "micro_batches"):
        wanted, number = getattr(pipeline, key), getattr(listed, key)
        if wanted not in (None, number):
            raise InvalidInputError(
                f"pipeline.{key}: {wanted}, but schedule {listed.name} has {number}",
                cure=f"leave pipeline.{key} out, or change the schedule",
            )
    return listed


def read_listed(path: Path, name: str) -> Listed:
    """The schedule in a file.

    Args:
        name: of the file, for messages and plans.

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
    entries = entry_points(group=SCHEDULES_GROUP, name=name)
    if not entries:
        known = ", ".join((*NAMES, *sorted(entry_points(group=SCHEDULES_GROUP).names)))
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
