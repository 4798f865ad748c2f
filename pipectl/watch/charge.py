"""The rank that a watcher watches, as a process: it lives, is stopped, or has ended and how."""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress

from pipectl.watch import machine
from pipectl.watch.board import Board, Sight
from pipectl.watch.head import Death
from pipectl.watch.siblings import Siblings

BYE, FAILING = b"\xfe", b"\xfd"
"""What a rank says through its pipe before it ends, or before it reports why it fails. Python puts
the numbers of signals there, and the stack when it crashes."""
_ASKED = (bytes([signal.SIGTERM]), bytes([signal.SIGINT]))
_LAST_WORDS_S = 2.0
"""Time between a signal to end and the kill: a rank may be in a long operator."""
_RECENT_S = 2.0
"""A process that was killed for memory earlier than that, before a rank ended, was another."""


class Charge:
    """One rank.

    Args:
        pid: of its process.
        secret: of the job.
        pipe: what it says, as a file descriptor.
        script: the job script's process, if it runs on this machine; else 0.
        launched: whether a job script started it, so that its launcher must stay.
    """

    def __init__(
        self,
        rank: int,
        pid: int,
        pipe: int,
        board: Board,
        *,
        secret: str,
        script: int,
        launched: bool,
    ) -> None:
        self.rank = rank
        self._pid, self._pipe, self._board = pid, pipe, board
        self._launched = launched
        self._origin = machine.process_state(pid)
        parent = 0 if self._origin is None else self._origin.parent
        self._siblings = Siblings(pid, parent, secret)
        self._launcher_pid = _grandparent(self._origin)
        self._launcher = machine.process_state(self._launcher_pid)
        self._with_launcher = False
        self._script = machine.process_state(script) if script else None
        self._script_pid = script
        self._handle = _open_handle(pid)
        self._kills = self._newer_kills = machine.killed_for_memory()
        self._counted_at = time.monotonic()
        self._for_memory = False
        self._shared = machine.shared_files(pid)
        self._heard = b""
        self._trains = self._hung_up = False
        self._asked_at = 0.0
        self.ended_at = 0.0
        self.stopped = False

    @property
    def handles(self) -> list[int]:
        """File descriptors that become readable when something happens."""
        pipe = [] if self._hung_up else [self._pipe]
        return [*pipe, *([] if self._handle is None else [self._handle])]

    @property
    def sight(self) -> Sight:
        """What the rank does."""
        return self._board.read()

    @property
    def said_goodbye(self) -> bool:
        """Whether it ends as it should."""
        return BYE in self._heard

    @property
    def explains(self) -> bool:
        """Whether it reports itself why it fails."""
        return FAILING in self._heard

    def look(self) -> None:
        """Find out how it is now."""
        self._listen()
        state = _still(self._pid, self._origin)
        if state is None:
            if not self.ended_at:
                self.ended_at = time.time()
                self._listen()  # to what it said in between
                self._for_memory = machine.killed_for_memory() > self._kills
                self._with_launcher = _still(self._launcher_pid, self._launcher) is None
            return
        self.stopped = state.letter == "T"  # a debugger's is a small one
        self._count_kills()
        if not self._trains:
            self._siblings.find()
            self._trains = self.sight.step > 1
            if self._trains:
                self._shared |= machine.shared_files(self._pid)
        if self._asked_at and time.monotonic() - self._asked_at > _LAST_WORDS_S:
            self.kill()

    def abandoned(self) -> str:
        """What is gone that should outlive the rank; empty if all is there."""
        state = machine.process_state(self._pid)
        if not self._launched or state is None or self._origin is None:
            return ""
        if state.parent != self._origin.parent:
            return "the launcher"
        if self._script is not None and _still(self._script_pid, self._script) is None:
            return "the job script"
        return ""

    def death(self, launcher: str = "") -> Death:
        """How it ended."""
        return Death(
            self.rank,
            self.ended_at or time.time(),
            earlier=self._siblings.ended_before() if self.ended_at else 0,
            asked=bool(self._asked_at),
            words=self._words(),
            for_memory=self._for_memory and not launcher,
            launcher=launcher,
            with_launcher=self._with_launcher,
        )

    def kill(self) -> None:
        """SIGKILL, which ends stopped processes too; only ever this very process."""
        if _still(self._pid, self._origin) is not None:
            with suppress(OSError):
                os.kill(self._pid, signal.SIGKILL)

    def clean_up(self) -> None:
        """Remove what its MPI leaves behind."""
        machine.remove(self._shared)

    def _count_kills(self) -> None:
        """Keep how many there were a moment ago, be they of this job or not."""
        if time.monotonic() - self._counted_at >= _RECENT_S:
            self._kills, self._newer_kills = self._newer_kills, machine.killed_for_memory()
            self._counted_at = time.monotonic()

    def _listen(self) -> None:
        with suppress(BlockingIOError):
            while data := os.read(self._pipe, 1 << 16):
                self._heard += data
            self._hung_up = True
        if not self._asked_at and any(number in self._heard for number in _ASKED):
            self._asked_at = time.monotonic()

    def _words(self) -> str:
        """What python said of a crash."""
        text = self._heard.decode(errors="replace")
        return "".join(letter for letter in text if letter.isprintable() or letter == "\n").strip()


def _still(pid: int, before: machine.ProcessState | None) -> machine.ProcessState | None:
    """How a process is; None where it is gone, or another has its number."""
    state = machine.process_state(pid)
    same = before is not None and state is not None and state.started == before.started
    return state if same else None


def _grandparent(state: machine.ProcessState | None) -> int:
    """Launchers start ranks by a process on each node; what started that one is on the first."""
    parent = None if state is None else machine.process_state(state.parent)
    return 1 if parent is None else parent.parent


def _open_handle(pid: int) -> int | None:
    """Readable when the process ends; not every kernel has that."""
    try:
        return os.pidfd_open(pid)
    except (OSError, AttributeError):
        return None
