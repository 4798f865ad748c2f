"""Training step by step: all ranks have ended a step before one of them begins the next."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from functools import cache, partial
from itertools import islice
from typing import Any

from pipectl.capture.data import Samples
from pipectl.capture.python_state import preserve_state
from pipectl.plan import Plan
from pipectl.runtime.division import LossShares
from pipectl.runtime.setup import Setup
from pipectl.runtime.step import Batch, Step, StepRun, narrowed
from pipectl.runtime.step_end import StepEnd
from pipectl.runtime.telemetry import StepReport, Telemetry
from pipectl.runtime.tracing import Tracing
from pipectl.schedule import plan_of_step, plan_of_trial


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
        self._loss_shares = LossShares(
            setup.communicator, setup.job, setup.plan, setup.cut.loss_stage
        )

        def step_of(samples: int, length: int) -> Step:
            return _rank_step(setup, plan_of_step(setup.plan, samples), length)

        self._step_of = cache(step_of)
        self._loaded: Iterator[Batch] = iter(())

    def learn_layouts(self) -> None:
        """See :func:`learn_layouts`."""
        learn_layouts(self._setup, self._setup.plan, self._loss_shares)

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
        run.update = lambda *_: self._end.run(step, computed, run)
        self._setup.training.run(run)


def learn_layouts(setup: Setup, plan: Plan, loss_shares: LossShares) -> None:
    """Send micro-batches of every shape over every channel, so that both ends know all layouts.

    It leaves no trace: buffers and Python state of modules are restored, gradients are dropped.

    Args:
        plan: with steps that do not overlap, and the same messages as the training.
    """
    seed = setup.job.spec.training.seed, "layouts"
    with preserve_state(setup.job.step, setup.written.values()):
        for rows in setup.division.sizes:
            trial = _rank_step(setup, plan_of_trial(plan, rows.whole), rows.length)
            assert trial.pieces is not None
            example = partial(setup.job.loader.example, rows.whole, length=rows.length)
            whole: Any = example() if setup.reading else None
            batches = (narrowed(whole, piece, rows) for piece in trial.pieces.values())
            setup.training.run(loss_shares.make_run(trial, batches, seed))
            for stage in setup.stages.values():
                stage.forget()
        if setup.evaluator is not None:
            setup.evaluator.learn()


def _rank_step(setup: Setup, plan: Plan, length: int) -> Step:
    whole = setup.job.loader.takes_whole
    rank = setup.communicator.rank
    return Step.of(plan, rank, setup.reading, length=length, load_whole=whole)
