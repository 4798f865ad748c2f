"""Time to lower the programs of up to 1,024 ranks with 4,096 micro-batches, and to validate them.

Each size has a process of its own, on one core, after compilation.

    python tests/benchmarks/scale.py [RANKSxMICRO_BATCHES ...]
"""

from __future__ import annotations

import resource
import subprocess
import sys
import time
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "schedule"))

from planner_simulator import plan_of
from validator import validate

from pipectl.schedule import lower

SHAPES = ("64x512", "256x1024", "1024x4096")
GOAL_S = 20.0


def measure(ranks: int, micro_batches: int) -> None:
    """A row of the table."""
    small = plan_of(2, 2)
    validate(small, [lower(small, rank) for rank in range(2)])
    plan = plan_of(ranks, micro_batches)
    seconds = [time.perf_counter()]
    processor = [time.process_time()]
    programs = [lower(plan, rank) for rank in range(ranks)]
    seconds.append(time.perf_counter())
    processor.append(time.process_time())
    validate(plan, programs)
    seconds.append(time.perf_counter())
    processor.append(time.process_time())
    rows = sum(len(program.body) for program in programs)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    lowering, proof = seconds[1] - seconds[0], seconds[2] - seconds[1]
    cells = (
        *(f"{ranks:,}", f"{micro_batches:,}", f"{rows:,}", f"{lowering:.2f}", f"{proof:.2f}"),
        *(f"{lowering + proof:.2f}", f"{processor[2] - processor[0]:.2f}", f"{peak:.1f} GiB"),
    )
    print(f"| {' | '.join(cells)} |", flush=True)


def main(shapes: list[str]) -> None:
    if shapes[:1] == ["--one"]:
        ranks, _, micro_batches = shapes[1].partition("x")
        measure(int(ranks), int(micro_batches))
        return
    print(f"## Lowering and proof at scale (goal: together below {GOAL_S:.0f} s)\n")
    print("1F1B, one stage a rank.\n")
    print(
        "| ranks | micro-batches | rows | lower s | prove s | together s | processor s | memory |"
    )
    print("|---|---|---|---|---|---|---|---|", flush=True)
    for shape in shapes or SHAPES:
        subprocess.run([sys.executable, __file__, "--one", shape], check=True)


if __name__ == "__main__":
    main(sys.argv[1:])
