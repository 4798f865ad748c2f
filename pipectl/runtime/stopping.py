"""Ending early: when the job script or a signal asks for it, or a metric no longer improves.

A signal reaches the script, launchers and ranks in as many ways as there are launchers, so every
receiver creates a file. Rank 0 looks for it at the end of a step, at most once per second. If steps
are shorter than that, all ranks stop after the next step, without waiting for one another. After a
longer step they wait for the answer of rank 0 and stop at once: the remaining walltime may be too
short for another step.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

import numpy as np
from mpi4py import MPI

from pipectl.runtime.waiting import wait
from pipectl.spec.models import EarlyStopping as EarlyStoppingSpec
from pipectl.units import plural

_LOOK_S = 1.0
"""Minimum time between looks at the file, and maximum step time at which no rank waits."""
_GO_ON, _STOP, _WAIT = range(3)
"""Answer of rank 0: wait for the next answer too, because steps are long."""
_FOR_GOOD = (signal.SIGTERM, signal.SIGINT)
"""Signals that end the job for good: the file names them; the job script does not restart it."""
_SIGNALS = (*_FOR_GOOD, signal.SIGUSR1, signal.SIGUSR2)


@contextmanager
def stop_on_signals(file: Path) -> Iterator[None]:
    """Create the file at any signal that batch systems and people send to jobs."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    process = os.getpid()

    def ask(number: int, frame: FrameType | None) -> None:  # noqa: ARG001
        if os.getpid() != process:  # a fork, such as a data loading worker, ends as usual
            is_interrupt = number == signal.SIGINT
            signal.signal(number, signal.default_int_handler if is_interrupt else signal.SIG_DFL)
            signal.raise_signal(number)
            return
        with suppress(OSError):
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW
            handle = os.open(file, flags, 0o600)
            try:
                if number in _FOR_GOOD:
                    os.write(handle, f"{signal.Signals(number).name[3:]}\n".encode())
            finally:
                os.close(handle)

    before = {number: signal.signal(number, ask) for number in _SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)


class Stopping:
    """Decides whether all ranks stop after a step.

    Args:
        communicator: used for nothing else.
        request: the file that requests it.
    """

    def __init__(self, communicator: MPI.Comm, request: Path) -> None:
        self._communicator = communicator
        self._request = request
        self._looked_at = self._sent_at = float("-inf")
        self._word = np.zeros(1, dtype=np.int8)
        self._sending: MPI.Request | None = None
        self._waits = False

    def stops(self, *, at_once: bool = False) -> bool:
        """Whether to stop after this step; the same on all ranks. Collective.

        Rank 0 sends one answer per call. If ``at_once``, or if steps are long, ranks wait for the
        answer to this call; otherwise they use the answer to the previous call.
        """
        word = self._receive()
        if at_once or self._waits or word == _WAIT:
            self._send()
            word = self._receive()
        elif word == _GO_ON:
            self._send()
        self._waits = word == _WAIT
        return word == _STOP

    def finish(self) -> None:
        """Receive the last answer; collective."""
        self._receive()

    def _receive(self) -> int:
        if self._sending is None:
            return _GO_ON
        wait([self._sending])
        self._sending = None
        return int(self._word[0])

    def _send(self) -> None:
        if self._communicator.rank == 0:
            now = time.monotonic()
            is_long, self._sent_at = now - self._sent_at >= _LOOK_S, now
            self._word[0] = _STOP if self._is_requested(now) else _WAIT if is_long else _GO_ON
        self._sending = self._communicator.Ibcast(self._word, 0)

    def _is_requested(self, now: float) -> bool:
        if now - self._looked_at < _LOOK_S:
            return False
        self._looked_at = now
        try:
            return self._request.exists()
        except OSError:  # the file system is unavailable
            return False


class EarlyStopping:
    """Decides from the results of the evaluations, which are the same on all ranks.

    Args:
        spec: None never stops a training.

    Attributes:
        metric_values: of all evaluations, in order.
        reason: why the training ends after the last of them; empty if it does not.
    """

    def __init__(self, spec: EarlyStoppingSpec | None) -> None:
        self._spec = spec
        self.metric_values: list[float] = []
        self.reason = ""

    def watch(self, result: Mapping[str, float]) -> None:
        """Add the result of an evaluation."""
        if self._spec is not None:
            self.move_on([result[self._spec.metric]])

    def move_on(self, values: Sequence[float]) -> None:
        """Add values of the metric, such as those of a checkpoint."""
        self.metric_values += values
        if (spec := self._spec) is None:
            return
        self.reason = ""
        count = count_without_improvement(self.metric_values, spec.mode, spec.min_delta)
        if count >= spec.patience:
            enough = f" by more than {spec.min_delta:g}" if spec.min_delta else ""
            waited = plural(spec.patience, "evaluation")
            self.reason = f"{spec.metric} has not improved{enough} in {waited}"


def count_without_improvement(values: Sequence[float], mode: str, min_delta: float) -> int:
    """The number of values at the end that are not better than the best one before them.

    NaN is never better, and every number is better than NaN.

    Args:
        mode: ``min`` if smaller is better, or ``max``.
        min_delta: a value must be better by more than this.
    """
    best, count = float("nan"), 0
    for value in values:
        gain = best - value if mode == "min" else value - best
        if gain > min_delta or (best != best and value == value):
            best, count = value, 0
        else:
            count += 1
    return count
