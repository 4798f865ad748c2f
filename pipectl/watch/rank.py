"""The processes of a node's ranks: whether each is alive, stopped or ended, and why."""

from __future__ import annotations

import mmap
import os
import select
import signal
import time
from collections.abc import Iterable
from contextlib import suppress
from math import inf
from pathlib import Path
from typing import NamedTuple

from pipectl.errors import LESS_MEMORY
from pipectl.units import printable
from pipectl.watch import ProcessState, process_state
from pipectl.watch.board import SIZE, read_activity
from pipectl.watch.report import RESUME, RankReport, State

BYE, FAILING = b"\xfe", b"\xfd"
"""Written by a rank to its pipe before it ends, or before it reports its error. Python writes
signal numbers, and the stack of a crash, to the same pipe."""
_END_SIGNALS = (bytes([signal.SIGTERM]), bytes([signal.SIGINT]))
_END_SIGNAL_S = 1.0
"""A rank that ends within this time after SIGTERM ended because of it."""
_MEMORY_S = 3.0
"""An out-of-memory kill explains the end of a rank within this time."""
_CPU_MARGIN, _CPU_MARGIN_S = 0.02, 4.0
"""A rank had used up its processor time if this much, relative and in seconds, was left when it was
last seen: several threads use it faster."""
_MAX_WORDS = 1 << 16
_SHARED_MEMORY = tuple(
    f"/dev/shm/{name}"
    for name in ("mpich_shm_", "sm_segment.", "vader_segment.", "psm2_shm.", "psm3_shm.")
)
"""Prefixes of the shared memory files of MPI libraries, which killed ranks leave behind."""


class LocalRank(NamedTuple):
    """A rank's process, see :class:`pipectl.watch.ProcessState`, and the paths of its board and of
    the pipe to which it writes."""

    rank: int
    pid: int
    started: int
    board: str
    words: str


class _Rank:
    """A rank: what it shares with the watcher, and what the watcher has observed."""

    def __init__(self, local: LocalRank) -> None:
        self.rank, self.pid, self.started, board, words = local
        handle = os.open(board, os.O_RDONLY)
        self.board = mmap.mmap(handle, SIZE, prot=mmap.PROT_READ)
        os.close(handle)
        self.words = os.open(words, os.O_RDONLY | os.O_NONBLOCK)
        self.handle: int | None = None  # None if the kernel has no pidfds
        with suppress(OSError, AttributeError):
            self.handle = os.pidfd_open(self.pid)
        # A launcher starts ranks through a process per node; on the first node its parent is the
        # launcher.
        process = process_state(self.pid, self.started)
        self.parent = process_state(process.parent) if process else None
        self.launcher = process_state(self.parent.parent) if self.parent else None
        self.shared, self.is_training = shared_files(self.pid), False
        self.cpu_limit_s, self.cpu_s = _processor_limit(self.pid), 0.0
        self.heard, self.asked_at, self.lived_at = b"", float("-inf"), 0.0
        self.point, self.moved_at = (False, 0, 0), 0.0
        self.death: RankReport | None = None
        self.ended_at: float | None = None  # when its end was noted, in the order of all ends
        self.has_ended = False

    @property
    def is_gone(self) -> bool:
        """Whether the process has ended, or is about to end without a failure."""
        return self.has_ended or BYE in self.heard

    def listen(self, now: float) -> None:
        """Read from the rank's pipe."""
        with suppress(BlockingIOError):
            while words := os.read(self.words, _MAX_WORDS):
                self.heard += words
                if any(number in words for number in _END_SIGNALS):
                    self.asked_at = now
        if len(self.heard) > 2 * _MAX_WORDS:
            self.heard = self.heard[:_MAX_WORDS] + self.heard[-_MAX_WORDS:]

    def note_life(self, now: float) -> None:
        """Note that the process is alive, and the processor time that it has used, if limited."""
        self.lived_at = now
        if self.cpu_limit_s < inf:
            self.cpu_s = _processor_time(self.pid)

    def explain_death(self, ended_at: float, lost_process: str, *, memory_kill: bool) -> RankReport:
        """Return the report of a rank that ended, or lost its launcher, without saying why.

        Args:
            lost_process: the launcher or job script if it has ended, otherwise empty.
            memory_kill: whether the kernel has just killed a process for lack of memory.
        """
        # It was last seen alive before the signal, or just after it.
        was_asked, hint, stack = self.lived_at - self.asked_at <= _END_SIGNAL_S, RESUME, ""
        words = printable(self.heard.decode(errors="replace")).replace("\ufffd", "").strip()
        if lost_process:
            message = f"{lost_process} that started it is gone"
            hint = f"it was killed, or its node is gone; {RESUME}"
        elif words:
            message, stack = f"its process crashed: {words.splitlines()[0]}", words[:_MAX_WORDS]
            was_asked = False
        elif memory_kill:
            message, hint = "killed by the kernel, for lack of memory on its node", LESS_MEMORY
            was_asked = False
        elif self.cpu_s >= (1 - _CPU_MARGIN) * self.cpu_limit_s - _CPU_MARGIN_S:
            message = f"killed by the kernel, after {self.cpu_limit_s:.0f} s of processor time"
            hint = f"raise its limit: `ulimit -t`, or the batch system's; {RESUME}"
            was_asked = False
        elif was_asked:
            message = "its process alone received SIGTERM or SIGINT"
        else:
            message = "its process was killed (by SIGKILL, for example) or exited without a message"
            if not _lives(self.launcher):
                message += "; the launcher is gone, too"
        dead = RankReport(self.rank, State.DIED, ended_at=ended_at, was_asked=was_asked)
        return dead._replace(message=message, hint=hint, stack=stack)


class LocalRanks:
    """The ranks of this node, and the order in which they end.

    When a rank dies, its launcher kills all others within a millisecond. An epoll instance keeps
    the order of these events until it is read. A process closes its files before it counts as
    ended, and launchers react to that, so the rank's pipe is watched besides its pidfd.

    Args:
        launched: whether a job script started the ranks, so that their launcher must live.
        script: pid of the job script if it runs on this machine and must live, otherwise 0.

    Raises:
        OSError: the memory or the pipe of a rank cannot be opened.
    """

    def __init__(self, ranks: Iterable[LocalRank], *, launched: bool, script: int) -> None:
        self._ranks = [_Rank(rank) for rank in ranks]
        self._launched, self._needs_script = launched, bool(script and launched)
        self._script = process_state(script) if self._needs_script else None
        self._memory_kills, self._memory_kill_at = _count_memory_kills(), float("-inf")
        self._epoll = select.epoll()
        self._rank_of: dict[int, _Rank] = {}
        self._last_end = 0.0
        for rank in self._ranks:
            # epoll always reports the end of a pipe.
            for handle, event in ((rank.words, 0), (rank.handle, select.EPOLLIN)):
                if handle is not None:
                    self._epoll.register(handle, event)
                    self._rank_of[handle] = rank

    def look(self, now: float) -> tuple[RankReport, ...]:
        """Return a report per rank; ``now`` is the watcher's time in seconds."""
        if (kills := _count_memory_kills()) > self._memory_kills:
            self._memory_kills, self._memory_kill_at = kills, now
        script_gone = self._needs_script and not _lives(self._script)
        return tuple(self._look_at(rank, now, script_gone) for rank in self._ranks)

    def _look_at(self, rank: _Rank, now: float, script_gone: bool) -> RankReport:
        process = process_state(rank.pid, rank.started)
        rank.has_ended = process is None
        rank.listen(now)
        activity = read_activity(rank.board)
        lost_process = ""
        if process is not None:
            rank.note_life(now)
            if self._launched and rank.parent and process.parent != rank.parent.pid:
                lost_process = "the launcher"
            elif script_gone:
                lost_process = "the job script"
            if activity.step > 1 and not rank.is_training:
                rank.is_training = True
                rank.shared |= shared_files(rank.pid)
        if rank.death is None and (lost_process or rank.has_ended):
            memory_kill = now - self._memory_kill_at <= _MEMORY_S
            self.wait(0)  # others that ended before it, in their order
            ended_at = self._note_end(rank)
            rank.death = rank.explain_death(ended_at, lost_process, memory_kill=memory_kill)
        if BYE in rank.heard:
            state = State.LEFT
        elif FAILING in rank.heard:
            state = State.FAILED if rank.has_ended else State.FAILS
        elif rank.death is not None:
            return rank.death._replace(activity=activity)
        else:  # a debugger stops with "t"
            state = State.STOPPED if process and process.letter == "T" else State.LIVES
        point = state == State.STOPPED, activity.moves, activity.step
        if point != rank.point:
            rank.point, rank.moved_at = point, now
        return RankReport(rank.rank, state, now - rank.moved_at, activity)

    def wait(self, seconds: float) -> None:
        """Wait until a rank ends, at most for the given time."""
        for handle, _ in self._epoll.poll(seconds):
            self._epoll.unregister(handle)
            self._note_end(self._rank_of.pop(handle))

    def _note_end(self, rank: _Rank) -> float:
        """Return when a rank ended: later than the ends noted before."""
        if rank.ended_at is None:
            self._last_end = rank.ended_at = max(time.time(), self._last_end + 1e-6)
        return rank.ended_at

    @property
    def are_ending(self) -> bool:
        """Whether the end of a rank is still to be reported."""
        return any(rank.ended_at is not None and not rank.is_gone for rank in self._ranks)

    @property
    def are_gone(self) -> bool:
        """Whether all have ended, or are about to end without a failure."""
        return all(rank.is_gone for rank in self._ranks)

    def kill(self) -> None:
        """Send SIGKILL to the remaining ranks; it ends stopped processes too."""
        for rank in self._ranks:
            with suppress(OSError):
                if process_state(rank.pid, rank.started) is None:
                    continue
                if rank.handle is not None:
                    signal.pidfd_send_signal(rank.handle, signal.SIGKILL)
                else:
                    os.kill(rank.pid, signal.SIGKILL)

    def clean_up(self) -> None:
        """Remove the shared memory of killed ranks."""
        for path in {path for r in self._ranks if BYE not in r.heard for path in r.shared}:
            with suppress(OSError):
                os.unlink(path)  # noqa: PTH108


def _lives(process: ProcessState | None) -> bool:
    return process is not None and process_state(process.pid, process.started) is not None


def _processor_limit(pid: int) -> float:
    """Return the seconds of processor time after which the kernel ends a process."""
    with suppress(OSError, ValueError):
        for line in Path(f"/proc/{pid}/limits").read_text(encoding="ascii").splitlines():
            if line.startswith("Max cpu time"):
                return float(line.split()[3].replace("unlimited", "inf"))
    return inf


def _processor_time(pid: int) -> float:
    """Return the seconds of processor time that a process has used."""
    with suppress(OSError, ValueError, IndexError):
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
        user, system = text.rpartition(")")[2].split()[11:13]
        return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")
    return 0.0


def _count_memory_kills() -> int:
    """Return how many processes the kernel has killed for lack of memory since boot."""
    with suppress(OSError, ValueError):
        for line in Path("/proc/vmstat").read_text(encoding="ascii").splitlines():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    return 0


def shared_files(pid: int) -> set[str]:
    """Return the files through which the MPI library of a process shares memory."""
    try:
        text = Path(f"/proc/{pid}/maps").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return set()
    paths = {line.split(maxsplit=5)[-1].strip() for line in text.splitlines()}
    return {path for path in paths if path.startswith(_SHARED_MEMORY)}
