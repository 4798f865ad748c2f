"""A rank as a process: it lives, is stopped, or has ended and how."""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from typing import NamedTuple

from pipectl.printable import printable
from pipectl.watch import machine
from pipectl.watch.board import Sight, open_board

BYE, FAILING = b"\xfe", b"\xfd"
"""What a rank says before it ends, or before it reports why it fails. Python puts the numbers of
signals there, and the stack when it crashes."""
LIVES, STOPPED, FAILS, FAILED, DIED, LEFT = STATES = (
    "lives", "stopped", "fails", "failed", "died", "left",
)  # fmt: skip
"""Of ``DIED`` nobody has said why; ``FAILED`` has said so itself."""
OVER = (FAILED, DIED, LEFT)
_END_SIGNALS = (bytes([signal.SIGTERM]), bytes([signal.SIGINT]))
_END_SIGNAL_S = 1.0
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


class WatchedRank:
    """One rank of this node.

    Args:
        pid: of its process, and ``started`` when that began, which tells it from a later one.
        board: file descriptor of what it does; -1 for none.
        words: file descriptor of what it says; -1 for none.
        launched: whether a job script started the ranks, so that their launcher must stay.
        script: the job script's process, if it runs on this machine and must stay; else 0.
    """

    def __init__(
        self, pid: int, started: int, board: int, words: int, *, launched: bool, script: int
    ) -> None:
        self._pid, self._started = pid, started
        self._board, self._words = open_board(board), words
        # A launcher starts ranks by a process on each node, whose parent is on the first node.
        self._parent = _parent_of(pid)
        self._launcher = _Process(_parent_of(self._parent) or 1)
        self._script = _Process(script) if script and launched else None
        self._launched = launched
        self.handle = self._open_handle()
        self._kills = self._newer_kills = machine.killed_for_memory()
        self._counted_at = self._lived_at = time.monotonic()
        self._shared = machine.shared_files(pid)
        self._heard = b""
        self._trains = self._is_stopped = False
        self._asked_at = float("-inf")
        self._death: Death | None = None
        self.ended_at = 0.0
        self.sight = Sight()

    @property
    def state(self) -> str:
        """One of ``STATES``."""
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
        process = self._process()
        if process is None:
            if not self.ended_at:
                self._end(earlier)
            return
        self._lived_at = now = time.monotonic()
        self._is_stopped = process.letter == "T"  # a debugger's is a small one
        if not self._trains and self.sight.step > 1:
            self._trains = True
            self._shared |= machine.shared_files(self._pid)
        if now - self._counted_at >= _RECENT_S:
            self._kills, self._newer_kills = self._newer_kills, machine.killed_for_memory()
            self._counted_at = now
        gone = ""
        if self._launched and process.parent != self._parent:
            gone = "the launcher"
        elif self._script is not None and not self._script.lives():
            gone = "the job script"
        if gone and self._death is None:
            self._death = Death(time.time(), launcher=gone, asked=self._is_asked())

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
            words = printable(self._heard.decode(errors="replace")).replace("\ufffd", "")
            self._death = Death(
                self.ended_at,
                earlier=earlier,
                asked=self._is_asked(),
                words=words.strip()[:_MAX_WORDS],
                for_memory=machine.killed_for_memory() > self._kills,
                with_launcher=not self._launcher.lives(),
            )

    def _is_asked(self) -> bool:
        """Whether it was last seen alive before, or just after, it was sent a signal to end."""
        return self._lived_at - self._asked_at <= _END_SIGNAL_S

    def _process(self) -> machine.ProcessState | None:
        """How the process is; None if it is gone, or another has its number."""
        state = machine.process_state(self._pid)
        return state if state is not None and state.started == self._started else None

    def _listen(self) -> None:
        with suppress(BlockingIOError):
            while self._words >= 0 and (words := os.read(self._words, 1 << 16)):
                self._heard += words
                if any(number in words for number in _END_SIGNALS):
                    self._asked_at = time.monotonic()
        if len(self._heard) > 2 * _MAX_WORDS:
            self._heard = self._heard[:_MAX_WORDS] + self._heard[-_MAX_WORDS:]

    def _open_handle(self) -> int | None:
        """Readable when the process ends; None if it has, or the kernel has no such thing."""
        try:
            handle = os.pidfd_open(self._pid)
        except (OSError, AttributeError):
            return None
        if self._process() is not None:
            return handle
        os.close(handle)
        return None


class _Process:
    """A process that should outlive the ranks, told from later ones with its number."""

    def __init__(self, pid: int) -> None:
        self._pid, self._first = pid, machine.process_state(pid)

    def lives(self) -> bool:
        state = machine.process_state(self._pid)
        first = self._first
        return state is not None and first is not None and state.started == first.started


def _parent_of(pid: int) -> int:
    state = machine.process_state(pid)
    return 0 if state is None else state.parent
