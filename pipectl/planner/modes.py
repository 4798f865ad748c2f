"""How each stage keeps the values that its backward needs: keep, offload, recompute or send.

Recomputation costs computing time, for the whole stage at once or segment by segment. Segments take
about the same time; they hold the inputs of all segments, and what one segment saves. Offload uses
the link to the host's memory, and costs no time while a copy is shorter than one computation. The
choice of one stage does not affect the memory of stages on other ranks, so one simulation with the
same mode for all stages shows which of them fit in this mode. Every stage then takes the cheapest
mode that seems to fit; single stages change theirs if that makes the simulated step shorter.

Recomputation is decided in two places. If stages are cut for a memory limit, the dynamic programme
chooses it together with the cuts, because the memory of a stage decides where to cut; plans of the
search itself (:mod:`pipectl.planner.explorer`) keep this choice. This module decides again for
stages that are already cut, together with offload and segments. It drops the choice of the
programme, which considers neither these two nor other traffic on the links.

If the backward of a stage has a rank of its own, the rank of the forward sends it either all saved
values, or only the inputs of the forward, which the rank of the backward then computes again: less
traffic for more computation. A link that carries the saved values within the time of a forward
hides them; on a slower link, the bottleneck of a stage is the shorter of

    saved values:   longest of forward, backward, copy of saved values
    inputs alone:   longest of forward + backward, copy of inputs

Messages of several stages share links, so this is decided by simulation: for no stage, for all, and
with changes of single stages.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import product
from typing import NamedTuple

from pipectl.cluster import OffloadTarget
from pipectl.plan import Plan, Stage
from pipectl.planner.choices import allowed_values
from pipectl.planner.evaluator import TIE, Evaluator
from pipectl.planner.segments import SegmentPlans
from pipectl.schedule.combinations import APART, SEGMENTS, go_together


class Mode(NamedTuple):
    """What a stage does with the values its backward needs; it keeps them if no field is true.

    Args:
        segments: whether it recomputes segment by segment, if it has segments.
    """

    recompute: bool
    offload: bool
    segments: bool = False

    @classmethod
    def of(cls, stage: Stage) -> Mode:
        """The mode of a stage."""
        return cls(stage.recompute, stage.offload, stage.segments is not None)


ON_THE_DEVICE = 2
"""Micro-batches that a stage with offload holds on the device."""
Price = Callable[[Mode, Stage], float]
"""Cost of a mode for a stage; lower is better."""


class ModeSearch:
    """Chooses the modes of the stages of plans.

    Args:
        evaluator: the request of its problem says which modes are allowed.
        offload: the allowed values of whether stages offload.
    """

    def __init__(self, evaluator: Evaluator, offload: Sequence[bool]) -> None:
        request = evaluator.problem.request
        combinations = product(
            allowed_values(request.recompute), allowed_values(request.segments), sorted(offload)
        )
        self._allowed = [
            Mode(recompute, offload, segments)
            for recompute, segments, offload in combinations
            if recompute or not segments
        ]
        self._evaluator = evaluator
        self._problem = evaluator.problem
        self._cluster = evaluator.problem.cluster
        self._may_recompute = request.recompute is None  # and need not

    @cached_property
    def _segment_plans(self) -> SegmentPlans:
        return SegmentPlans(self._problem.profile)

    def simplest(self, plan: Plan) -> Plan:
        """The plan with a prediction, with the first allowed mode for all stages.

        Stages with their backward on another rank recompute if they may and if that is better.
        """
        first = self._allowed[0]
        tried = self._evaluator.run(self._with_modes(plan, [first] * len(plan.stages)))
        apart = [bool(stage.backward_ranks) for stage in plan.stages]
        if any(apart) and self._may_recompute:
            chosen = [first._replace(recompute=each) for each in apart]
            other = self._evaluator.run(self._with_modes(plan, chosen))
            fits, other_fits = (
                self._problem.fits(tried),
                self._problem.fits(other),
            )
            if other_fits > fits or (other_fits == fits and _is_faster(other, tried)):
                return other
        return tried

    def within_memory(self, plan: Plan) -> Plan | None:
        """The fastest plan with other modes of the stages that fits into memory.

        Args:
            plan: from :meth:`simplest`.

        Returns:
            None if none fits.
        """
        evaluator = self._evaluator
        fitting: dict[Mode, list[bool]] = {}
        if self._problem.fits(plan):  # only what two ranks of a stage send is open
            apart = [bool(stage.backward_ranks) for stage in plan.stages]
            fitting = {mode: apart for mode in self._allowed if not mode.segments}
            return self._improved(plan, fitting) if any(apart) else plan
        if len(self._allowed) == 1:
            return None
        stages = range(len(plan.stages))
        for mode in self._allowed:
            alike = evaluator.run(self._with_modes(plan, [mode] * len(stages)))
            fitting[mode] = [self._problem.stage_fits(alike, index) for index in stages]
        best: Plan | None = None
        for price in (self._cost_of(plan.offload_to), _offload_first, _recompute_first):
            chosen = _cheapest(plan, fitting, price)
            tried = None if chosen is None else evaluator.run(self._with_modes(plan, chosen))
            if tried is not None and self._problem.fits(tried) and _is_faster(tried, best):
                best = tried
        return None if best is None else self._improved(best, fitting)

    def least_demanding(self, plan: Plan) -> Plan:
        """The plan with the least excess memory: unchanged if allowed, or with one mode for all.

        Args:
            plan: with a prediction.
        """
        stages = plan.stages
        tried = [plan] if all(Mode.of(stage) in self._allowed for stage in stages) else []
        alike = (self._with_modes(plan, [mode] * len(stages)) for mode in self._allowed)
        tried += map(self._evaluator.run, alike)
        return min(tried, key=self._problem.excess_bytes)

    def _with_modes(self, plan: Plan, chosen: Sequence[Mode]) -> Plan:
        chosen = [
            mode._replace(segments=False)
            if mode.segments and stage.backward_ranks and not go_together((SEGMENTS, APART))
            else mode
            for stage, mode in zip(plan.stages, chosen, strict=True)
        ]
        some = any(mode.segments for mode in chosen)
        segments = self._segment_plans.of(plan) if some else [None] * len(plan.stages)
        stages = (
            stage
            if mode == Mode.of(stage) and not mode.segments
            else replace(
                stage,
                recompute=mode.recompute,
                offload=mode.offload,
                segments=parts if mode.segments else None,
            )
            for stage, mode, parts in zip(plan.stages, chosen, segments, strict=True)
        )
        return self._problem.with_needed_recompute(
            replace(plan, stages=tuple(stages), prediction=None)
        )

    def _improved(self, best: Plan, fitting: Mapping[Mode, Sequence[bool]]) -> Plan:
        """Change the modes of single stages as long as that makes the step shorter.

        If forward and backward of a stage share a rank, only cheaper modes are tried.
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
                    other = self._with_modes(best, chosen)
                    if Mode.of(other.stages[index]) != mode:  # the stage has to recompute
                        continue
                    tried = evaluator.run(other)
                    simpler = stage.recompute and not mode.recompute
                    simpler &= tried.predicted_step_s <= best.predicted_step_s
                    if self._problem.fits(tried) and (simpler or _is_faster(tried, best)):
                        best = tried
        return best

    def _cost_of(self, target: OffloadTarget) -> Price:
        """About the seconds that a mode adds to one micro-batch of a stage."""

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
    """Per stage the cheapest mode that fits; None if a stage has none."""
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
    return any(other is not stage and {*stage.every_rank} & {*other.ranks} for other in plan.stages)
