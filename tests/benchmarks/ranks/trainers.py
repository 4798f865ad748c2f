"""Trainers in one process whose steps are compared in turns: so the machine is alike for all."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from itertools import count
from pathlib import Path
from typing import Any

from mpi4py import MPI

from pipectl.capture import CapturedJob
from pipectl.plan import Plan
from pipectl.runs import RunDirectory
from pipectl.runtime.agreement import neighbours_of
from pipectl.runtime.device import CpuDevice
from pipectl.runtime.process import Doing
from pipectl.runtime.setup import Setup
from pipectl.runtime.trainer import Trainer
from pipectl.runtime.transport import Circumstances, Progress, choose_progress
from pipectl.runtime.waiting import barrier
from pipectl.spec import JobSpec


class Training:
    """Steps of a trainer, as ``Trainer.train`` makes them.

    Args:
        folder: of ``plan.json``; the run directory is made within it.
        steps: that it makes in all.
    """

    def __init__(self, spec: JobSpec, folder: Path, name: str, progress: Any, steps: int) -> None:
        run = RunDirectory(folder / name)
        if MPI.COMM_WORLD.rank == 0:
            run.trace.mkdir(parents=True)
        barrier(MPI.COMM_WORLD)
        plan = Plan.load(folder / "plan.json")
        setup = Setup(MPI.COMM_WORLD, CapturedJob(spec), plan, CpuDevice(), Doing(), progress)
        self.trainer = Trainer(setup, run, 1)
        self.trainer._telemetry.state("measuring")
        self.trainer._steps.learn_layouts()
        batches = iter(setup.division.batches)
        self._planned = [next(batches) for _ in range(steps)]
        self.trainer._steps.begin(self._planned, 0)
        self._number = count(1)

    def run(self, steps: int) -> float:
        """Seconds a step, from one meeting of all ranks to the next."""
        barrier(MPI.COMM_WORLD)
        start = time.perf_counter()
        for _ in range(steps):
            self.step(next(self._number))
        barrier(MPI.COMM_WORLD)
        return (time.perf_counter() - start) / steps

    def step(self, number: int) -> None:
        """Make the next step."""
        self.trainer._steps.train(number, [self._planned[number - 1][1]])

    def finish(self) -> None:
        """End what goes on beside the steps."""
        self.trainer._telemetry.finish()


def helped(plans: Iterable[Path]) -> Progress:
    """Messages with the help that suits the largest one of some plans. Collective."""
    most = max((Plan.load(path).most_sent_bytes for path in plans), default=0)
    ranks_per_node = [len(ranks) for ranks in neighbours_of(MPI.COMM_WORLD)]
    circumstances = Circumstances(ranks_per_node, most)
    return choose_progress(MPI.COMM_WORLD, "auto", circumstances).progress(staged=False)


def in_turns(
    trainings: Mapping[str, Training], warm_up: int, rounds: int, steps: int, unmeasured: int = 0
) -> dict[str, list[float]]:
    """Seconds a step in every round, by name.

    Args:
        unmeasured: first steps of a turn, in which ends what the turn before has left behind.
    """
    found: dict[str, list[float]] = {name: [] for name in trainings}
    for training in trainings.values():
        training.run(warm_up)
    for number in range(rounds):
        for name in _order(list(trainings), number):
            for _ in range(unmeasured):
                trainings[name].run(1)
            found[name].append(trainings[name].run(steps))
    for training in trainings.values():
        training.finish()
    return found


def _order(names: list[str], number: int) -> list[str]:
    """Of a round, so that each is as often in every place and behind every other."""
    first = number % len(names)
    order = names[first:] + names[:first]
    return order[::-1] if number // len(names) % 2 else order
