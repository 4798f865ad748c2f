"""Directories of runs and sweeps: their paths, and how they are created, locked and found."""

from __future__ import annotations

import fcntl
import os
import re
import shlex
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from itertools import count
from pathlib import Path

from pipectl.errors import DataFileError, UnknownRunError, UsageError
from pipectl.files import (
    RUNS_VARIABLE,
    fault_of_owner,
    files_like,
    is_of_another,
    is_there,
    make_private_directory,
    open_regular,
    owner_number,
    owner_of,
    path_of_user,
    read_limited,
)
from pipectl.runs.record import MAX_BYTES, Record, is_job_id
from pipectl.units import did_you_mean

RUN_NAME = re.compile(r"[0-9]{8}-[0-9]{6}-[A-Za-z0-9._-]+")
"""Name of a run directory; it has no characters that a shell interprets."""
START_VARIABLE = "PIPECTL_START"
"""Environment variable: the directory of this start, set by the job script."""
SCRIPT = "PIPECTL_SCRIPT"
"""Environment variable: pid of the job script, if the ranks run on its machine."""
RUN_VARIABLE = "PIPECTL_RUN_DIRECTORY"
"""Environment variable, set by the job script."""
SWEEPS = "sweeps"
"""Directory of sweeps beside the runs; where users share a directory of runs, of the first one who
had a sweep. Others have ``sweeps-UID``: who owns a directory can exchange what is in it."""
_SWEEPS = re.compile(rf"{SWEEPS}(-[0-9]+)?")
_FOLDERS = ("logs", "trace", "checkpoints", "starts", "starts/1", "starts/1/errors")
_START = re.compile(r"[1-9][0-9]{0,8}")
"""Name of the directory of a start."""


class File:
    """A path in a directory, as an attribute."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, directory: Place, _owner: type) -> Path:
        return directory.path / self._name


@dataclass(frozen=True)
class Place:
    """A directory; its path is made absolute, since jobs run elsewhere."""

    path: Path

    def __post_init__(self) -> None:
        object.__setattr__(self, "path", self.path.absolute())


class Directory(Place):
    """The directory of a run or sweep."""

    lock = File(".lock")
    """Locked by the command that changes the record or submits the sweep."""
    logs = File("logs")
    """Logs of the job and its ranks; for a sweep, of jobs that have not yet become a run."""

    @property
    def name(self) -> str:
        """Name of the run or sweep; names of a sweep's runs begin with the sweep's name."""
        return self.path.name


class StartDirectory(Place):
    """The paths of one start of a run: ``starts/N`` in the run's directory, N from 1.

    A submission makes the directory of the start that it asks for, so the run looks as if it had
    done nothing yet. The job script takes the newest directory if no script has begun in it, else
    it makes the next one. No later start changes it.
    """

    begun = File("begun")  # made by the job script that takes the directory, as the first file
    stop_request = File("stop")  # written by the job script: ranks save a checkpoint and end
    stopped_marker = File("stopped")  # written by the ranks when they have done so
    resubmitted = File("resubmitted")  # job id under which the job script submitted itself again
    requeue_error = File("requeue_error")  # why the job script could not requeue the job
    starting = File("starting")  # there until what the job script has started begins its work
    finished = File("finished")  # the ranks have done and saved all their work
    launch_error = File("launch_error")  # what was printed by a launcher that started no rank
    exit_warning = File("exit_warning")  # what failed after all work was done
    exit_code = File("exit_code")  # the job script's exit code, written when it ends
    nodes = File("nodes")  # of a range: how many the script has found, then how many its plan takes
    heartbeat = File("heartbeat.json")  # state and progress of the ranks
    changed_code = File("changed_code")  # files that the job used though they had changed
    errors = File("errors")  # one file per rank that failed
    preparation_error = File("errors/prepare.json")  # why a job could not profile or plan
    watch = File("watch")  # one file per node, written by its watcher

    @property
    def number(self) -> int:
        """Number of the start, from 1."""
        return int(self.path.name)

    @property
    def run(self) -> RunDirectory:
        """The directory of the run."""
        return RunDirectory(self.path.parent.parent)

    def error_of(self, rank: int) -> Path:
        """Return the path of a rank's error report."""
        return self.errors / f"rank-{rank:04d}.json"

    def memory_of(self, rank: int) -> Path:
        """Return the path of what a rank's accelerator held when its memory was exhausted."""
        return self.errors / f"rank-{rank:04d}.memory.pickle"


class RunDirectory(Directory):
    """The paths of one run."""

    job = File("job.yaml")  # the resolved job spec
    profile = File("profile.json")  # the measured operator graph
    plan = File("plan.json")  # stages, ranks and schedule
    cluster = File("cluster.json")  # nodes, devices and links
    range = File("range")  # of a range of nodes: plans by number, and the cluster of all
    script = File("job.sh")  # the job script
    variables = File("variables.sh")  # what the job script sources; keys and tokens may be in it
    record = File("record.json")  # the submission and its history
    starts = File("starts")  # one directory per start, see StartDirectory
    metrics = File("metrics.jsonl")  # one line per step and per evaluation
    samples = File("samples.json")  # checksums of a few samples at the first start
    job_log = File("logs/job.log")  # output of the job script, the launcher and pipectl
    trace = File("trace")  # predicted and measured timelines
    predicted = File("trace/predicted.json")  # predicted timeline of a step
    code = File("code")  # the user's sources as they were at submission
    code_file = File("code.json")  # where they were, and their digests
    environment = File("environment.txt")  # Python, packages and git commit at submission
    rebalance = File("rebalance")  # what ranks measured, and the plan that was made from it
    imbalance = File("rebalance/imbalance.json")
    balance = File("rebalance/balance.json")
    rehearsal = File("rehearsal.json")  # waiting times of the ranks of a rehearsal
    checkpoints = File("checkpoints")  # one folder per saved step

    @classmethod
    def create(cls, base: Path, name: str, now: float) -> RunDirectory:
        """Create the directory ``<YYYYMMDD-HHMMSS>-<name>`` with mode 0700.

        If it exists, ``-2`` is appended, and so on.

        Args:
            now: seconds since the epoch; the name has local time.

        Raises:
            UsageError: ``base`` cannot be written; nothing is left in it.
        """
        for stem in _stems(name, now):
            if _make_all(base, {base / stem: _FOLDERS}):
                return cls(base / stem)
        raise AssertionError("unreachable")

    @property
    def start(self) -> StartDirectory:
        """The newest start; the first one, which does not exist, of a run without any."""
        return self.start_of(max(self._numbers(), default=1))

    def every_start(self) -> list[StartDirectory]:
        """Return all starts, the newest first."""
        return [self.start_of(number) for number in sorted(self._numbers(), reverse=True)]

    def start_of(self, number: int) -> StartDirectory:
        """Return the start of that number, which may not exist."""
        return StartDirectory(self.starts / str(number))

    def next_start(self) -> StartDirectory:
        """Return the start for the next submission, which may not exist.

        It is the newest one if no job script has begun in it.
        """
        newest = self.start
        return self.start_of(newest.number + 1) if is_there(newest.begun) else newest

    def _numbers(self) -> list[int]:
        names = (path.name for path in files_like(self.starts, "[1-9]*"))
        return [int(name) for name in names if _START.fullmatch(name)]

    def rank_log(self, rank: int) -> Path:
        """Return the path of a rank's log."""
        return self.logs / f"rank-{rank:04d}.log"

    def node_log(self, node: str) -> Path:
        """Return the path of a node's log, used if there are too many ranks for a file each."""
        return self.logs / f"node-{re.sub(r'[^A-Za-z0-9.-]', '_', node)}.log"

    def rank_logs(self) -> Sequence[Path]:
        """Return the logs of ranks and nodes, sorted by number or name."""
        return sorted(
            [*files_like(self.logs, "rank-*.log"), *files_like(self.logs, "node-*.log")],
            key=lambda path: ([int(part) for part in re.findall(r"\d+", path.name)], path.name),
        )

    def measured_of(self, step: int) -> Path:
        """Return the path of the measured timeline of a step."""
        return self.trace / f"step-{step:06d}.json"

    def trace_until(self, step: int) -> Path:
        """Return the directory of timelines under a plan that was in use up to a step."""
        return self.trace / f"until-{step:06d}"

    def trace_before(self, starts: int) -> Path:
        """Return the directory of timelines under an earlier plan, up to start ``starts``."""
        return self.trace / f"attempt-{starts}"

    def put_aside(self, place: Path) -> None:
        """Before another plan takes the place of the present one, copy this to another directory,
        and move there what was predicted and recorded under it, as far as the disk allows.

        Args:
            place: the directory, which is made unless there is nothing to keep.
        """
        recorded = [*files_like(self.trace, "step-*.json"), self.predicted]
        moved, has_plan = [path for path in recorded if is_there(path)], is_there(self.plan)
        if not (moved or has_plan):
            return
        with suppress(OSError):
            make_private_directory(place)
            for path in moved:
                path.replace(place / path.name)
            if has_plan:
                shutil.copyfile(self.plan, place / self.plan.name)


class SweepDirectory(Directory):
    """The directory ``sweeps/<date>-<name>`` beside the runs of a sweep; see :data:`SWEEPS`."""

    script = File("array.sh")
    """Script of the job array."""

    @classmethod
    def create(
        cls, base: Path, name: str, points: int, now: float
    ) -> tuple[SweepDirectory, list[RunDirectory]]:
        """Create the directory of the sweep and those of its runs; see
        :meth:`RunDirectory.create`."""

        for stem in _stems(name, now):
            sweep = cls.beside(base / stem)
            runs = [sweep.run(index) for index in range(points)]
            folders = {sweep.path: ("logs",), **dict.fromkeys((r.path for r in runs), _FOLDERS)}
            if _make_all(base, folders):
                if is_of_another(sweep.path.parent):  # it had that name before we did
                    shutil.rmtree(sweep.path, ignore_errors=True)
                    raise UsageError(
                        f"{sweep.path.parent}: belongs to {owner_of(sweep.path.parent)}, who could "
                        "exchange the scripts in it",
                        hint="let its owner remove it, or set another output.directory",
                    )
                return sweep, runs
        raise AssertionError("unreachable")

    @classmethod
    def beside(cls, run: Path, user: int | None = None) -> SweepDirectory:
        """Return the sweep whose runs are beside ``run`` and which has the same name.

        Args:
            user: whose sweep it is; None for this user.
        """
        user = os.geteuid() if user is None else user
        usual, own = run.parent / SWEEPS, run.parent / f"{SWEEPS}-{user}"
        is_own = os.path.isdir(own / run.name) or owner_number(usual) not in (None, user)  # noqa: PTH112
        return cls((own if is_own else usual) / run.name)

    @property
    def base(self) -> Path:
        """The directory of the runs."""
        return self.path.parent.parent

    def run(self, index: int) -> RunDirectory:
        """Return the run of a point, which may not exist."""
        return RunDirectory(self.base / f"{self.name}-{index}")

    def runs(self) -> list[RunDirectory]:
        """Return the existing runs in the order of the points."""
        runs = (run for run in list_runs(self.base) if run.name.startswith(f"{self.name}-"))
        return [run for run in runs if self._has(run)]

    def _has(self, run: RunDirectory) -> bool:
        """Return whether a run is a point of the sweep, not another run of the same second."""
        if not run.name.removeprefix(f"{self.name}-").isdecimal():
            return False
        try:
            record = Record.load(run.record)
        except DataFileError:  # it is not written yet, or damaged
            return True
        return record.sweep is not None and record.sweep.name == self.name


def checkpoints(directory: Path) -> list[Path]:
    """Return the checkpoints in a directory, the latest step first."""
    folders = [path for path in files_like(directory, "step-*") if step_of(path) is not None]
    return sorted(folders, key=lambda path: step_of(path) or 0, reverse=True)


def start_of_job(run: RunDirectory) -> StartDirectory:
    """Return the start of a run that this process is part of, as the job script says; the newest
    one if this process is not of a job of the run."""
    path = os.environ.get(START_VARIABLE)
    if path and (own := StartDirectory(Path(path))).run == run and _START.fullmatch(own.path.name):
        return own
    return run.start


def step_of(checkpoint: Path) -> int | None:
    """Return the step in the name of a checkpoint; None for other names."""
    digits = checkpoint.name.removeprefix("step-")
    return int(digits) if digits.isascii() and digits.isdigit() else None


def sweep_of(run: RunDirectory, name: str) -> SweepDirectory:
    """Return the sweep of the given name that ``run`` is part of."""
    return SweepDirectory.beside(run.path.parent / name, owner_number(run.path))


def stem_of(name: str, now: float) -> str:
    """Return ``<YYYYMMDD-HHMMSS>-<name>`` in local time; ``now`` is seconds since the epoch."""
    return f"{datetime.fromtimestamp(now):%Y%m%d-%H%M%S}-{name}"


def _stems(name: str, now: float) -> Iterator[str]:
    """Yield the usual stem, then ``stem-2``, ``stem-3``…"""
    usual = stem_of(name, now)
    yield usual
    for number in count(2):
        yield f"{usual}-{number}"


def _make_all(base: Path, folders: Mapping[Path, Sequence[str]]) -> bool:
    """Create directories with their subdirectories, all or none; False if one exists."""
    new: list[Path] = []
    try:
        for path in folders:
            make_private_directory(path.parent)
        for path, names in folders.items():
            try:
                path.mkdir(0o700)
            except FileExistsError:
                break
            new.append(path)
            for inner in names:
                (path / inner).mkdir(0o700)
        else:
            new = []
            return True
    except OSError as error:
        raise UsageError(
            f"{base}: no run directory can be made: {error.strerror or error}",
            hint="set output.directory to a directory with room that you may write to",
        ) from error
    finally:
        for path in new:
            shutil.rmtree(path, ignore_errors=True)
    return False


@contextmanager
def locked(directory: Directory, *, wait: bool = True) -> Iterator[bool]:
    """Lock a run or sweep against other commands until the end of the block.

    On a file system without locks, or if the directory cannot be written, there is no lock; files
    are still replaced atomically.

    Args:
        wait: whether to wait for another command; otherwise the value says if the lock was taken.

    Raises:
        UsageError: the directory belongs to another user, or others can write to it: its job ids
            and links cannot be trusted.
    """
    if fault := fault_of_owner(directory.path, root=False):
        theirs = fault.startswith("belongs")
        copy = "copy it to a directory of your own, and use the copy"
        raise UsageError(
            f"{directory.path}: {fault}, so its files cannot be trusted",
            hint=copy if theirs else f"if you know what is in it: chmod go-w {directory.path}",
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


def runs_directory() -> Path:
    """Return the default directory of runs: ``PIPECTL_RUNS``, otherwise ``./runs``.

    Raises:
        UsageError: the path in the variable cannot be expanded.
    """
    return path_of_user(os.environ.get(RUNS_VARIABLE) or "runs")


def list_runs(base: Path) -> list[RunDirectory]:
    """Return all runs in ``base``, oldest first; none if ``base`` does not exist."""
    try:
        # Of links, too, that lead to where one may not look.
        names = [path.name for path in base.iterdir() if os.path.isdir(path)]  # noqa: PTH112
    except OSError:
        return []
    return [
        RunDirectory(base / name) for name in sorted(names, key=_age) if RUN_NAME.fullmatch(name)
    ]


def list_sweeps(base: Path) -> list[SweepDirectory]:
    """Return all sweeps of the runs in ``base``, oldest first."""
    folders = [path for path in files_like(base, f"{SWEEPS}*") if _SWEEPS.fullmatch(path.name)]
    sweeps = [run.path for folder in folders for run in list_runs(folder)]
    return [SweepDirectory(path) for path in sorted(sweeps, key=lambda path: _age(path.name))]


def find(base: Path, name: str) -> RunDirectory | SweepDirectory:
    """Find a run or sweep.

    A name is a path, a whole name, the beginning or end of one, a job id of the batch system, or
    ``last``, the newest run of the user. If a sweep matches, its runs do not count as further
    matches.

    Raises:
        UnknownRunError: none matches, or several do.
    """
    matches = _find_all(base, name)
    if len(matches) > 1 and matches[0].name != name:
        more = f" and {len(matches) - 5} more" if len(matches) > 5 else ""
        names = ", ".join(run.name for run in matches[-5:])
        raise UnknownRunError(
            f"{name!r} matches {len(matches)} runs: {names}{more}",
            hint="write the whole name of one, or `last` for the newest run",
        )
    return matches[0]


def find_run(base: Path, name: str) -> RunDirectory:
    """Find a run; see :func:`find`.

    Raises:
        UnknownRunError: none matches, several do, or it is a sweep.
    """
    match = find(base, name)
    if isinstance(match, RunDirectory):
        return match
    raise UnknownRunError(
        f"{name!r} is a sweep of several runs",
        hint=f"name one of them, such as {name_in_shell(match.run(0))}",
    )


def find_runs(base: Path, names: Sequence[str]) -> list[RunDirectory]:
    """Find runs, each once; the name of a sweep stands for all of its runs.

    Raises:
        UnknownRunError: none matches a name, or several do.
    """
    runs: dict[RunDirectory, None] = {}
    for match in (find(base, name) for name in names):
        members = [match] if isinstance(match, RunDirectory) else match.runs()
        runs.update(dict.fromkeys(members))
    return list(runs)


def name_in_shell(run: RunDirectory | SweepDirectory) -> str:
    """Return how to name a run or sweep on a command line: by its name if possible, or its path."""
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


def _find_all(base: Path, name: str) -> Sequence[RunDirectory | SweepDirectory]:
    """Return all matches of a name, at least one; only exact matches if there are any."""
    if "/" in name and RUN_NAME.fullmatch(Path(name).absolute().name) and Path(name).is_dir():
        run = RunDirectory(Path(name))
        is_sweep = _SWEEPS.fullmatch(run.path.parent.name) and not is_there(run.record)
        return [SweepDirectory(run.path) if is_sweep else run]
    runs, sweeps = list_runs(base), list_sweeps(base)
    if not runs:
        raise UnknownRunError(f"{base}: no runs here", hint="start one with `pipectl submit`")
    if name == "last":
        return [run for run in runs if not is_of_another(run.path)][-1:] or runs[-1:]
    every: list[RunDirectory | SweepDirectory] = [*runs, *sweeps]
    if exact := [each for each in every if each.name == name]:
        return exact
    by_job = _find_job(runs, name)
    if by_job and len(name) < len("20261231"):
        return by_job  # a part of a date is not what is meant
    parts = [each for each in sweeps if _matches(each.name, name)]
    stems = tuple(f"{sweep.name}-" for sweep in parts)
    others = [run for run in runs if _matches(run.name, name) and not run.name.startswith(stems)]
    matches = [*parts, *others, *(each for each in by_job if each not in others)]
    if not matches:
        names = [part for run in runs for part in (run.name, run.name.split("-", 2)[-1])]
        raise UnknownRunError(
            f"{base}: no run {name!r}{did_you_mean(name, [*names, 'last'])}",
            hint="`pipectl status` shows all runs",
        )
    return matches


def _find_job(runs: Sequence[RunDirectory], job_id: str) -> Sequence[RunDirectory | SweepDirectory]:
    """Return the runs of a job; their sweep, if it is a job array.

    ``123`` also matches ``123.server``.
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
        if own_id == job_id or (own_id.startswith(job_id) and own_id[len(job_id)] in "._[@;"):
            matches.append((run, record))
    sweeps = {record.sweep.name if record.sweep else "" for _, record in matches}
    if len(matches) > 1 and len(sweeps) == 1 and "" not in sweeps:
        return [sweep_of(matches[0][0], sweeps.pop())]
    return [run for run, _ in matches]


def _matches(run: str, part: str) -> bool:
    return bool(part) and (run.startswith(part) or run.endswith(part))


def _age(name: str) -> list[tuple[int, str]]:
    """Sort key: by time stamp, and ``-10`` after ``-9``."""
    parts = re.split(r"(\d+)", name)
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in parts]
