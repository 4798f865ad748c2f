"""The directory of a sweep: what belongs to no single run of it."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

from pipectl.fields import Reader
from pipectl.files import make_private_directory, read_json, write_json
from pipectl.runs.directory import File, RunDirectory, not_made, numbered, stem_of

VERSION = 1
FOLDER = "sweeps"
"""Beside the runs: its name begins with no date, so that it is not taken for one."""
_CURE = "name the runs themselves; `pipectl status` lists them"


@dataclass(frozen=True)
class Members:
    """What ``sweep.json`` says.

    Args:
        tag: of the job array, which the records of its runs have too.
        runs: names of the run directories, in the order of the points.
        at_once: how many may run at the same time; None if the batch system decides.
    """

    tag: str
    runs: tuple[str, ...]
    at_once: int | None


class SweepDirectory:
    """Paths of one sweep, ``sweeps/<date>-<name>`` in the directory of the runs.

    Args:
        path: made absolute.
    """

    script = File("array.sh")
    """The script of the job array."""
    logs = File("logs")
    """What jobs of the array say before they go on as those of their runs."""
    members = File("sweep.json")
    """Which runs it has."""
    lock = File(".lock")
    """Empty; held while it is submitted, or its job is looked for."""

    def __init__(self, path: Path) -> None:
        self.path = path.absolute()

    @classmethod
    def create(
        cls, base: Path, name: str, points: int, now: float
    ) -> tuple[SweepDirectory, list[RunDirectory]]:
        """A new directory and those of its runs, ``<YYYYMMDD-HHMMSS>-<name>-0`` and so on.

        Args:
            now: seconds since the epoch; written in local time.

        Raises:
            UsageError: ``base`` cannot be written.
        """
        stem = stem_of(name, now)
        try:
            make_private_directory(base / FOLDER)
            for path in numbered(base / FOLDER, stem):
                sweep = cls(path)
                runs = sweep._make(points)
                if runs is not None:
                    return sweep, runs
        except OSError as error:
            raise not_made(base, error) from error
        raise AssertionError("unreachable")

    @classmethod
    def beside(cls, run: Path) -> SweepDirectory:
        """The sweep that lies beside a run of this path, and has its name."""
        return cls(run.parent / FOLDER / run.name)

    def _make(self, points: int) -> list[RunDirectory] | None:
        """Make it and its runs; None, and nothing is left, if one of the directories exists."""
        runs = [RunDirectory(self.base / f"{self.name}-{index}") for index in range(points)]
        made: list[Path] = []
        try:
            for path in (self.path, *(run.path for run in runs)):
                path.mkdir(0o700)
                made.append(path)
            for run in runs:
                run.make_folders()
        except BaseException as error:
            for path in made:
                shutil.rmtree(path, ignore_errors=True)
            if isinstance(error, FileExistsError):
                return None
            raise
        self.logs.mkdir(0o700)
        return runs

    @property
    def name(self) -> str:
        """By which commands call it: what the names of its runs begin with."""
        return self.path.name

    @property
    def base(self) -> Path:
        """The directory of the runs."""
        return self.path.parent.parent

    def save(self, members: Members) -> None:
        """Write ``sweep.json``."""
        values = {"tag": members.tag, "runs": members.runs, "at_once": members.at_once}
        write_json(self.members, {"version": VERSION, **values})

    def load(self) -> Members:
        """Read ``sweep.json``.

        Raises:
            DataFileError: missing, damaged, or of another version.
        """
        reader = Reader(read_json(self.members, cure=_CURE), file=str(self.members), cure=_CURE)
        reader.check_version(VERSION)
        runs, at_once = reader.texts("runs"), reader.optional_integer("at_once")
        if not all(name.startswith(f"{self.name}-") and "/" not in name for name in runs):
            raise reader.error("runs", f"must be names of runs of {self.name}")
        return Members(reader.text("tag"), runs, at_once)

    def runs(self) -> list[RunDirectory]:
        """Its runs, without those that were removed.

        Raises:
            DataFileError: see :meth:`load`.
        """
        runs = (RunDirectory(self.base / name) for name in self.load().runs)
        return [run for run in runs if run.path.is_dir()]


def sweep_of(run: RunDirectory, name: str) -> SweepDirectory:
    """The sweep of this name that a run is of."""
    return SweepDirectory.beside(run.path.parent / name)
