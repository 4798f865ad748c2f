"""The run directory: every path of a run, in one place."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from datetime import datetime
from itertools import count
from pathlib import Path

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
VARIABLES = "variables.sh"
"""Name of the file with the job's own variables of the environment."""
REQUEUE_ERROR = "requeue_error"
"""Name of the file with what the batch system said when it did not start the job again."""
_FOLDERS = ("errors", "logs", "trace", "checkpoints")


class RunDirectory:
    """Paths of one run; nothing is read or written.

    Args:
        path: made absolute, since jobs run elsewhere.
    """

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
            run = cls(_make_unique(base, stem_of(name, now)))
            run.make_folders()
        except OSError as error:
            raise not_made(base, error) from error
        return run

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

    @property
    def job(self) -> Path:
        """The resolved job spec."""
        return self.path / "job.yaml"

    @property
    def profile(self) -> Path:
        """The measured operator graph."""
        return self.path / "profile.json"

    @property
    def measurement(self) -> Path:
        """How the profile of a run that only measures came to be."""
        return self.path / "measurement.json"

    @property
    def plan(self) -> Path:
        """Stages, ranks and schedule."""
        return self.path / "plan.json"

    @property
    def cluster(self) -> Path:
        """Nodes, devices and links."""
        return self.path / "cluster.json"

    @property
    def script(self) -> Path:
        """The job script."""
        return self.path / "job.sh"

    @property
    def variables(self) -> Path:
        """What the job script sources; keys and tokens may be in it."""
        return self.path / VARIABLES

    @property
    def template(self) -> Path:
        """The user's script around the job script, as it was when the run was submitted."""
        return self.path / "template.sh"

    @property
    def record(self) -> Path:
        """The submission and its history."""
        return self.path / "record.json"

    @property
    def lock(self) -> Path:
        """Empty; held by the command that changes the record."""
        return self.path / ".lock"

    @property
    def stop(self) -> Path:
        """Where the job script asks the ranks to save a checkpoint and end."""
        return self.path / "stop"

    @property
    def stopped(self) -> Path:
        """Where the ranks tell the script that they did so."""
        return self.path / "stopped"

    @property
    def resubmitted(self) -> Path:
        """Where the job script tells under which id it submitted itself again."""
        return self.path / RESUBMITTED

    @property
    def requeue_error(self) -> Path:
        """Where the job script tells why it could not have the job started again."""
        return self.path / REQUEUE_ERROR

    @property
    def attempt(self) -> Path:
        """How often the job script was started."""
        return self.path / "attempt"

    @property
    def exit_code(self) -> Path:
        """The job script's exit code, written when it ends."""
        return self.path / "exit_code"

    @property
    def metrics(self) -> Path:
        """One line per step and per evaluation."""
        return self.path / "metrics.jsonl"

    @property
    def heartbeat(self) -> Path:
        """What the ranks do, as of one of the last steps."""
        return self.path / "heartbeat.json"

    @property
    def errors(self) -> Path:
        """One file per rank that failed."""
        return self.path / "errors"

    @property
    def logs(self) -> Path:
        """Where the log is."""
        return self.path / "logs"

    @property
    def job_log(self) -> Path:
        """What the job script and the launcher print, and what pipectl says of the run."""
        return self.logs / "job.log"

    def rank_log(self, rank: int) -> Path:
        """What a rank printed."""
        return self.logs / f"rank-{rank:04d}.log"

    def node_log(self, node: str) -> Path:
        """What the ranks of a node printed, if there are too many for a file each."""
        return self.logs / f"node-{re.sub(r'[^A-Za-z0-9.-]', '_', node)}.log"

    def rank_logs(self) -> Sequence[Path]:
        """All of both kinds, by number or name."""
        return sorted([*self.logs.glob("rank-*.log"), *self.logs.glob("node-*.log")], key=_numbers)

    @property
    def watch(self) -> Path:
        """One file per node, of the process that watches its ranks."""
        return self.path / "watch"

    @property
    def trace(self) -> Path:
        """Predicted and measured timelines."""
        return self.path / "trace"

    @property
    def predicted(self) -> Path:
        """Timeline of a step as the plan predicts it."""
        return self.trace / "predicted.json"

    def measured_of(self, step: int) -> Path:
        """Timeline of a step as it was."""
        return self.trace / f"step-{step:06d}.json"

    def errors_before(self, starts: int) -> Path:
        """What was reported by the last of so many starts of the job."""
        return self.errors / f"attempt-{starts}"

    def trace_before(self, starts: int) -> Path:
        """Timelines of steps under an earlier plan, after so many starts of the job."""
        return self.trace / f"attempt-{starts}"

    @property
    def report(self) -> Path:
        """The run on one page."""
        return self.path / "report.html"

    @property
    def rehearsal(self) -> Path:
        """What the ranks of a rehearsal wait for."""
        return self.path / "rehearsal.json"

    @property
    def checkpoints(self) -> Path:
        """One folder per saved step."""
        return self.path / "checkpoints"

    @property
    def preparation_error(self) -> Path:
        """Where a job reports that it could not profile or plan."""
        return self.errors / "prepare.json"

    def error_of(self, rank: int) -> Path:
        """Where a rank reports its failure."""
        return self.errors / f"rank-{rank:04d}.json"


def stem_of(name: str, now: float) -> str:
    """``<YYYYMMDD-HHMMSS>-<name>``, in local time.

    Args:
        now: seconds since the epoch.
    """
    return f"{datetime.fromtimestamp(now):%Y%m%d-%H%M%S}-{name}"


def not_made(base: Path, error: OSError) -> UsageError:
    """What to raise where nothing can be made in ``base``."""
    return UsageError(
        f"{base}: no run directory can be made: {error.strerror or error}",
        cure="set output.directory to a directory you may write to",
    )


def _numbers(path: Path) -> tuple[list[int], str]:
    return [int(digits) for digits in re.findall(r"\d+", path.name)], path.name


def numbered(base: Path, stem: str) -> Iterator[Path]:
    """``stem``, then ``stem-2``, ``stem-3``… without end."""
    yield base / stem
    yield from (base / f"{stem}-{number}" for number in count(2))


def _make_unique(base: Path, stem: str) -> Path:
    """Make the first that is free; two callers never share one."""
    for path in numbered(base, stem):
        try:
            path.mkdir(0o700)
        except FileExistsError:
            continue
        return path
    raise AssertionError("unreachable")
