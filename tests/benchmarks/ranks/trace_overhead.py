"""A rank of ``trace_overhead.py``: three trainers in a process, one of which records every step."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from mpi4py import MPI
from trainers import Training, helped, in_turns

from pipectl.plan import Plan
from pipectl.runtime.device import settle_process
from pipectl.runtime.transport import Progress
from pipectl.schedule import lower
from pipectl.spec import load

WARM_UP, UNMEASURED = 3, 1
NOTHING = "{steps: []}"


class Recording(Training):
    """Steps of a trainer that may record them."""

    def __init__(self, folder: Path, name: str, progress: Progress, trace: str, steps: int) -> None:
        spec = load(folder / "job.yaml", overrides=[f"training.steps={steps}", f"trace={trace}"])
        super().__init__(spec, folder, name, progress, steps)

    def finish(self) -> None:
        self.trainer._tracing.finish()
        super().finish()


def main(folder: Path) -> None:
    settle_process(1)
    case = json.loads((folder / "case.json").read_text())
    total = WARM_UP + case["rounds"] * (UNMEASURED + case["steps"])
    traces = {"none": NOTHING, "every": "{every: 1}", "again": NOTHING}
    with helped([folder / "plan.json"]) as progress:
        trainings = {
            name: Recording(folder, name, progress, trace, total) for name, trace in traces.items()
        }
        times = in_turns(trainings, WARM_UP, case["rounds"], case["steps"], UNMEASURED)
    if MPI.COMM_WORLD.rank == 0:
        rows = len(lower(Plan.load(folder / "plan.json"), 0))
        (folder / "result.json").write_text(json.dumps({**times, "rows": rows}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
