"""The share of its cores that a rank gets, and who has the rest.

The kernel counts how long each thread was ready to run but had no core (``schedstat``): its *run
delay*. That alone accuses nobody. Ranks that outnumber their cores delay each other as the plan
says, and so do the threads and loader processes of one rank. So a delay counts only as far as
others used these cores meanwhile: processes that are not of the job, the hypervisor of a virtual
machine, or a control group whose limit forbade their use.

A rank that waits for MPI looks for messages again and again, and yields its core in between. So
delays of the main thread count only in forwards and backwards.
"""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from pipectl.control_groups import groups_of
from pipectl.runs import LostTo
from pipectl.runtime.clock import machine
from pipectl.runtime.waiting import gather_all

if TYPE_CHECKING:
    from mpi4py import MPI

INTERVAL_S = 0.5
"""Shortest time that is measured: the system counts the use of cores in hundredths of seconds."""
_MIN_LOST = 0.05
"""Smallest part of the wall time that counts; less is the system's own work."""
_TICKS = os.sysconf("SC_CLK_TCK")
_BUSY, _STOLEN = (0, 1, 2, 5, 6), 7
"""Columns of a core in ``/proc/stat``: user, nice, system, interrupts; and the hypervisor's."""
_NAMESPACE = Path("/proc/self/ns/pid")
_CPU_CLOCK = 2
"""Which clock of a process tells its processor time; see ``clock_getcpuclockid``."""


class ProcessorShare(NamedTuple):
    """What a rank got of the time of its cores that it needed.

    Args:
        share: 1 if it lost none to others; None if the system does not say, or not yet.
        lost_to: who had most of the rest.
        limit_cores: the limit of the control group, if it had.
    """

    share: float | None = None
    lost_to: LostTo | None = None
    limit_cores: float | None = None


class Limit(NamedTuple):
    """A limit of a control group.

    Args:
        cores: processor seconds per second that all its processes may use.
        stopped_s: for how long they were stopped because of it, over all cores.
    """

    cores: float
    stopped_s: float


@dataclass(frozen=True)
class Sample:
    """What the system has counted up to a time.

    Args:
        main_delay_s: run delay of the main thread.
        threads: seconds on a core, and of run delay, of every other thread by its id.
        own_s: processor time of all ranks that may use these cores, and of their children.
        used_s, stolen_s: time of these cores that processes used, and that the hypervisor took.
        limits: of its control groups, by path.
    """

    time_s: float
    main_delay_s: float
    threads: Mapping[int, tuple[float, float]]
    own_s: float
    used_s: float
    stolen_s: float
    limits: Mapping[Path, Limit]


def share_between(
    before: Sample, now: Sample, busy_s: float, busy_cpu_s: float, ranks: int = 1
) -> ProcessorShare:
    """The share of a rank between two samples.

    Args:
        busy_s, busy_cpu_s: wall and processor time of the main thread in forwards and backwards.
        ranks: number of ranks that may use these cores.
    """
    cpu_s, delay_s = busy_cpu_s, min(now.main_delay_s - before.main_delay_s, busy_s - busy_cpu_s)
    for thread, (ran_s, waited_s) in now.threads.items():
        ran_before_s, waited_before_s = before.threads.get(thread, (0.0, 0.0))
        cpu_s += ran_s - ran_before_s
        delay_s += waited_s - waited_before_s
    stops = [
        (limit.stopped_s - before.limits[path].stopped_s, limit.cores)
        for path, limit in now.limits.items()
        if path in before.limits
    ]
    stopped_s, limit_cores = max(stops, default=(0.0, 0.0))
    used_s, stolen_s = now.used_s - before.used_s, now.stolen_s - before.stolen_s
    by_limit_s = min(delay_s, stopped_s)
    # What other processes used would have been divided among the ranks.
    theirs_s = max(0.0, used_s - (now.own_s - before.own_s)) / ranks
    lost_s: dict[LostTo, float] = {
        "limit": by_limit_s,
        "processes": min(delay_s - by_limit_s, theirs_s),
        # The kernel does not count it as a delay.
        "hypervisor": cpu_s * stolen_s / used_s if used_s > 0 else 0.0,
    }
    total_s = sum(lost_s.values())
    if total_s < _MIN_LOST * (now.time_s - before.time_s):
        return ProcessorShare(1.0)
    lost_to = max(lost_s, key=lost_s.__getitem__)
    is_limit = lost_to == "limit"
    return ProcessorShare(cpu_s / (cpu_s + total_s), lost_to, limit_cores if is_limit else None)


def make_meter(communicator: MPI.Comm) -> ProcessorMeter:
    """The meter of this rank. Collective."""
    names, cores = "", frozenset(os.sched_getaffinity(0))
    with suppress(OSError):
        names = str(_NAMESPACE.readlink())
    here = machine()
    places = gather_all(communicator, (here, names, cores, os.getpid()))
    sharing = [each for each in places if each[0] == here and each[2] & cores]
    known = all(each[1] == names for each in sharing)  # else ids are of other processes
    return ProcessorMeter([each[3] for each in sharing] if known else (), cores)


class ProcessorMeter:
    """Measures the share of this rank, again and again.

    Args:
        ranks: process ids of all ranks that may use its cores, its own included; empty if some
            are not known, so that nobody can tell who uses the cores.
        cores: that it may use.
        root: directory that contains ``proc`` and the mounts of control groups.
    """

    def __init__(
        self, ranks: Collection[int], cores: Collection[int], root: Path = Path("/")
    ) -> None:
        self._ranks = ranks
        self._cores = {f"cpu{core}" for core in cores}
        self._proc = root / "proc"
        self._groups = [path for path in groups_of("cpu", root) if _limit_of(path) is not None]
        self._own_s = dict.fromkeys(ranks, 0.0)
        """Processor time of ranks and their children, by process."""
        self._last = ProcessorShare()
        self._find_children()
        self.restart()

    def restart(self) -> None:
        """Ignore the time since the last measurement."""
        self._begin(self._sample())

    def _begin(self, sample: Sample | None) -> None:
        self._before, self._busy_s, self._busy_cpu_s = sample, 0.0, 0.0

    def measure(self, busy_s: float, busy_cpu_s: float) -> ProcessorShare:
        """The share of the last interval; a new one begins if this one was long enough.

        Args:
            busy_s, busy_cpu_s: see :func:`share_between`; since the last call.
        """
        self._busy_s += busy_s
        self._busy_cpu_s += busy_cpu_s
        before = self._before
        if before is None or time.perf_counter() - before.time_s < INTERVAL_S:
            return self._last
        now = self._sample()
        if now is not None:
            busy = self._busy_s, self._busy_cpu_s
            self._last = share_between(before, now, *busy, len(self._ranks))
            if self._last.lost_to == "processes" and self._find_children():
                self._last = ProcessorShare()  # they may be what used the cores
                now = self._sample()  # with what they have used until now
        self._begin(now or self._sample())
        return self._last

    def _sample(self) -> Sample | None:
        threads = {}
        if not self._ranks:
            return None
        try:
            for path in (self._proc / "self/task").iterdir():
                with suppress(FileNotFoundError, ProcessLookupError):  # it has ended
                    ran, waited, *_ = (path / "schedstat").read_text(encoding="ascii").split()
                    threads[int(path.name)] = int(ran) / 1e9, int(waited) / 1e9
            _, main_delay_s = threads.pop(os.getpid())
            used_s, stolen_s = self._use_of_cores_s()
        except (OSError, LookupError, ValueError):
            return None
        for process, own_s in self._own_s.items():
            with suppress(OSError):  # it has ended
                clock = ~process << 3 | _CPU_CLOCK
                self._own_s[process] = max(own_s, time.clock_gettime(clock))
        own_s = sum(self._own_s.values())
        limits = {path: limit for path in self._groups if (limit := _limit_of(path))}
        now_s = time.perf_counter()
        return Sample(now_s, main_delay_s, threads, own_s, used_s, stolen_s, limits)

    def _use_of_cores_s(self) -> tuple[float, float]:
        """Time that processes used of the cores, and that the hypervisor took."""
        used = stolen = 0
        for line in (self._proc / "stat").read_text(encoding="ascii").splitlines():
            name, *columns = line.split()
            if name in self._cores:
                used += sum(int(columns[index]) for index in _BUSY)
                stolen += int(columns[_STOLEN])
        return used / _TICKS, stolen / _TICKS

    def _find_children(self) -> bool:
        """Look for processes that ranks have started; returns whether there are new ones."""
        parents = {}
        entries = list[Path]()
        with suppress(OSError):
            entries += self._proc.iterdir()  # Path.glob fails if a process ends between its looks
        for path in entries:
            with suppress(OSError, LookupError, ValueError):  # not a process, or it has ended
                text = (path / "stat").read_text(encoding="ascii", errors="replace")
                parents[int(path.name)] = int(text.rpartition(")")[2].split()[1])
        family = set(self._ranks)
        while new := {pid for pid, parent in parents.items() if parent in family} - family:
            family |= new
        found = family - self._own_s.keys()
        self._own_s.update(dict.fromkeys(found, 0.0))
        return bool(found)


def _limit_of(group: Path) -> Limit | None:
    """The limit of a control group of either version; None if it has none."""
    with suppress(OSError, ValueError, LookupError):
        stat = dict(line.split()[:2] for line in _read(group / "cpu.stat").splitlines())
        if (group / "cpu.max").exists():
            quota, period = _read(group / "cpu.max").split()
            stopped_s = int(stat.get("throttled_usec", 0)) / 1e6
        else:
            quota, period = (_read(group / f"cpu.cfs_{name}_us") for name in ("quota", "period"))
            stopped_s = int(stat.get("throttled_time", 0)) / 1e9
        if quota != "max" and int(quota) > 0:
            return Limit(int(quota) / int(period), stopped_s)
    return None


def _read(path: Path) -> str:
    return path.read_text(encoding="ascii").strip()
