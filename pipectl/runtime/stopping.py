"""Ending early: when the job script or a signal asks for it, or a metric no longer improves.
Also which evaluation was the best.

A signal reaches the script, launchers and ranks in as many ways as there are launchers, so every
receiver creates a file. Rank 0 looks for it at the end of a step, at most once per second; its
answer travels with the vote of all ranks on the step (:mod:`.vote`). If steps are shorter than
that, all ranks stop after the next step, without waiting for one another. After a longer step they
wait for the answer and stop at once: the remaining walltime may be too short for another step. If
steps overlap, ranks vote on this alone whenever the pipeline is empty.
"""

from __future__ import annotations

import math
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

from pipectl.plan import LONG_STEP_S
from pipectl.runs import Best
from pipectl.spec.models import EarlyStopping as EarlyStoppingSpec
from pipectl.units import plural

_LOOK_S = LONG_STEP_S
"""Minimum time between looks at the file, and maximum step time at which no rank waits."""
GO_ON, WAIT, MOVE, STOP = range(4)
"""Answers of rank 0: WAIT is to wait for the next answer too, because steps are long; MOVE is to go
on under another plan."""
_FOR_GOOD = (signal.SIGTERM, signal.SIGINT)
"""Signals that end the job for good: the file names them; the job script does not restart it."""
_SIGNALS = (*_FOR_GOOD, signal.SIGUSR1, signal.SIGUSR2)


@contextmanager
def stop_on_signals(file: Path) -> Iterator[None]:
    """Create the file at any signal that batch systems and people send to jobs."""
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


class StopRequest:
    """Looks for the file that requests a stop. Only rank 0 looks; all ranks get its answer.

    Args:
        file: that requests it.
        moves: whether the training is to go on under another plan.
    """

    def __init__(self, file: Path, moves: Callable[[], bool] = lambda: False) -> None:
        self._file, self._moves = file, moves
        self._is_made = False
        self._looked_at = self._answered_at = float("-inf")

    def answer(self) -> int:
        """The answer for a vote; after a STOP always STOP."""
        now = time.monotonic()
        is_long, self._answered_at = now - self._answered_at >= _LOOK_S, now
        if not self._is_made and now - self._looked_at >= _LOOK_S:
            self._looked_at = now
            with suppress(OSError):  # the file system is unavailable
                self._is_made = self._file.exists()
        if self._is_made:
            return STOP
        if self._moves():
            return MOVE
        return WAIT if is_long else GO_ON


class EarlyStopping:
    """Decides from the results of the evaluations, which are the same on all ranks.

    Args:
        spec: None never stops a training.
        keeps_best: whether to find the best evaluation also without ``spec``, by the loss.

    Attributes:
        metric_values: of the evaluations that recur, in order.
        best: the best of all evaluations; the first of several that are equal.
        reason: why the training ends after the last one that recurs; empty if it does not.
    """

    def __init__(self, spec: EarlyStoppingSpec | None, *, keeps_best: bool = False) -> None:
        self._spec = spec
        self._watched = EarlyStoppingSpec() if spec is None and keeps_best else spec
        self.metric_values: list[float] = []
        self.best: Best | None = None
        self.reason = ""

    @property
    def watches(self) -> bool:
        """Whether it takes the results of evaluations."""
        return self._watched is not None

    def watch(self, step: int, result: Mapping[str, float], *, recurs: bool = True) -> None:
        """Take the result of the evaluation after a step.

        Args:
            recurs: whether it is made however many steps there are. One that is made only because
                the training ends may be the best, but more steps are not decided by it.
        """
        if (watched := self._watched) is None:
            return
        value = result[watched.metric]
        before = math.nan if self.best is None else self.best.value
        if is_better(value, before, watched.mode):
            self.best = Best(step, watched.metric, watched.mode, value)
        if recurs:
            self._add([value])

    def restore(self, values: Sequence[float], best: Best | None) -> None:
        """Go on from the values of a checkpoint, unless they are of another metric."""
        watched = self._watched
        if watched is None:
            return
        if best is None or (best.metric, best.mode) == (watched.metric, watched.mode):
            self.best = best
            self._add(values)

    def _add(self, values: Sequence[float]) -> None:
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
    best, count = math.nan, 0
    for value in values:
        if is_better(value, best, mode, min_delta):
            best, count = value, 0
        else:
            count += 1
    return count


def is_better(value: float, other: float, mode: str, min_delta: float = 0.0) -> bool:
    """Whether a value is better than another; see :func:`count_without_improvement`."""
    gain = other - value if mode == "min" else value - other
    return gain > min_delta or (math.isnan(other) and not math.isnan(value))
