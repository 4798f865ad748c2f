"""What each stage does with the values its backward needs: keep, offload, recompute or send them.

Recomputation takes time to compute, all at once or block by block: blocks take about the same time,
and hold the inputs of all, but besides them only what one block saves. Offload takes time of the
way to the host's memory, which is free of charge while it is shorter than one computation. Stages
that are on ranks of their own do not feel each other's choice in their memory, so one simulation
with all stages alike says which of them fit that way. Every stage then takes what seems cheapest of
what fits, and changes its mind if that makes the simulated step shorter.

Between the two ranks of a stage whose backward is elsewhere, either all that its forward has saved
streams, or only what the forward started from, and the rank of the backward computes the rest once
more: less traffic for more computation. A link that carries the first within a forward hides it; on
a slower one, the bottleneck of a stage is the shorter of

    saved values:   longest of forward, backward, copy of saved values
    inputs alone:   longest of forward + backward, copy of inputs

This says which stages might recompute. Messages of several stages share links, so the simulator
judges: that choice, none, all, and single stages that change theirs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import NamedTuple

from pipectl.cluster import Cluster
from pipectl.plan import Blocks, OffloadTarget, Plan, Stage
from pipectl.planner.judge import TIE, Trials


def guessed_traffic(plan: Plan, cluster: Cluster, trials: Trials) -> Plan:
    """The fastest if no stages, those with slow links, or all recompute; of equals the first.

    Args:
        plan: with a prediction, and nothing recomputed.
    """
    apart = [index for index, stage in enumerate(plan.stages) if stage.backward_ranks]
    slow = [index for index in apart if _has_slow_link(plan.stages[index], cluster)]
    best = plan
    for chosen in (slow, apart) if slow != apart else (apart,):
        best = _better(best, _recomputing(plan, chosen), trials) if chosen else best
    return best


def settled_traffic(plan: Plan, trials: Trials) -> Plan:
    """With other choices of single stages, as long as that makes the step shorter.

    Args:
        plan: with a prediction.
    """
    best, before = plan, None
    while best is not before and not trials.are_over:
        before = best
        for index, stage in enumerate(plan.stages):
            if stage.backward_ranks and not trials.are_over:
                best = _better(best, _changed(best, index), trials)
    return best


def _has_slow_link(stage: Stage, cluster: Cluster) -> bool:
    """Whether sending its inputs and computing once more seems to take less than what it saves."""
    ends = stage.ranks[0], stage.backward_ranks[0]
    link, speeds = cluster.link(*ends), [cluster.device(rank).speed for rank in ends]
    forward_s, again_s = (stage.cost.forward_s / speed for speed in speeds)
    backward_s = stage.cost.backward_s / speeds[1]
    saved_s = max(forward_s, backward_s, link.hold_s(stage.cost.saved_bytes))
    inputs_s = max(forward_s, again_s + backward_s, link.hold_s(stage.cost.input_bytes))
    return inputs_s < saved_s


def _better(best: Plan, other: Plan, trials: Trials) -> Plan:
    """One of the two: what fits, and of what both do, what is faster by more than a tie."""
    tried = trials.run(other)
    fit = trials.fits(best), trials.fits(tried)
    if fit[0] != fit[1]:
        return tried if fit[1] else best
    return tried if tried.predicted_step_s < best.predicted_step_s * (1 - TIE) else best


def _recomputing(plan: Plan, chosen: Sequence[int]) -> Plan:
    stages = (
        replace(stage, recompute=index in chosen) if stage.backward_ranks else stage
        for index, stage in enumerate(plan.stages)
    )
    return replace(plan, stages=tuple(stages), prediction=None)


def _changed(plan: Plan, index: int) -> Plan:
    stages = list(plan.stages)
    stages[index] = replace(stages[index], recompute=not stages[index].recompute)
    return replace(plan, stages=tuple(stages), prediction=None)


class Way(NamedTuple):
    """What a stage does with what its backward needs; all keep it if neither.

    Args:
        blocks: whether it recomputes block by block, where it has blocks.
    """

    recompute: bool
    offload: bool
    blocks: bool = False


Price = Callable[[Way, Stage], float]
"""What is to be low."""


def ways(
    recompute: Sequence[bool], offload: Sequence[bool], blocks: Sequence[bool] = (False,)
) -> tuple[Way, ...]:
    """All combinations, the simplest first."""
    found = product(sorted(recompute), sorted(blocks), sorted(offload))
    return tuple(Way(again, away, cut) for again, cut, away in found if again or not cut)


class Keeping:
    """Gives the stages of plans their ways.

    Args:
        allowed: ways, the simplest first.
        blocks_of: of every stage of a plan; None where it is better not cut.
    """

    def __init__(
        self,
        allowed: Sequence[Way],
        trials: Trials,
        cluster: Cluster,
        blocks_of: Callable[[Plan], Sequence[Blocks | None]],
    ) -> None:
        self._allowed = allowed
        self._trials = trials
        self._cluster = cluster
        self._blocks_of = blocks_of

    def simplest(self, plan: Plan) -> Plan:
        """Simulated with the first of the allowed ways for all stages.

        Where backwards are elsewhere, and stages may recompute, they do if less traffic pays.
        """
        tried = self._trials.run(self._alike(plan, self._allowed[0]))
        return guessed_traffic(tried, self._cluster, self._trials) if self._is_open else tried

    @property
    def _is_open(self) -> bool:
        """Whether stages may recompute, and need not."""
        return len({way.recompute for way in self._allowed}) > 1

    def within_memory(self, plan: Plan) -> Plan | None:
        """The fastest found of the plans that differ in the ways of their stages.

        Args:
            plan: as :meth:`simplest` gives it.

        Returns:
            None if none fits.
        """
        trials = self._trials
        if trials.fits(plan):
            return settled_traffic(plan, trials) if self._is_open else plan
        if len(self._allowed) == 1:
            return None
        uniform = {way: trials.run(self._alike(plan, way)) for way in self._allowed}
        fitting = {way: _fitting_stages(tried, trials) for way, tried in uniform.items()}
        best: Plan | None = None
        for price in (_cost_s(self._cluster, plan.offload_to), _offload_first, _recompute_first):
            chosen = _assigned(plan, fitting, price)
            tried = None if chosen is None else trials.run(self._with_ways(plan, chosen))
            if tried is not None and trials.fits(tried) and _is_faster(tried, best):
                best = tried
        return None if best is None else self._improved(best, fitting)

    def _alike(self, plan: Plan, way: Way) -> Plan:
        return self._with_ways(plan, [way] * len(plan.stages))

    def _with_ways(self, plan: Plan, chosen: Sequence[Way]) -> Plan:
        in_blocks = any(way.blocks for way in chosen)
        blocks = self._blocks_of(plan) if in_blocks else [None] * len(plan.stages)
        stages = (
            replace(
                stage,
                recompute=way.recompute,
                offload=way.offload,
                blocks=cut if way.blocks else None,
            )
            for stage, way, cut in zip(plan.stages, chosen, blocks, strict=True)
        )
        return replace(plan, stages=tuple(stages), prediction=None)

    def _improved(self, best: Plan, fitting: Mapping[Way, Sequence[bool]]) -> Plan:
        """Cheaper ways for single stages, as long as that makes the step shorter."""
        before, cost_s = None, _cost_s(self._cluster, best.offload_to)
        while best is not before and not self._trials.are_over:
            before = best
            for index in range(len(best.stages)):
                for way, fits in fitting.items():
                    stage = best.stages[index]
                    cheaper = cost_s(way, stage) < cost_s(_way_of(stage), stage)
                    if cheaper and (fits[index] or _shares_ranks(best, index)):
                        best = self._better(best, index, way)
        return best

    def _better(self, best: Plan, index: int, way: Way) -> Plan:
        chosen = [_way_of(stage) for stage in best.stages]
        if chosen[index] == way or self._trials.are_over:
            return best
        chosen[index] = way
        tried = self._trials.run(self._with_ways(best, chosen))
        return tried if self._trials.fits(tried) and _is_faster(tried, best) else best


def _way_of(stage: Stage) -> Way:
    return Way(stage.recompute, stage.offload, stage.blocks is not None)


def _fitting_stages(tried: Plan, trials: Trials) -> list[bool]:
    return [trials.stage_fits(tried, index) for index in range(len(tried.stages))]


def _assigned(plan: Plan, fitting: Mapping[Way, Sequence[bool]], price: Price) -> list[Way] | None:
    """The cheapest way that fits each stage; None if one of them has none."""
    chosen = []
    for index, stage in enumerate(plan.stages):
        there = [way for way, fits in fitting.items() if fits[index]]
        if not there:
            return None
        chosen.append(min(there, key=lambda way: price(way, stage)))
    return chosen


def _cost_s(cluster: Cluster, target: OffloadTarget) -> Price:
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


def _is_faster(tried: Plan, best: Plan | None) -> bool:
    return best is None or tried.predicted_step_s < best.predicted_step_s * (1 - TIE)


def _shares_ranks(plan: Plan, index: int) -> bool:
    stage = plan.stages[index]
    return any(
        other is not stage and {*stage.ranks, *stage.backward_ranks} & {*other.ranks}
        for other in plan.stages
    )
