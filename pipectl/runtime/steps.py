"""Training step by step: from the samples of a step to its report."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from itertools import islice
from typing import ClassVar

from pipectl.capture.data import Loader, Samples
from pipectl.plan import Plan
from pipectl.runtime.division import Batches
from pipectl.runtime.engine import Engine
from pipectl.runtime.step import Outcome, StepRun
from pipectl.runtime.step_end import StepEnd
from pipectl.runtime.telemetry import StepReport, Telemetry
from pipectl.runtime.tracing import Tracing


class Steps:
    """The steps of one rank, of which each kind of schedule has its own.

    Args:
        engine: of the training.
        step_end: what the rank does at the end of every step.
        on_update: called after every update; must not wait for another rank.

    Attributes:
        overlap: whether steps overlap.
    """

    overlap: ClassVar[bool]

    def __init__(
        self,
        plan: Plan,
        batches: Batches,
        engine: Engine,
        step_end: StepEnd,
        telemetry: Telemetry,
        tracing: Tracing,
        on_update: Callable[[], None],
    ) -> None:
        self._plan, self._batches, self._engine = plan, batches, engine
        self._step_end = step_end
        self._telemetry, self._tracing, self._on_update = telemetry, tracing, on_update

    def begin(self, loader: Loader, steps: int, done: int) -> None:
        """Open the data.

        Args:
            loader: of the training data.
            steps: of the whole run.
            done: number of steps that are done.
        """
        raise NotImplementedError

    def train(self, first: int, batches: Sequence[Samples]) -> None:
        """Train some steps; only one, if steps do not overlap.

        Args:
            first: number of the first.
            batches: the samples of each.
        """
        raise NotImplementedError

    def _finish(
        self,
        step: int,
        batch: Samples,
        run: StepRun,
        outcome: Outcome,
        loss: tuple[float, ...],
        since: float,
    ) -> float:
        """Report a step; returns the time of its end.

        Args:
            loss: this rank's parts of it.
            since: its start, or the end of the step before it if steps overlap.
        """
        self._tracing.advance()
        self._on_update()
        now = time.perf_counter()
        self._engine.board.pace(now - since)
        self._telemetry.report(
            StepReport(
                step=step,
                loss=loss,
                learning_rate=outcome.learning_rate,
                gradient_norm=outcome.gradient_norm,
                loss_scale=math.nan if self._step_end.loss_scale is None else run.scale,
                skipped=outcome.skipped,
                step_time_s=now - since,
                samples=batch.size,
                tokens=self._batches.tokens_of(batch),
            ),
            run.called_s if self._engine.device.work_clock is None else run.worked_s,
            (run.called_s, run.called_cpu_s),
            self._engine.device.peak_bytes(),
        )
        return now


class SynchronousSteps(Steps):
    """Steps with gradients of the newest weights."""

    overlap = False

    def begin(self, loader: Loader, steps: int, done: int) -> None:
        """Open the data; see :class:`Steps`."""

        if self._batches.loader is not None:
            self._batches.feed.open(
                islice(loader.batches(), steps),
                done,
                lambda batch: self._batches.step_for(batch.size, batch.length).positions,
            )

    def train(self, first: int, batches: Sequence[Samples]) -> None:
        """Train one step; see :class:`Steps`."""
        step_end, (batch,) = self._step_end, batches
        is_recorded = self._tracing.wants(first)
        recording = self._tracing.begin(first) if is_recorded else None
        start = time.perf_counter()
        step = self._batches.step_for(batch.size, batch.length)
        self._engine.board.row("LOAD", -1, -1)  # at once, if weights depend on the targets
        loaded, compare = self._batches.take(batch)
        scale = 1.0 if step_end.loss_scale is None else step_end.loss_scale.value
        run = self._batches.make_run(
            step, loaded, first, scale, update=lambda run, *_: step_end.end_step(first, run)
        )
        run.recording, run.compare_readings = recording, compare
        step_end.begin()
        self._engine.run(run)
        deque(loaded, maxlen=0)  # what no stage has read is not of the next step
        assert run.outcome is not None
        if is_recorded:
            skipped = run.outcome.skipped
            self._tracing.end(first, recording, start, batches, skipped=skipped)
        self._finish(first, batch, run, run.outcome, self._batches.loss(run), start)
