"""One stage alone, run by the real engine: what other stages send is replayed from a record.

The record is made once a cut, by passing one micro-batch through all stages; how much memory a
stage needs does not depend on what the values are.
"""

from __future__ import annotations

import gc
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from stages import Stages
from torch import Tensor

from pipectl.capture import CapturedJob, Cut, Lane, Slot
from pipectl.capture.randomness import seed_of
from pipectl.capture.slices import Rows
from pipectl.cluster import assumed_cluster
from pipectl.plan import Plan, Stage
from pipectl.planner.costs.footprint import Footprints
from pipectl.planner.costs.stage_costs import operator_times, scaled_transfers, stage_costs
from pipectl.profile import Profile
from pipectl.profiler.machine import record_allocated
from pipectl.runtime.device import CpuDevice
from pipectl.runtime.engine import Engine
from pipectl.runtime.gradients import (
    SharedGradients,
    clip_gradients,
    gradient_norms,
    shared_uses,
    total_norm,
)
from pipectl.runtime.layout import Layout
from pipectl.runtime.offload import mover_of
from pipectl.runtime.optimizer import make_updater
from pipectl.runtime.stage import Stage as RankStage
from pipectl.runtime.step import Step, StepRun
from pipectl.schedule import channels, lower
from pipectl.schedule.one_f_one_b import policy_a
from pipectl.simulate import simulate
from pipectl.watch.board import Board

Messages = dict[Lane, dict[Slot, Tensor | None]]


def plan_of(profile: Profile, stage_of: Mapping[str, int], size: int, micro_batches: int) -> Plan:
    """A 1F1B plan with one stage a rank."""
    count = 1 + max(stage_of.values())
    members: list[list[int]] = [[] for _ in range(count)]
    for index, operator in enumerate(profile.operators):
        members[stage_of[operator.id]].append(index)
    parts = Footprints(profile).of(members)
    scale = size / profile.micro_batch_size
    costs = stage_costs(parts, operator_times(profile, size), scale, profile)
    return Plan(
        name=profile.name,
        fingerprint=profile.fingerprint,
        schedule="1f1b",
        warm_up=policy_a(count, micro_batches),
        batch_size=size * micro_batches,
        micro_batch_size=size,
        micro_batches=micro_batches,
        stages=tuple(
            Stage(nodes, (rank,), cost)
            for rank, (nodes, cost) in enumerate(zip(parts.nodes, costs, strict=True))
        ),
        transfers=scaled_transfers(parts, scale),
        node_of_rank=(0,) * count,
    )


class Recorded(Stages):
    """Stages that note every message of a micro-batch."""

    def messages(self) -> Messages:
        """What one micro-batch sends along every lane."""
        self.found: Messages = {}
        self._forward(0, seed_of("record"), self._job.loader.example(self._rows.size))
        self._backward(0, 1.0)
        return self.found

    def _deliver(self, kind: Any, stage: int, micro_batch: int, made: Any) -> None:
        for lane, slots in self.cut.lanes.items():
            if lane.kind is kind and lane.source == stage:
                self.found[lane] = {slot: made.get(slot) for slot in slots}
        super()._deliver(kind, stage, micro_batch, made)


@dataclass
class _Posted:
    buffers: dict[Slot, Tensor]


class Replay:
    """Takes the place of the transport: receives come from the record, sends go nowhere."""

    def __init__(self, messages: Messages) -> None:
        self._messages = messages

    def line(self, lane: Lane, _rank: int) -> _ReplayedLine:
        return _ReplayedLine(self._messages[lane])

    def advance(self) -> None:
        pass


class _ReplayedLine:
    """Takes the place of a line of the transport."""

    def __init__(self, message: dict[Slot, Tensor | None]) -> None:
        self._message = message

    def start_send(self, _micro_batch: int, _size: int, tensors: Any) -> _Posted:
        known = {slot: tensors.get(slot) for slot in self._message}
        kept = {s: Layout.of(t).flatten(t.detach()) for s, t in known.items() if t is not None}
        return _Posted(kept)

    def start_receive(self, _micro_batch: int, _size: int) -> _Posted:
        layouts = {s: Layout.of(t) for s, t in self._message.items() if t is not None}
        return _Posted({s: torch.empty(o.count, dtype=o.dtype) for s, o in layouts.items()})

    def finish_receive(self, posted: _Posted) -> Any:
        found: dict[Slot, Tensor | None] = {}
        for slot, tensor in self._message.items():
            found[slot] = None
            if tensor is not None:
                layout = Layout.of(tensor)
                buffer = posted.buffers[slot].copy_(layout.flatten(tensor.detach()))
                found[slot] = layout.unflatten(buffer)
        return found

    def finish_send(self, posted: _Posted) -> None:
        posted.buffers.clear()


class _Alone:
    """A wire to other ranks that send numbers at once."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def send(self, vector: Tensor, *_: Any) -> Tensor:
        return vector

    def receive(self, count: int, dtype: torch.dtype, *_: Any) -> Tensor:
        return torch.ones(count, dtype=dtype)

    def wait(self, _: Any) -> None:
        pass

    def arrived(self, flight: Tensor) -> Tensor:
        return flight


@dataclass(frozen=True)
class Peak:
    """Most bytes of tensors that a rank held in a step, and what was predicted."""

    predicted: int
    measured: int


def peak_of_stage(
    job: CapturedJob, cut: Cut, plan: Plan, stage: int, messages: Messages, directory: Path
) -> Peak:
    """Train one stage for two steps on the engine; the second step is measured.

    What is there before (parameters, buffers, optimizer state) is added as it is.

    Args:
        directory: for what the stage offloads.
    """
    mover = mover_of(plan, plan.stages[stage].ranks[0], torch.device("cpu"), directory)
    held = plan.stages[stage]
    given = {(True, Rows.of(plan.micro_batch_size)): cut}, _copies(job), CpuDevice()
    firsts = () if held.blocks is None else held.blocks.firsts
    runtime = RankStage(stage, *given, recompute=held.recompute, firsts=firsts, mover=mover)
    engine = Engine(
        {stage: runtime},
        cut,
        Replay(messages),
        CpuDevice(),
        Board(),  # type: ignore[arg-type]
    )
    program = lower(plan, stage)
    step = _Step(job, plan, stage, runtime, cut)
    sizes = [Rows.of(plan.micro_batch_size)] * plan.micro_batches
    pieces = dict(enumerate(sizes))
    given_rows = Step(program, channels(plan), stage, sizes, pieces=pieces)
    engine.run(step.given(given_rows))
    gc.collect()  # what earlier steps and stages left must not be freed meanwhile
    with record_allocated(torch.device("cpu")) as recording:
        engine.run(step.given(given_rows))
    if mover is not None:
        mover.close()
    resident = step.resident_bytes()
    measured = resident + recording.phases[-1].peak_bytes
    predicted = simulate(plan, assumed_cluster("c", [plan.ranks], 1, None))
    return Peak(predicted.peak_memory_bytes[stage], measured)


def _copies(job: CapturedJob) -> dict[str, Tensor]:
    return {
        name: torch.nn.Parameter(t.detach().clone(), t.requires_grad)
        if isinstance(t, torch.nn.Parameter)
        else t.detach().clone()
        for name, t in job.states.items()
    }


class _Step:
    """The end of a step as the trainer does it, and its input."""

    def __init__(
        self, job: CapturedJob, plan: Plan, stage: int, runtime: RankStage, cut: Cut
    ) -> None:
        self._job, self._plan, self._runtime = job, plan, runtime
        ranks = [(rank,) for rank in range(len(plan.stages))]
        alone: Any = _Alone(stage)
        given = shared_uses(cut), ranks, runtime.uses, runtime.parameters
        self._shared = SharedGradients(alone, *given)
        held = {n: p for n, p in runtime.parameters.items() if p.requires_grad}
        self._held = held
        self._updater = make_updater(job, runtime.parameters)

    def given(self, step: Step) -> StepRun:
        """One step's micro-batches, loaded as they are asked for."""
        plan = self._plan
        batches = (self._job.loader.example(plan.micro_batch_size) for _ in plan.micro_batch_shares)
        share = 1 / plan.micro_batches
        return StepRun(step, [share] * plan.micro_batches, batches, ("memory",), update=self.update)

    def update(self, *_: Any) -> None:
        self._shared.reduce()
        norms = gradient_norms(self._held)
        dtypes = [p.dtype for p in self._held.values()]
        norm = total_norm([norms.get(name) for name in self._held], dtypes)
        clip_gradients(self._held.values(), norm, 1.0)
        self._updater.step()

    def resident_bytes(self) -> int:
        """Parameters, buffers and optimizer state."""
        optimizer = self._updater.optimizer
        states = [] if optimizer is None else [list(s.values()) for s in optimizer.state.values()]
        tensors = [t for values in states for t in values if isinstance(t, Tensor)]
        held = (*self._runtime.parameters.values(), *self._runtime.buffers.values(), *tensors)
        return sum(t.nbytes for t in held)


def record(job: CapturedJob, size: int, stage_of: Mapping[str, int]) -> tuple[Cut, Messages]:
    """The cut and what one micro-batch sends along its lanes."""
    stages = Recorded(job, size, stage_of)
    return stages.cut, stages.messages()
