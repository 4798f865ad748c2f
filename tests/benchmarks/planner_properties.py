"""Properties of plans on random problems: more of anything makes no plan slower

    python tests/benchmarks/planner_properties.py [FIRST COUNT] [--kind NAME ...] [--only TEXT] [-v]

Every problem is planned, and so are its relatives: with a node or a rank less, with less memory,
slower links, slower devices or fewer cores; with every open choice closed in some ways; and with
other orders or names. A failure is a plan that is slower than that of a lesser relative by more
than a tie, or that differs from that of an equal one. For plans with several stages per rank or
split backwards, the gains count that the planner demands of them.
"""

from __future__ import annotations

import sys
from argparse import ArgumentParser
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from math import inf
from random import Random
from time import process_time

from pipectl.cluster import Cluster
from pipectl.errors import InfeasibleError
from pipectl.plan import Plan, Replication
from pipectl.planner import PlanRequest, make_plan
from pipectl.planner.evaluator import TIE
from pipectl.planner.other_schedules import SEVERAL_STAGES_GAIN, UNMEASURED_SPLIT_GAIN
from pipectl.profile import Profile
from pipectl.schedule import SCHEDULES
from tests.benchmarks.jobs import print_table
from tests.planner.gate.gate_corpus import BASELINE, GRAPHS, SIZES_OF_MOST, nodes, profile_of
from tests.planner.test_properties import problem as problem_of_tests
from tests.planner.test_properties import renamed, reordered, twice_as_slow

Problem = tuple[Profile, Cluster, PlanRequest]
MACHINES = (
    *((2,), (1, 1), (3,), (1, 2), (2, 1), (1, 1, 1), (4,), (2, 2), (1, 1, 1, 1), (2, 1, 2)),
    *((3, 3), (2, 2, 2), (1,) * 6, (4, 4), (2, 2, 2, 2)),
)
SPEEDS = ((1.0,), (1.0, 0.5), (0.3, 1.0, 1.0), (1.0, 0.7, 0.4), (0.25, 1.0, 0.6))
OPEN = {
    "one": {},
    "replicas": {"replicas": None},
    "job": {"every_schedule": True, "backward_apart": None, "segments": None},
    "all": {"every_schedule": True, "replicas": None},
    "fixed": {"replicas": None, "micro_batches": 8},
}
KINDS = ("tests", *OPEN)


def problem_of(number: int, kind: str) -> Problem:
    """A random problem; every third one has little memory."""
    if kind == "tests":
        return problem_of_tests(number)
    draw = Random(f"{kind}-{number}")
    graph, count = draw.choice([*GRAPHS]), draw.randint(4, 14)
    sizes = draw.choice([(), SIZES_OF_MOST])
    profile = profile_of(f"{kind}-{graph}-{number}", count, sizes=sizes)
    ranks, speeds = draw.choice(MACHINES), draw.choice(SPEEDS)
    if draw.random() < 0.3:
        speeds = tuple(round(draw.uniform(0.2, 1.0), 2) for _ in ranks)
    cluster = nodes(*ranks, between=draw.choice([1.2e8, 3e8, 1.1e9]), speeds=speeds)
    request = PlanRequest("job", draw.choice([16, 24, 32]), recompute=None, **OPEN[kind])
    request = replace(request, replication=draw.choice([*Replication, None]))
    if number % 3 == 0:
        state = 4 * sum(each.parameter_bytes for each in profile.operators)
        kept = 2 * sum(size for each in profile.operators for _, size in each.saved)
        share = draw.choice([1.2, 1.7, 2.5]) * (state + kept) / cluster.ranks
        if draw.random() < 0.5:
            request = replace(request, memory_limit_bytes=BASELINE + int(share))
        else:  # other memory on every second node
            limits = [BASELINE + int(share * draw.choice([0.6, 1, 2])) for _ in cluster.nodes]
            few = (
                replace(node, device=replace(node.device, memory_bytes=limit))
                for node, limit in zip(cluster.nodes, limits, strict=True)
            )
            cluster = replace(cluster, nodes=tuple(few))
    return profile, cluster, request


def lesser(
    number: int, profile: Profile, cluster: Cluster, request: PlanRequest
) -> Iterator[tuple[str, Problem]]:
    """Problems whose plans can be no faster, by the names of their properties."""
    for place in range(len(cluster.nodes)):
        rest = cluster.nodes[:place] + cluster.nodes[place + 1 :]
        if rest:
            yield "less a node", (profile, replace(cluster, nodes=rest), request)
    for place, node in enumerate(cluster.nodes):
        if node.ranks > 1:
            cores = min(node.cores, node.ranks - 1)
            fewer = [*cluster.nodes]
            fewer[place] = replace(node, ranks=node.ranks - 1, cores=cores)
            yield "less a rank", (profile, replace(cluster, nodes=tuple(fewer)), request)
            break
    if any(node.ranks > 1 for node in cluster.nodes):
        one = tuple(replace(node, cores=1) for node in cluster.nodes)
        yield "one core", (profile, replace(cluster, nodes=one), request)
    yield "slower links", (profile, cluster.with_slower_links(2.0), request)
    slow = [*cluster.nodes]
    at = number % len(slow)
    device = slow[at].device
    slow[at] = replace(slow[at], device=replace(device, speed=device.speed * 0.8))
    yield "slower device", (profile, replace(cluster, nodes=tuple(slow)), request)
    if request.memory_limit_bytes is not None:
        limit = BASELINE + int((request.memory_limit_bytes - BASELINE) * 0.9)
        yield "less memory", (profile, cluster, replace(request, memory_limit_bytes=limit))
    elif slow[at].device.memory_bytes is not None:
        yield "less memory", (profile, cluster.with_more_memory(-BASELINE // 20), request)
    for name, closed in _closed(cluster, request):
        yield name, (profile, cluster, replace(request, **closed))


def _closed(cluster: Cluster, request: PlanRequest) -> Iterator[tuple[str, dict[str, object]]]:
    """Every open choice closed in some ways."""
    copies = [n for n in range(1, cluster.ranks + 1) if cluster.ranks % n == 0 or n == 2]
    named = ["1f1b", "gpipe"]
    if request.every_schedule:
        flushing = (name for name, schedule in SCHEDULES.items() if schedule.flushes)
        named = list(dict.fromkeys([*named, *flushing]))
    values: dict[str, Sequence[object]] = {
        "replicas": copies,
        "replication": tuple(Replication),
        "segments": (False,),
        "backward_apart": (False,),
        "stages": range(1, min(cluster.ranks, 4) + 1),
        "micro_batches": (1, 2, 3, 4, 8, 16),
    }
    for name, every in values.items():
        for value in every if getattr(request, name) is None else ():
            yield name, {name: value}
    for again in (False, True):
        yield "recompute", {"recompute": again, "segments": request.segments and again}
    for name in named:
        yield name, {"schedule": name, "every_schedule": False}


def equal(
    number: int, profile: Profile, cluster: Cluster, request: PlanRequest
) -> Iterator[tuple[str, Problem, float]]:
    """Problems with the same plans, and how many times as long the steps are."""
    if len(cluster.nodes) > 1:
        turned = [*cluster.nodes]
        Random(number).shuffle(turned)
        for order in dict.fromkeys((cluster.nodes[::-1], tuple(turned))):
            yield "nodes", (profile, replace(cluster, nodes=order), request), 1.0
    yield "names", (renamed(profile, number), cluster, request), 1.0
    yield "order", (reordered(profile, number), cluster, request), 1.0
    slower = twice_as_slow(profile), cluster.with_slower_links(2.0), request
    yield "times two", slower, 2.0


def planned(problem: Problem) -> Plan | None:
    """None if there is no plan."""
    try:
        return make_plan(*problem)
    except InfeasibleError:
        return None


def step_of(plan: Plan | None) -> float:
    return inf if plan is None else plan.predicted_step_s


def gain_of(plan: Plan | None) -> float:
    """By which share a plan may be faster than one for which the schedule is open."""
    schedule = None if plan is None else SCHEDULES[plan.schedule]
    gain = TIE
    if schedule is not None and schedule.splits_backward:
        gain = UNMEASURED_SPLIT_GAIN
    elif schedule is not None and schedule.stages_per_rank != (1,):
        gain = SEVERAL_STAGES_GAIN
    return 1 / (1 - gain) - 1


class Count:
    """How often a property was tested, and by which shares it failed, with their problems."""

    def __init__(self) -> None:
        self.tested = 0
        self.failed: list[tuple[float, str]] = []

    def add(self, share: float, allowed: float, problem: str) -> bool:
        """Count one more; whether it failed."""
        self.tested += 1
        if fails := share > allowed:
            self.failed.append((share, problem))
        return fails


def share_above(step_s: float, other_s: float) -> float:
    """By which share a step is above another one."""
    if step_s == other_s:
        return 0.0
    return inf if inf in (step_s, other_s) and step_s > other_s else step_s / other_s - 1


def examine(
    number: int,
    kind: str,
    counts: dict[str, Count],
    wanted: Callable[[str], bool],
    *,
    verbose: bool,
) -> None:
    """Plan a problem and its relatives."""
    problem = problem_of(number, kind)
    own = planned(problem)
    step_s = step_of(own)
    tested = [(name, each, 1.0, False) for name, each in lesser(number, *problem)]
    tested += [(name, each, times, True) for name, each, times in equal(number, *problem)]
    for name, relative, times, both in tested:
        if not wanted(name):
            continue
        plan = planned(relative)
        other_s = step_of(plan) / times
        share = share_above(step_s, other_s)
        if both:
            share = max(share, share_above(other_s, step_s))
        count = counts.setdefault(name, Count())
        if count.add(share, gain_of(plan) + 1e-9, f"{kind} {number}") and verbose:
            print(f"{kind} {number} {name}: {share:.4%}", file=sys.stderr)
            for each in (own, plan):
                print("   ", "none" if each is None else words_of(each), file=sys.stderr)
    bound = counts.setdefault("bound", Count())
    if own is not None and own.search is not None:
        bound.add((own.search.step_lower_bound_s or 0) / step_s - 1, 1e-9, f"{kind} {number}")


def words_of(plan: Plan) -> str:
    """A plan in short."""
    stages = ", ".join(
        f"{len(stage.nodes)}@{'.'.join(map(str, stage.every_rank))}{'r' * stage.recompute}"
        for stage in plan.stages
    )
    return (
        f"{plan.predicted_step_s * 1e3:.3f} ms {plan.schedule} {plan.replication} "
        f"{plan.micro_batches} x {plan.micro_batch_size} {plan.warm_up} [{stages}]"
    )


def main() -> None:
    parser = ArgumentParser()
    parser.add_argument("numbers", nargs="*", type=int, default=[0, 20])
    parser.add_argument("--kind", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--only", default="", help="part of the names of properties")
    parser.add_argument("-v", action="store_true", dest="verbose")
    asked = parser.parse_args()
    first, count = asked.numbers
    counts: dict[str, Count] = {}
    began = process_time()
    for kind in asked.kind:
        for number in range(first, first + count):
            examine(number, kind, counts, lambda name: asked.only in name, verbose=asked.verbose)
    rows = []
    for name, each in counts.items():
        worst = sorted(each.failed, reverse=True)
        which = ", ".join(f"{problem} {share:.2%}" for share, problem in worst[:6])
        rows.append((name, each.tested, len(worst), sum(s > 0.01 for s, _ in worst), which))
    print_table(("property", "tested", "failed", "above 1 %", "largest"), rows)
    total, failed = (sum(row[at] for row in rows) for at in (1, 2))
    print(f"{failed} of {total} failed; {process_time() - began:.0f} s")


if __name__ == "__main__":
    main()
