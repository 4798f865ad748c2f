"""The last choices of a plan whose stages are found: who is where, and how deep is the warm-up."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np

from pipectl.planner.hybrid.links import LinkRules
from pipectl.planner.hybrid.model import Model
from pipectl.planner.hybrid.placing import POLICIES, Ranks, consecutive, placed
from pipectl.planner.hybrid.plans import placed_parts
from pipectl.planner.hybrid.value import Parts, scheduled_s, warm_up_of

Depths = tuple[int, ...]


def rank_choices(
    rules: LinkRules, order: Sequence[int], replicas: Sequence[int], *, scatter: bool
) -> list[Ranks]:
    """Ranks for every stage: consecutive in the order, and by DAPPLE's three policies."""
    found = consecutive(replicas, order)
    others = [placed(rules.machine_of, replicas, take) for take in POLICIES.values()]
    return list(dict.fromkeys([found, *(others if scatter else ())]))


def best_ranks(
    model: Model,
    rules: LinkRules,
    cuts: Sequence[int],
    picks: Sequence[int],
    choices: Sequence[Ranks],
) -> tuple[float, Ranks, Depths]:
    """The step time, ranks and warm-up of the best of several choices of ranks."""
    found = []
    for number, ranks in enumerate(choices):
        step_s, depths = best_warm_up(model, placed_parts(model, rules, cuts, picks, ranks))
        found.append((step_s, number, ranks, depths))
    step_s, _, ranks, depths = min(found)
    return step_s, ranks, depths


def best_warm_up(model: Model, parts: Parts) -> tuple[float, Depths]:
    """The fastest warm-up from policy A to policy B, entry by entry; the shallowest of equals.

    Begins with the better policy and changes one entry at a time while the step gets shorter.
    """
    count = len(parts.forward_s)
    least, most = (tuple(warm_up_of(model, count, slope).tolist()) for slope in (1, 2))
    best_s, best = min((_step_s(model, parts, depths), depths) for depths in {least, most})
    improving = True
    while improving:
        improving = False
        for depths in _near(best, least, most):
            step_s = _step_s(model, parts, depths)
            if step_s < best_s * (1 - 1e-9):
                best_s, best, improving = step_s, depths, True
    return best_s, best


def _near(depths: Depths, least: Depths, most: Depths) -> Iterator[Depths]:
    """One entry one deeper or shallower, still within the two policies and never rising."""
    for stage, depth in enumerate(depths):
        for changed in (depth - 1, depth + 1):
            found = (*depths[:stage], changed, *depths[stage + 1 :])
            falls = all(early >= late for early, late in pairwise(found))
            if least[stage] <= changed <= most[stage] and falls:
                yield found


def _step_s(model: Model, parts: Parts, depths: Depths) -> float:
    return scheduled_s(model, parts, np.array(depths, np.int64))
