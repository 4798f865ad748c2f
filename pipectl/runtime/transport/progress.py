"""Keeping messages moving while the rank computes.

Many MPIs advance a large message only within calls of the two ranks that share it. Ways to make
such calls during the computation:

- ``none``: none is needed, because the library or the hardware works by itself;
- ``poll``: between operators of a stage;
- ``thread``: by a thread that works in bursts. A burst goes on while its calls move data, which
  they do one fragment at a time, and ends when they find nothing, so that the thread takes little
  of a core that computes. While a message is expected but does not come, pauses grow.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

from pipectl.runtime.transport.transfer import WHOLE, Pieces, Start, Transfer, Words
from pipectl.runtime.waiting import WorkMeter, poll

_BURST_S = 0.2e-3
_QUIET_CALLS = 3
"""Calls that found nothing, after which a burst ends."""
_PAUSE_S, _LONGEST_PAUSE_S = 0.5e-3, 2e-3
_TICK_S = 0.1e-3


class Progress:
    """All transfers of a rank that are under way, and who works on them.

    Transfers belong to whoever holds the lock: the rank's own thread or the helper's.

    Args:
        mode: ``none``, ``poll`` or ``thread``; the same on all ranks.
        pieces: how messages are cut, likewise.
        enter_thread: called first in the thread, if there is one.
    """

    def __init__(
        self,
        mode: str = "none",
        pieces: Pieces = WHOLE,
        enter_thread: Callable[[], None] = lambda: None,
    ) -> None:
        self.mode = mode
        self.pieces = pieces
        self._enter_thread = enter_thread
        self._lock = threading.Lock()
        self._meter, self._helpers_meter = WorkMeter(), WorkMeter()
        self._transfers: list[Transfer] = []
        self._has_work = threading.Event()
        self._waiting = self._closed = False
        self._ticked_at = 0.0
        self._failure: BaseException | None = None
        self._thread: threading.Thread | None = None
        if mode == "thread":
            self._thread = threading.Thread(target=self._help, name="progress", daemon=True)
            self._thread.start()

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def begin(
        self,
        start: Start,
        size_bytes: int,
        what: Words | None = None,
        after: Transfer | None = None,
    ) -> Transfer:
        """Start a transfer (see its arguments), and see to it from now on."""
        with self._lock:
            transfer = Transfer(start, size_bytes, self.pieces, what, after)
            self._transfers.append(transfer)
        if self._thread is not None:
            self._has_work.set()
        return transfer

    def wait(self, transfers: Sequence[Transfer]) -> None:
        """Return when some transfers are complete; all others advance meanwhile."""
        pending = [transfer for transfer in transfers if not transfer.done]
        if pending:
            self.advance()  # which mostly ends what a schedule has let go on for long enough
            pending = [transfer for transfer in pending if not transfer.done]
        if pending:
            self._waiting = True
            try:
                self.until(lambda: all(transfer.done for transfer in pending))
            finally:
                self._waiting = False

    def until(self, done: Callable[[], bool]) -> None:
        """Return when ``done`` says so; all transfers advance meanwhile."""

        def is_over() -> bool:
            self.advance()
            return done()

        poll(is_over, self._worked)

    def advance(self) -> None:
        """Let MPI work on everything once; raise what has failed in the helper."""
        with self._lock:
            if self._failure is not None:
                raise self._failure
            self._advance()

    def tick(self) -> None:
        """The same, at most every tenth of a millisecond; called between operators."""
        now = time.perf_counter()
        if self._transfers and now - self._ticked_at > _TICK_S:
            self.advance()
            self._ticked_at = time.perf_counter()

    def close(self) -> None:
        """End the helper; before MPI ends."""
        self._closed = True
        self._has_work.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _worked(self, cpu_s: float) -> bool:
        return self._meter.worked(cpu_s / max(1, len(self._transfers)))

    def _advance(self) -> None:
        self._transfers = [item for item in self._transfers if not item.advance()]

    def _help(self) -> None:
        pause_s = _PAUSE_S
        try:
            self._enter_thread()
            while not self._closed:
                self._has_work.wait()
                pause_s = _PAUSE_S if self._burst() else min(2 * pause_s, _LONGEST_PAUSE_S)
                time.sleep(pause_s)
        except BaseException as error:  # the rank's own thread raises it at its next wait
            self._failure = error

    def _burst(self) -> bool:
        """Advance as long as there is something to do; whether there was."""
        end, quiet, worked = time.perf_counter() + _BURST_S, 0, False
        while quiet < _QUIET_CALLS and time.perf_counter() < end:
            if self._waiting or not self._lock.acquire(blocking=False):
                return True
            try:
                count = len(self._transfers)
                if not count:
                    self._has_work.clear()
                    return worked
                before_s = time.thread_time()
                self._advance()
                moved = self._helpers_meter.worked((time.thread_time() - before_s) / count)
            finally:
                self._lock.release()
            worked |= moved
            quiet = 0 if moved else quiet + 1
        return worked
