"""The run directory: every path of a run, in one place."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from datetime import datetime
from itertools import count
from pathlib import Path
from typing import Protocol

from pipectl.errors import UsageError
from pipectl.files import make_private_directory

RUN_NAME = re.compile(r"[0-9]{8}-[0-9]{6}-[A-Za-z0-9._-]+")
"""In full: shells complete such names, so that nothing in them may mean anything to a shell."""
ATTEMPT = "PIPECTL_ATTEMPT"
"""Variable of the environment: which start of the job this is, from 1."""
SCRIPT = "PIPECTL_SCRIPT"
"""Variable of the environment: the job script's process, where ranks are on its machine."""
RUN_VARIABLE = "PIPECTL_RUN_DIRECTORY"
"""Variable of the environment: set by the job script."""
RESUBMITTED = "resubmitted"
"""Name of the file with the id of the job that goes on where an earlier one of the run stopped."""
REQUEUE_ERROR = "requeue_error"
"""Name of the file with what the batch system said when it did not start the job again."""
_FOLDERS = ("errors", "logs", "trace", "checkpoints")


class HasPath(Protocol):
    """A directory of a run or sweep."""

    path: Path


class File:
    """A path in the directory of a run or sweep, as an attribute of it."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, directory: HasPath, _owner: type) -> Path:
        return directory.path / self._name


class RunDirectory:
    """Paths of one run; nothing is read or written.

    Args:
        path: made absolute, since jobs run elsewhere.
    """

    job = File("job.yaml")
    """The resolved job spec."""
    profile = File("profile.json")
    """The measured operator graph."""
    measurement = File("measurement.json")
    """How the profile of a run that only measures came to be."""
    plan = File("plan.json")
    """Stages, ranks and schedule."""
    cluster = File("cluster.json")
    """Nodes, devices and links."""
    script = File("job.sh")
    """The job script."""
    variables = File("variables.sh")
    """What the job script sources; keys and tokens may be in it."""
    template = File("template.sh")
    """The user's template of the job script, as it was when the run was submitted."""
    record = File("record.json")
    """The submission and its history."""
    lock = File(".lock")
    """Empty; held by the command that changes the record."""
    stop = File("stop")
    """Where the job script asks the ranks to save a checkpoint and end."""
    stopped = File("stopped")
    """Where the ranks tell the script that they did so."""
    resubmitted = File(RESUBMITTED)
    """Where the job script tells under which id it submitted itself again."""
    requeue_error = File(REQUEUE_ERROR)
    """Where the job script tells why it could not have the job started again."""
    attempt = File("attempt")
    """How often the job script was started."""
    exit_code = File("exit_code")
    """The job script's exit code, written when it ends."""
    metrics = File("metrics.jsonl")
    """One line per step and per evaluation."""
    heartbeat = File("heartbeat.json")
    """What the ranks do, as of one of the last steps."""
    errors = File("errors")
    """One file per rank that failed."""
    preparation_error = File("errors/prepare.json")
    """Where a job reports that it could not profile or plan."""
    logs = File("logs")
    """Logs of the job and its ranks."""
    job_log = File("logs/job.log")
    """What the job script and the launcher print, and what pipectl says of the run."""
    watch = File("watch")
    """One file per node, of the process that watches its ranks."""
    trace = File("trace")
    """Predicted and measured timelines."""
    predicted = File("trace/predicted.json")
    """Timeline of a step as the plan predicts it."""
    rehearsal = File("rehearsal.json")
    """What the ranks of a rehearsal wait for."""
    checkpoints = File("checkpoints")
    """One folder per saved step."""

    def __init__(self, path: Path) -> None:
        self.path = path.absolute()

    @classmethod
    def create(cls, base: Path, name: str, now: float) -> RunDirectory:
        """A new directory ``<YYYYMMDD-HHMMSS>-<name>`` with its folders, for its owner alone.

        A second run of the same second gets ``-2`` appended, and so on.

        Args:
            now: seconds since the epoch; written in local time.

        Raises:
            UsageError: ``base`` cannot be written.
        """
        try:
            make_private_directory(base)
            for path in numbered(base, stem_of(name, now)):
                try:
                    path.mkdir(0o700)
                except FileExistsError:  # two callers never share one
                    continue
                run = cls(path)
                run.make_folders()
                return run
        except OSError as error:
            raise not_made(base, error) from error
        raise AssertionError("unreachable")

    def __repr__(self) -> str:
        return f"RunDirectory({str(self.path)!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RunDirectory) and other.path == self.path

    def __hash__(self) -> int:
        return hash(self.path)

    def make_folders(self) -> None:
        """Make what a new run directory holds."""
        for folder in _FOLDERS:
            (self.path / folder).mkdir(0o700)

    @property
    def name(self) -> str:
        """The directory's own name, by which commands call the run."""
        return self.path.name

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
        """What was reported by the last of so many starts of the job."""
        return self.errors / f"attempt-{starts}"

    def measured_of(self, step: int) -> Path:
        """Timeline of a step as it was."""
        return self.trace / f"step-{step:06d}.json"

    def trace_before(self, starts: int) -> Path:
        """Timelines of steps under an earlier plan, after so many starts of the job."""
        return self.trace / f"attempt-{starts}"


def stem_of(name: str, now: float) -> str:
    """``<YYYYMMDD-HHMMSS>-<name>``, in local time.

    Args:
        now: seconds since the epoch.
    """
    return f"{datetime.fromtimestamp(now):%Y%m%d-%H%M%S}-{name}"


def numbered(base: Path, stem: str) -> Iterator[Path]:
    """``stem``, then ``stem-2``, ``stem-3``… without end."""
    yield base / stem
    yield from (base / f"{stem}-{number}" for number in count(2))


def not_made(base: Path, error: OSError) -> UsageError:
    """What to raise if nothing can be made in ``base``."""
    return UsageError(
        f"{base}: no run directory can be made: {error.strerror or error}",
        cure="set output.directory to a directory you may write to",
    )
