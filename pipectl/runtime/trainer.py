"""The training loop of one rank: the warm-up before the first step, steps, and checkpoints."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from dataclasses import replace
from functools import cache
from itertools import islice, pairwise
from typing import Any

from pipectl.capture.python_state import undisturbed
from pipectl.capture.slices import Rows
from pipectl.cluster import Cluster
from pipectl.files import write_text
from pipectl.runs import Manifest, RunDirectory
from pipectl.runtime.callbacks import Callbacks
from pipectl.runtime.checkpoint import Keep, Saver, Stored, plain_name, take_snapshot
from pipectl.runtime.division import LossShares
from pipectl.runtime.engine import StepRun
from pipectl.runtime.evaluation import Evaluator
from pipectl.runtime.failure import warn
from pipectl.runtime.setup import Setup
from pipectl.runtime.step import Batch, Row, Step, StepInput, narrowed
from pipectl.runtime.step_end import StepEnd
from pipectl.runtime.stopping import Stopping
from pipectl.runtime.stretches import Stretches
from pipectl.runtime.telemetry import StepReport, Telemetry
from pipectl.runtime.tracing import Tracing
from pipectl.runtime.waiting import barrier
from pipectl.schedule import (
    channels,
    is_unflushed,
    lower,
    lower_renewal,
    plan_of_step,
    plan_of_trial,
)
from pipectl.schedule.memory import room_bytes
from pipectl.schedule.one_f_one_b import ONE_F_ONE_B

_CHECK_REPLICAS_EVERY = 100
"""Steps."""


class Trainer:
    """Trains the stages of one rank, step by step, together with all others.

    Args:
        setup: what the rank holds.
        attempt: number of the job's start, from 1.
        messages: how they travel, for the heartbeat.
        stored: the checkpoint that the run goes on from.
    """

    def __init__(
        self,
        setup: Setup,
        run: RunDirectory,
        attempt: int,
        messages: Mapping[str, Any] | None = None,
        stored: Stored | None = None,
    ) -> None:
        self._setup = setup
        self._spec = setup.job.spec
        self._run = run
        self._rank = setup.communicator.rank
        steps, loss_ranks = self._spec.training.steps, setup.plan.stages[setup.cut.loss_stage].ranks
        self._telemetry = Telemetry(
            setup.communicator.Dup(), run, steps, attempt, tuple(setup.stages), messages, loss_ranks
        )
        rows = len(lower(setup.plan, self._rank).body)
        self._tracing = Tracing(setup.communicator, run, self._spec.trace, steps, rows)
        self._loss_shares = LossShares(
            setup.communicator, setup.job, setup.plan, setup.cut.loss_stage
        )
        self._end = StepEnd(setup, self._telemetry.fault, self._finish_saving)
        self._evaluator = Evaluator(setup)
        whole = setup.job.loader.takes_whole
        self._step_of = cache(
            lambda samples: Step.of(
                plan_of_step(setup.plan, samples), self._rank, setup.reading, load_whole=whole
            )
        )
        self._saver = self._make_saver(run, attempt)
        self._stopping = Stopping(setup.communicator.Dup(), run.stop)
        self._stopped = False
        self._steps_done = 0
        if stored is not None:
            self._go_on_from(stored)

    def train(self) -> None:
        """Run all steps, evaluations and checkpoints."""
        callbacks = nullcontext() if self._rank else Callbacks(self._spec, self._run, warn)
        with callbacks as self._telemetry.tell:
            self._train()
        self._setup.close()
        if self._stopped and self._rank == 0:
            write_text(self._run.stopped, "")

    def _train(self) -> None:
        self._begin("warming up")
        self.learn_layouts()
        self._begin("training")
        steps, training = self._spec.training.steps, self._setup.division.batches
        self._train_steps(list(islice(iter(training), steps)))
        self._setup.doing.action = "finishing"
        self._stopping.finish()
        self._tracing.finish()  # also where the last checkpoint cannot be written
        self._saver.finish()
        self._telemetry.finish("stopped" if self._stopped else "done")

    def _train_steps(self, planned: list[tuple[int, range]]) -> None:
        """Step by step; if steps overlap, from one to the next after which all ranks meet."""
        setup, steps = self._setup, range(self._steps_done + 1, len(planned) + 1)
        batches = [positions for _, positions in planned]
        stretches = None
        loaded: Iterator[Batch] = iter(())
        if is_unflushed(setup.plan):
            on_update = self._saver.poll
            stretches = Stretches(setup, self._end, self._telemetry, self._tracing, on_update)
            if setup.loader is not None:
                size = setup.plan.micro_batch_size
                loaded = setup.loader.micro_batches(planned, size, self._steps_done)
        elif setup.loader is not None:
            loaded = setup.loader.pieces(
                planned, lambda samples: self._step_of(samples).positions, self._steps_done
            )
        ends = [step for step in steps if stretches is None or self._stops_after(step)]
        for before, end in pairwise([self._steps_done, *ends]):
            setup.doing.step = before + 1
            if stretches is None:
                self._step(end, len(batches[before]), loaded)
            else:
                barrier(setup.communicator)
                stretches.train(before + 1, batches[before:end], loaded)
            self._between_steps(end)
            if self._stopping.stops(at_once=stretches is not None) and end < len(planned):
                self._stopped = True
                self._end.settle()
                if not self._saves_after(end):
                    self._setup.replicas.check_weights(end)
                    self._save(end)
                return

    def _step(self, step: int, samples: int, loaded: Iterator[Batch]) -> None:
        setup, end = self._setup, self._end
        traced = self._tracing.wants(step)
        recording = self._tracing.begin(step) if traced else None
        start = time.perf_counter()
        scale = 1.0 if end.loss_scale is None else end.loss_scale.value
        doing = self._step_of(samples)
        assert doing.plan is not None
        assert doing.pieces is not None
        batches, seed = islice(loaded, len(doing.pieces)), (self._spec.training.seed, step)
        step_input = self._loss_shares.step_input(doing, batches, seed, scale)
        step_input.recording = recording
        end.begin()
        run = self._run_step(step, doing, step_input)
        if not end.undo():
            setup.replicas.agree_on_buffers(doing.plan)
        if traced:
            self._tracing.end(step, recording, start)
        self._tracing.advance()
        setup.doing.board.pace(time.perf_counter() - start)
        self._telemetry.report(
            StepReport(
                step=step,
                loss=self._loss_shares.loss(doing, run.losses, step_input.weights),
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

    def _run_step(self, step: int, doing: Step, given: StepInput) -> StepRun:
        def update(_: Row, run: StepRun) -> None:
            computed = self._loss_shares.computed(doing)
            self._end.run(step, computed, run.losses, given.weights, given.recording)

        return self._setup.training.run(doing, given, update)

    def _between_steps(self, step: int) -> None:
        setup, plan = self._setup, self._setup.plan
        if self._stops_after(step):
            self._end.settle()
        if self._saves_after(step) or step % _CHECK_REPLICAS_EVERY == 0:
            self._setup.replicas.check_weights(step)
        if self._evaluates_after(step):
            self._begin("evaluating")
            # Weights go to where forwards run without the backwards, as the next step sends them.
            renewal = lower_renewal(plan, self._rank).body
            weights = Step.plain(renewal, channels(plan), self._rank, ())
            setup.training.run(weights, StepInput((), iter(()), ()))
            result = self._evaluator.evaluate(step)
            setup.replicas.take_evaluated(setup.evaluation_writes)
            self._end.stepper.watch(result["loss"])
            if self._rank == 0:
                self._telemetry.evaluation(step, result)
            self._begin("training")
        if self._saves_after(step):
            self._save(step)
            self._begin("training")
        self._saver.poll()

    def _begin(self, phase: str) -> None:
        self._telemetry.state(phase)
        self._setup.doing.action = phase

    def _make_saver(self, run: RunDirectory, attempt: int) -> Saver:
        """Collective. Beside an accelerator, whose memory the plan counts, copies have room."""
        setup, spec = self._setup, self._spec.checkpoint
        self._room_bytes = None
        if setup.device.torch_device.type == "cpu":
            limit_bytes: float | None = setup.plan.memory_limit_bytes
            if run.cluster.exists():
                limit_bytes = Cluster.load(run.cluster).memory_of(self._rank, limit_bytes)
            self._room_bytes = room_bytes(setup.plan, self._rank, limit_bytes)
        # Of the parameters and buffers of all ranks, those that a state dict holds.
        self._persistent = set(setup.job.step.state_dict(keep_vars=True))
        tied = setup.job.tied.items()
        named = [(plain_name(n), plain_name(first)) for n, first in tied if n in self._persistent]
        self._aliases = {n: first for n, first in named if n is not None and first is not None}
        return Saver(
            setup.communicator.Dup(),
            run.checkpoints,
            Keep(spec.keep, spec.keep_every),
            attempt,
            warn,
            self._telemetry.has_written,
        )

    def _go_on_from(self, stored: Stored) -> None:
        """Put back what is not in the model.

        Where samples stand, and which random numbers come next, follows from the number of steps.
        """
        manifest, stepper, scale = stored.manifest, self._end.stepper, self._end.loss_scale
        if stepper.optimizer is not None:
            stored.restore_optimizer(stepper.optimizer, self._end.updated)
        stepper.move_on(manifest.updates, manifest.losses)
        if scale is not None and manifest.loss_scale is not None:
            scale.restore(manifest.loss_scale)
        stored.close()
        self._steps_done = manifest.step
        self._telemetry.go_on_from(self._steps_done)

    def _save(self, step: int) -> None:
        self._begin("saving")
        end, setup = self._end, self._setup
        states, stepper = setup.job.states, end.stepper
        snapshot = take_snapshot(
            {name: states[name] for name, owner in setup.owners.items() if owner == self._rank},
            self._persistent,
            stepper,
            end.owned_parameters,
            self._room_bytes,
        )
        manifest = Manifest(
            step,
            setup.plan.micro_batch_size,
            self._aliases,
            updates=stepper.updates,
            losses=tuple(stepper.losses),
            loss_scale=None if end.loss_scale is None else end.loss_scale.state,
        )
        self._saver.start(manifest, snapshot)

    def _finish_saving(self) -> None:
        """As a phase: on a slow disk it takes long, and no rank is to be taken for lost by that."""
        doing = self._setup.doing
        before = doing.board.read()
        doing.action = "saving"
        try:
            self._saver.finish()
        finally:  # reports of errors tell of the row
            doing.board.return_to(before)

    def _stops_after(self, step: int) -> bool:
        return self._evaluates_after(step) or self._saves_after(step)

    def _evaluates_after(self, step: int) -> bool:
        evaluation = self._spec.evaluation
        return evaluation is not None and self._is_due(step, evaluation.every)

    def _saves_after(self, step: int) -> bool:
        return self._is_due(step, self._spec.checkpoint.every)

    def _is_due(self, step: int, every: int | None) -> bool:
        """Whether something happens after a step: every so many, and after the last."""
        return step == self._spec.training.steps or bool(every and step % every == 0)

    def learn_layouts(self) -> None:
        """Send micro-batches of every size over every channel, so that all ends know all layouts.

        It leaves no trace: buffers and what modules keep in Python objects are put back, gradients
        are dropped.
        """
        setup, plan = self._setup, self._setup.plan
        if is_unflushed(plan):  # a trial is flushed; its messages are the same
            plan = replace(plan, schedule=ONE_F_ONE_B.name)
        loader, seed = setup.job.loader, (self._spec.training.seed, "layouts")
        with undisturbed(setup.job.step, setup.written.values()):
            for size in setup.division.sizes:
                trial = Step.of(
                    plan_of_trial(plan, size),
                    self._rank,
                    setup.reading,
                    load_whole=loader.takes_whole,
                )
                assert trial.pieces is not None
                whole: Any = loader.example(size) if setup.reading else None
                batches = (narrowed(whole, rows, Rows.of(size)) for rows in trial.pieces.values())
                setup.training.run(trial, self._loss_shares.step_input(trial, batches, seed))
                for stage in setup.stages.values():
                    stage.forget()
            self._evaluator.learn()
