"""What each stage does with the values its backward needs: keep, offload or recompute them.

Recomputation takes time to compute, offload takes time of the way to the host's memory, which is
free of charge while it is shorter than one computation. Stages that are on ranks of their own do
not feel each other's choice in their memory, so one simulation with all stages alike says which of
them fit that way. Every stage then takes what seems cheapest of what fits, and changes its mind if
that makes the simulated step shorter.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import NamedTuple

from pipectl.cluster import Cluster
from pipectl.plan import OffloadTarget, Plan, Stage
from pipectl.planner.judge import TIE
from pipectl.planner.trials import Trials


class Way(NamedTuple):
    """What a stage does with what its backward needs; all keep it if neither."""

    recompute: bool
    offload: bool


Order = Callable[[Way, Stage], float]
"""What is to be low."""


def ways(recompute: Sequence[bool], offload: Sequence[bool]) -> tuple[Way, ...]:
    """All combinations, the simplest first."""
    return tuple(Way(*both) for both in product(sorted(recompute), sorted(offload)))


def alike(plan: Plan, way: Way) -> Plan:
    """With the same way for all stages."""
    return _with_ways(plan, [way] * len(plan.stages))


def within_memory(
    plan: Plan, allowed: Sequence[Way], trials: Trials, cluster: Cluster
) -> Plan | None:
    """The fastest found of the plans that differ in the ways of their stages; None if none fits.

    Args:
        plan: with a prediction for the first of the allowed ways.
    """
    if trials.fits(plan):
        return plan
    uniform = {allowed[0]: plan, **{way: trials.run(alike(plan, way)) for way in allowed[1:]}}
    fitting = {way: _fitting_stages(tried, trials) for way, tried in uniform.items()}
    best: Plan | None = None
    for order in (_cost_s(cluster, plan.offload_to), _offload_first, _recompute_first):
        chosen = _assigned(plan, fitting, order)
        tried = None if chosen is None else trials.run(_with_ways(plan, chosen))
        if tried is not None and trials.fits(tried) and _is_faster(tried, best):
            best = tried
    return None if best is None else _improved(best, fitting, trials)


def _with_ways(plan: Plan, chosen: Sequence[Way]) -> Plan:
    stages = (
        replace(stage, recompute=way.recompute, offload=way.offload and not stage.backward_ranks)
        for stage, way in zip(plan.stages, chosen, strict=True)
    )
    return replace(plan, stages=tuple(stages), prediction=None)


def _fitting_stages(tried: Plan, trials: Trials) -> list[bool]:
    return [trials.stage_fits(tried, index) for index in range(len(tried.stages))]


def _assigned(plan: Plan, fitting: Mapping[Way, Sequence[bool]], order: Order) -> list[Way] | None:
    """The first way in some order that fits each stage; None if one of them has none."""
    chosen = []
    for index, stage in enumerate(plan.stages):
        there = [way for way, fits in fitting.items() if fits[index]]
        if not there:
            return None
        chosen.append(min(there, key=lambda way: order(way, stage)))
    return chosen


def _cost_s(cluster: Cluster, target: OffloadTarget) -> Order:
    """About what a way takes longer, for one micro-batch."""

    def cost_s(way: Way, stage: Stage) -> float:
        device = cluster.device(stage.ranks[0])
        forward_s = stage.cost.forward_s / device.speed
        backward_s = stage.cost.backward_s / device.speed
        kept = stage.cost.input_bytes if way.recompute else stage.cost.saved_bytes
        copy_s = device.offload_link(target).transfer_s(kept) if way.offload else 0.0
        late_s = max(0.0, copy_s - forward_s) + max(0.0, copy_s - backward_s)
        return late_s + way.recompute * forward_s

    return cost_s


def _offload_first(way: Way, _: Stage) -> float:
    return 2 * way.recompute + (way.offload and way.recompute)


def _recompute_first(way: Way, _: Stage) -> float:
    return 2 * way.offload + (way.offload and way.recompute)


def _improved(best: Plan, fitting: Mapping[Way, Sequence[bool]], trials: Trials) -> Plan:
    """Other ways for single stages, as long as that makes the step shorter."""
    before: Plan | None = None
    while best is not before and not trials.are_over:
        before = best
        for index in range(len(best.stages)):
            for way, fits in fitting.items():
                if (fits[index] or _shares_ranks(best, index)) and not trials.are_over:
                    best = _better(best, index, way, trials)
    return best


def _better(best: Plan, index: int, way: Way, trials: Trials) -> Plan:
    chosen = [Way(stage.recompute, stage.offload) for stage in best.stages]
    if chosen[index] == way:
        return best
    chosen[index] = way
    tried = trials.run(_with_ways(best, chosen))
    return tried if trials.fits(tried) and _is_faster(tried, best) else best


def _is_faster(tried: Plan, best: Plan | None) -> bool:
    return best is None or tried.predicted_step_s < best.predicted_step_s * (1 - TIE)


def _shares_ranks(plan: Plan, index: int) -> bool:
    stage = plan.stages[index]
    return any(
        other is not stage and {*stage.ranks, *stage.backward_ranks} & {*other.ranks}
        for other in plan.stages
    )
