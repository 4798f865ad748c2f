"""From a sweep to the specs of its runs, with every fault at the place of its value."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from pipectl.errors import Problem, SpecError
from pipectl.spec.document import (
    MAX_DEPTH,
    Place,
    escape,
    locate,
    pairs_of,
    show,
    with_pairs,
)
from pipectl.spec.load import (
    fault_of_former_key,
    holds_variables,
    is_within,
    load_document,
    put,
    validate,
)
from pipectl.spec.models import JobSpec
from pipectl.spec.schema import read

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

    key: yaml.ScalarNode
    value: yaml.Node

    @property
    def name(self) -> str:
        return str(self.key.value)

    def fault(self, message: str, node: yaml.Node | None = None) -> Problem:
        place = Place.of((node or self.key).start_mark)
        return place.problem(f"{escape(self.name)}: {message}")


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
    runs = _combine(*locate(tree, ("sweep",))[:2], problems)
    if problems:
        raise SpecError(problems)
    rest = with_pairs(tree, {k: pair for k, pair in pairs_of(tree).items() if k != "sweep"})
    points = []
    numbers: dict[str, dict[str, int]] = {}
    for settings in runs:
        job, faults, values = rest, list[Problem](), {}
        for setting in settings:
            place = Place.of(setting.key.start_mark)
            job = put(job, setting.name.split("."), place, setting.value)
            value = read(setting.value)
            if holds_variables(setting.name):
                known = numbers.setdefault(setting.name, {})
                value = f"(value {known.setdefault(repr(value), len(known) + 1)})"
            values[setting.name] = value
        run = validate(job, path, faults, check_files=check_files)
        problems += (_blame_values(fault, settings) for fault in faults)
        if run is not None:
            points.append(Point(values, run))
    if problems:
        raise SpecError(problems)
    return spec, tuple(points)


def _combine(
    key: yaml.Node, sweep: yaml.Node, problems: list[Problem]
) -> list[tuple[_Setting, ...]]:
    """The settings of every run."""
    inner = {name: value for name, (_, value) in pairs_of(sweep).items()}
    columns = []
    for name, values in _settings(inner.get("grid")):
        if values.value:
            columns.append([_Setting(name, value) for value in values.value])
        else:
            problems.append(_Setting(name, values).fault("has no values"))
    points = inner.get("points")
    listed = []
    for point in points.value if isinstance(points, yaml.SequenceNode) else ():
        listed.append(tuple(_settings(point)))
        if not point.value:
            message = "sweep.points: a point without a key"
            problems.append(Place.of(point.start_mark).problem(message))
    for settings in ([column[0] for column in columns], *listed):
        problems += _key_faults(settings)
    place = Place.of(key.start_mark)
    count = (prod(map(len, columns)) if columns else 0) + len(listed)
    if count > MAX_POINTS:
        problems.append(place.problem(f"sweep: has {count} points; {MAX_POINTS} are allowed"))
        return []
    if not count and not problems:
        problems.append(place.problem("sweep: has no points; give it a grid, or points"))
    runs = [*(product(*columns) if columns else ()), *listed]
    problems += _repetitions(runs)
    return runs


def _settings(node: yaml.Node | None) -> Iterator[_Setting]:
    yield from (_Setting(key, value) for key, value in pairs_of(node).values())


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
        values = tuple(sorted((s.name, repr(read(s.value))) for s in settings))
        if values and seen.setdefault(values, number) != number:
            message = f"a point with the same values as number {seen[values]}"
            yield settings[-1].fault(message, settings[-1].value)


def _blame_values(problem: Problem, settings: Sequence[_Setting]) -> Problem:
    """A fault at its value, or moved from another place to the values that cause it."""
    place = Place(problem.file, problem.line, problem.column)
    for node in (node for setting in settings for node in setting):
        if Place.of(node.start_mark) <= place <= Place.of(node.end_mark):
            return problem
    shown = (
        f"{escape(s.name)}: {'(not shown)' if holds_variables(s.name) else show(s.value)}"
        for s in settings
    )
    blamed = Place.of(settings[0].value.start_mark)
    return blamed.problem(f"with {', '.join(shown)}: {problem.message}")
