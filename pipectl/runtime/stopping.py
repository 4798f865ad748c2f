"""Ending early: when the job script or a signal asks for it, or a metric no longer improves.

A signal reaches the script, launchers and ranks in as many ways as there are launchers, so whoever
gets one makes a file. Rank 0 looks for it once a second; what it found at the end of one step, all
ranks know at the end of the next, without waiting for one another.
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
_FOR_GOOD = (signal.SIGTERM, signal.SIGINT)
"""Somebody ends the job: the file names them, and the job script does not start it again."""
_SIGNALS = (*_FOR_GOOD, signal.SIGUSR1, signal.SIGUSR2)


@contextmanager
def stop_on_signals(file: Path) -> Iterator[None]:
    """Within, the signals that batch systems and people send to jobs make the file."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    process = os.getpid()

    def ask(number: int, frame: FrameType | None) -> None:  # noqa: ARG001
        if os.getpid() != process:  # a fork, such as a worker that loads data, ends as ever
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
    """Whether all ranks stop after a step.

    Args:
        communicator: of its own.
        asked: the file.
    """

    def __init__(self, communicator: MPI.Comm, asked: Path) -> None:
        self._communicator = communicator
        self._asked = asked
        self._looked_at = float("-inf")
        self._word = np.zeros(1, dtype=np.int8)
        self._sending: MPI.Request | None = None

    def stops(self, *, at_once: bool = False) -> bool:
        """Whether to stop now, as was told at the call before; collective.

        Args:
            at_once: whether rank 0 looks for the file now, for which all wait.
        """
        if at_once:
            self._send()
        stop = self._receive()
        if not (stop or at_once):
            self._send()
        return stop

    def finish(self) -> None:
        """Hear what was told last; collective."""
        self._receive()

    def _receive(self) -> bool:
        if self._sending is None:
            return False
        wait([self._sending])
        self._sending = None
        return bool(self._word[0])

    def _send(self) -> None:
        if self._communicator.rank == 0:
            self._word[0] = self._looks()
        self._sending = self._communicator.Ibcast(self._word, 0)

    def _looks(self) -> bool:
        now = time.monotonic()
        if now - self._looked_at < _LOOK_S:
            return False
        self._looked_at = now
        try:
            return self._asked.exists()
        except OSError:  # the file system is away
            return False


class EarlyStopping:
    """Decides from the results of the evaluations, which are the same on all ranks.

    Args:
        spec: None never ends a training.

    Attributes:
        metric_values: of all evaluations, in order.
        reason: why the training ends after the last of them; empty if it does not.
    """

    def __init__(self, spec: EarlyStoppingSpec | None) -> None:
        self._spec = spec
        self.metric_values: list[float] = []
        self.reason = ""

    def watch(self, result: Mapping[str, float]) -> None:
        """Take in the result of an evaluation."""
        if self._spec is not None:
            self.move_on([result[self._spec.metric]])

    def move_on(self, values: Sequence[float]) -> None:
        """Take in values of the metric, such as those of a checkpoint."""
        self.metric_values += values
        if (spec := self._spec) is None:
            return
        count = count_without_improvement(self.metric_values, spec.mode, spec.min_delta)
        waited = plural(spec.patience, "evaluation")
        is_over = count >= spec.patience
        self.reason = f"{spec.metric} has not improved in {waited}" if is_over else ""


def count_without_improvement(values: Sequence[float], mode: str, min_delta: float) -> int:
    """How many values at the end are not better than the best one before them.

    NaN is never better, and every number is better than NaN.

    Args:
        mode: ``min`` if smaller is better, or ``max``.
        min_delta: by how much more than this a value must be better.
    """
    best, count = float("nan"), 0
    for value in values:
        gain = best - value if mode == "min" else value - best
        if gain > min_delta or (best != best and value == value):
            best, count = value, 0
        else:
            count += 1
    return count
