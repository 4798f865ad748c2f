"""A rank that trains one job in several ways in turns, so that the machine hits all of them alike.

Started as ``mpiexec -n RANKS python -m mpi4py rank.py FOLDER``. The folder holds ``job.yaml``,
plans and ``case.json``: how many rounds, steps in each, and by name who takes part:

- with ``plan``, pipectl's engine; with ``compile``, its stages go through ``torch.compile``;
- with ``schedule``, torch.distributed.pipelining over gloo, which splits the model in front of the
  modules in ``split``, for so many ``micro_batches``.

Rank 0 writes what every rank measured to ``result.json``.
"""

from __future__ import annotations

import json
import resource
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from mpi4py import MPI
from torch.distributed import pipelining
from torch.distributed.pipelining.schedules import PipelineScheduleMulti

from pipectl.capture import CapturedJob
from pipectl.plan import Plan
from pipectl.runs import RunDirectory
from pipectl.runtime.agreement import neighbours_of
from pipectl.runtime.device import CpuDevice
from pipectl.runtime.setup import Setup
from pipectl.runtime.step import StepRun
from pipectl.runtime.trainer import Trainer
from pipectl.runtime.transport import Circumstances, Progress, choose_progress
from pipectl.runtime.waiting import barrier
from pipectl.spec import JobSpec, load
from pipectl.watch.board import Board

WORLD = MPI.COMM_WORLD
Step = Callable[[int], None]


def ours(spec: JobSpec, plan: Plan, progress: Progress, folder: Path, batch: Any) -> Step:
    """A training step of pipectl's engine, as the worker runs it, always of the same samples."""
    setup = Setup(WORLD, CapturedJob(spec), plan, CpuDevice(), Board(), progress)
    trainer = Trainer(setup, RunDirectory(folder).start)
    setup.learn_layouts()
    doing = setup.batches.step_of(plan, 0)
    weights = [rows.size / plan.batch_size for rows in doing.sizes]
    cut = (tensor[: plan.batch_size].split(plan.micro_batch_size) for tensor in batch)
    parts = list(zip(*cut, strict=True))
    mine = [parts[index] for index in doing.loads]

    def step(number: int) -> None:
        trainer._step_end.begin()
        given = StepRun(
            doing,
            weights=weights,
            batches=iter(mine),
            seed=(0, number),
            update=lambda run, *_: trainer._step_end.end_step(number, run),
        )
        setup.training.run(given)

    return step


def theirs(spec: JobSpec, given: dict[str, Any], batch: Any) -> Step:
    """The same by torch.distributed.pipelining."""
    step, micro_batches = CapturedJob(spec).step, given["micro_batches"]
    size = spec.training.batch_size // micro_batches
    points = dict.fromkeys(given["split"], pipelining.SplitPoint.BEGINNING)
    pipe = pipelining.pipeline(step.model, (batch[0][:size],), split_spec=points)
    mine = range(WORLD.rank, pipe.num_stages, WORLD.size)
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


def helped(plans: Iterable[Path]) -> Progress:
    """Messages with the help that suits the largest one of some plans. Collective."""
    largest = max((Plan.load(path).most_sent_bytes for path in plans), default=0)
    ranks_per_node = [len(ranks) for ranks in neighbours_of(WORLD)]
    circumstances = Circumstances(ranks_per_node, largest)
    return choose_progress(WORLD, "auto", circumstances).progress(staged=False)


def in_order(names: Sequence[str], number: int) -> list[str]:
    """Of a round, so that each is as often in every place and after every other."""
    first = number % len(names)
    order = [*names[first:], *names[:first]]
    return order[::-1] if number // len(names) % 2 else order


def clocked(act: Callable[[], object]) -> float:
    """Seconds until all ranks have done something."""
    barrier(WORLD)
    start = time.perf_counter()
    act()
    barrier(WORLD)
    return time.perf_counter() - start


def measure(case: dict[str, Any], folder: Path, progress: Progress) -> dict[str, Any]:
    """Seconds a step of everyone in every round, and until the first step was done."""
    spec = load(folder / "job.yaml")
    compiled = spec.training.model_copy(update={"compile": True})
    batch = CapturedJob(spec).loader.example(spec.training.batch_size)
    steps: dict[str, Step] = {}

    def begin(name: str, given: dict[str, Any]) -> None:
        if "plan" in given:
            plan, own = Plan.load(folder / given["plan"]), folder / f"run of {name}"
            more = {"training": compiled} if given.get("compile") else {}
            steps[name] = ours(spec.model_copy(update=more), plan, progress, own, batch)
        else:
            steps[name] = theirs(spec, given, batch)
        steps[name](0)

    def several(step: Step) -> None:
        for number in range(1, case["steps"] + 1):
            step(number)

    everyone = case["contenders"].items()
    first_s = {name: clocked(partial(begin, name, given)) for name, given in everyone}
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for number in range(case["rounds"]):
        for name in in_order([*steps], number):
            steps[name](0)  # behind the others, which is not counted
            seconds[name].append(clocked(partial(several, steps[name])) / case["steps"])
    return {"seconds": seconds, "first_s": first_s}


def main(folder: Path) -> None:
    case = json.loads((folder / "case.json").read_text())
    torch.set_num_threads(1)
    plans = [folder / given["plan"] for given in case["contenders"].values() if "plan" in given]
    store = dist.TCPStore(case["host"], 29511, WORLD.size, WORLD.rank == 0)
    dist.init_process_group("gloo", store=store, rank=WORLD.rank, world_size=WORLD.size)
    with helped(plans) as progress:
        mine = measure(case, folder, progress)
    mine["peak_bytes"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    everyone = WORLD.gather(mine)
    if everyone is not None:
        (folder / "result.json").write_text(json.dumps(everyone))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
