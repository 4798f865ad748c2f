"""Directories of runs and sweeps: every path in them, how they are created, and their lock."""

from __future__ import annotations

import fcntl
import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import datetime
from itertools import count
from pathlib import Path

from pipectl.access import fault_of_owner, open_regular
from pipectl.errors import DataFileError, UsageError
from pipectl.fields import read_fields
from pipectl.files import make_private_directory, read_json, write_json

RUN_NAME = re.compile(r"[0-9]{8}-[0-9]{6}-[A-Za-z0-9._-]+")
"""Name of a run directory; shells complete it, so it holds nothing with a meaning for a shell."""
ATTEMPT = "PIPECTL_ATTEMPT"
"""Variable of the environment: which start of the job this is, from 1."""
SCRIPT = "PIPECTL_SCRIPT"
"""Variable of the environment: the job script's process, if ranks are on its machine."""
RUN_VARIABLE = "PIPECTL_RUN_DIRECTORY"
"""Variable of the environment: set by the job script."""
SWEEPS = "sweeps"
"""The folder of sweeps beside the runs: its name begins with no date, as those of runs do."""
SWEEP_VERSION = 1
_FOLDERS = ("errors", "logs", "trace", "checkpoints")


class File:
    """A path in a directory, as an attribute of it."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, directory: Directory, _owner: type) -> Path:
        return directory.path / self._name


class Directory:
    """The directory of a run or sweep, which one command at a time changes.

    Args:
        path: made absolute, since jobs run elsewhere.
    """

    lock = File(".lock")
    """Empty; held by the command that changes the record, or submits the sweep."""
    logs = File("logs")
    """Logs of the job and its ranks; of a sweep, what jobs say before they go on as their runs'."""

    def __init__(self, path: Path) -> None:
        self.path = path.absolute()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self.path)!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, type(self)) and other.path == self.path

    def __hash__(self) -> int:
        return hash(self.path)

    @property
    def name(self) -> str:
        """The directory's own name, by which commands call it; runs of a sweep begin with its."""
        return self.path.name


class RunDirectory(Directory):
    """Paths of one run; nothing is read or written."""

    job = File("job.yaml")  # the resolved job spec
    profile = File("profile.json")  # the measured operator graph
    measurement = File("measurement.json")  # how the profile of a run that only measures came to be
    plan = File("plan.json")  # stages, ranks and schedule
    cluster = File("cluster.json")  # nodes, devices and links
    script = File("job.sh")  # the job script
    variables = File("variables.sh")  # what the job script sources; keys and tokens may be in it
    template = File("template.sh")  # the user's template of the job script, as it was at submission
    record = File("record.json")  # the submission and its history
    stop = File("stop")  # where the job script asks the ranks to save a checkpoint and end
    stopped = File("stopped")  # where the ranks tell the script that they did so
    resubmitted = File("resubmitted")  # under which id the job script submitted itself again
    requeue_error = File("requeue_error")  # why the job script could not have the job started again
    attempt = File("attempt")  # how often the job script was started
    exit_code = File("exit_code")  # the job script's exit code, written when it ends
    metrics = File("metrics.jsonl")  # one line per step and per evaluation
    heartbeat = File("heartbeat.json")  # what the ranks do, as of one of the last steps
    errors = File("errors")  # one file per rank that failed
    preparation_error = File("errors/prepare.json")  # why a job could not profile or plan
    job_log = File("logs/job.log")  # what the job script and the launcher print, and pipectl says
    watch = File("watch")  # one file per node, of the process that watches its ranks
    trace = File("trace")  # predicted and measured timelines
    predicted = File("trace/predicted.json")  # timeline of a step as the plan predicts it
    rehearsal = File("rehearsal.json")  # what the ranks of a rehearsal wait for
    checkpoints = File("checkpoints")  # one folder per saved step

    @classmethod
    def create(cls, base: Path, name: str, now: float) -> RunDirectory:
        """A new directory ``<YYYYMMDD-HHMMSS>-<name>`` with its folders, for its owner alone.

        A second run of the same second gets ``-2`` appended, and so on.

        Args:
            now: seconds since the epoch; written in local time.

        Raises:
            UsageError: ``base`` cannot be written; no directory of a run or sweep is left in it.
        """
        for stem in _stems(name, now):
            run = cls(base / stem)
            if _make_all(base, {run.path: _FOLDERS}):
                return run
        raise AssertionError("unreachable")

    def rank_log(self, rank: int) -> Path:
        """What a rank printed."""
        return self.logs / f"rank-{rank:04d}.log"

    def node_log(self, node: str) -> Path:
        """What the ranks of a node printed, if there are too many for a file each."""
        return self.logs / f"node-{re.sub(r'[^A-Za-z0-9.-]', '_', node)}.log"

    def rank_logs(self) -> Sequence[Path]:
        """Logs of ranks and of nodes, by number or name."""
        return sorted(
            [*self.logs.glob("rank-*.log"), *self.logs.glob("node-*.log")],
            key=lambda path: ([int(part) for part in re.findall(r"\d+", path.name)], path.name),
        )

    def error_of(self, rank: int) -> Path:
        """Where a rank reports its failure."""
        return self.errors / f"rank-{rank:04d}.json"

    def errors_before(self, starts: int) -> Path:
        """Reports of start number ``starts`` of the job."""
        return self.errors / f"attempt-{starts}"

    def measured_of(self, step: int) -> Path:
        """Timeline of a step as it was."""
        return self.trace / f"step-{step:06d}.json"

    def trace_before(self, starts: int) -> Path:
        """Timelines of steps under an earlier plan, up to start number ``starts`` of the job."""
        return self.trace / f"attempt-{starts}"


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


class SweepDirectory(Directory):
    """What belongs to no single run of a sweep: ``sweeps/<date>-<name>`` beside the runs."""

    script = File("array.sh")
    """The script of the job array."""
    members = File("sweep.json")
    """Which runs it has."""

    @classmethod
    def create(
        cls, base: Path, name: str, points: int, now: float
    ) -> tuple[SweepDirectory, list[RunDirectory]]:
        """A new directory and those of its runs, ``<YYYYMMDD-HHMMSS>-<name>-0`` and so on.

        Args:
            now: seconds since the epoch; written in local time.

        Raises:
            UsageError: ``base`` cannot be written; no directory of a run or sweep is left in it.
        """
        for stem in _stems(name, now):
            sweep = cls.beside(base / stem)
            runs = [RunDirectory(base / f"{stem}-{index}") for index in range(points)]
            folders = dict.fromkeys((run.path for run in runs), _FOLDERS)
            if _make_all(base, {sweep.path: ("logs",), **folders}):
                return sweep, runs
        raise AssertionError("unreachable")

    @classmethod
    def beside(cls, run: Path) -> SweepDirectory:
        """The sweep that lies beside a run of this path, and has its name."""
        return cls(run.parent / SWEEPS / run.name)

    @property
    def base(self) -> Path:
        """The directory of the runs."""
        return self.path.parent.parent

    def save(self, members: Members) -> None:
        """Write ``sweep.json``."""
        write_json(self.members, {"version": SWEEP_VERSION, **asdict(members)})

    def load(self) -> Members:
        """Read ``sweep.json``.

        Raises:
            DataFileError: missing, damaged, or of another version.
        """
        cure, file = "name the runs themselves; `pipectl status` lists them", str(self.members)
        document = read_json(self.members, cure=cure)
        members = read_fields(Members, document, file=file, cure=cure, version=SWEEP_VERSION)
        for name in members.runs:
            if not name.startswith(f"{self.name}-") or "/" in name:
                raise DataFileError(f"{file}: runs: {name!r} is no run of {self.name}", cure=cure)
        return members

    def runs(self) -> list[RunDirectory]:
        """Its runs, without those that were removed.

        Raises:
            DataFileError: see :meth:`load`.
        """
        runs = (RunDirectory(self.base / name) for name in self.load().runs)
        return [run for run in runs if run.path.is_dir()]


def checkpoints(directory: Path) -> list[Path]:
    """The checkpoints in a directory, the one with the most steps first."""
    folders = [path for path in directory.glob("step-*") if step_of(path) is not None]
    return sorted(folders, key=lambda path: step_of(path) or 0, reverse=True)


def step_of(checkpoint: Path) -> int | None:
    """The step in the name of a checkpoint; None if it is no such name."""
    digits = checkpoint.name.removeprefix("step-")
    return int(digits) if digits.isascii() and digits.isdigit() else None


def sweep_of(run: RunDirectory, name: str) -> SweepDirectory:
    """The sweep of this name that a run is of."""
    return SweepDirectory.beside(run.path.parent / name)


def stem_of(name: str, now: float) -> str:
    """``<YYYYMMDD-HHMMSS>-<name>``, in local time.

    Args:
        now: seconds since the epoch.
    """
    return f"{datetime.fromtimestamp(now):%Y%m%d-%H%M%S}-{name}"


def _stems(name: str, now: float) -> Iterator[str]:
    """The stem, then ``stem-2``, ``stem-3``… without end."""
    stem = stem_of(name, now)
    yield stem
    yield from (f"{stem}-{number}" for number in count(2))


def _make_all(base: Path, folders: Mapping[Path, Sequence[str]]) -> bool:
    """Make directories with their folders for us alone, all or none; False if one exists.

    Two callers never share one.

    Raises:
        UsageError: they cannot be made.
    """
    new: list[Path] = []
    try:
        for path in folders:
            make_private_directory(path.parent)
        for path, names in folders.items():
            try:
                path.mkdir(0o700)
            except FileExistsError:
                _remove(new)
                return False
            new.append(path)
            for name in names:
                (path / name).mkdir(0o700)
    except BaseException as error:
        _remove(new)
        if isinstance(error, OSError):
            raise UsageError(
                f"{base}: no run directory can be made: {error.strerror or error}",
                cure="set output.directory to a directory with room that you may write to",
            ) from error
        raise
    return True


def _remove(directories: Sequence[Path]) -> None:
    for path in directories:
        shutil.rmtree(path, ignore_errors=True)


@contextmanager
def locked(directory: Directory, *, wait: bool = True) -> Iterator[bool]:
    """Keep other commands from holding the run; the system frees it when this process ends.

    On a file system without locks, or if the directory cannot be written, nobody is kept out: files
    are still written whole.

    Args:
        wait: whether to wait for another command; else the value says whether the run is ours.

    Raises:
        UsageError: it belongs to another user, or others may put files there: what it says of
            jobs and processes, and its links, would be theirs.
    """
    if fault := fault_of_owner(directory.path, root=False):
        theirs = fault.startswith("belongs")
        copy = "copy it to a directory of your own, and go on with the copy"
        raise UsageError(
            f"{directory.path}: {fault}, so that nothing in it can be relied on",
            cure=copy if theirs else f"if you know what is in it: chmod go-w {directory.path}",
        )
    try:
        handle = open_regular(directory.lock, os.O_CREAT | os.O_RDWR)
    except OSError:
        yield True
        return
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            is_ours = True
        except OSError as error:
            is_ours = not isinstance(error, BlockingIOError)
        yield is_ours
    finally:
        os.close(handle)
