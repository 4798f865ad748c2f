"""From a sweep to the specs of its runs, with every fault at the place of its value."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from math import prod
from pathlib import Path
from typing import Any

from pipectl.errors import Problem
from pipectl.spec.layers import put
from pipectl.spec.models import JobSpec
from pipectl.spec.tree import (
    Entry,
    Items,
    Place,
    Scalar,
    Table,
    Tree,
    is_null,
    printable,
    to_values,
)
from pipectl.spec.validate import validate

MOST_POINTS = 1000
"""Slurm allows arrays of 1,001 jobs unless a site says otherwise (``MaxArraySize``)."""
_ALIKE = (
    "version", "name", "resources", "launch.scheduler", "launch.template", "output", "slurm", "pbs",
    "checkpoint.on_signal", "checkpoint.lead_time", "checkpoint.max_requeues", "site_defaults",
    "sweep",
)  # fmt: skip
"""Keys that all runs share, because the directives of a job array are those of all its jobs."""

_Setting = Mapping[Scalar, Tree]
"""Keys and their values in one run; both know their place."""


@dataclass(frozen=True)
class Point:
    """One run of a sweep.

    Args:
        values: that the sweep gives to it, by dotted key, typed as YAML types them.
        spec: of the run; it has no sweep.
    """

    values: Mapping[str, Any]
    spec: JobSpec


def points_of(
    tree: Table, source: Path, problems: list[Problem], *, check_files: bool = True
) -> tuple[Point, ...]:
    """The runs of the sweep in a tree: first those of its grid, the last key changing fastest.

    Args:
        tree: of a spec that is right, the sweep aside.
        problems: gets all that is wrong with the sweep, or with a spec that it makes.
    """
    entry = tree.entries["sweep"]
    rest = Table({k: e for k, e in tree.entries.items() if k != "sweep"}, tree.place)
    assert isinstance(entry.value, Table)
    before = len(problems)
    settings = _settings(entry.value, entry.key.place, problems)
    if len(problems) > before:
        return ()
    found = (_point(rest, setting, source, problems, check_files) for setting in settings)
    return tuple(point for point in found if point is not None)


def _settings(sweep: Table, place: Place, problems: list[Problem]) -> list[_Setting]:
    grid = {e.key: _items(e.value) for e in _entries(sweep, "grid")}
    items = _items(_value(sweep, "points"))
    listed = [_setting(item) for item in items]
    problems += _key_faults([tuple(grid), *map(tuple, listed)])
    problems += (_problem(key.place, key, "has no values") for key in grid if not grid[key])
    empty = (item.place for item, keys in zip(items, listed, strict=True) if not keys)
    problems += (place.problem("sweep.points: a point without a key") for place in empty)
    count = (prod(map(len, grid.values())) if grid else 0) + len(listed)
    if count > MOST_POINTS:
        problems.append(place.problem(f"sweep: has {count} points; {MOST_POINTS} are allowed"))
        return []
    if not count and not problems:
        problems.append(place.problem("sweep: has no points; give it a grid, or points"))
    combined = product(*grid.values()) if grid else ()
    found = [*(dict(zip(grid, values, strict=True)) for values in combined), *listed]
    problems += _repeated(found)
    return found


def _entries(table: Table, key: str) -> Iterator[Entry]:
    value = _value(table, key)
    if isinstance(value, Table):
        yield from value.entries.values()


def _value(table: Table, key: str) -> Tree | None:
    entry = table.entries.get(key)
    return None if entry is None or is_null(entry.value) else entry.value


def _items(value: Tree | None) -> tuple[Tree, ...]:
    return value.items if isinstance(value, Items) else ()


def _setting(item: Tree) -> _Setting:
    assert isinstance(item, Table)
    return {entry.key: entry.value for entry in item.entries.values()}


def _key_faults(groups: list[tuple[Scalar, ...]]) -> Iterator[Problem]:
    """Of keys that are set together, those that no sweep can set."""
    for keys in groups:
        for key in keys:
            if fault := _key_fault(key.text, [other.text for other in keys]):
                yield _problem(key.place, key, fault)


def _key_fault(key: str, together: list[str]) -> str | None:
    if not all(key.split(".")):
        return "must be a key such as training.seed"
    if any(_within(key, alike) or _within(alike, key) for alike in _ALIKE):
        return (
            "cannot differ between the runs of a sweep, which are one job array; instead, submit "
            f"several times with --set {printable(key)}=..."
        )
    around = next((other for other in together if other != key and _within(key, other)), None)
    return None if around is None else f"is a part of {printable(around)}, which is set as well"


def _within(key: str, other: str) -> bool:
    return f"{key}.".startswith(f"{other}.")


def _repeated(settings: list[_Setting]) -> Iterator[Problem]:
    """Runs that would be the same as an earlier one."""
    seen: dict[object, int] = {}
    for number, setting in enumerate(settings):
        values = tuple(sorted((k.text, repr(to_values(v))) for k, v in setting.items()))
        if values and seen.setdefault(values, number) != number:
            key, value = list(setting.items())[-1]
            fault = f"a point with the same values as number {seen[values]}"
            yield _problem(value.place, key, fault)


def _point(
    rest: Table, setting: _Setting, source: Path, problems: list[Problem], check_files: bool
) -> Point | None:
    tree = rest
    for key, value in setting.items():
        tree = put(tree, key.text.split("."), value, key.place)
    found: list[Problem] = []
    spec = validate(tree, source, found, check_files=check_files)
    places = {place for key, value in setting.items() for place in (key.place, *_places(value))}
    problems += (_told(problem, setting, places) for problem in found)
    values = {key.text: to_values(value) for key, value in setting.items()}
    return None if spec is None else Point(values, spec)


def _told(problem: Problem, setting: _Setting, places: set[Place]) -> Problem:
    """A fault at its value; one that is found elsewhere, at the values that cause it."""
    if Place(problem.file, problem.line, problem.column) in places:
        return problem
    values = ", ".join(f"{printable(key.text)}: {_shown(v)}" for key, v in setting.items())
    return next(iter(setting.values())).place.problem(f"with {values}: {problem.message}")


def _shown(value: Tree) -> str:
    return str(value) if isinstance(value, Scalar) else repr(to_values(value))[:60]


def _places(tree: Tree) -> Iterator[Place]:
    yield tree.place
    if isinstance(tree, Items):
        for item in tree.items:
            yield from _places(item)
    elif isinstance(tree, Table):
        for entry in tree.entries.values():
            yield entry.key.place
            yield from _places(entry.value)


def _problem(place: Place, key: Scalar, message: str) -> Problem:
    return place.problem(f"{printable(key.text)}: {message}")
