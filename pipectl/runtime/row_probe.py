"""The row probe: two ranks of a node train a small model, and rank 0 writes the times of rows.

``mpiexec -n 2 python -m mpi4py -m pipectl.runtime.row_probe --run DIRECTORY --output FILE --budget
SECONDS``. The model exists only to have messages of some sizes: `Setup` and `Trainer` are those of
every training, so the times of the recorded steps are valid for them.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from statistics import median

import torch
from mpi4py import MPI
from torch import Tensor, nn

from pipectl.capture import CapturedJob, Cut
from pipectl.fields import write_value
from pipectl.files import make_private_directory, write_json
from pipectl.link import RowTimes
from pipectl.plan import Plan, Stage, StageCost, Transfer
from pipectl.runs import RunDirectory
from pipectl.runtime.device import choose_device, settle_process
from pipectl.runtime.setup import Setup
from pipectl.runtime.trainer import Trainer
from pipectl.runtime.waiting import broadcast
from pipectl.schedule import channels
from pipectl.schedule.measured_rows import Steps, row_times_of
from pipectl.spec import JobSpec
from pipectl.timeline import Timeline
from pipectl.watch.board import Board

SAMPLES = (1, 16, 64, 256)
"""Per micro-batch: messages of 4 KiB, 64 KiB, 256 KiB and 1 MiB."""
MICRO_BATCHES = 8
MIN_STEPS, MAX_STEPS = 3, 15
"""Measured steps for each size of messages. Each step has 16 messages."""
_PILOT_STEPS = 2
_WIDTH, _HIDDEN, _ROWS, _BLOCKS = 1024, 256, 16, 8


class HalfModel(nn.Module):
    """Layers on values of its own, for a few milliseconds, and a scale for the samples' columns.

    The layers run the operators of a usual stage and go through as much memory: after them, data of
    Python and MPI are no longer in the caches. Few of their parameters are trained, since an
    update's time for parameters is the optimizer's.
    """

    hidden: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("hidden", torch.ones(_ROWS, _HIDDEN))
        blocks = [
            nn.Sequential(
                nn.LayerNorm(_HIDDEN),
                nn.Linear(_HIDDEN, 2 * _HIDDEN),
                nn.GELU(),
                nn.Linear(2 * _HIDDEN, _HIDDEN),
            )
            for _ in range(_BLOCKS)
        ]
        self.blocks = nn.ModuleList(blocks)
        for weight in self.parameters():
            weight.requires_grad_(weight.dim() == 1)
        self.scale = nn.Parameter(torch.ones(_WIDTH))

    def forward(self, values: Tensor) -> Tensor:
        """Columns, each multiplied by its scale and one factor for all."""
        hidden = self.hidden
        for block in self.blocks:
            hidden = hidden + block(hidden)
        return values * self.scale * hidden.mean()


class Samples(torch.utils.data.Dataset[tuple[Tensor, Tensor]]):
    """As many equal samples as one step takes."""

    def __init__(self, count: int) -> None:
        self._count, self._sample = count, (torch.ones(_WIDTH), torch.zeros(_WIDTH))

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if not 0 <= index < self._count:
            raise IndexError(index)
        return self._sample


def build() -> nn.Module:
    """The model: a half for each stage."""
    return nn.Sequential(HalfModel(), HalfModel())


def _spec(largest: int, threads: int) -> JobSpec:
    here = "pipectl.runtime.row_probe:"
    batch = largest * MICRO_BATCHES
    return JobSpec.model_validate(
        {
            "name": "rows",
            "model": {"factory": f"{here}build"},
            "loss": {"factory": "torch.nn:MSELoss"},
            "data": {"factory": f"{here}Samples", "kwargs": {"count": batch}},
            "optimizer": {"factory": "torch.optim:SGD", "kwargs": {"lr": 0.0}},
            "training": {"steps": 1, "batch_size": batch},
            "pipeline": {"micro_batches": MICRO_BATCHES},
            "resources": {"tasks_per_node": 2, "cpus_per_task": threads},
            "trace": {"every": 1},
        }
    )


def _plan(job: CapturedJob, samples: int) -> Plan:
    graph = job.training_graph(samples)
    stage_of = {}
    for node in graph.operators:
        paths = [path for path, _ in (node.meta.get("nn_module_stack") or {}).values()]
        stage_of[node.name] = int(not any(path.endswith("model.0") for path in paths))
    cut = Cut(graph, stage_of, training=True)
    size_bytes = samples * _WIDTH * 4
    return Plan(
        name=job.spec.name,
        fingerprint=graph.fingerprint,
        schedule="1f1b",
        warm_up=(2, 1),
        batch_size=samples * MICRO_BATCHES,
        micro_batch_size=samples,
        micro_batches=MICRO_BATCHES,
        stages=tuple(
            Stage(tuple(cut.operators(rank)), (rank,), StageCost(0.0, 0.0, 0.0, 0, 0, 0))
            for rank in (0, 1)
        ),
        transfers=tuple(
            Transfer(lane.kind, lane.source, lane.target, size_bytes) for lane in cut.lanes
        ),
        node_of_rank=(0, 0),
    )


def _train(
    communicator: MPI.Comm, directory: Path, job: CapturedJob, samples: int, steps: int
) -> Steps:
    """Train with micro-batches of a size, after a few steps that are not measured."""
    run, warm_up = RunDirectory(directory), _warm_up(steps)
    if communicator.rank == 0:
        for place in (run.path, run.trace, run.checkpoints, run.logs, run.start.path):
            make_private_directory(place)
    communicator.Barrier()
    plan = _plan(job, samples)
    changes = {"steps": warm_up + steps, "batch_size": plan.batch_size}
    training = job.spec.training.model_copy(update=changes)
    job.spec = job.spec.model_copy(update={"training": training})
    job.loader = job.loader.with_batch_size(plan.batch_size, drop_last=False)
    setup = Setup(communicator, job, plan, choose_device(0, 0), Board())
    Trainer(setup, run.start).train()
    communicator.Barrier()
    if communicator.rank:
        return Steps(channels(plan), (), ())
    counted = range(warm_up + 1, warm_up + steps + 1)
    lines = [json.loads(line) for line in run.metrics.read_text().splitlines()]
    times_s = {line["step"]: line["step_time_s"] for line in lines if "step_time_s" in line}
    recorded = tuple(Timeline.load(run.measured_of(step)) for step in counted)
    return Steps(channels(plan), recorded, tuple(times_s[step] for step in counted))


def _warm_up(steps: int) -> int:
    return 1 + steps // 4


def _affordable_steps(step_s: float, budget_s: float) -> int:
    """The maximum number of steps per size that fit into the budget, the warm-up included."""
    counts = range(MAX_STEPS, MIN_STEPS, -1)
    return next(
        (n for n in counts if len(SAMPLES) * (n + _warm_up(n)) * step_s <= budget_s), MIN_STEPS
    )


def measure_rows(
    communicator: MPI.Comm, directory: Path, threads: int, budget_s: float
) -> RowTimes:
    """The time of rows on this node; collective over two ranks.

    Args:
        directory: empty; for files of the trainings.
        threads: per rank.
        budget_s: for the steps; a minimum number of steps runs even if they take longer.
    """
    settle_process(threads)
    if communicator.rank == 0:
        make_private_directory(directory)
    job = CapturedJob(_spec(max(SAMPLES), threads))
    for samples in SAMPLES:  # before a training frees the other rank's parameters
        job.training_graph(samples)
    pilot = _train(communicator, directory / "pilot", job, max(SAMPLES), _PILOT_STEPS)
    step_s = broadcast(communicator, median(pilot.time_s or [0.0]))
    steps = _affordable_steps(step_s, budget_s)
    measured = [
        _train(communicator, directory / f"{samples}", job, samples, steps) for samples in SAMPLES
    ]
    mine = RowTimes() if communicator.rank else row_times_of(measured)
    return broadcast(communicator, mine)


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run", type=Path, required=True, help="an empty directory")
    parser.add_argument("--output", type=Path, required=True, help="file for the times")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--budget", type=float, required=True, help="seconds for the steps")
    arguments = parser.parse_args()
    times = measure_rows(MPI.COMM_WORLD, arguments.run, arguments.threads, arguments.budget)
    if MPI.COMM_WORLD.rank == 0:
        write_json(arguments.output, write_value(times))


if __name__ == "__main__":
    main()
