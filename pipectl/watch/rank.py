"""A rank as a process of this node: it lives, is stopped, or has ended and how."""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from pipectl.printable import printable
from pipectl.watch.board import Activity, open_board

BYE, FAILING = b"\xfe", b"\xfd"
"""What a rank says before it ends, or before it reports why it fails. Python writes the numbers of
signals to the same pipe, and the stack when it crashes."""
LIVES, STOPPED, FAILS, FAILED, DIED, LEFT = STATES = (
    "lives", "stopped", "fails", "failed", "died", "left",
)  # fmt: skip
"""A rank in ``FAILS`` or ``FAILED`` reports its error itself; of ``DIED`` nobody has said why."""
OVER = (FAILED, DIED, LEFT)
_END_SIGNALS = (bytes([signal.SIGTERM]), bytes([signal.SIGINT]))
_END_SIGNAL_S = 1.0
"""A signal to end explains the end of a rank for so long; one that goes on saves a checkpoint."""
_RECENT_S = 2.0
"""A process that was killed for memory earlier than that, before a rank ended, was another."""
_MAX_WORDS = 1 << 16
_SHARED_MEMORY = tuple(
    f"/dev/shm/{name}"
    for name in ("mpich_shm_", "sm_segment.", "vader_segment.", "psm2_shm.", "psm3_shm.")
)
"""How the files begin by which MPIs share memory, and which they leave if they are killed."""


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


class RankReport(NamedTuple):
    """How one rank is.

    Args:
        state: one of ``STATES``.
        death: how it ended, if it is in ``DIED``.
        still_s: for how long it has not moved on.
        stopped_s: for how long it has been stopped.
    """

    rank: int = 0
    state: str = LIVES
    activity: Activity = Activity()
    death: Death = Death()
    still_s: float = 0.0
    stopped_s: float = 0.0

    @property
    def is_over(self) -> bool:
        """Whether it has ended."""
        return self.state in OVER


class WatchedRank:
    """One rank of this node.

    Args:
        pid: of its process, and ``started`` when that began.
        board: file descriptor of what it does; -1 for none.
        words: file descriptor of what it says; -1 for none.
        launched: whether a job script started the ranks, so that their launcher must stay.
        script: the job script's process, if it runs on this machine and must stay; else 0.
    """

    def __init__(
        self,
        rank: int,
        pid: int,
        started: int,
        board: int,
        words: int,
        *,
        launched: bool,
        script: int,
    ) -> None:
        self._pid, self._started, self._words = pid, started, words
        self._board, self._activity = open_board(board), Activity()
        # A launcher starts ranks by a process on each node, whose parent is on the first node.
        self._parent = _parent_of(pid)
        self._launcher = process_state(_parent_of(self._parent) or 1)
        self._launched = launched
        self._script = process_state(script) if script and launched else None
        self._has_script = bool(script and launched)
        self.handle = self._open_handle()
        self._kills = self._newer_kills = killed_for_memory()
        self._counted_at = self._lived_at = self._moved_at = 0.0
        self._asked_at = float("-inf")
        self._stopped_at: float | None = None
        self._shared = shared_files(pid)
        self._heard = b""
        self._trains = self._has_ended = False
        self._death: Death | None = None
        self.rank = rank

    def look(self, now: float, earlier: int) -> RankReport:
        """Find out how it is.

        Args:
            now: of the watcher's clock, in seconds.
            earlier: how many ranks of the node had ended before it, if it has.
        """
        before, self._activity = self._activity, self._board.read()
        if before.moves != self._activity.moves or before.step != self._activity.step:
            self._moved_at = now
        self._listen(now)
        process = process_state(self._pid, self._started)
        if process is not None:
            self._look_at_process(process, now)
        elif not self._has_ended:
            self._has_ended, self._stopped_at = True, None
            self._listen(now)  # to what it said in between
            if self._death is None:
                words = printable(self._heard.decode(errors="replace")).replace("\ufffd", "")
                self._death = Death(
                    time.time(),
                    earlier=earlier,
                    asked=self._is_asked(),
                    words=words.strip()[:_MAX_WORDS],
                    for_memory=killed_for_memory() > self._kills,
                    with_launcher=not _lives(self._launcher),
                )
        if BYE in self._heard:
            state = LEFT
        elif FAILING in self._heard:
            state = FAILED if self._has_ended else FAILS
        elif self._death is not None:
            state = DIED
        else:
            state = LIVES if self._stopped_at is None else STOPPED
        return RankReport(
            self.rank,
            state,
            self._activity,
            self._death if self._death is not None and state == DIED else Death(),
            still_s=now - self._moved_at,
            stopped_s=0.0 if self._stopped_at is None else now - self._stopped_at,
        )

    @property
    def is_gone(self) -> bool:
        """Whether its process has ended, or is about to as it should."""
        return self._has_ended or BYE in self._heard

    def kill(self) -> None:
        """SIGKILL, which ends stopped processes too; only ever this very process."""
        with suppress(OSError):
            if self.handle is not None:
                signal.pidfd_send_signal(self.handle, signal.SIGKILL)
            elif process_state(self._pid, self._started) is not None:
                os.kill(self._pid, signal.SIGKILL)

    def clean_up(self) -> None:
        """Remove the shared memory that its MPI leaves if it is killed."""
        for path in set() if BYE in self._heard else self._shared:
            with suppress(OSError):
                os.unlink(path)  # noqa: PTH108

    def _look_at_process(self, process: ProcessState, now: float) -> None:
        self._lived_at = now
        if process.letter != "T":  # a debugger's is a small one
            if self._stopped_at is not None:  # until now it could not move on
                self._moved_at = now
            self._stopped_at = None
        elif self._stopped_at is None:
            self._stopped_at = now
        if not self._trains and self._activity.step > 1:
            self._trains = True
            self._shared |= shared_files(self._pid)
        if now - self._counted_at >= _RECENT_S:
            self._kills, self._newer_kills = self._newer_kills, killed_for_memory()
            self._counted_at = now
        gone = ""
        if self._launched and process.parent != self._parent:
            gone = "the launcher"
        elif self._has_script and not _lives(self._script):
            gone = "the job script"
        if gone and self._death is None:
            self._death = Death(time.time(), launcher=gone, asked=self._is_asked())

    def _is_asked(self) -> bool:
        """Whether it was last seen alive before, or just after, it was sent a signal to end."""
        return self._lived_at - self._asked_at <= _END_SIGNAL_S

    def _listen(self, now: float) -> None:
        with suppress(BlockingIOError):
            while self._words >= 0 and (words := os.read(self._words, 1 << 16)):
                self._heard += words
                if any(number in words for number in _END_SIGNALS):
                    self._asked_at = now
        if len(self._heard) > 2 * _MAX_WORDS:
            self._heard = self._heard[:_MAX_WORDS] + self._heard[-_MAX_WORDS:]

    def _open_handle(self) -> int | None:
        """Readable when the process ends; None if it has, or the kernel has no such thing."""
        try:
            handle = os.pidfd_open(self._pid)
        except (OSError, AttributeError):
            return None
        if process_state(self._pid, self._started) is not None:
            return handle
        os.close(handle)
        return None


def _lives(process: ProcessState | None) -> bool:
    """Whether a process that was seen then is still there."""
    return process is not None and process_state(process.pid, process.started) is not None


def _parent_of(pid: int) -> int:
    state = process_state(pid)
    return 0 if state is None else state.parent


def process_state(pid: int, started: int | None = None) -> ProcessState | None:
    """None if the process is gone or a zombie, or if it did not start at the given time."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    letter, parent, *rest = text.rpartition(")")[2].split()
    state = ProcessState(pid, letter, int(parent), int(rest[17]))
    return None if letter in "ZX" or started not in (None, state.started) else state


def killed_for_memory() -> int:
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
