"""Ranks as processes of this node: each lives, is stopped, or has ended and how."""

from __future__ import annotations

import mmap
import os
import select
import signal
import time
from collections import deque
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from pipectl.printable import printable
from pipectl.watch.board import SIZE, Activity, read_activity

BYE, FAILING = b"\xfe", b"\xfd"
"""What a rank says before it ends, or before it reports why it fails. Python writes the numbers of
signals to the same pipe, and the stack when it crashes."""
LIVES, STOPPED, FAILS, FAILED, DIED, LEFT = "lives", "stopped", "fails", "failed", "died", "left"
"""A rank in ``FAILS`` or ``FAILED`` reports its error itself; of ``DIED`` nobody has said why."""
RESUME = "pipectl resume goes on from the last checkpoint"
_MEMORY = "set pipeline.memory_limit below what a rank gets, and plan again; pipectl resume goes on"
_END_SIGNALS = (bytes([signal.SIGTERM]), bytes([signal.SIGINT]))
_END_SIGNAL_S = 1.0
"""A signal to end explains the end of a rank for so long; one that goes on saves a checkpoint."""
_MEMORY_S = 3.0
"""A process that was killed for memory earlier than that, before a rank ended, was another."""
_MAX_WORDS = 1 << 16
_SHARED_MEMORY = tuple(
    f"/dev/shm/{name}"
    for name in ("mpich_shm_", "sm_segment.", "vader_segment.", "psm2_shm.", "psm3_shm.")
)
"""How the files begin by which MPIs share memory, and which they leave if they are killed."""


class Death(NamedTuple):
    """The end of a rank that it did not announce, or why it is lost.

    Args:
        at: seconds since the epoch, when its watcher saw it; 0 if it has not ended.
        earlier: how many ranks of its node had ended before.
        is_wanted: whether it ended because it was to, as when a job is cancelled.
        message: what happened.
        cure: what the user can do.
        stack: where it was, if it crashed.
    """

    at: float = 0.0
    earlier: int = 0
    is_wanted: bool = False
    message: str = ""
    cure: str = RESUME
    stack: str = ""


class RankReport(NamedTuple):
    """How one rank is.

    Args:
        state: ``LIVES`` or another of the constants above.
        death: how it ended, if it is in ``DIED``.
    """

    rank: int = 0
    state: str = LIVES
    activity: Activity = Activity()
    death: Death = Death()

    @property
    def is_over(self) -> bool:
        """Whether it has ended."""
        return self.state in (FAILED, DIED, LEFT)


class WatchedRank:
    """One rank of this node.

    Args:
        pid: of its process, and ``started`` when that began.
        board: path of the memory with what it does.
        words: path of the pipe through which it speaks.
        launched: whether a job script started the ranks, so that their launcher must stay.

    Attributes:
        words: file descriptor of the pipe.
        handle: one that is readable when the process ends; None if the kernel has none.
        has_ended: whether the process has.

    Raises:
        OSError: the memory or the pipe cannot be opened.
    """

    def __init__(
        self, rank: int, pid: int, started: int, board: str, words: str, *, launched: bool
    ) -> None:
        self.rank, self.has_ended = rank, False
        self._pid, self._started, self._launched = pid, started, launched
        handle = os.open(board, os.O_RDONLY)
        self._board = mmap.mmap(handle, SIZE, prot=mmap.PROT_READ)
        os.close(handle)
        self.words = os.open(words, os.O_RDONLY | os.O_NONBLOCK)
        self.handle: int | None = None
        with suppress(OSError, AttributeError):
            self.handle = os.pidfd_open(pid)
        # A launcher starts ranks by a process on each node, whose parent is on the first node.
        process = process_state(pid, started)
        self._parent = process_state(process.parent) if process else None
        self._launcher = process_state(self._parent.parent) if self._parent else None
        self._heard = b""
        self._lived_at, self._asked_at = 0.0, float("-inf")
        self._death: Death | None = None
        self._trains = False
        self._shared = shared_files(pid)

    def look(self, now: float, earlier: int, *, memory_kill: bool, script_gone: bool) -> RankReport:
        """Find out how it is.

        Args:
            now: of the watcher's clock, in seconds.
            earlier: how many ranks of the node had ended before it, if it has.
            memory_kill: whether the kernel has just killed a process of the node for memory.
            script_gone: whether the job script has ended.
        """
        process = process_state(self._pid, self._started)
        self.has_ended = process is None
        self._listen(now)
        activity = read_activity(self._board)
        gone = ""
        if process is not None:
            self._lived_at = now
            if self._launched and self._parent and process.parent != self._parent.pid:
                gone = "the launcher"
            elif script_gone:
                gone = "the job script"
            if activity.step > 1 and not self._trains:
                self._trains = True
                self._shared |= shared_files(self._pid)
        if self._death is None and (gone or self.has_ended):
            self._death = self._explain_death(gone, memory_kill=memory_kill)._replace(
                at=time.time(), earlier=earlier
            )
        if BYE in self._heard:
            state = LEFT
        elif FAILING in self._heard:
            state = FAILED if self.has_ended else FAILS
        elif self._death is not None:
            return RankReport(self.rank, DIED, activity, self._death)
        else:
            state = STOPPED if process and process.letter == "T" else LIVES  # a debugger's is "t"
        return RankReport(self.rank, state, activity)

    @property
    def is_gone(self) -> bool:
        """Whether its process has ended, or is about to as it should."""
        return self.has_ended or BYE in self._heard

    def kill(self) -> None:
        """SIGKILL, which ends stopped processes too; only ever this very process."""
        with suppress(OSError):
            if process_state(self._pid, self._started) is None:
                return
            if self.handle is not None:
                signal.pidfd_send_signal(self.handle, signal.SIGKILL)
            else:
                os.kill(self._pid, signal.SIGKILL)

    def clean_up(self) -> None:
        """Remove the shared memory that its MPI leaves if it is killed."""
        for path in set() if BYE in self._heard else self._shared:
            with suppress(OSError):
                os.unlink(path)  # noqa: PTH108

    def _listen(self, now: float) -> None:
        with suppress(BlockingIOError):
            while words := os.read(self.words, _MAX_WORDS):
                self._heard += words
                if any(number in words for number in _END_SIGNALS):
                    self._asked_at = now
        if len(self._heard) > 2 * _MAX_WORDS:
            self._heard = self._heard[:_MAX_WORDS] + self._heard[-_MAX_WORDS:]

    def _explain_death(self, gone: str, *, memory_kill: bool) -> Death:
        """How a rank ended that did not say so, or what is gone that it depends on."""
        # It was seen alive last before the signal, or just after.
        asked = self._lived_at - self._asked_at <= _END_SIGNAL_S
        words = printable(self._heard.decode(errors="replace")).replace("\ufffd", "").strip()
        if gone:
            message = f"{gone} that started it is gone"
            cure = f"it was killed, or its node is gone; {RESUME}"
            return Death(is_wanted=asked, message=message, cure=cure)
        if words:
            message = f"its process crashed: {words.splitlines()[0]}"
            return Death(message=message, stack=words[:_MAX_WORDS])
        if memory_kill:
            message = "killed by the kernel, for lack of memory on its node"
            return Death(message=message, cure=_MEMORY)
        if asked:
            message = "its process was sent a signal to end (SIGTERM or SIGINT), by itself"
            return Death(is_wanted=True, message=message)
        too = "" if _lives(self._launcher) else "; the launcher is gone, too"
        message = f"its process was killed (SIGKILL, say), or ended without a word{too}"
        return Death(message=message)


class LocalRanks:
    """All ranks of this node, and in which order they end.

    The death of one rank has its launcher kill all others within a millisecond, but what happens
    becomes ready in an epoll instance one after the other, however late that is looked at. A
    process gives back its files before it counts as ended, and launchers notice by that; so the
    pipe through which it speaks tells, too.

    Args:
        ranks: the arguments of :class:`WatchedRank` by name.
        launched: whether a job script started the ranks, so that their launcher must stay.
        script: the job script's process, if it runs on this machine and must stay; else 0.

    Raises:
        OSError: the memory or the pipe of a rank cannot be opened.
    """

    def __init__(self, ranks: Iterable[Mapping[str, Any]], *, launched: bool, script: int) -> None:
        self._ranks = [WatchedRank(**rank, launched=launched) for rank in ranks]
        self._script = process_state(script) if script and launched else None
        self._needs_script = bool(script and launched)
        self._memory_kills = deque([(0.0, _count_memory_kills())])
        self._epoll = select.epoll()
        self._rank_of: dict[int, int] = {}
        self._ended: list[int] = []
        for rank in self._ranks:
            self._epoll.register(rank.words, 0)  # its end is told without being asked for
            self._rank_of[rank.words] = rank.rank
            if rank.handle is not None:
                self._epoll.register(rank.handle, select.EPOLLIN)
                self._rank_of[rank.handle] = rank.rank

    def look(self, now: float) -> tuple[RankReport, ...]:
        """How they are.

        Args:
            now: of the watcher's clock, in seconds.
        """
        self._memory_kills.append((now, _count_memory_kills()))
        while now - self._memory_kills[1][0] > _MEMORY_S:
            self._memory_kills.popleft()
        memory_kill = self._memory_kills[-1][1] > self._memory_kills[0][1]
        script_gone = self._needs_script and not _lives(self._script)
        ended = self._ended
        return tuple(
            rank.look(
                now,
                ended.index(rank.rank) if rank.rank in ended else len(ended),
                memory_kill=memory_kill,
                script_gone=script_gone,
            )
            for rank in self._ranks
        )

    def wait(self, seconds: float) -> None:
        """Until a rank ends, or for so long."""
        if not self._rank_of:
            time.sleep(seconds)
            return
        for handle, _ in self._epoll.poll(seconds, len(self._rank_of)):
            self._epoll.unregister(handle)
            rank = self._rank_of.pop(handle)
            if rank not in self._ended:
                self._ended.append(rank)

    @property
    def are_ending(self) -> bool:
        """Whether one is about to end."""
        return any(rank.rank in self._ended and not rank.is_gone for rank in self._ranks)

    @property
    def are_gone(self) -> bool:
        """Whether all have ended, or are about to as they should."""
        return all(rank.is_gone for rank in self._ranks)

    def kill(self) -> None:
        """End all that are left."""
        for rank in self._ranks:
            rank.kill()

    def clean_up(self) -> None:
        """Remove the shared memory that MPI leaves of ranks that were killed."""
        for rank in self._ranks:
            rank.clean_up()


class ProcessState(NamedTuple):
    """Of one process.

    Args:
        letter: as in ``/proc/PID/stat``; ``T`` is stopped.
        started: in clock ticks since boot, which tells it from a later one with its number.
    """

    pid: int
    letter: str
    parent: int
    started: int


def process_state(pid: int, started: int | None = None) -> ProcessState | None:
    """None if the process is gone or a zombie, or if it did not start at the given time."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    letter, parent, *rest = text.rpartition(")")[2].split()
    state = ProcessState(pid, letter, int(parent), int(rest[17]))
    return None if letter in "ZX" or started not in (None, state.started) else state


def _lives(process: ProcessState | None) -> bool:
    """Whether a process that was seen then is still there."""
    return process is not None and process_state(process.pid, process.started) is not None


def _count_memory_kills() -> int:
    """How many processes of this machine the kernel has killed for lack of memory; 0 if unknown."""
    with suppress(OSError, ValueError):
        for line in Path("/proc/vmstat").read_text(encoding="ascii").splitlines():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    return 0


def shared_files(pid: int) -> set[str]:
    """The files by which the MPI of a process shares memory with others of its node."""
    try:
        text = Path(f"/proc/{pid}/maps").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return set()
    paths = {line.split(maxsplit=5)[-1].strip() for line in text.splitlines()}
    return {path for path in paths if path.startswith(_SHARED_MEMORY)}
