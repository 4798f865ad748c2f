"""A rank as a process: it lives, is stopped, or has ended and how."""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from typing import Any, NamedTuple

from pipectl.printable import printable
from pipectl.watch import machine
from pipectl.watch.board import Sight, open_board

BYE, FAILING = b"\xfe", b"\xfd"
"""What a rank says before it ends, or before it reports why it fails. Python puts the numbers of
signals there, and the stack when it crashes."""
LIVES, STOPPED, FAILS, FAILED, DIED, LEFT = "lives", "stopped", "fails", "failed", "died", "left"
"""States: of ``DIED`` nobody has said why; ``FAILED`` has said so itself."""
OVER = (FAILED, DIED, LEFT)
_ASKED = (bytes([signal.SIGTERM]), bytes([signal.SIGINT]))
_ASKED_S = 1.0
"""A signal to end explains the end of a rank for so long; one that goes on saves a checkpoint."""
_RECENT_S = 2.0
"""A process that was killed for memory earlier than that, before a rank ended, was another."""
_MAX_WORDS = 1 << 16


class Death(NamedTuple):
    """The end of a rank that it did not announce.

    Args:
        at: seconds since the epoch, when its watcher saw it.
        earlier: how many ranks of its node had ended before.
        asked: whether it had just been sent a signal to end, as launchers do.
        words: its last, if it had any.
        for_memory: whether the kernel killed a process of its machine for memory just then.
        launcher: what is gone that started it, in words, while it still lived; else empty.
        with_launcher: whether the launcher was gone when this was noticed.
    """

    at: float = 0.0
    earlier: int = 0
    asked: bool = False
    words: str = ""
    for_memory: bool = False
    launcher: str = ""
    with_launcher: bool = False

    @property
    def is_wanted(self) -> bool:
        """Whether it ended because it was to, as when a job is cancelled."""
        return self.asked and not (self.words or self.for_memory)


class Launch(NamedTuple):
    """What must stay while ranks work.

    Args:
        script: the job script's process, if it runs on this machine; else 0.
        launched: whether a job script started the ranks, so that their launcher must stay.
    """

    script: int
    launched: bool


class WatchedRank:
    """One rank of this node.

    Args:
        pid: of its process, and ``started`` when that began, which tells it from a later one.
        board: file descriptor of what it does; -1 for none.
        words: file descriptor of what it says; -1 for none.
    """

    def __init__(self, pid: int, started: int, board: int, words: int, launch: Launch) -> None:
        self._pid, self._started, self._launch = pid, started, launch
        self._board, self._words = open_board(board), words
        state = machine.process_state(pid)
        self._parent = 0 if state is None else state.parent
        self._launcher_pid = _parent_of(self._parent) or 1
        self._launcher = machine.process_state(self._launcher_pid)
        self._script = machine.process_state(launch.script) if launch.script else None
        self.handle = _open_handle(pid, started)
        self._kills = self._newer_kills = machine.killed_for_memory()
        self._counted_at = time.monotonic()
        self._shared = machine.shared_files(pid)
        self._heard = b""
        self._trains = self._is_stopped = False
        self._asked_at, self._lived_at = float("-inf"), time.monotonic()
        self.ended_at = 0.0
        self._death: Death | None = None
        self.sight = Sight()

    @property
    def state(self) -> str:
        """One of the states above."""
        if BYE in self._heard:
            return LEFT
        if FAILING in self._heard:
            return FAILED if self.ended_at else FAILS
        if self._death is not None:
            return DIED
        return STOPPED if self._is_stopped else LIVES

    @property
    def death(self) -> Death | None:
        """How it ended, if nobody has said so."""
        return self._death if self.state == DIED else None

    def look(self, earlier: int) -> None:
        """Find out how it is now.

        Args:
            earlier: how many ranks of the node had ended before it, if it has.
        """
        self.sight = self._board.read()
        self._listen()
        state = self._process()
        if state is None:
            if not self.ended_at:
                self._end(earlier)
            return
        self._lived_at = time.monotonic()
        self._is_stopped = state.letter == "T"  # a debugger's is a small one
        if not self._trains:
            self._trains = self.sight.step > 1
            if self._trains:
                self._shared |= machine.shared_files(self._pid)
        if time.monotonic() - self._counted_at >= _RECENT_S:
            self._kills, self._newer_kills = self._newer_kills, machine.killed_for_memory()
            self._counted_at = time.monotonic()
        if self._death is None and (gone := self._gone(state)):
            self._death = Death(time.time(), launcher=gone, asked=self._is_asked)

    def kill(self) -> None:
        """SIGKILL, which ends stopped processes too; only ever this very process."""
        with suppress(OSError):
            if self.handle is not None:
                signal.pidfd_send_signal(self.handle, signal.SIGKILL)
            elif self._process() is not None:
                os.kill(self._pid, signal.SIGKILL)

    def clean_up(self) -> None:
        """Remove what its MPI leaves behind."""
        if self.state != LEFT:
            machine.remove(self._shared)

    def _end(self, earlier: int) -> None:
        self.ended_at = time.time()
        self._is_stopped = False
        self._listen()  # to what it said in between
        if self._death is None:
            self._death = Death(
                self.ended_at,
                earlier=earlier,
                asked=self._is_asked,
                words=self._last_words(),
                for_memory=machine.killed_for_memory() > self._kills,
                with_launcher=not _is_same(self._launcher_pid, self._launcher),
            )

    @property
    def _is_asked(self) -> bool:
        """Whether it was last seen alive before, or just after, it was sent a signal to end."""
        return self._lived_at - self._asked_at <= _ASKED_S

    def _gone(self, state: machine.ProcessState) -> str:
        """What is gone that should outlive the rank; empty if all is there."""
        if not self._launch.launched:
            return ""
        if state.parent != self._parent:
            return "the launcher"
        if self._script is not None and not _is_same(self._launch.script, self._script):
            return "the job script"
        return ""

    def _process(self) -> machine.ProcessState | None:
        """How the process is; None where it is gone, or another has its number."""
        state = machine.process_state(self._pid)
        return state if state is not None and state.started == self._started else None

    def _listen(self) -> None:
        with suppress(BlockingIOError):
            while self._words >= 0 and (said := os.read(self._words, 1 << 16)):
                self._heard += said
                if any(number in said for number in _ASKED):
                    self._asked_at = time.monotonic()
        if len(self._heard) > 2 * _MAX_WORDS:
            self._heard = self._heard[:_MAX_WORDS] + self._heard[-_MAX_WORDS:]

    def _last_words(self) -> str:
        """What python said of a crash."""
        text = printable(self._heard.decode(errors="replace")).replace("\ufffd", "")
        return text.strip()[:_MAX_WORDS]


def described(state: Any) -> bool:
    """Whether a file names a state."""
    return state in (LIVES, STOPPED, *OVER, FAILS)


def _is_same(pid: int, before: machine.ProcessState | None) -> bool:
    """Whether a process lives that was seen before."""
    state = machine.process_state(pid)
    return state is not None and before is not None and state.started == before.started


def _parent_of(pid: int) -> int:
    """Launchers start ranks by a process on each node; what started that one is on the first."""
    state = machine.process_state(pid)
    return 0 if state is None else state.parent


def _open_handle(pid: int, started: int) -> int | None:
    """Readable when the process ends; None where it has, or the kernel has no such thing."""
    try:
        handle = os.pidfd_open(pid)
    except (OSError, AttributeError):
        return None
    state = machine.process_state(pid)
    if state is not None and state.started == started:
        return handle
    os.close(handle)
    return None
