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

from pipectl.cluster import OffloadTarget
from pipectl.plan import Plan, Stage
from pipectl.planner.activations.blocks import BlockPlans
from pipectl.planner.evaluate import TIE, Evaluator


class Mode(NamedTuple):
    """What a stage does with what its backward needs; it keeps it if neither.

    Args:
        blocks: whether it recomputes block by block, if it has blocks.
    """

    recompute: bool
    offload: bool
    blocks: bool = False

    @classmethod
    def of(cls, stage: Stage) -> Mode:
        """That of a stage."""
        return cls(stage.recompute, stage.offload, stage.blocks is not None)


Price = Callable[[Mode, Stage], float]
"""What is to be low."""


class ModeSearch:
    """Chooses the modes of the stages of plans.

    Args:
        evaluator: of a problem, whose request says which modes are allowed.
        offload: whether stages may offload, all that is allowed.
    """

    def __init__(self, evaluator: Evaluator, offload: Sequence[bool]) -> None:
        request = evaluator.problem.request
        combinations = product(
            sorted(request.recompute_choices), sorted(request.block_choices), sorted(offload)
        )
        self._allowed = [
            Mode(again, away, cut) for again, cut, away in combinations if again or not cut
        ]
        self._evaluator = evaluator
        self._cluster = evaluator.problem.cluster
        self._block_plans = BlockPlans(evaluator.problem.profile)
        self._may_recompute = len(request.recompute_choices) > 1  # and need not

    def simplest(self, plan: Plan) -> Plan:
        """Simulated with the first of the allowed modes for all stages.

        If backwards are elsewhere, and stages may recompute, they do if less traffic pays.
        """
        tried = self._evaluator.run(self._alike(plan, self._allowed[0]))
        return _guess_traffic(tried, self._evaluator) if self._may_recompute else tried

    def within_memory(self, plan: Plan) -> Plan | None:
        """The fastest of the plans found that differ in the modes of their stages.

        Args:
            plan: as :meth:`simplest` gives it.

        Returns:
            None if none fits.
        """
        evaluator = self._evaluator
        if evaluator.fits(plan):
            return _settle_traffic(plan, evaluator) if self._may_recompute else plan
        if len(self._allowed) == 1:
            return None
        stages = range(len(plan.stages))
        fitting: dict[Mode, list[bool]] = {}
        for mode in self._allowed:
            alike = evaluator.run(self._alike(plan, mode))
            fitting[mode] = [evaluator.stage_fits(alike, index) for index in stages]
        best: Plan | None = None
        for price in (self._cost_of(plan.offload_to), _offload_first, _recompute_first):
            chosen = _cheapest(plan, fitting, price)
            tried = None if chosen is None else evaluator.run(self._with_modes(plan, chosen))
            if tried is not None and evaluator.fits(tried) and _is_faster(tried, best):
                best = tried
        return None if best is None else self._improved(best, fitting)

    def _alike(self, plan: Plan, mode: Mode) -> Plan:
        return self._with_modes(plan, [mode] * len(plan.stages))

    def _with_modes(self, plan: Plan, chosen: Sequence[Mode]) -> Plan:
        in_blocks = any(mode.blocks for mode in chosen)
        blocks = self._block_plans.of(plan) if in_blocks else [None] * len(plan.stages)
        stages = (
            replace(
                stage,
                recompute=mode.recompute,
                offload=mode.offload,
                blocks=cut if mode.blocks else None,
            )
            for stage, mode, cut in zip(plan.stages, chosen, blocks, strict=True)
        )
        return replace(plan, stages=tuple(stages), prediction=None)

    def _improved(self, best: Plan, fitting: Mapping[Mode, Sequence[bool]]) -> Plan:
        """With cheaper modes for single stages, as long as that makes the step shorter."""
        evaluator, before, cost_s = self._evaluator, None, self._cost_of(best.offload_to)
        while best is not before and not evaluator.is_exhausted:
            before = best
            for index in range(len(best.stages)):
                for mode, fits in fitting.items():
                    stage, chosen = best.stages[index], list(map(Mode.of, best.stages))
                    cheaper = cost_s(mode, stage) < cost_s(chosen[index], stage)
                    may_fit = fits[index] or _shares_ranks(best, index)
                    if not (cheaper and may_fit) or chosen[index] == mode or evaluator.is_exhausted:
                        continue
                    chosen[index] = mode
                    tried = evaluator.run(self._with_modes(best, chosen))
                    if evaluator.fits(tried) and _is_faster(tried, best):
                        best = tried
        return best

    def _cost_of(self, target: OffloadTarget) -> Price:
        """About what a mode takes longer, for one micro-batch."""

        def cost_s(mode: Mode, stage: Stage) -> float:
            device = self._cluster.device(stage.ranks[0])
            forward_s = stage.cost.forward_s / device.speed
            backward_s = stage.cost.backward_s / device.speed
            kept = stage.cost.input_bytes if mode.recompute else stage.cost.saved_bytes
            copy_s = device.offload_link(target).transfer_s(kept) if mode.offload else 0.0
            late_s = max(0.0, copy_s - forward_s) + max(0.0, copy_s - backward_s)
            return late_s + mode.recompute * forward_s

        return cost_s


def _offload_first(mode: Mode, _: Stage) -> float:
    return 2 * mode.recompute + (mode.offload and mode.recompute)


def _recompute_first(mode: Mode, _: Stage) -> float:
    return 2 * mode.offload + (mode.offload and mode.recompute)


def _cheapest(
    plan: Plan, fitting: Mapping[Mode, Sequence[bool]], price: Price
) -> list[Mode] | None:
    """The cheapest mode that fits each stage; None if one of them has none."""
    chosen = []
    for index, stage in enumerate(plan.stages):
        prices = {mode: price(mode, stage) for mode, fits in fitting.items() if fits[index]}
        if not prices:
            return None
        chosen.append(min(prices, key=prices.__getitem__))
    return chosen


def _is_faster(tried: Plan, best: Plan | None) -> bool:
    return best is None or tried.predicted_step_s < best.predicted_step_s * (1 - TIE)


def _shares_ranks(plan: Plan, index: int) -> bool:
    stage = plan.stages[index]
    return any(
        other is not stage and {*stage.ranks, *stage.backward_ranks} & {*other.ranks}
        for other in plan.stages
    )


def _guess_traffic(plan: Plan, evaluator: Evaluator) -> Plan:
    """The fastest if no stages, those with slow links, or all recompute; of equals the first.

    Args:
        plan: with a prediction, and nothing recomputed.
    """
    apart = [index for index, stage in enumerate(plan.stages) if stage.backward_ranks]
    slow = [index for index in apart if _has_slow_link(plan.stages[index], evaluator)]
    best = plan
    for chosen in (slow, apart) if slow != apart else (apart,):
        if chosen:
            again = (
                replace(stage, recompute=index in chosen) if stage.backward_ranks else stage
                for index, stage in enumerate(plan.stages)
            )
            best = _better(best, tuple(again), evaluator)
    return best


def _settle_traffic(plan: Plan, evaluator: Evaluator) -> Plan:
    """With other choices of single stages, as long as that makes the step shorter.

    Args:
        plan: with a prediction.
    """
    best, before = plan, None
    while best is not before and not evaluator.is_exhausted:
        before = best
        for index, stage in enumerate(plan.stages):
            if stage.backward_ranks and not evaluator.is_exhausted:
                changed = list(best.stages)
                changed[index] = replace(changed[index], recompute=not changed[index].recompute)
                best = _better(best, tuple(changed), evaluator)
    return best


def _has_slow_link(stage: Stage, evaluator: Evaluator) -> bool:
    """Whether sending its inputs and computing once more seems to take less than what it saves."""
    cluster = evaluator.problem.cluster
    ends = stage.ranks[0], stage.backward_ranks[0]
    link, speeds = cluster.link(*ends), [cluster.device(rank).speed for rank in ends]
    forward_s, again_s = (stage.cost.forward_s / speed for speed in speeds)
    backward_s = stage.cost.backward_s / speeds[1]
    saved_s = max(forward_s, backward_s, link.hold_s(stage.cost.saved_bytes))
    inputs_s = max(forward_s, again_s + backward_s, link.hold_s(stage.cost.input_bytes))
    return inputs_s < saved_s


def _better(best: Plan, stages: tuple[Stage, ...], evaluator: Evaluator) -> Plan:
    """The plan, or that with other stages: what fits, and of what both do, what is faster by more
    than a tie."""
    tried = evaluator.run(replace(best, stages=stages, prediction=None))
    fit = evaluator.fits(best), evaluator.fits(tried)
    if fit[0] != fit[1]:
        return tried if fit[1] else best
    return tried if _is_faster(tried, best) else best
