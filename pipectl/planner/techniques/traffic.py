"""What travels between the two ranks of a stage whose backward is elsewhere.

Either all that its forward has saved streams, or only what the forward started from, and the rank
of the backward computes the rest once more: less traffic for more computation. A link that carries
the first within a forward hides it; on a slower one, the bottleneck of a stage is the shorter of

    saved values:   longest of forward, backward, copy of saved values
    inputs alone:   longest of forward + backward, copy of inputs

This says which stages might recompute. Messages of several stages share links, so the simulator
judges: that choice, none, all, and single stages that change theirs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from pipectl.cluster import Cluster
from pipectl.plan import Plan, Stage
from pipectl.planner.exploring.judge import TIE
from pipectl.planner.trials import Trials


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
