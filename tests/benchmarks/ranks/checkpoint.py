"""A rank of ``checkpoint.py``: two trainers in one process, one of which saves checkpoints."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

from mpi4py import MPI
from trainers import Training, helped, in_turns

from pipectl.runtime.device import settle_process
from pipectl.spec import load


class Saving(Training):
    """Steps of a trainer, and what it does between them."""

    def __init__(self, case: dict[str, Any], name: str, progress: Any, every: str) -> None:
        total = case["warm_up"] + case["rounds"] * case["steps"] + 1  # behind the last it saves
        more = [f"training.steps={total}", f"checkpoint={{every: {every}, keep: 2}}"]
        spec = load(Path(case["job"]), overrides=[*case["overrides"], *more])
        super().__init__(spec, Path(case["folder"]), name, progress, total)
        self.saving_s: list[float] = []
        self._save = self.trainer._save
        self.trainer._save = self._timed_save  # type: ignore[method-assign]

    def step(self, number: int) -> None:
        super().step(number)
        self.trainer._between_steps(number)

    def finish(self) -> None:
        self.trainer._saver.finish()
        super().finish()

    def _timed_save(self, step: int) -> None:
        start = time.perf_counter()
        self._save(step)
        self.saving_s.append(time.perf_counter() - start)


def main(folder: Path) -> None:
    settle_process(1)
    case = json.loads((folder / "case.json").read_text())
    with helped([folder / "plan.json"]) as progress:
        saving = Saving(case, "with", progress, str(case["steps"]))
        trainings = {"without": Saving(case, "without", progress, "null"), "with": saving}
        times = in_turns(trainings, case["warm_up"], case["rounds"], case["steps"])
    if MPI.COMM_WORLD.rank == 0:
        found = {**times, "saving_s": saving.saving_s}
        (folder / "result.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
