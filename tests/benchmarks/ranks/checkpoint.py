"""A rank of ``checkpoint.py``: two trainers in one process, one of which saves checkpoints."""

from __future__ import annotations

import json
import sys
import time
from itertools import count, islice
from pathlib import Path
from typing import Any

from mpi4py import MPI
from turns import clocked, helped, in_order

from pipectl.capture import CapturedJob
from pipectl.plan import Plan
from pipectl.runs import RunDirectory
from pipectl.runtime.device import CpuDevice, settle_process
from pipectl.runtime.setup import Setup
from pipectl.runtime.trainer import Trainer
from pipectl.runtime.waiting import barrier
from pipectl.spec import load
from pipectl.watch.board import Board

WORLD = MPI.COMM_WORLD


class Training:
    """Steps of a trainer and what it does between them, as ``Trainer.train`` makes them.

    Args:
        every: steps from a checkpoint to the next; null for none.

    Attributes:
        saving_s: seconds for which training stood still, of every checkpoint.
    """

    def __init__(self, case: dict[str, Any], name: str, progress: Any, every: str) -> None:
        folder = Path(case["folder"])
        total = case["warm_up"] + case["rounds"] * case["steps"] + 1  # after the last it saves
        more = [f"training.steps={total}", f"checkpoint={{every: {every}, keep: 2}}"]
        spec = load(Path(case["job"]), overrides=[*case["overrides"], *more])
        run = RunDirectory(folder / name)
        if WORLD.rank == 0:
            run.trace.mkdir(parents=True)
        barrier(WORLD)
        plan = Plan.load(folder / "plan.json")
        setup = Setup(WORLD, CapturedJob(spec), plan, CpuDevice(), Board(), progress)
        self.trainer = Trainer(setup, run, 1)
        self.trainer._telemetry.state("measuring")
        setup.learn_layouts()
        self._planned = list(islice(setup.job.loader.batches(), total))
        self.trainer._steps.begin(setup.job.loader, total, 0)
        self._number = count(1)
        self.saving_s: list[float] = []
        self._save = self.trainer._save
        self.trainer._save = self._timed_save  # type: ignore[method-assign]

    def run(self, steps: int) -> float:
        """Seconds per step, from one meeting of all ranks to the next."""
        return (
            clocked(lambda: [self._step(next(self._number)) for _ in range(steps)], WORLD) / steps
        )

    def finish(self) -> None:
        """End what goes on beside the steps."""
        self.trainer._saver.finish()
        self.trainer._telemetry.finish()

    def _step(self, number: int) -> None:
        self.trainer._steps.train(number, [self._planned[number - 1]])
        self.trainer._between_steps(number)

    def _timed_save(self, step: int) -> None:
        start = time.perf_counter()
        self._save(step)
        self.saving_s.append(time.perf_counter() - start)


def main(folder: Path) -> None:
    settle_process(1)
    case = json.loads((folder / "case.json").read_text())
    with helped([folder / "plan.json"]) as progress:
        saving = Training(case, "with", progress, str(case["steps"]))
        trainings = {"without": Training(case, "without", progress, "null"), "with": saving}
        found: dict[str, list[float]] = {name: [] for name in trainings}
        for training in trainings.values():
            training.run(case["warm_up"])
        for number in range(case["rounds"]):
            for name in in_order([*trainings], number):
                found[name].append(trainings[name].run(case["steps"]))
        for training in trainings.values():
            training.finish()
    if WORLD.rank == 0:
        result = {**found, "saving_s": saving.saving_s}
        (folder / "result.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
