"""``training.compile``: compiled stages against stages that are not compiled.

Two ranks train the same plan in turns, in the same processes. *Begins later* is the time of the
compiler; *pays after* is the number of steps after which it has paid.

    python tests/benchmarks/compiled.py [MODEL ...]     gpt, resnet50, densenet121
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from in_turns import cluster_of, gpt, profiled, ratio, spread, train_in_turns, vision
from tables import print_table

from pipectl.planner import PlanRequest, make_plan

RANKS, MICRO_BATCHES = 2, 8
ROUNDS, STEPS = 5, 3
COLUMNS = ("model", "s per step", "compiled", "faster", "begins later by s", "pays after")
JOBS = {"gpt": gpt(), "resnet50": vision("resnet50"), "densenet121": vision("densenet121")}


def trained(folder: Path, name: str) -> dict[str, Any]:
    """What rank 0 measured of both."""
    job = JOBS[name]
    job.write(folder, RANKS)
    request = PlanRequest("compiled", job.batch, micro_batches=MICRO_BATCHES, stages=RANKS)
    make_plan(profiled(folder, MICRO_BATCHES), cluster_of(RANKS), request).save(
        folder / "plan.json"
    )
    plain = {"plan": "plan.json"}
    contenders = {"plain": plain, "compiled": {**plain, "compile": True}}
    case = {"contenders": contenders, "rounds": ROUNDS, "steps": STEPS}
    return train_in_turns(folder, case, RANKS)[0]


def row(name: str) -> tuple[str, ...]:
    """Of the table."""
    with tempfile.TemporaryDirectory() as place:
        found = trained(Path(place), name)
    plain, compiled = (found["seconds"][key] for key in ("plain", "compiled"))
    more_s = found["first_s"]["compiled"] - found["first_s"]["plain"]
    saved_s = statistics.median(plain) - statistics.median(compiled)
    pays = f"{more_s / saved_s:.0f} steps" if saved_s > 0 else "never"
    faster = f"{ratio(plain, compiled):.2f}x"
    return name, spread(plain), spread(compiled), faster, f"{more_s:.0f}", pays


def main() -> None:
    print(f"## Compiled stages ({RANKS} ranks, {ROUNDS} rounds of {STEPS} steps)\n")
    print_table(COLUMNS, map(row, sys.argv[1:] or JOBS))


if __name__ == "__main__":
    main()
