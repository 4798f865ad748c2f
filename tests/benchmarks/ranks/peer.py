"""A rank of ``peer.py``: trains one model in turns by pipectl's engine and by torch's pipelining.

Both run in the same processes, so that whatever else the machine does hits them alike. Started as
``mpiexec -n RANKS python -m mpi4py peer.py FOLDER``; the folder holds ``case.json``.
"""

from __future__ import annotations

import json
import resource
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from mpi4py import MPI
from torch.distributed import pipelining
from torch.distributed.pipelining.schedules import PipelineScheduleMulti

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "corpus"))

import packages
from turns import Step, helped, in_order, timed, trained

from pipectl.capture import CapturedJob
from pipectl.plan import Plan
from pipectl.runtime.transport import Progress
from pipectl.spec import JobSpec, load

Case = dict[str, Any]


def theirs(spec: JobSpec, given: dict[str, Any], batch: Any) -> Step:
    """The same by torch.distributed.pipelining over gloo, split in front of the named modules."""
    step, micro_batches = CapturedJob(spec).step, given["micro_batches"]
    size = spec.training.batch_size // micro_batches
    points = dict.fromkeys(given["split"], pipelining.SplitPoint.BEGINNING)
    pipe = pipelining.pipeline(step.model, (batch[0][:size],), split_spec=points)
    mine = range(MPI.COMM_WORLD.rank, pipe.num_stages, MPI.COMM_WORLD.size)
    stages = [pipe.build_stage(index, torch.device("cpu")) for index in mine]
    schedule = getattr(pipelining, f"Schedule{given['schedule']}")
    held = stages if issubclass(schedule, PipelineScheduleMulti) else stages[0]
    runs = schedule(held, micro_batches, loss_fn=step.loss)
    parameters = [p for stage in stages for p in stage.submod.parameters()]
    optimizer = torch.optim.AdamW(parameters, **spec.optimizer.kwargs)
    inputs = (batch[0],) if any(stage.is_first for stage in stages) else ()
    target = {"target": batch[1]} if any(stage.is_last for stage in stages) else {}

    def train(_: int) -> None:
        runs.step(*inputs, **target)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return train


def contenders(case: Case, folder: Path, progress: Progress) -> Iterator[tuple[str, Step]]:
    """All that take part, by name."""
    spec = load(folder / "job.yaml")
    batch = CapturedJob(spec).loader.example(spec.training.batch_size)
    for name in case["plans"]:
        plan = Plan.load(folder / f"{name}.json")
        yield name, trained(spec, plan, progress, folder / name, batch, MPI.COMM_WORLD).step
    for name, given in case["theirs"].items():
        yield name, theirs(spec, given, batch)


def main(folder: Path) -> None:
    case = json.loads((folder / "case.json").read_text())
    torch.set_num_threads(1)
    packages.declare_torchvision()
    world = MPI.COMM_WORLD
    store = dist.TCPStore(case["host"], case["port"], world.size, world.rank == 0)
    dist.init_process_group("gloo", store=store, rank=world.rank, world_size=world.size)
    found: dict[str, list[float]] = {}
    with helped(folder / f"{name}.json" for name in case["plans"]) as progress:
        steps = dict(contenders(case, folder, progress))
        for number in range(case["rounds"]):
            for name in in_order([*steps], number):
                found.setdefault(name, []).append(timed(steps[name], case["steps"], world))
    peaks = world.gather(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
    if world.rank == 0:
        result = {"seconds": found, "peak_bytes": peaks}
        (folder / "result.json").write_text(json.dumps(result))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
