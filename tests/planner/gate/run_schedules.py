"""What a free choice of schedule gains over 1F1B and GPipe on requests of the gate.

    python tests/planner/gate/run_schedules.py plain small

Plans those with one replica per stage and an open schedule whose names begin so.
"""

from __future__ import annotations

import sys
from collections import Counter
from dataclasses import replace
from math import exp, log

from gate_corpus import cases
from run_gate import step_of

from pipectl.planner import make_plan


def main(prefixes: tuple[str, ...]) -> None:
    ratios: list[float] = []
    chosen: Counter[str] = Counter()
    for case in cases():
        request = case.request
        is_open = request.schedule is None and request.warm_up is None and request.replicas == 1
        if is_open and case.name.startswith(prefixes):
            free = replace(request, every_schedule=True)
            plan = make_plan(case.profile, case.cluster, free)
            chosen[plan.schedule] += 1
            few = replace(case, request=replace(request, every_schedule=False))
            ratios.append(plan.predicted_step_s / step_of(few))
    print(
        f"{len(ratios)} requests: mean {exp(sum(map(log, ratios)) / len(ratios)):.4f}, best "
        f"{min(ratios):.4f}, worst {max(ratios):.4f}; {sum(each < 0.999 for each in ratios)} "
        f"shorter; {dict(chosen.most_common())}"
    )


if __name__ == "__main__":
    main(tuple(sys.argv[1:]) or ("",))
