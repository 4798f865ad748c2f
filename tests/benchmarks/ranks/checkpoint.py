"""A rank of ``checkpoint.py``: two trainers in one process, one of which saves checkpoints."""

from __future__ import annotations

import json
import sys
import time
from itertools import count
from pathlib import Path
from typing import Any

from mpi4py import MPI

from pipectl.capture import CapturedJob
from pipectl.plan import Plan
from pipectl.runs import RunDirectory
from pipectl.runtime.device import CpuDevice
from pipectl.runtime.failure import Doing
from pipectl.runtime.process import settle_process
from pipectl.runtime.setup import Setup
from pipectl.runtime.trainer import Trainer
from pipectl.runtime.transport import choose_progress
from pipectl.runtime.waiting import barrier
from pipectl.spec import load


class Training:
    """Steps of a trainer, and what it does between them, as ``Trainer.train`` has it."""

    def __init__(self, case: dict[str, Any], name: str, progress: Any, every: str) -> None:
        total = case["warm_up"] + case["rounds"] * case["steps"] + 1  # behind the last it saves
        more = [f"training.steps={total}", f"checkpoint={{every: {every}, keep: 2}}"]
        spec = load(Path(case["job"]), overrides=[*case["overrides"], *more])
        folder = Path(case["folder"])
        if MPI.COMM_WORLD.rank == 0:
            (folder / name).mkdir()
        barrier(MPI.COMM_WORLD)
        plan = Plan.load(folder / "plan.json")
        setup = Setup(MPI.COMM_WORLD, CapturedJob(spec), plan, CpuDevice(), Doing(), progress)
        self.trainer = Trainer(setup, RunDirectory(folder / name), 1)
        self.trainer._telemetry.state("measuring")
        self.trainer.learn_layouts()
        batches = iter(setup.batches)
        self._planned = [next(batches) for _ in range(total)]
        self._loaded = self.trainer._load(self._planned)
        self._number = count(1)
        self.saving_s: list[float] = []
        self._save = self.trainer._continuation.save
        self.trainer._continuation.save = self._timed_save  # type: ignore[method-assign]

    def run(self, steps: int) -> float:
        """Seconds a step, from one meeting of all ranks to the next."""
        barrier(MPI.COMM_WORLD)
        start = time.perf_counter()
        for _ in range(steps):
            number = next(self._number)
            self.trainer._step(number, len(self._planned[number - 1][1]), self._loaded)
            self.trainer._between_steps(number)
        barrier(MPI.COMM_WORLD)
        return (time.perf_counter() - start) / steps

    def finish(self) -> None:
        self.trainer._continuation.finish()
        self.trainer._telemetry.finish()

    def _timed_save(self, step: int) -> None:
        start = time.perf_counter()
        self._save(step)
        self.saving_s.append(time.perf_counter() - start)


def main(folder: Path) -> None:
    settle_process(1)
    case = json.loads((folder / "case.json").read_text())
    choice = choose_progress(MPI.COMM_WORLD.Dup(), "auto")
    with choice.progress(staged=False) as progress:
        trainings = {
            "without": Training(case, "without", progress, "null"),
            "with": Training(case, "with", progress, str(case["steps"])),
        }
        found: dict[str, Any] = {name: [] for name in trainings}
        for training in trainings.values():
            training.run(case["warm_up"])
        for number in range(case["rounds"]):
            order = list(trainings) if number % 2 else list(trainings)[::-1]
            for name in order:
                found[name].append(trainings[name].run(case["steps"]))
        for training in trainings.values():
            training.finish()
    found["saving_s"] = trainings["with"].saving_s
    if MPI.COMM_WORLD.rank == 0:
        (folder / "result.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
