"""The files that a job writes while it runs: heartbeat, errors, exit code.

They can be read at any time, also after a crash: fields of a wrong type count as missing, so that
``status`` shows everything else. See also :mod:`pipectl.runs.metrics` and :mod:`pipectl.runs.logs`.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from signal import Signals
from typing import Annotated, Any, ClassVar, Literal

from pipectl.errors import DataFileError
from pipectl.faults import LAUNCH, ErrorReport
from pipectl.fields import VERSION, DataFile, LenientFields, Rule, read_value
from pipectl.files import files_like, is_there, open_regular, read_json, read_limited
from pipectl.runs.directory import RunDirectory, StartDirectory, checkpoints
from pipectl.units import printable

_MAX_REPORT_BYTES, _MAX_DIGITS = 2**24, 100
_TELLING = re.compile(
    r"error|fail|fatal|not found|no such|cannot|can't|unable|denied|refused|expired|invalid|abort"
    r"|killed|not enough|disabled|no space|limit|as root",
    re.IGNORECASE,
)
_NOISE = re.compile(
    r"[-=+*#\s]*$|\[mpiexec\S*\] (HYD|send_hdr|ui_cmd|main )|.*job\.sh: line \d+: +\d+ |pipectl: "
    r"|\[proxy\S*\] (HYD_pmcd_pmip_control_cmd_cb|HYDT_dmxu|main )|=   |This typically refers"
    r"|Please see the FAQ|srun: cluster configuration lacks"
)
"""Lines that do not say why a launcher failed, but that it is being ended."""
_OWN_WORDS = re.compile(r"a process ended .*before MPI")
"""What the job script found, which says more than what launchers make of it."""
_PROCESS_ENDED = re.compile(
    r"a process ended .*before MPI|srun: error: \S+: tasks? \S+ "
    r"|srun: (launch/|Terminating|Job step a)|slurmstepd\S* error: \*\*\*"
    r"|YOUR APPLICATION TERMINATED"
)
"""Lines that say only which process ended, or that others are ended."""
_NO_DIRECTORY = re.compile(r"slurmstepd(?:-([\w.-]{1,255}))?: error: couldn't chdir to ")
_MAX_LINES, _LOG_END = 3, 2**16
_KILLED = "if that was for lack of memory, raise resources.memory_per_node"
AS_ROOT = "attempt to run as root"
"""Part of what Open MPI says if it starts nothing for root."""
HINT_OF_ROOT = (
    "be another user, or set OMPI_ALLOW_RUN_AS_ROOT and OMPI_ALLOW_RUN_AS_ROOT_CONFIRM to 1, in a "
    "job by environment.variables"
)
_MORE_TIME = "see the log; launch.hang_after allows more time: ten times that, and 1 s per rank"


Share = Annotated[float, Rule(lambda share: share <= 1, "at most 1")]
LostTo = Literal["processes", "limit", "hypervisor"]
"""Who had the time of cores that a rank did not get: processes that are not of the job, nobody
because of a limit of the control group, or the hypervisor of a virtual machine."""


@dataclass(frozen=True)
class RankBeat(LenientFields):
    """A rank in a heartbeat; figures are of its last step, and None before the first.

    Args:
        rank: number of the rank.
        host: name of its machine.
        node: name of its node in the batch system.
        pid: id of its process.
        stages: stages that it holds.
        busy_s: time spent computing.
        waiting: share of the time spent waiting for other ranks.
        processor: share of the time of its cores that it got while it computed; 1 if it lost none
            to others. None if the system does not say.
        lost_to: who had the rest: other ``processes``, the ``hypervisor``, or nobody because of the
            ``limit`` of the control group.
        limit_cores: that limit.
        rss_bytes, peak_bytes: current and largest memory of the process.
    """

    rank: int
    host: str = ""
    node: str = ""
    pid: int | None = None
    stages: tuple[int, ...] = ()
    busy_s: float | None = None
    waiting: Share | None = None
    processor: Share | None = None
    lost_to: LostTo | None = None
    limit_cores: float | None = None
    rss_bytes: int | None = None
    peak_bytes: int | None = None


@dataclass(frozen=True)
class Heartbeat(LenientFields, DataFile):
    """``heartbeat.json``: what a job does, and the state of its ranks.

    Args:
        state: a phase, such as ``training``.
        step, steps: completed steps, and steps of the run; percent if the run only profiles.
        attempt: number of the job's start, from 1.
        ranks: the ranks.
        messages: how messages move: ``route``, ``progress`` and ``why``; empty before this is
            chosen.
        time: seconds since the epoch.
    """

    max_bytes: ClassVar[int] = _MAX_REPORT_BYTES
    hint: ClassVar[str] = "the running job writes it again within seconds"
    state: str = ""
    step: int | None = None
    steps: int | None = None
    attempt: int = 1
    ranks: tuple[RankBeat, ...] = ()
    messages: Mapping[str, str] = field(default_factory=dict)
    time: float = field(default_factory=time.time)

    def to_json(self) -> dict[str, Any]:
        """Return the documented JSON object, fast also for thousands of ranks."""
        return {"version": VERSION, **vars(self), "ranks": [vars(rank) for rank in self.ranks]}


def read_heartbeat(start: StartDirectory) -> Heartbeat | None:
    """Return the last heartbeat; None before the first, or if it is damaged."""
    with suppress(DataFileError):
        return Heartbeat.load(start.heartbeat)
    return None


def read_errors(start: StartDirectory) -> list[ErrorReport]:
    """Return the readable error reports of the preparation and the ranks, first failure first."""
    errors = []
    for path in (start.preparation_error, *files_like(start.errors, "rank-*.json")):
        with suppress(DataFileError):
            document = read_json(path, hint="", limit=_MAX_REPORT_BYTES)
            errors.append(read_value(ErrorReport, document))
    if not errors:
        errors = [error for error in (_read_launch_error(start) or _find_missing(start),) if error]
    return sorted(errors, key=lambda error: (error.rank is not None, error.time))


def _read_launch_error(start: StartDirectory) -> ErrorReport | None:
    """Return why no rank has begun, in the words of the launcher; None if one has.

    The job script writes the node, its exit code and, if it ended the launcher itself, the seconds
    that it waited for a rank, or ``begun`` if a signal ended what comes before the ranks; then what
    was printed.
    """
    try:
        text = read_limited(start.launch_error, _MAX_REPORT_BYTES).decode("utf-8", "replace")
    except OSError:
        return None
    node, numbers, *printed = [*text.splitlines(), "", ""]
    code, *waited_s = numbers.split() or ["unknown"]
    if waited_s == ["begun"] and code.isdecimal():
        names = {signal + 128: signal.name for signal in Signals}
        what = f"its process was ended by {names.get(int(code[:3]), 'a signal')}"
        hint = _KILLED if what.endswith("KILL") else None
        return ErrorReport(what, action=LAUNCH, host=printable(node), hint=hint)
    what = f"no rank has begun: exit code {code}"
    if waited_s:
        what = f"no rank has begun in {waited_s[0]} s, so the launcher was ended"
    words = "\n".join(_telling(printed))
    hint = _MORE_TIME if waited_s else None
    if AS_ROOT in words:
        hint = HINT_OF_ROOT
    if missing := next(filter(None, map(_NO_DIRECTORY.match, printed)), None):
        hint = _hint_of_missing(missing)
    return ErrorReport(
        printable(f"{what}\n{words}" if words else what),
        action=LAUNCH,
        host=printable(node),
        hint=hint,
    )


def _find_missing(start: StartDirectory) -> ErrorReport | None:
    """Return that a node had no run directory, in which its ranks could not report anything, if the
    end of the log of a run that failed says so."""
    if read_exit_code(start) in (None, 0) or is_there(start.stopped_marker):
        return None
    try:
        with os.fdopen(open_regular(start.run.job_log), "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - _LOG_END))
            lines = file.read(_LOG_END).decode("utf-8", "replace").splitlines()
    except OSError:
        return None
    missing = next(filter(None, map(_NO_DIRECTORY.match, lines)), None)
    if missing is None:
        return None
    host = printable(missing[1] or "")
    return ErrorReport(
        printable(missing.string), action=LAUNCH, host=host, hint=_hint_of_missing(missing)
    )


def _hint_of_missing(missing: re.Match[str]) -> str:
    return f"check that {missing[1] or 'each of its nodes'} has that directory"


def _telling(printed: Iterable[str]) -> list[str]:
    """Return the few lines that say what went wrong: the first ones with a word for it, and at
    least one that says which process ended."""
    lines = list(dict.fromkeys(line.strip() for line in printed if not _NOISE.match(line)))
    ends = [line for line in lines if _PROCESS_ENDED.match(line)]
    ends.sort(key=lambda line: not _OWN_WORDS.match(line))
    words = [line for line in lines if line not in ends]
    telling = [line for line in words if _TELLING.search(line)]
    return [*(telling or words[-_MAX_LINES:])[: _MAX_LINES - bool(ends)], *ends][:_MAX_LINES]


def read_stall(start: StartDirectory) -> str:
    """Describe who waits for whom while no rank makes progress; otherwise empty."""
    from pipectl.watch.report import node_path, read_report

    news = read_report(node_path(start.watch, 0))
    return "" if news is None else printable(news[1].stalled)


def read_exit_code(start: StartDirectory) -> int | None:
    """Return the exit code of the job script; None while it runs."""
    return _read_number(start.exit_code)


def read_starts(run: RunDirectory) -> int:
    """Return how often the job script of a run has begun."""
    newest = run.start
    return newest.number if is_there(newest.begun) else newest.number - 1


def read_nodes(start: StartDirectory) -> int | None:
    """Return how many nodes of a range a start has found, or its plan takes; None before that."""
    return _read_number(start.nodes)


def _read_number(path: Path) -> int | None:
    try:
        return int(read_limited(path, _MAX_DIGITS))
    except (OSError, ValueError):
        return None


def read_exit_warning(start: StartDirectory) -> str:
    """Return what failed after all work was done; empty if nothing did."""
    return _last_line(start.exit_warning)


def read_requeue_error(start: StartDirectory) -> str:
    """Return why the batch system did not requeue the job; empty if it did."""
    return _last_line(start.requeue_error)


def _last_line(path: Path) -> str:
    try:
        text = read_limited(path, _MAX_REPORT_BYTES).decode("utf-8", "replace")
    except OSError:
        return ""
    return next((line.strip() for line in reversed(text.split("\n")) if line.strip()), "")


def measured_steps(run: RunDirectory) -> list[int]:
    """Return the steps with measured timelines, ascending."""
    names = (
        re.fullmatch(r"step-(\d+)\.json", path.name) for path in files_like(run.trace, "step-*")
    )
    return sorted(int(match[1]) for match in names if match)


def last_checkpoint(run: RunDirectory) -> Path | None:
    """Return the directory of the latest complete checkpoint."""
    return next(iter(checkpoints(run.checkpoints)), None)
