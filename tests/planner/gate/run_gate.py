"""Plans the requests of the gate and compares the steps with the golden ones.

python tests/planner/gate/run_gate.py            all of them
python tests/planner/gate/run_gate.py memory     those whose names begin so
python tests/planner/gate/run_gate.py --write    make today's steps the golden ones
python tests/planner/gate/run_gate.py --open     with an open schedule against 1F1B and GPipe alone
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, replace
from math import exp, inf, log
from pathlib import Path
from time import process_time
from typing import Any

from pipectl.errors import InfeasibleError
from pipectl.planner import make_plan
from pipectl.simulate import simulate
from tests.planner.gate.gate_corpus import BASELINE, Case, cases

GOLDEN = Path(__file__).with_name("golden.json")
MAX_MEAN, MAX_RATIO = 1.0, 1.01
"""Of the steps over the golden ones: the geometric mean, and any of them."""


@dataclass(frozen=True)
class Result:
    """What became of a case; the ratio is of its step to the golden one."""

    name: str
    step_s: float
    ratio: float
    planning_s: float


def step_of(case: Case, **changes: Any) -> float:
    """The simulated step of the plan of a changed request; infinite if there is none that fits."""
    try:
        plan = make_plan(case.profile, case.cluster, replace(case.request, **changes))
    except InfeasibleError:
        return inf
    found = simulate(plan, case.cluster, process_baseline_bytes=BASELINE)
    for rank, peak in enumerate(found.peak_memory_bytes):
        assert peak <= case.cluster.memory_of(rank, case.request.memory_limit_bytes), case.name
    return found.step_time_s


def run(chosen: list[Case]) -> list[Result]:
    """Plan some cases."""
    golden = json.loads(GOLDEN.read_text())
    found = []
    for case in chosen:
        began = process_time()
        step_s = step_of(case)
        ratio = step_s / golden.get(case.name, step_s)
        found.append(Result(case.name, step_s, ratio, process_time() - began))
    return found


def with_open_schedules(chosen: list[Case]) -> list[Result]:
    """Plan those that name no schedule and have a replica per stage, with all and with two."""
    found = []
    for case in chosen:
        request = case.request
        if request.schedule is None and request.warm_up is None and request.replicas == 1:
            began = process_time()
            step_s, few_s = (step_of(case, every_schedule=every) for every in (True, False))
            found.append(Result(case.name, step_s, step_s / few_s, process_time() - began))
    return found


def mean_of(results: list[Result]) -> float:
    """The geometric mean of the ratios."""
    return exp(sum(log(result.ratio) for result in results) / len(results))


def main(words: list[str]) -> int:
    prefixes = tuple(word for word in words if not word.startswith("-"))
    plan = with_open_schedules if "--open" in words else run
    results = plan([case for case in cases() if not prefixes or case.name.startswith(prefixes)])
    if "--write" in words:
        steps = {result.name: result.step_s for result in results if result.step_s < inf}
        GOLDEN.write_text(json.dumps(json.loads(GOLDEN.read_text()) | steps, indent=1) + "\n")
    for result in sorted(results, key=lambda each: each.ratio):
        if abs(result.ratio - 1) > 1e-6 or "-v" in words:
            print(f"{result.ratio:8.4f}  {result.planning_s:6.2f} s  {result.name}")
    ratios = [result.ratio for result in results]
    better = sum(ratio < 1 - 1e-6 for ratio in ratios)
    worse = sum(ratio > 1 + 1e-6 for ratio in ratios)
    print(
        f"{len(results)} requests: mean {mean_of(results):.4f}, worst {max(ratios):.4f}, "
        f"best {min(ratios):.4f}; {better} better, {worse} worse; "
        f"{sum(result.planning_s for result in results):.0f} s"
    )
    return int(mean_of(results) > MAX_MEAN + 1e-6 or max(ratios) > MAX_RATIO)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
