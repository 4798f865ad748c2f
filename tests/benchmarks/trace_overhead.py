"""Cost of recording steps.

Two ranks train a small GPT in turns with every step recorded, with none, and with none once more;
the ratio of the latter two is the error of the method. Also measured: the time to record one
action, and to write the file of one step, which a thread of rank 0 does.

    python tests/benchmarks/trace_overhead.py [ROUNDS] [STEPS]
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from in_turns import cluster_of, gpt, profiled, train_in_turns

from pipectl.planner import PlanRequest, make_plan
from pipectl.runtime.tracing import WIDTH, Recording, timeline_of
from pipectl.schedule import Action, Kind

RANKS, MICRO_BATCHES = 2, 8
ROUNDS, STEPS = 180, 2
ACTIONS, FILES, REPEATS = 20_000, 20, 15
PAUSE_S = 0.05


def measure(folder: Path, rounds: int, steps: int) -> tuple[dict[str, list[float]], int]:
    """Seconds per step in every round, by name, and the rows of a step."""
    job = gpt(layers=4, width=128, batch=16)
    job.write(folder, RANKS)
    request = PlanRequest("trace", job.batch, micro_batches=MICRO_BATCHES, stages=RANKS)
    plan = make_plan(profiled(folder, MICRO_BATCHES), cluster_of(RANKS), request)
    plan.save(folder / "plan.json")
    plain = {"plan": "plan.json"}
    contenders = {"none": plain, "every": {**plain, "records": True}, "again": plain}
    case = {"contenders": contenders, "rounds": rounds, "steps": steps}
    found = train_in_turns(folder, case, RANKS)[0]
    return found["seconds"], found["rows"]["every"]


def show(seconds: dict[str, list[float]], rows: int, record_s: float) -> None:
    none, again, every = (seconds[name] for name in ("none", "again", "every"))
    step_s = statistics.median([*none, *again])
    print(f"a step, nothing recorded:  {step_s * 1e3:.2f} ms (median)")
    print(f"a step, every one recorded: {statistics.median(every) * 1e3:.2f} ms")
    base = [(n + a) / 2 for n, a in zip(none, again, strict=True)]
    show_ratio("ratio", every, base)
    show_ratio("nothing recorded, against itself", again, none)
    share = rows * record_s / step_s
    print(f"actions a step and rank: {rows}, which take {share:.3%} of a step to record")


def show_ratio(name: str, ours: list[float], theirs: list[float]) -> None:
    """By round; the error is that of a median, from the spread of the middle half."""
    ratios = sorted(a / b for a, b in zip(ours, theirs, strict=True))
    low, high = ratios[len(ratios) // 4], ratios[-1 - len(ratios) // 4]
    error = 0.93 * (high - low) / len(ratios) ** 0.5
    print(
        f"{name}: {statistics.median(ratios):.4f} +- {error:.4f} (median of {len(ratios)} rounds; "
        f"half of them {low:.4f} to {high:.4f}, all {ratios[0]:.4f} to {ratios[-1]:.4f})"
    )


def record() -> float:
    """Seconds that recording one action takes; median of some repeats."""
    rows = np.zeros((ACTIONS, len(Action._fields)), dtype=np.int32)
    times = []
    for _ in range(REPEATS):
        recording = Recording()
        recording.expect(rows)
        start = time.perf_counter()
        for _ in range(ACTIONS):
            recording.add(1.0, 2.0)
        times.append((time.perf_counter() - start) / ACTIONS)
    return statistics.median(times)


def write(folder: Path, rows: int) -> float:
    """Seconds that a step's file takes, of so many actions a rank; median of some repeats."""
    table = np.zeros((rows + 1, WIDTH))
    table[1:, 2] = int(Kind.FORWARD)
    times = []
    for _ in range(FILES):
        time.sleep(PAUSE_S)  # what is written again at once is in the caches, and faster
        start = time.perf_counter()
        timeline_of(dict.fromkeys(range(RANKS), table), RANKS).save(folder / "step.json")
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def main(rounds: int = ROUNDS, steps: int = STEPS) -> None:
    record_s = record()
    with tempfile.TemporaryDirectory() as folder:
        seconds, rows = measure(Path(folder), rounds, steps)
        write_s = write(Path(folder), rows)
    show(seconds, rows, record_s)
    print(f"recording one action: {record_s * 1e6:.3f} us")
    print(f"writing a step's file: {write_s * 1e3:.2f} ms")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
