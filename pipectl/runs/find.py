"""Finding runs by name, and how to call one so that it is found."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from pathlib import Path

from pipectl.errors import UnknownRunError
from pipectl.runs.directory import RUN_NAME, RunDirectory
from pipectl.runs.sweep import FOLDER, SweepDirectory
from pipectl.units import did_you_mean

USUAL = Path("runs")
"""Where commands look for runs unless told otherwise."""


def list_runs(base: Path) -> list[RunDirectory]:
    """All runs in ``base``, oldest first; none where ``base`` does not exist."""
    try:
        names = [path.name for path in base.iterdir() if _is_directory(path)]
    except OSError:
        return []
    return [
        RunDirectory(base / name) for name in sorted(names, key=_age) if RUN_NAME.fullmatch(name)
    ]


def _is_directory(path: Path) -> bool:
    """Not if it cannot be told, such as of a link to where one may not look."""
    try:
        return path.is_dir()
    except OSError:
        return False


def list_sweeps(base: Path) -> list[SweepDirectory]:
    """All sweeps of the runs in ``base``, oldest first."""
    return [SweepDirectory(run.path) for run in list_runs(base / FOLDER)]


def find_sweep(base: Path, name: str) -> SweepDirectory | None:
    """The sweep called ``name``; None where a run is meant.

    It is called by its path, its whole name, or a part as of a run.

    What runs have in common is the name of their sweep, so those of a sweep that matches do not
    count as further matches.

    Raises:
        UnknownRunError: several match.
    """
    if _is_path(name):
        sweep = SweepDirectory(Path(name))
        return sweep if sweep.members.exists() else None
    sweeps = [] if name == "last" else list_sweeps(base)
    runs = list_runs(base) if sweeps else []
    exact = [sweep for sweep in sweeps if sweep.name == name]
    matches = exact or [sweep for sweep in sweeps if _matches(sweep.name, name)]
    if not matches or (not exact and any(run.name == name for run in runs)):
        return None
    stems = tuple(f"{sweep.name}-" for sweep in matches)
    others = [run for run in runs if _matches(run.name, name) and not run.name.startswith(stems)]
    if exact or (len(matches) == 1 and not others):
        return matches[0]
    raise _several(name, [*matches, *others])


def find_run(base: Path, name: str) -> RunDirectory:
    """The run called ``name``: its path, its whole name, a unique part of it, or ``last``.

    A part is the start of the directory's name, its end, or the job's name.

    Raises:
        UnknownRunError: none matches, or several do.
    """
    if _is_path(name):
        if sweep := find_sweep(base, name):
            raise _of_several(name, sweep)
        return RunDirectory(Path(name))
    runs = list_runs(base)
    if not runs:
        raise UnknownRunError(f"{base}: no runs here", cure="start one with `pipectl submit`")
    if name == "last":
        return runs[-1]
    exact = [run for run in runs if run.name == name]
    matches = exact or [run for run in runs if _matches(run.name, name)]
    if len(matches) == 1:
        return matches[0]
    if sweep := find_sweep(base, name):
        raise _of_several(name, sweep)
    raise _several(name, matches) if matches else _none(base, name, runs)


def find_runs(base: Path, names: Sequence[str]) -> list[RunDirectory]:
    """Runs by name, all of a sweep where one is named.

    Raises:
        UnknownRunError: none of a name, or several.
    """
    found: list[RunDirectory] = []
    for name in names:
        sweep = find_sweep(base, name)
        found += [find_run(base, name)] if sweep is None else sweep.runs()
    return found


def as_typed(found: RunDirectory | SweepDirectory) -> str:
    """What calls a run or sweep from here: its name where that leads to it, else its path."""
    base = found.base if isinstance(found, SweepDirectory) else found.path.parent
    try:
        named = USUAL.samefile(base)
    except OSError:
        named = False
    if named:
        return shlex.quote(found.name)
    here = Path.cwd()
    if not found.path.is_relative_to(here):
        return shlex.quote(str(found.path))
    path = str(found.path.relative_to(here))
    return shlex.quote(path if "/" in path else f"./{path}")


def _is_path(name: str) -> bool:
    """Of a run or sweep, not a name: that has no slash."""
    is_run = RUN_NAME.fullmatch(Path(name).absolute().name) is not None
    return "/" in name and is_run and Path(name).is_dir()


def _matches(run: str, part: str) -> bool:
    return bool(part) and (run.startswith(part) or run.endswith(part))


def one_of(sweep: SweepDirectory) -> str:
    """What calls one of its runs from here, for an example."""
    return as_typed(RunDirectory(sweep.base / f"{sweep.name}-0"))


def _of_several(name: str, sweep: SweepDirectory) -> UnknownRunError:
    return UnknownRunError(
        f"{name!r} is a sweep of several runs", cure=f"name one of them: {one_of(sweep)}, say"
    )


def _several(name: str, matches: Sequence[RunDirectory | SweepDirectory]) -> UnknownRunError:
    listed = ", ".join(run.name for run in matches[-5:])
    more = f"{len(matches) - 5} more, " if len(matches) > 5 else ""
    return UnknownRunError(
        f"{name!r} matches {len(matches)} runs: {more}{listed}",
        cure=f"write the whole name, or `last` for {matches[-1].name}",
    )


def _none(base: Path, name: str, runs: list[RunDirectory]) -> UnknownRunError:
    parts = [part for run in runs for part in (run.name, run.name.split("-", 2)[-1])]
    return UnknownRunError(
        f"{base}: no run {name!r}{did_you_mean(name, [*parts, 'last'])}",
        cure="`pipectl status` shows all runs",
    )


def _age(name: str) -> list[tuple[int, str]]:
    """Sort key: the time stamp comes first, and ``-10`` after ``-9``."""
    parts = re.split(r"(\d+)", name)
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in parts]
