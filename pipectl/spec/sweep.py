"""From a sweep to the specs of its runs, with every fault at the place of its value."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod
from pathlib import Path
from typing import Any

from pipectl.errors import Problem, SpecError
from pipectl.spec.document import (
    MAX_DEPTH,
    Place,
    YamlList,
    YamlMapping,
    YamlNode,
    YamlPlain,
    describe,
    escape,
    put,
    resolve,
)
from pipectl.spec.former import fault_of_former_key
from pipectl.spec.load import holds_variables, is_within, load_document, set_key, validate
from pipectl.spec.models import JobSpec

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
        values: that the sweep gives to it, by dotted key, typed as YAML types them. What holds
            environment variables, which may be secrets, has its number instead: ``(value 2)``.
        spec: of the run; it has no sweep.
    """

    values: Mapping[str, Any]
    spec: JobSpec


_Run = Mapping[str, YamlNode]
"""Values by dotted key; where a key is written is the ``key_place`` of its value."""


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
    runs, problems = _list_runs(tree["sweep"])
    if problems:
        raise SpecError(problems)
    base = put(tree, ["sweep"], YamlPlain().at(tree.place), tree.place)
    points = []
    numbers: dict[str, dict[str, int]] = {}
    for run in runs:
        job, values = base, {}
        for name, node in run.items():
            job = set_key(job, name.split("."), node, _place_of_key(node))
            value = resolve(node)
            if holds_variables(name):
                number_of = numbers.setdefault(name, {})
                value = f"(value {number_of.setdefault(repr(value), len(number_of) + 1)})"
            values[name] = value
        run_spec, faults = validate(job, path, check_files=check_files)
        problems += (_blame_values(fault, run) for fault in faults)
        if run_spec is not None:
            points.append(Point(values, run_spec))
    if problems:
        raise SpecError(problems)
    return spec, tuple(points)


def _list_runs(sweep: YamlMapping) -> tuple[list[_Run], list[Problem]]:
    """The values of every run, and the faults of the sweep."""
    columns: dict[str, list[YamlNode]] = {}
    problems: list[Problem] = []
    grid, points_node = sweep.get("grid"), sweep.get("points")
    for name, values in grid.items() if isinstance(grid, YamlMapping) else ():
        if isinstance(values, YamlList) and values:
            columns[name] = [value.at(value.place, values.key_place) for value in values]
        else:
            problems.append(_fault(name, values, "has no values"))
    points = list(points_node) if isinstance(points_node, YamlList) else []
    empty = "sweep.points: a point without a key"
    problems += (point.place.problem(empty) for point in points if not point)
    for together in ({name: values[0] for name, values in columns.items()}, *points):
        problems += _key_faults(together)
    place = _place_of_key(sweep)
    count = (prod(map(len, columns.values())) if columns else 0) + len(points)
    if count > MAX_POINTS:
        problems.append(place.problem(f"sweep: has {count} points; {MAX_POINTS} are allowed"))
        return [], problems
    if not count and not problems:
        problems.append(place.problem("sweep: has no points; give it a grid, or points"))
    combinations = product(*columns.values()) if columns else ()
    runs = [*(dict(zip(columns, values, strict=True)) for values in combinations), *points]
    seen: dict[object, int] = {}
    for number, run in enumerate(runs):
        key = tuple(sorted((name, repr(resolve(value))) for name, value in run.items()))
        if run and seen.setdefault(key, number) != number:
            name, value = list(run.items())[-1]
            message = f"{escape(name)}: a point with the same values as number {seen[key]}"
            problems.append(value.place.problem(message))
    return runs, problems


def _place_of_key(value: YamlNode) -> Place:
    return value.key_place or value.place


def _fault(name: str, value: YamlNode, message: str) -> Problem:
    """A fault at the key of a value."""
    return _place_of_key(value).problem(f"{escape(name)}: {message}")


def _key_faults(together: _Run) -> Iterator[Problem]:
    """Faults of keys that are set together: those that no sweep can set."""
    for key, value in together.items():
        around = next((other for other in together if other != key and is_within(key, other)), None)
        fault = fault_of_former_key(key.split("."))
        if not all(key.split(".")) or key.count(".") > MAX_DEPTH:
            fault = "must be a key such as training.seed"
        elif any(is_within(key, shared) or is_within(shared, key) for shared in _SHARED):
            fault = (
                "cannot differ between the runs of a sweep, which are one job array; instead, "
                f"submit several times with --set {escape(key)}=..."
            )
        elif around is not None and not fault:
            fault = f"is a part of {escape(around)}, which is set as well"
        if fault:
            yield _fault(key, value, fault)


def _blame_values(problem: Problem, run: _Run) -> Problem:
    """A fault at its value, or moved from another place to the values that cause it."""
    place = Place(problem.file, problem.line, problem.column)
    if any(place in _places(value) for value in run.values()):
        return problem
    values = (
        f"{escape(name)}: {'(not shown)' if holds_variables(name) else describe(value)}"
        for name, value in run.items()
    )
    first = next(iter(run.values()))
    return first.place.problem(f"with {', '.join(values)}: {problem.message}")


def _places(value: YamlNode) -> list[Place]:
    """The places of a value and its key, and of all that is in it."""
    parts: Iterable[YamlNode] = value.values() if isinstance(value, YamlMapping) else ()
    parts = value if isinstance(value, YamlList) else parts
    return [value.place, _place_of_key(value), *(x for part in parts for x in _places(part))]
