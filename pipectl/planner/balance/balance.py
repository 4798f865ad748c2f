"""The smallest largest stage load of a graph, with a proof.

1. Bounds from the work alone and from minimum cuts.
2. A partition: the best along several topological orders, then with single blocks moved. Often it
   meets a bound: done.
3. All downsets are enumerated, and it is decided whether any partition is better. Each better one
   asks again, until none is, which proves the last one.

If there are too many downsets, or time is up, what was found is returned with the bounds: an answer
with a proven gap.
"""

from __future__ import annotations

from collections.abc import Callable
from math import inf

from pipectl.planner.balance.bounds import stage_bound_s
from pipectl.planner.balance.chains import best_of_orders, move_blocks
from pipectl.planner.balance.decide import Decider
from pipectl.planner.balance.downsets import enumerate_downsets
from pipectl.planner.balance.load_model import LoadModel, Stages, load_model
from pipectl.planner.balance.request import TOLERANCE, Balance, BalancedStage, BalanceRequest
from pipectl.profile import Profile

MAX_DOWNSETS = 1_000_000


def balance(
    profile: Profile,
    request: BalanceRequest,
    expired: Callable[[], bool] = lambda: False,
    *,
    max_downsets: int = MAX_DOWNSETS,
) -> Balance | None:
    """Partition a graph so that its most loaded stage has the least load.

    Args:
        profile: prepared (:mod:`pipectl.planner.imported`).
        expired: whether time is up; asked every few tenths of a second. The answer is then the
            best so far, with the gap that is proven.
        max_downsets: a graph with more is not searched exhaustively.

    Returns:
        None if no partition fits the devices and their memory, or none was found in time.
    """
    model, devices = load_model(profile, request), request.devices
    bound_s = float(model.compute_s.sum()) / max(devices, 1) * (1 - TOLERANCE)
    stages, value_s, downsets = best_of_orders(model, devices, inf, expired), inf, 0

    def is_proven() -> bool:
        return bound_s >= value_s * (1 - TOLERANCE) or expired()

    if stages is not None:
        value_s = model.value_s(stages)
    if not is_proven():
        bound_s = min(max(bound_s, stage_bound_s(model, value_s, expired)), value_s)
    if not is_proven() and stages is not None:
        moved = move_blocks(model, stages, expired)
        stages, value_s = min((moved, model.value_s(moved)), (stages, value_s), key=lambda s: s[1])
    lattice = None if is_proven() else enumerate_downsets(model, max_downsets, expired)
    if lattice is not None:
        downsets, decider = len(lattice), Decider(model, devices, lattice)
        try:
            while (better := decider.below(value_s * (1 - TOLERANCE), expired)) is not None:
                if model.value_s(better) >= value_s:
                    break
                stages, value_s = better, model.value_s(better)
            bound_s = value_s
        except TimeoutError:
            pass
    if stages is None:
        return None
    return Balance(value_s, min(bound_s, value_s), _named(profile, model, stages), downsets)


def _named(profile: Profile, model: LoadModel, stages: Stages) -> tuple[BalancedStage, ...]:
    """The stages in terms of operators."""
    numbers = [[n for block in blocks for n in model.operators[block]] for blocks in stages]
    numbers[0] += model.first
    numbers[-1] += model.last
    ids = [operator.id for operator in profile.operators]
    return tuple(
        BalancedStage(tuple(ids[n] for n in sorted(inside)), model.load_s(blocks))
        for inside, blocks in zip(numbers, stages, strict=True)
    )
