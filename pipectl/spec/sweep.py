"""From a sweep to the specs of its runs, with every fault at the place of its value."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

from pipectl.errors import Problem, SpecError
from pipectl.spec.document import MAX_DEPTH, Node, Place, escape, resolve
from pipectl.spec.former import fault_of_former_key
from pipectl.spec.load import (
    holds_variables,
    is_within,
    load_document,
    set_key,
    validate,
)
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


class _Setting(NamedTuple):
    """A dotted key and its value in one run, as the sweep writes them."""

    name: str
    place: Place
    value: Node

    def fault(self, message: str, place: Place | None = None) -> Problem:
        return (place or self.place).problem(f"{escape(self.name)}: {message}")


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
    runs, problems = _combine(tree.locate(("sweep",))[0])
    if problems:
        raise SpecError(problems)
    rest = replace(tree, value={key: node for key, node in tree.items.items() if key != "sweep"})
    points = []
    numbers: dict[str, dict[str, int]] = {}
    for settings in runs:
        job, values = rest, {}
        for name, place, node in settings:
            job = set_key(job, name.split("."), node, place)
            value = resolve(node.data)
            if holds_variables(name):
                known = numbers.setdefault(name, {})
                value = f"(value {known.setdefault(repr(value), len(known) + 1)})"
            values[name] = value
        run, faults = validate(job, path, check_files=check_files)
        problems += (_blame_values(fault, settings) for fault in faults)
        if run is not None:
            points.append(Point(values, run))
    if problems:
        raise SpecError(problems)
    return spec, tuple(points)


def _combine(sweep: Node) -> tuple[list[tuple[_Setting, ...]], list[Problem]]:
    """The settings of every run, and the faults of the sweep."""
    columns, listed, problems = [], [], []
    for setting in _settings(sweep.items.get("grid")):
        values = setting.value.value
        if isinstance(values, list) and values:
            columns.append([setting._replace(value=value) for value in values])
        else:
            problems.append(setting.fault("has no values"))
    points = sweep.items["points"].value if "points" in sweep.items else ()
    for point in points if isinstance(points, list) else ():
        listed.append(tuple(_settings(point)))
        if not point.value:
            problems.append(point.place.problem("sweep.points: a point without a key"))
    for settings in ([column[0] for column in columns], *listed):
        problems += _key_faults(settings)
    place = sweep.key_place or sweep.place
    count = (prod(map(len, columns)) if columns else 0) + len(listed)
    if count > MAX_POINTS:
        problems.append(place.problem(f"sweep: has {count} points; {MAX_POINTS} are allowed"))
        return [], problems
    if not count and not problems:
        problems.append(place.problem("sweep: has no points; give it a grid, or points"))
    runs = [*(product(*columns) if columns else ()), *listed]
    return runs, [*problems, *_repetitions(runs)]


def _settings(node: Node | None) -> Iterator[_Setting]:
    for name, value in (node.items if node else {}).items():
        yield _Setting(name, value.key_place or value.place, value)


def _key_faults(together: Sequence[_Setting]) -> Iterator[Problem]:
    """Of keys that are set together, those that no sweep can set."""
    names = [setting.name for setting in together]
    for setting in together:
        key = setting.name
        around = next((other for other in names if other != key and is_within(key, other)), None)
        if not all(key.split(".")) or key.count(".") > MAX_DEPTH:
            yield setting.fault("must be a key such as training.seed")
        elif any(is_within(key, shared) or is_within(shared, key) for shared in _SHARED):
            yield setting.fault(
                "cannot differ between the runs of a sweep, which are one job array; instead, "
                f"submit several times with --set {escape(key)}=..."
            )
        elif fault := fault_of_former_key(tuple(key.split("."))):
            yield setting.fault(fault)
        elif around is not None:
            yield setting.fault(f"is a part of {escape(around)}, which is set as well")


def _repetitions(runs: Sequence[Sequence[_Setting]]) -> Iterator[Problem]:
    """Runs that would be the same as an earlier one."""
    seen: dict[object, int] = {}
    for number, settings in enumerate(runs):
        values = tuple(sorted((s.name, repr(resolve(s.value.data))) for s in settings))
        if values and seen.setdefault(values, number) != number:
            message = f"a point with the same values as number {seen[values]}"
            yield settings[-1].fault(message, settings[-1].value.place)


def _blame_values(problem: Problem, settings: Sequence[_Setting]) -> Problem:
    """A fault at its value, or moved from another place to the values that cause it."""
    place = Place(problem.file, problem.line, problem.column)
    for setting in settings:
        within = [(node.place, node.key_place) for node in setting.value.within()]
        if place == setting.place or any(place in places for places in within):
            return problem
    shown = (
        f"{escape(s.name)}: {'(not shown)' if holds_variables(s.name) else s.value}"
        for s in settings
    )
    return settings[0].value.place.problem(f"with {', '.join(shown)}: {problem.message}")
