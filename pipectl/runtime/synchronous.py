"""Training step by step: all ranks have ended a step before one of them begins the next."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import islice

from pipectl.capture.data import Samples
from pipectl.runtime.setup import Setup
from pipectl.runtime.step import Batch, Step, StepRun
from pipectl.runtime.step_end import StepEnd
from pipectl.runtime.telemetry import StepReport, Telemetry
from pipectl.runtime.tracing import Tracing
from pipectl.schedule import plan_of_step


class SynchronousSteps:
    """Trains the stages of one rank, step by step. The constructor is collective.

    Attributes:
        overlap: whether steps overlap.
    """

    overlap = False

    def __init__(self, setup: Setup, end: StepEnd, telemetry: Telemetry, tracing: Tracing) -> None:
        self._setup, self._end = setup, end
        self._telemetry, self._tracing = telemetry, tracing
        self._seed = setup.job.spec.training.seed
        self._loss_shares = setup.loss_shares

        def step_of(samples: int, length: int) -> Step:
            return setup.step_of(plan_of_step(setup.plan, samples), length)

        self._step_of = cache(step_of)
        self._loaded: Iterator[Batch] = iter(())

    def begin(self, planned: Sequence[Samples], done: int) -> None:
        """Open the data.

        Args:
            planned: the samples of every step.
            done: number of steps that are done.
        """
        if self._setup.loader is not None:
            self._loaded = self._setup.loader.pieces(
                planned, lambda batch: self._step_of(batch.size, batch.length).positions, done
            )

    def train(self, step: int, batches: Sequence[Samples]) -> None:
        """Train one step.

        Args:
            batches: the samples of this step only.
        """
        setup, end, (batch,) = self._setup, self._end, batches
        traced = self._tracing.wants(step)
        recording = self._tracing.begin(step) if traced else None
        start = time.perf_counter()
        scale = 1.0 if end.loss_scale is None else end.loss_scale.value
        rank_step = self._step_of(batch.size, batch.length)
        assert rank_step.plan is not None
        assert rank_step.pieces is not None
        loaded = islice(self._loaded, len(rank_step.pieces))
        run = self._loss_shares.make_run(rank_step, loaded, (self._seed, step), scale)
        run.recording = recording
        end.begin()
        self.execute(step, run)
        if not end.undo():
            setup.replicas.agree_on_buffers(rank_step.plan)
        if traced:
            self._tracing.end(step, recording, start)
        self._tracing.advance()
        setup.doing.board.pace(time.perf_counter() - start)
        self._telemetry.report(
            StepReport(
                step=step,
                loss=self._loss_shares.loss(run),
                learning_rate=end.used_rate,
                gradient_norm=end.gradient_norm,
                loss_scale=math.nan if end.loss_scale is None else scale,
                skipped=end.skipped,
                busy_s=run.busy_s,
                step_time_s=time.perf_counter() - start,
                samples=batch.size,
                tokens=setup.tokens_of(batch),
                peak_bytes=setup.device.peak_bytes(),
            )
        )

    def execute(self, step: int, run: StepRun) -> None:
        """Execute the rows of a step, including the update."""
        computed = self._loss_shares.computed(run.step)
        run.update = lambda run, *_: self._end.run(step, computed, run)
        self._setup.training.run(run)
