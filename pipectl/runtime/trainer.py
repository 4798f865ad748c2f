"""The training loop of one rank."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cache
from itertools import islice
from typing import Any

import torch
from torch import nn

from pipectl.capture.data import split_batch
from pipectl.capture.shares import sample_shares, target_shares, weighted
from pipectl.files import write_json
from pipectl.runs import RunDirectory
from pipectl.runtime import checkpoint
from pipectl.runtime.engine import Batch, StepInput, StepOutput
from pipectl.runtime.evaluation import Metrics
from pipectl.runtime.loss_scale import LossScale
from pipectl.runtime.optimizer import Clipping, SharedGradients
from pipectl.runtime.setup import Setup
from pipectl.runtime.stage import shared_uses
from pipectl.runtime.stepper import make_stepper
from pipectl.runtime.telemetry import StepReport, Telemetry
from pipectl.runtime.waiting import barrier
from pipectl.schedule import Actions, lower, lower_evaluation
from pipectl.timeline import Event, Timeline

_TRACED_STEP = 10


class Trainer:
    """Trains the stages of one rank, step by step, together with all others.

    Args:
        setup: what the rank holds.
        attempt: number of the job's start, from 1.
        messages: how they travel, for the heartbeat.
    """

    def __init__(
        self,
        setup: Setup,
        run: RunDirectory,
        attempt: int,
        messages: Mapping[str, Any] | None = None,
    ) -> None:
        self._setup = setup
        self._spec = setup.job.spec
        self._run = run
        self._rank = setup.communicator.rank
        stages = tuple(setup.stages)
        communicator = setup.communicator.Dup()
        self._telemetry = Telemetry(
            communicator, run, self._spec.training.steps, attempt, stages, messages
        )
        self._weight = setup.job.weight()
        self._stepper = make_stepper(setup.job, setup.parameters)
        self._shared = self._make_shared()
        self._clipping = self._make_clipping()
        self._loss_scale = self._make_loss_scale()
        self._metrics = setup.job.metrics()
        self._program = cache(self._lower)
        self._gradient_norm = self._used_rate = math.nan
        self._skipped = False

    def train(self) -> None:
        """Run all steps, evaluations and checkpoints."""
        self._telemetry.state("warming up")
        self.learn_layouts()
        self._telemetry.state("training")
        steps, training = self._spec.training.steps, self._setup.batches
        planned = list(islice(iter(training), steps))
        loaded = self._load(planned)
        traced = min(steps, _TRACED_STEP)
        for step, (_, positions) in enumerate(planned, 1):
            self._setup.doing.step = step
            self._step(step, len(positions), loaded, traced=step == traced)
            self._between_steps(step)
        self._telemetry.finish()
        self._setup.close()

    def _step(self, step: int, samples: int, loaded: Iterator[Batch], *, traced: bool) -> None:
        if traced:
            barrier(self._setup.communicator)
        start = time.perf_counter()
        sizes = split_batch(samples, self._setup.plan.micro_batch_size)
        seed = (self._spec.training.seed, step)
        scale = 1.0 if self._loss_scale is None else self._loss_scale.value
        given = StepInput(sizes, (), islice(loaded, len(sizes)), seed, scale)
        given = replace(given, **self._weights(given))
        out = self._setup.training.run(self._program(len(sizes)), given, self.update)
        if traced:
            self._write_timeline(out, start)
        self._telemetry.report(
            StepReport(
                step=step,
                loss=weighted(out.losses, given.weights),
                learning_rate=self._used_rate,
                gradient_norm=self._gradient_norm,
                loss_scale=math.nan if self._loss_scale is None else scale,
                skipped=self._skipped,
                busy_s=out.busy_s,
                step_time_s=time.perf_counter() - start,
                samples=samples,
                peak_bytes=self._setup.device.peak_bytes(),
            )
        )

    def update(self) -> None:
        """End a step: shared gradients, loss scale, clipping, optimizer and learning rate."""
        self._shared.reduce()
        self._gradient_norm = math.nan
        self._used_rate = self._stepper.learning_rate
        self._skipped = self._loss_scale is not None and not self._loss_scale.unscale()
        if self._skipped:
            self._stepper.skip()
            return
        if self._spec.training.clip_grad_norm is not None:
            self._gradient_norm = self._clipping.clip(self._spec.training.clip_grad_norm)
        self._stepper.step()

    def _between_steps(self, step: int) -> None:
        last = step == self._spec.training.steps
        evaluation = self._spec.evaluation
        if evaluation is not None and (last or (evaluation.every and step % evaluation.every == 0)):
            self._telemetry.state("evaluating")
            self._evaluate(step)
            self._telemetry.state("training")
        every = self._spec.checkpoint.every
        if last or (every and step % every == 0):
            self._telemetry.state("saving")
            self._save(step)
            self._telemetry.state("training")

    def _weights(self, given: StepInput) -> dict[str, Any]:
        """The weight of every micro-batch, and the batches again where they had to be read."""
        if self._weight is None or self._setup.cut.loss_stage not in self._setup.stages:
            return {"weights": sample_shares(given.sizes)}
        batches = list(given.batches)
        targets = [targets for _, targets in batches]
        shares = target_shares(self._weight, self._spec.loss.weight, targets)
        return {"weights": shares, "batches": iter(batches)}

    def _load(self, planned: list[tuple[int, range]]) -> Iterator[Batch]:
        loader = self._setup.loader
        if loader is None:
            return iter(())
        return loader.micro_batches(planned, self._setup.plan.micro_batch_size)

    def _lower(self, micro_batches: int) -> Actions:
        return lower(self._setup.plan, self._rank, micro_batches).body

    def learn_layouts(self) -> None:
        """Send one micro-batch of every size through, so that both ends know all layouts.

        It leaves no trace: buffers are put back, gradients are dropped.
        """
        setup = self._setup
        buffers = [tensor for stage in setup.stages.values() for tensor in stage.buffers.values()]
        before = [tensor.clone() for tensor in buffers]
        for size in setup.sizes:
            given = self._example(size, setup.job.loader)
            setup.training.run(self._program(1), given, lambda: None)
            self._shared.learn()
            for stage in setup.stages.values():
                stage.forget()
        for size in setup.evaluation_sizes:
            held_out = setup.evaluation_loader or setup.job.loader
            assert setup.evaluating is not None
            program = self._lower_evaluation(1)
            setup.evaluating.run(program, self._example(size, held_out), lambda: None)
        with torch.no_grad():
            for tensor, old in zip(buffers, before, strict=True):
                tensor.copy_(old)

    def _example(self, size: int, loader: Any) -> StepInput:
        batches = iter([loader.example(size)]) if self._setup.stages else iter(())
        return StepInput([size], [1.0], batches, (self._spec.training.seed, "layouts"))

    def _lower_evaluation(self, micro_batches: int) -> Actions:
        setup = self._setup
        stages = tuple(setup.stages)
        return lower_evaluation(setup.evaluation_channels, stages, self._rank, micro_batches).body

    def _evaluate(self, step: int) -> None:
        setup = self._setup
        assert setup.evaluating is not None
        assert setup.evaluation_samples is not None
        sizes = split_batch(setup.evaluation_samples, setup.evaluation_size)
        metrics = Metrics(self._metrics, setup.job.evaluation_graph(sizes[0]))
        setup.evaluating.on_evaluated = metrics.add
        batches: Iterator[Batch] = iter(())
        if setup.evaluation_loader is not None:
            everything = [(0, range(setup.evaluation_samples))]
            batches = setup.evaluation_loader.micro_batches(everything, setup.evaluation_size)
        given = StepInput(sizes, (), batches, (self._spec.training.seed, "evaluation", step))
        setup.evaluating.run(self._lower_evaluation(len(sizes)), given, lambda: None)
        barrier(setup.communicator)
        root = setup.rank_of_stage[setup.evaluating.loss_stage]
        mine = metrics.result() if self._rank == root else None
        result = setup.communicator.bcast(mine, root)
        if self._rank == 0:
            self._telemetry.evaluation(step, result)

    def _save(self, step: int) -> None:
        checkpoint.save(
            self._setup.communicator,
            self._run.checkpoints,
            step,
            self._setup.saved_states,
            self._setup.saved_aliases,
            self._spec.checkpoint.keep,
        )

    def _write_timeline(self, out: StepOutput, start: float) -> None:
        events = [
            event._replace(start_s=event.start_s - start, end_s=event.end_s - start)
            for event in out.events
        ]
        gathered: list[list[Event]] | None = self._setup.communicator.gather(events)
        if gathered is not None:
            everything = tuple(sorted(event for events in gathered for event in events))
            timeline = Timeline(everything, self._setup.communicator.size)
            write_json(self._run.trace / "measured.json", timeline.to_json())

    def _make_shared(self) -> SharedGradients:
        setup = self._setup
        return SharedGradients(
            setup.communicator.Dup(),
            shared_uses(setup.cut),
            setup.rank_of_stage,
            {slot: leaf for stage in setup.stages.values() for slot, leaf in stage.uses.items()},
            setup.parameters,
        )

    def _make_loss_scale(self) -> LossScale | None:
        training = self._spec.training
        if training.precision != "float16":
            return None
        return LossScale(self._setup.communicator.Dup(), training.loss_scale, self._trained())

    def _trained(self) -> dict[str, nn.Parameter]:
        """This rank's parameters that are not frozen."""
        return {n: p for n, p in self._setup.parameters.items() if p.requires_grad}

    def _make_clipping(self) -> Clipping:
        held = self._trained()
        owners = self._setup.owners
        states = self._setup.job.states.items()
        dtypes = {name: tensor.dtype for name, tensor in states if tensor.requires_grad}
        owned = {n: p for n, p in held.items() if owners[n] == self._rank}
        return Clipping(self._setup.communicator.Dup(), dtypes, owned, held)
