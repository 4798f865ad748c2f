"""A rank that trains one job by several plans in turns, so that the machine hits all of them alike.

Started as ``mpiexec -n RANKS python -m mpi4py turns.py FOLDER``. The folder holds ``job.yaml``,
plans and ``case.json``: how many rounds, steps in each, and by name who takes part, with a plan and

- ``on``: ``all`` ranks together, the ``first`` alone while others sleep, or ``each`` for itself;
- ``sums``: ``late`` if sums of gradients over replicas start when all ranks have done all else;
- ``compile``: true if stages go through ``torch.compile``.

With ``recorded`` in the case, everyone then trains so many steps of which every row is recorded.
"""

from __future__ import annotations

import json
import resource
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from mpi4py import MPI

from pipectl.capture import CapturedJob
from pipectl.plan import Plan
from pipectl.runs import RunDirectory
from pipectl.runtime.agreement import neighbours_of
from pipectl.runtime.device import CpuDevice, settle_process
from pipectl.runtime.reduction import StageReduction
from pipectl.runtime.setup import Setup
from pipectl.runtime.step import StepRun
from pipectl.runtime.tracing import Recording
from pipectl.runtime.trainer import Trainer
from pipectl.runtime.transport import Circumstances, Progress, choose_progress
from pipectl.runtime.waiting import barrier
from pipectl.schedule.actions import EVENT_NAMES
from pipectl.spec import JobSpec, load
from pipectl.watch.board import Board

Step = Callable[[int], None]


@dataclass
class Training:
    """A job under one plan, ready for its steps."""

    setup: Setup
    step: Step
    rows: int
    recording: Recording | None = None


def trained(
    spec: JobSpec, plan: Plan, progress: Progress, folder: Path, batch: Any, world: MPI.Intracomm
) -> Training:
    """A training step of pipectl's engine, as the worker runs it, always of the same samples."""
    setup = Setup(world, CapturedJob(spec), plan, CpuDevice(), Board(), progress)
    trainer = Trainer(setup, RunDirectory(folder), 1)
    setup.learn_layouts()
    doing = setup.batches.step_of(plan, 0)
    weights = [rows.size / plan.batch_size for rows in doing.sizes]
    cut = (tensor[: plan.batch_size].split(plan.micro_batch_size) for tensor in batch)
    parts = list(zip(*cut, strict=True))
    mine = [parts[index] for index in doing.pieces]

    def step(number: int) -> None:
        given = StepRun(
            doing,
            weights=weights,
            batches=iter(mine),
            seed=(0, number),
            update=lambda run, *_: trainer._end.run(number, run),
            recording=training.recording,
        )
        trainer._end.begin()
        setup.training.run(given)

    training = Training(setup, step, len(doing.actions))
    return training


def helped(plans: Iterable[Path]) -> Progress:
    """Messages with the help that suits the largest one of some plans. Collective."""
    largest = max((Plan.load(path).most_sent_bytes for path in plans), default=0)
    ranks_per_node = [len(ranks) for ranks in neighbours_of(MPI.COMM_WORLD)]
    circumstances = Circumstances(ranks_per_node, largest)
    return choose_progress(MPI.COMM_WORLD, "auto", circumstances).progress(staged=False)


def in_order(names: Sequence[str], number: int) -> list[str]:
    """Of a round, so that each is as often in every place and after every other."""
    first = number % len(names)
    order = [*names[first:], *names[:first]]
    return order[::-1] if number // len(names) % 2 else order


def timed(step: Step, steps: int, world: MPI.Intracomm) -> float:
    """Seconds a step, over all ranks, behind one that is not counted."""
    step(0)
    return clocked(lambda: [step(number) for number in range(1, steps + 1)], world) / steps


def clocked(act: Callable[[], object], world: MPI.Intracomm) -> float:
    """Seconds until all ranks have done something."""
    barrier(world)
    start = time.perf_counter()
    act()
    barrier(world)
    return time.perf_counter() - start


def recorded(training: Training, steps: int, world: MPI.Intracomm) -> list[dict[str, Any]]:
    """Steps one by one, and what this rank did in them."""
    found = []
    for number in range(steps):
        recording = training.recording = Recording()
        seconds = clocked(partial(training.step, number), world)
        found.append({"seconds": seconds, "table": recording.table().tolist()})
    training.recording = None
    return found


class LateSums:
    """Sums of a stage that start when all ranks wait for nothing else."""

    def __init__(self, reduction: StageReduction, world: MPI.Intracomm) -> None:
        self._reduction, self._world = reduction, world

    def arm(self) -> None:
        """Nothing starts within a backward."""

    def start(self) -> None:
        """Nor behind it."""

    def finish(self) -> None:
        barrier(self._world)
        self._reduction.start()
        self._reduction.finish()

    def advance(self) -> None:
        self._reduction.advance()


def rows_by_kind(training: Training, steps: int, world: MPI.Intracomm) -> dict[str, float]:
    """Median seconds from the begin of a row to the begin of the next, by kind and of all."""
    seconds: dict[str, list[float]] = {}
    for step in recorded(training, steps, world):
        for row, following in pairwise(step["table"]):
            kind = EVENT_NAMES[int(row[2])]
            seconds.setdefault(kind, []).append(following[0] - row[0])
    every = [second for times in seconds.values() for second in times]
    named = {kind: statistics.median(times) for kind, times in seconds.items()}
    return {"all": statistics.median(every), **named}


def operators_alone(training: Training) -> dict[str, float]:
    """Median seconds of a stage's forward and backward as PyTorch runs them, without the engine."""
    (stage,) = training.setup.stages.values()
    (segment,) = stage.segments
    call, given = segment.call, list[Any]()

    def noted(*arguments: Any) -> Any:
        *others, received = arguments
        given[:] = *others, list(received)
        return call(*arguments)

    segment.call = noted  # type: ignore[method-assign]
    training.step(0)
    segment.call = call  # type: ignore[method-assign]
    code, seed, states, inputs, received = given
    batch = [inputs[name] for name in code.stage.inputs]
    values = [value.detach().requires_grad_(value.requires_grad) for value in received]
    times: dict[str, list[float]] = {"forward": [], "backward": []}
    for _ in range(500):
        start = time.perf_counter()
        results = code.stage.module(seed, *states, *batch, *values)
        middle = time.perf_counter()
        torch.autograd.backward(results, [torch.ones_like(result) for result in results])
        times["forward"].append(middle - start)
        times["backward"].append(time.perf_counter() - middle)
    stage.forget()
    return {kind: statistics.median(each) for kind, each in times.items()}


def contender(
    given: dict[str, Any], spec: JobSpec, progress: Progress, folder: Path, batch: Any
) -> Training | None:
    """What this rank does for one that takes part; None if others do it."""
    plan = Plan.load(folder / given["plan"])
    on = given.get("on", "all")
    if on == "first" and MPI.COMM_WORLD.rank:
        return None
    world = MPI.COMM_WORLD if on == "all" else MPI.COMM_SELF
    own = folder / f"{given['plan']}-{on}-{MPI.COMM_WORLD.rank if on == 'each' else 0}"
    if given.get("compile"):
        compiled = spec.training.model_copy(update={"compile": True})
        spec = spec.model_copy(update={"training": compiled})
    training = trained(spec, plan, progress, own, batch, world)
    if given.get("sums") == "late":
        sums: Any = training.setup.training.reductions
        sums.update({i: LateSums(each, MPI.COMM_WORLD) for i, each in sums.items()})
    return training


def nothing(number: int) -> None:
    """A step in which others train."""


def measure(case: dict[str, Any], folder: Path, progress: Progress) -> dict[str, Any]:
    """Seconds a step of everyone in every round, and rows of this rank's programs."""
    spec, world = load(folder / "job.yaml"), MPI.COMM_WORLD
    batch = CapturedJob(spec).loader.example(spec.training.batch_size)
    found: dict[str, Training | None] = {}
    first_s: dict[str, float] = {}

    def begin(name: str, given: dict[str, Any]) -> None:
        found[name] = training = contender(given, spec, progress, folder, batch)
        if training:
            training.step(0)

    for name, given in case["contenders"].items():
        first_s[name] = clocked(partial(begin, name, given), world)
    steps = {name: training.step if training else nothing for name, training in found.items()}
    seconds: dict[str, list[float]] = {name: [] for name in found}
    for number in range(case["rounds"]):
        for name in in_order([*steps], number):
            seconds[name].append(timed(steps[name], case["steps"], world))
    rows = {name: training.rows for name, training in found.items() if training}
    kinds, alone = {}, {}
    for name, training in found.items() if case.get("by_kind") else ():
        if training:
            kinds[name] = rows_by_kind(training, case["rounds"], world)
            alone[name] = operators_alone(training)
    records = {
        name: recorded(training, case.get("recorded", 0), world)
        for name, training in found.items()
        if training
    }
    return {
        "seconds": seconds,
        "first_s": first_s,
        "rows": rows,
        "kinds": kinds,
        "operators": alone,
        "records": records,
    }


def main(folder: Path) -> None:
    case = json.loads((folder / "case.json").read_text())
    settle_process(1)
    world = MPI.COMM_WORLD
    plans = {folder / given["plan"] for given in case["contenders"].values()}
    with helped(plans) as progress:
        mine = measure(case, folder, progress)
    mine["peak_bytes"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    everyone = world.gather(mine)
    if everyone is not None:
        (folder / "result.json").write_text(json.dumps(everyone))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
