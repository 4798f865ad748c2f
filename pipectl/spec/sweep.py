"""From a sweep to the specs of its runs, with every fault at the place of its value."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

from pipectl.errors import Problem, SpecError
from pipectl.spec.document import Items, Place, Table, escape, show, to_python
from pipectl.spec.load import hide_variables, load_document, put_at
from pipectl.spec.models import JobSpec
from pipectl.spec.reader import MAX_DEPTH
from pipectl.spec.validate import fault_of_former_key, validate

MAX_POINTS = 1000
"""Slurm allows arrays of 1,001 jobs unless a site says otherwise (``MaxArraySize``)."""
_SHARED = (
    "version", "name", "resources", "launch.scheduler", "launch.template", "output", "slurm", "pbs",
    "checkpoint.lead_time", "checkpoint.max_requeues", "site_defaults", "sweep",
)  # fmt: skip
"""Keys that all runs share, because the directives of a job array are those of all its jobs."""


@dataclass(frozen=True)
class Point:
    """One run of a sweep.

    Args:
        values: that the sweep gives to it, by dotted key, typed as YAML types them. An environment
            variable, which may be a secret, has the number of its value instead: ``(value 2)``.
        spec: of the run; it has no sweep.
    """

    values: Mapping[str, Any]
    spec: JobSpec


class _Assignment(NamedTuple):
    """A key of a sweep and its value in one run."""

    key: str
    value: Any
    key_place: Place
    value_place: Place

    def problem(self, place: Place, message: str) -> Problem:
        return place.problem(f"{escape(self.key)}: {message}")


def load_sweep(
    path: Path,
    overrides: Sequence[str] = (),
    *,
    sites: Sequence[Path] | None = None,
    check_files: bool = True,
) -> tuple[JobSpec, tuple[Point, ...]]:
    """As :func:`pipectl.spec.load`, with the runs of its sweep; none if it has no sweep.

    The runs of the grid come first, the last key changing fastest. Values of the sweep go over
    those of ``--set``.
    """
    spec, tree = load_document(path, overrides, sites, check_files=check_files)
    if spec.sweep is None:
        return spec, ()
    problems: list[Problem] = []
    runs = _combine(tree["sweep"], tree.key_places["sweep"], problems)
    if problems:
        raise SpecError(list(dict.fromkeys(problems)))
    rest = tree.copy()
    del rest["sweep"]
    points = []
    numbers: dict[str, list[str]] = {}
    for settings in runs:
        job = rest
        for key, value, key_place, value_place in settings:
            job = put_at(job, key.split("."), value, key_place, value_place)
        faults: list[Problem] = []
        run = validate(job, path, faults, check_files=check_files)
        problems += (_blame_values(fault, settings) for fault in faults)
        values = {}
        for key, value, *_ in settings:
            same = numbers.setdefault(key, [])
            if repr(value) not in same:
                same.append(repr(value))
            hidden = f"(value {same.index(repr(value)) + 1})"
            values[key] = hide_variables(tuple(key.split(".")), to_python(value), hidden)
        if run is not None:
            points.append(Point(values, run))
    if problems:
        raise SpecError(list(dict.fromkeys(problems)))
    return spec, tuple(points)


def _combine(sweep: Table, place: Place, problems: list[Problem]) -> list[list[_Assignment]]:
    """The settings of every run."""
    columns = []
    grid = sweep.get("grid") or Table(place)
    for key, values in grid.items():
        key_place = grid.key_places[key]
        pairs = zip(values, values.places, strict=True)
        columns.append([_Assignment(key, value, key_place, at) for value, at in pairs])
        if not values:
            problems.append(key_place.problem(f"{escape(key)}: has no values"))
    points = sweep.get("points") or Items(place)
    listed = []
    for point, at in zip(points, points.places, strict=True):
        keys, at_values = point.key_places, point.value_places
        listed.append([_Assignment(k, v, keys[k], at_values[k]) for k, v in point.items()])
        if not point:
            problems.append(at.problem("sweep.points: a point without a key"))
    for settings in ([column[0] for column in columns if column], *listed):
        problems += _key_faults(settings)
    count = (prod(map(len, columns)) if columns else 0) + len(listed)
    if count > MAX_POINTS:
        problems.append(place.problem(f"sweep: has {count} points; {MAX_POINTS} are allowed"))
        return []
    if not count and not problems:
        problems.append(place.problem("sweep: has no points; give it a grid, or points"))
    runs = [*(list(run) for run in product(*columns) if columns), *listed]
    problems += _repetitions(runs)
    return runs


def _key_faults(together: Sequence[_Assignment]) -> Iterator[Problem]:
    """Of keys that are set together, those that no sweep can set."""
    for setting in together:
        key = setting.key
        around = next((o.key for o in together if o.key != key and _within(key, o.key)), None)
        if not all(key.split(".")) or key.count(".") > MAX_DEPTH:
            message = "must be a key such as training.seed"
        elif any(_within(key, shared) or _within(shared, key) for shared in _SHARED):
            message = (
                "cannot differ between the runs of a sweep, which are one job array; instead, "
                f"submit several times with --set {escape(key)}=..."
            )
        elif fault := fault_of_former_key(tuple(key.split("."))):
            message = fault
        elif around is not None:
            message = f"is a part of {escape(around)}, which is set as well"
        else:
            continue
        yield setting.problem(setting.key_place, message)


def _within(key: str, other: str) -> bool:
    return f"{key}.".startswith(f"{other}.")


def _repetitions(runs: Sequence[Sequence[_Assignment]]) -> Iterator[Problem]:
    """Runs that would be the same as an earlier one."""
    seen: dict[object, int] = {}
    for number, settings in enumerate(runs):
        values = tuple(sorted((s.key, repr(to_python(s.value))) for s in settings))
        if values and seen.setdefault(values, number) != number:
            last = settings[-1]
            message = f"a point with the same values as number {seen[values]}"
            yield last.problem(last.value_place, message)


def _blame_values(problem: Problem, settings: Sequence[_Assignment]) -> Problem:
    """A fault at its value; one that is found elsewhere, at the values that cause it."""
    places = {place for s in settings for place in (s.key_place, s.value_place, *_places(s.value))}
    if Place(problem.file, problem.line, problem.column) in places:
        return problem
    shown = []
    for key, value, *_ in settings:
        value = hide_variables(tuple(key.split(".")), value, "(not shown)")
        shown.append(f"{escape(key)}: {show(value)}")
    return settings[0].value_place.problem(f"with {', '.join(shown)}: {problem.message}")


def _places(tree: Any) -> Iterator[Place]:
    if isinstance(tree, Table):
        yield from (*tree.key_places.values(), *tree.value_places.values())
    elif isinstance(tree, Items):
        yield from tree.places
    if isinstance(tree, Table | Items):
        for item in tree.values() if isinstance(tree, Table) else tree:
            yield from _places(item)
