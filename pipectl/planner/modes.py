"""What each stage does with the values its backward needs: keep, offload, recompute or send them.

Recomputation takes time to compute, all at once or segment by segment: segments take about the same
time, and hold the inputs of all, but besides them only what one segment saves. Offload takes time
of the way to the host's memory, which is free of charge while it is shorter than one computation.
Stages that are on ranks of their own do not feel each other's choice in their memory, so one
simulation with all stages alike says which of them fit that way. Every stage then takes what seems
cheapest of what fits, and changes its mind if that makes the simulated step shorter.

Recomputation is decided at two places. Where stages are cut for a memory limit, the dynamic
programme chooses it together with the cuts, because what a stage keeps decides where to cut; plans
of the search itself (:mod:`pipectl.planner.explorer`) have that choice. Here it is made anew for
stages that are cut already, together with offload and segments, and what the programme chose is
dropped: it knows neither, nor what the links carry at the same time.

Between the two ranks of a stage whose backward is elsewhere, either all that its forward has saved
streams, or only what the forward started from, and the rank of the backward computes the rest once
more: less traffic for more computation. A link that carries the first within a forward hides it; on
a slower one, the bottleneck of a stage is the shorter of

    saved values:   longest of forward, backward, copy of saved values
    inputs alone:   longest of forward + backward, copy of inputs

Messages of several stages share links, so the simulator judges: none, all, and single stages that
change theirs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import product
from math import inf
from typing import NamedTuple

from pipectl.cluster import OffloadTarget
from pipectl.plan import Plan, Stage
from pipectl.planner.bounds import least_step_s
from pipectl.planner.evaluate import TIE, Evaluator, preference
from pipectl.planner.problem import Problem
from pipectl.planner.request import choices
from pipectl.planner.segments import SegmentPlans


class Mode(NamedTuple):
    """What a stage does with what its backward needs; it keeps it if neither.

    Args:
        segments: whether it recomputes segment by segment, if it has any.
    """

    recompute: bool
    offload: bool
    segments: bool = False

    @classmethod
    def of(cls, stage: Stage) -> Mode:
        """That of a stage."""
        return cls(stage.recompute, stage.offload, stage.blocks is not None)


ON_THE_DEVICE = 2
"""Micro-batches of a stage that offloads; the others wait elsewhere."""
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
        combinations = product(choices(request.recompute), choices(request.blocks), sorted(offload))
        self._allowed = [
            Mode(recompute, offload, segments)
            for recompute, segments, offload in combinations
            if recompute or not segments
        ]
        self._evaluator = evaluator
        self._cluster = evaluator.problem.cluster
        self._segment_plans = SegmentPlans(evaluator.problem.profile)
        self._may_recompute = request.recompute is None  # and need not

    def simplest(self, plan: Plan) -> Plan:
        """Simulated with the first of the allowed modes for all stages.

        If backwards are elsewhere, and stages may recompute, these do if that is better.
        """
        first = self._allowed[0]
        tried = self._evaluator.run(self._with_modes(plan, [first] * len(plan.stages)))
        apart = [bool(stage.backward_ranks) for stage in plan.stages]
        if any(apart) and self._may_recompute:
            chosen = [first._replace(recompute=each) for each in apart]
            other = self._evaluator.run(self._with_modes(plan, chosen))
            fits, other_fits = self._evaluator.fits(tried), self._evaluator.fits(other)
            if other_fits > fits or (other_fits == fits and _is_faster(other, tried)):
                return other
        return tried

    def within_memory(self, plan: Plan) -> Plan | None:
        """The fastest of the plans found that differ in the modes of their stages.

        Args:
            plan: as :meth:`simplest` gives it.

        Returns:
            None if none fits.
        """
        evaluator = self._evaluator
        fitting: dict[Mode, list[bool]] = {}
        if evaluator.fits(plan):  # only what streams between two ranks of a stage is open
            apart = [bool(stage.backward_ranks) for stage in plan.stages]
            fitting = {mode: apart for mode in self._allowed if not mode.segments}
            return self._improved(plan, fitting) if any(apart) else plan
        if len(self._allowed) == 1:
            return None
        stages = range(len(plan.stages))
        for mode in self._allowed:
            alike = evaluator.run(self._with_modes(plan, [mode] * len(stages)))
            fitting[mode] = [evaluator.stage_fits(alike, index) for index in stages]
        best: Plan | None = None
        for price in (self._cost_of(plan.offload_to), _offload_first, _recompute_first):
            chosen = _cheapest(plan, fitting, price)
            tried = None if chosen is None else evaluator.run(self._with_modes(plan, chosen))
            if tried is not None and evaluator.fits(tried) and _is_faster(tried, best):
                best = tried
        return None if best is None else self._improved(best, fitting)

    def least_demanding(self, plan: Plan) -> Plan:
        """As it is, if that is allowed, or with one mode for all stages: what exceeds limits least.

        Args:
            plan: with a prediction.
        """
        stages = plan.stages
        tried = [plan] if all(Mode.of(stage) in self._allowed for stage in stages) else []
        alike = (self._with_modes(plan, [mode] * len(stages)) for mode in self._allowed)
        tried += map(self._evaluator.run, alike)
        return min(tried, key=self._evaluator.problem.excess_bytes)

    def _with_modes(self, plan: Plan, chosen: Sequence[Mode]) -> Plan:
        some = any(mode.segments for mode in chosen)
        segments = self._segment_plans.of(plan) if some else [None] * len(plan.stages)
        stages = (
            replace(
                stage,
                recompute=mode.recompute,
                offload=mode.offload,
                blocks=parts if mode.segments else None,
            )
            for stage, mode, parts in zip(plan.stages, chosen, segments, strict=True)
        )
        return replace(plan, stages=tuple(stages), prediction=None)

    def _improved(self, best: Plan, fitting: Mapping[Mode, Sequence[bool]]) -> Plan:
        """With other modes for single stages, as long as that makes the step shorter.

        Only cheaper ones are tried of stages whose forward and backward share a rank.
        """
        evaluator, before, cost_s = self._evaluator, None, self._cost_of(best.offload_to)
        while best is not before and not evaluator.is_exhausted:
            before = best
            for index in range(len(best.stages)):
                for mode, fits in fitting.items():
                    stage, chosen = best.stages[index], list(map(Mode.of, best.stages))
                    cheaper = cost_s(mode, stage) < cost_s(chosen[index], stage)
                    cheaper |= bool(stage.backward_ranks)
                    may_fit = fits[index] or _shares_ranks(best, index)
                    if not (cheaper and may_fit) or chosen[index] == mode or evaluator.is_exhausted:
                        continue
                    chosen[index] = mode
                    tried = evaluator.run(self._with_modes(best, chosen))
                    simpler = stage.recompute and not mode.recompute
                    simpler &= tried.predicted_step_s <= best.predicted_step_s
                    if evaluator.fits(tried) and (simpler or _is_faster(tried, best)):
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


class Shortlist:
    """Plans that fit, with predictions.

    Args:
        expired: asked now and then; once it is true, no more is tried.
        offload: whether stages may offload, all that is allowed.
        accepts: whether a plan is as it was asked for.
        max_actions: to simulate, forwards and backwards of all replicas in all.

    Attributes:
        plans: in the order in which they were accepted.
        closest: of all that were simulated before they were made to fit, the one that exceeds its
            limits least.
        finished: whether nothing was left out for want of time.
    """

    def __init__(
        self,
        problem: Problem,
        expired: Callable[[], bool],
        offload: tuple[bool, ...] = (False,),
        accepts: Callable[[Plan], bool] = lambda _: True,
        **limits: int,
    ) -> None:
        self.evaluator = Evaluator(problem, expired, **limits)
        self.plans: list[Plan] = []
        self.closest: Plan | None = None
        self.finished = True
        self._plain_s = inf  # the shortest step of plans that need not gain anything
        self._modes = ModeSearch(self.evaluator, offload)
        self._cluster = problem.cluster
        self._accepts = accepts

    @property
    def fastest_s(self) -> float:
        """The shortest step so far."""
        return min((plan.predicted_step_s for plan in self.plans), default=inf)

    def add(self, plans: Iterable[Plan]) -> None:
        """Accept plans that fit, with predictions, if they are as asked for."""
        for plan in filter(self._accepts, plans):
            self.plans.append(plan)
            self._plain_s = min(self._plain_s, plan.predicted_step_s)

    def consider(self, proposed: Iterable[Plan], gain: float = TIE) -> None:
        """Accept what fits; of what does not, what could be the fastest if it saves memory.

        Args:
            proposed: without predictions.
            gain: share by which their steps must be shorter than that of any plan that was accepted
                without a gain (or of any plan, if there is none such); if it is more than a tie,
                only what is the fastest is accepted.
        """
        gain_s = self._limit_s(gain)
        simulated: list[Plan] = []
        for plan in proposed:
            if self.evaluator.is_exhausted and (self.plans or simulated):
                self.finished = False
                break
            if least_step_s(plan, self._cluster) < min(gain_s, self.fastest_s * (1 - TIE)):
                simulated.append(self._modes.simplest(plan))
                excess, closest = self.evaluator.problem.excess_bytes, self.closest
                if closest is None or excess(simulated[-1]) < excess(closest):
                    self.closest = simulated[-1]
        self.settle(simulated, gain)

    def settle(self, simulated: Iterable[Plan], gain: float = TIE) -> None:
        """The same for plans with predictions."""
        gain_s = self._limit_s(gain)
        for plan in sorted(simulated, key=preference):
            limit_s = min(gain_s, self.fastest_s * (1 - TIE))
            fitting: Plan | None = plan if self.evaluator.fits(plan) else None
            if plan.predicted_step_s < limit_s and not (self.plans and self.evaluator.is_exhausted):
                fitting = self._modes.within_memory(plan)
            if fitting is None:
                continue
            if gain == TIE:
                self.add([fitting])
            elif fitting.predicted_step_s < limit_s and self._accepts(fitting):
                self.plans.append(fitting)

    def _limit_s(self, gain: float) -> float:
        """What steps must be shorter than if they have to gain more than a tie."""
        if gain == TIE:
            return inf
        return (self._plain_s if self._plain_s < inf else self.fastest_s) * (1 - gain)
