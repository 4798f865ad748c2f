"""Finding runs by name, path or job id, and how to call one so that it is found."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Sequence
from pathlib import Path

from pipectl.access import read_limited
from pipectl.errors import DataFileError, UnknownRunError
from pipectl.files import RUNS_VARIABLE
from pipectl.runs.directory import RUN_NAME, SWEEPS, RunDirectory, SweepDirectory, sweep_of
from pipectl.runs.record import MAX_BYTES, Record, is_job_id
from pipectl.units import did_you_mean


def runs_directory() -> Path:
    """Where commands look for runs by default: ``PIPECTL_RUNS``, else ``./runs``."""
    return Path(os.environ.get(RUNS_VARIABLE) or "runs")


def list_runs(base: Path) -> list[RunDirectory]:
    """All runs in ``base``, oldest first; none if ``base`` does not exist."""
    try:
        # Of links, too, that lead to where one may not look.
        names = [path.name for path in base.iterdir() if os.path.isdir(path)]  # noqa: PTH112
    except OSError:
        return []
    return [
        RunDirectory(base / name) for name in sorted(names, key=_age) if RUN_NAME.fullmatch(name)
    ]


def list_sweeps(base: Path) -> list[SweepDirectory]:
    """All sweeps of the runs in ``base``, oldest first."""
    return [SweepDirectory(run.path) for run in list_runs(base / SWEEPS)]


def find(base: Path, name: str) -> RunDirectory | SweepDirectory:
    """The run or sweep called ``name``.

    It is called by its path, its whole name, the start or the end of its name (which is the job's
    name), the id of its job in the batch system, or ``last``. What runs have in common is the name
    of their sweep, so those of a sweep that matches are no further matches.

    Raises:
        UnknownRunError: none matches, or several do.
    """
    matches = _find_all(base, name)
    if len(matches) > 1 and matches[0].name != name:
        more = f"{len(matches) - 5} more, " if len(matches) > 5 else ""
        names = ", ".join(run.name for run in matches[-5:])
        raise UnknownRunError(
            f"{name!r} matches {len(matches)} runs: {more}{names}",
            cure="write the whole name of one, or `last` for the newest run",
        )
    return matches[0]


def find_run(base: Path, name: str) -> RunDirectory:
    """The run called ``name``; see :func:`find`.

    Raises:
        UnknownRunError: none matches, several do, or it is a sweep.
    """
    match = find(base, name)
    if isinstance(match, RunDirectory):
        return match
    raise UnknownRunError(
        f"{name!r} is a sweep of several runs", cure=f"name one of them, such as {one_of(match)}"
    )


def find_runs(base: Path, names: Sequence[str]) -> list[RunDirectory]:
    """Runs by name, all of a sweep if one is named, each once.

    Raises:
        UnknownRunError: none matches a name, or several do.
    """
    runs: dict[RunDirectory, None] = {}
    for match in (find(base, name) for name in names):
        members = [match] if isinstance(match, RunDirectory) else match.runs()
        runs.update(dict.fromkeys(members))
    return list(runs)


def as_typed(run: RunDirectory | SweepDirectory) -> str:
    """What calls a run or sweep from here: its name if that leads to it, else its path."""
    base = run.base if isinstance(run, SweepDirectory) else run.path.parent
    try:
        by_name = runs_directory().samefile(base)
    except OSError:
        by_name = False
    if by_name:
        return shlex.quote(run.name)
    here = Path.cwd()
    if not run.path.is_relative_to(here):
        return shlex.quote(str(run.path))
    path = str(run.path.relative_to(here))
    return shlex.quote(path if "/" in path else f"./{path}")


def one_of(sweep: SweepDirectory) -> str:
    """What calls one of its runs from here, for an example."""
    return as_typed(RunDirectory(sweep.base / f"{sweep.name}-0"))


def _find_all(base: Path, name: str) -> Sequence[RunDirectory | SweepDirectory]:
    """All that ``name`` may mean, at least one; if some have that whole name, only these."""
    if "/" in name and RUN_NAME.fullmatch(Path(name).absolute().name) and Path(name).is_dir():
        sweep = SweepDirectory(Path(name))
        return [sweep if sweep.members.exists() else RunDirectory(Path(name))]
    runs, sweeps = list_runs(base), list_sweeps(base)
    if not runs:
        raise UnknownRunError(f"{base}: no runs here", cure="start one with `pipectl submit`")
    if name == "last":
        return runs[-1:]
    every: list[RunDirectory | SweepDirectory] = [*runs, *sweeps]
    if exact := [each for each in every if each.name == name]:
        return exact
    parts = [each for each in sweeps if _matches(each.name, name)]
    stems = tuple(f"{sweep.name}-" for sweep in parts)
    others = [run for run in runs if _matches(run.name, name) and not run.name.startswith(stems)]
    by_job = [each for each in _find_job(runs, name) if each not in others]
    matches = [*parts, *others, *by_job]
    if not matches:
        names = [part for run in runs for part in (run.name, run.name.split("-", 2)[-1])]
        raise UnknownRunError(
            f"{base}: no run {name!r}{did_you_mean(name, [*names, 'last'])}",
            cure="`pipectl status` shows all runs",
        )
    return matches


def _find_job(runs: Sequence[RunDirectory], job_id: str) -> Sequence[RunDirectory | SweepDirectory]:
    """The runs with a job of this id; their sweep, if it is the id of a job array.

    The id may be written without what follows its number: ``123`` for ``123.server``.
    """
    if not is_job_id(job_id) or not job_id[0].isdigit():
        return []
    matches: list[tuple[RunDirectory, Record]] = []
    for run in runs:
        try:
            if job_id.encode() not in read_limited(run.record, MAX_BYTES):  # most, without parsing
                continue
            record = Record.load(run.record)
        except (OSError, DataFileError):
            continue
        own_id = record.job_id or ""
        if own_id == job_id or (own_id.startswith(job_id) and own_id[len(job_id)] in "._[@"):
            matches.append((run, record))
    sweeps = {record.sweep.name if record.sweep else "" for _, record in matches}
    if len(matches) > 1 and len(sweeps) == 1 and "" not in sweeps:
        return [sweep_of(matches[0][0], sweeps.pop())]
    return [run for run, _ in matches]


def _matches(run: str, part: str) -> bool:
    return bool(part) and (run.startswith(part) or run.endswith(part))


def _age(name: str) -> list[tuple[int, str]]:
    """Sort key: the time stamp comes first, and ``-10`` after ``-9``."""
    parts = re.split(r"(\d+)", name)
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in parts]
