"""Training step by step: all ranks have ended a step before one of them begins the next."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import islice
from typing import Any

from pipectl.capture.python_state import undisturbed
from pipectl.capture.slices import Rows
from pipectl.plan import Plan
from pipectl.runtime.division import LossShares
from pipectl.runtime.engine import StepRun
from pipectl.runtime.setup import Setup
from pipectl.runtime.step import Batch, Row, Step, StepInput, narrowed
from pipectl.runtime.step_end import StepEnd
from pipectl.runtime.telemetry import StepReport, Telemetry
from pipectl.runtime.tracing import Tracing
from pipectl.schedule import plan_of_step, plan_of_trial


class SynchronousSteps:
    """Trains the stages of one rank, step by step. Making one is collective.

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
        self._step_of = cache(lambda samples: _rank_step(setup, plan_of_step(setup.plan, samples)))
        self._loaded: Iterator[Batch] = iter(())

    def learn_layouts(self) -> None:
        """See :func:`learn_layouts`."""
        learn_layouts(self._setup, self._setup.plan, self._loss_shares)

    def begin(self, planned: Sequence[tuple[int, range]], done: int) -> None:
        """Open the data.

        Args:
            planned: epoch and positions of the samples of every step.
            done: so many of the steps.
        """
        if self._setup.loader is not None:
            self._loaded = self._setup.loader.pieces(
                planned, lambda samples: self._step_of(samples).positions, done
            )

    def train(self, step: int, batches: Sequence[range]) -> None:
        """Train one step.

        Args:
            batches: positions of its samples.
        """
        setup, end, samples = self._setup, self._end, len(batches[0])
        traced = self._tracing.wants(step)
        recording = self._tracing.begin(step) if traced else None
        start = time.perf_counter()
        scale = 1.0 if end.loss_scale is None else end.loss_scale.value
        rank_step = self._step_of(samples)
        assert rank_step.plan is not None
        assert rank_step.pieces is not None
        loaded = islice(self._loaded, len(rank_step.pieces))
        step_input = self._loss_shares.step_input(rank_step, loaded, (self._seed, step), scale)
        step_input.recording = recording
        end.begin()
        run = self.execute(step, rank_step, step_input)
        if not end.undo():
            setup.replicas.agree_on_buffers(rank_step.plan)
        if traced:
            self._tracing.end(step, recording, start)
        self._tracing.advance()
        setup.doing.board.pace(time.perf_counter() - start)
        self._telemetry.report(
            StepReport(
                step=step,
                loss=self._loss_shares.loss(rank_step, run.losses, step_input.weights),
                learning_rate=end.used_rate,
                gradient_norm=end.gradient_norm,
                loss_scale=math.nan if end.loss_scale is None else scale,
                skipped=end.skipped,
                busy_s=run.busy_s,
                step_time_s=time.perf_counter() - start,
                samples=samples,
                peak_bytes=setup.device.peak_bytes(),
            )
        )

    def execute(self, step: int, rank_step: Step, step_input: StepInput) -> StepRun:
        """The rows of a step, the update among them."""

        def update(_: Row, run: StepRun) -> None:
            computed = self._loss_shares.computed(rank_step)
            self._end.run(step, computed, run.losses, step_input.weights, step_input.recording)

        return self._setup.training.run(rank_step, step_input, update)


def learn_layouts(setup: Setup, plan: Plan, loss_shares: LossShares) -> None:
    """Send micro-batches of every size over every channel, so that all ends know all layouts.

    It leaves no trace: buffers and what modules keep in Python objects are put back, gradients
    are dropped.

    Args:
        plan: whose steps do not overlap; its messages are those of the training.
    """
    seed = setup.job.spec.training.seed, "layouts"
    with undisturbed(setup.job.step, setup.written.values()):
        for size in setup.division.sizes:
            trial = _rank_step(setup, plan_of_trial(plan, size))
            assert trial.pieces is not None
            whole: Any = setup.job.loader.example(size) if setup.reading else None
            batches = (narrowed(whole, rows, Rows.of(size)) for rows in trial.pieces.values())
            setup.training.run(trial, loss_shares.step_input(trial, batches, seed))
            for stage in setup.stages.values():
                stage.forget()
        if setup.evaluator is not None:
            setup.evaluator.learn()


def _rank_step(setup: Setup, plan: Plan) -> Step:
    whole = setup.job.loader.takes_whole
    return Step.of(plan, setup.communicator.rank, setup.reading, load_whole=whole)
