"""The most bytes of tensors that ranks hold in a step, as predicted and as measured.

Started as ``mpiexec -n RANKS python -m mpi4py peaks.py RUN...``, each rank trains the plans of the
run directories and writes what it held in the last step into ``RUN/peak-<rank>``.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from mpi4py import MPI
from torch import Tensor

from pipectl.capture import CapturedJob
from pipectl.cluster import assumed_cluster
from pipectl.plan import Plan, Stage
from pipectl.planner.costs.footprint import Footprints
from pipectl.planner.costs.stage_costs import operator_times, scaled_transfers, stage_costs
from pipectl.profile import Profile
from pipectl.profiler.machine import record_allocated
from pipectl.runs import RunDirectory
from pipectl.runtime.device import CpuDevice
from pipectl.runtime.offload import Pages
from pipectl.runtime.saved_tensors import SavedTensors
from pipectl.runtime.setup import Setup
from pipectl.runtime.trainer import Trainer
from pipectl.schedule.one_f_one_b import policy_a
from pipectl.simulate import simulate
from pipectl.spec import load
from pipectl.watch.board import Board


@dataclass(frozen=True)
class Peak:
    """Bytes that a rank held at most."""

    predicted: int
    measured: int


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


def prepare(run: RunDirectory, job: str, plan: Plan) -> RunDirectory:
    """Write what ranks read."""
    run.trace.mkdir(parents=True)
    run.job.write_text(job)
    plan.save(run.plan)
    return run


def peaks_of(run: RunDirectory) -> list[Peak]:
    """Of all ranks, once they have trained."""
    plan = Plan.load(run.plan)
    predicted = simulate(plan, assumed_cluster("c", [plan.ranks], 1, None)).peak_memory_bytes
    measured = [int((run.path / f"peak-{rank}").read_text()) for rank in range(plan.ranks)]
    return [Peak(*pair) for pair in zip(predicted, measured, strict=True)]


def measure(run: RunDirectory, world: MPI.Comm) -> int:
    """Train; what is there before the last step is added as it is."""
    job = CapturedJob(load(run.job, ["evaluation=null"]))
    setup = Setup(world, job, Plan.load(run.plan), CpuDevice(), Board())
    trainer = Trainer(setup, run, 1)
    train_step, peaks = setup.training.run, list[int]()

    def record(*given: Any) -> None:
        gc.collect()  # what earlier steps left must not be freed meanwhile
        with record_allocated(torch.device("cpu")) as recording:
            train_step(*given)
        peaks.append(recording.phases[-1].peak_bytes)

    setup.training.run = record  # type: ignore[method-assign]
    trainer.train()
    optimizer = trainer._end.updater.optimizer
    states = [] if optimizer is None else [list(s.values()) for s in optimizer.state.values()]
    held = [t for values in states for t in values if isinstance(t, Tensor)]
    for stage in setup.stages.values():
        held += [*stage.parameters.values(), *stage.buffers.values()]
    return peaks[-1] + sum(tensor.nbytes for tensor in held)


if __name__ == "__main__":
    torch.set_num_threads(1)
    SavedTensors.min_bytes = 0
    # Torch knows how much of its own memory is in use.
    Pages.take = lambda _, size: torch.empty(size, dtype=torch.uint8)  # type: ignore[method-assign]
    for directory in sys.argv[1:]:
        run = RunDirectory(Path(directory))
        peak = measure(run, MPI.COMM_WORLD)
        (run.path / f"peak-{MPI.COMM_WORLD.rank}").write_text(str(peak))
