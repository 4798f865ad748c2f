"""The smallest largest stage load of a graph on accelerators and CPUs, with a proof.

1. Bounds from the work alone and from minimum cuts (:mod:`~pipectl.planner.exact.stage_bound`).
2. A partition: the best along several topological orders. Often it meets a bound: done.
3. All downsets are enumerated, and it is decided whether any partition is better. Each better one
   asks again, until none is, which proves the last one.

If there are too many downsets, or time is up, what was found is returned with the bounds: an answer
with a proven gap.
"""

from __future__ import annotations

from collections.abc import Callable
from math import inf

from pipectl.planner.exact.chains import Stages, best_of_orders
from pipectl.planner.exact.decide import Decider
from pipectl.planner.exact.improve import improved
from pipectl.planner.exact.lattice import all_downsets
from pipectl.planner.exact.load_model import LoadModel, load_model
from pipectl.planner.exact.orders import topological_orders
from pipectl.planner.exact.request import TOLERANCE, Balance, BalancedStage, BalanceRequest
from pipectl.planner.exact.stage_bound import StageBound
from pipectl.planner.exact.work_bound import work_bound_s
from pipectl.profile import Profile

MOST_DOWNSETS = 1_000_000


def balance(
    profile: Profile,
    request: BalanceRequest,
    expired: Callable[[], bool] = lambda: False,
    *,
    most_downsets: int = MOST_DOWNSETS,
) -> Balance | None:
    """Partition a graph so that its most loaded stage has the least load.

    Args:
        profile: prepared (:mod:`pipectl.planner.pruning`).
        expired: whether time is up; asked every few tenths of a second. The answer is then the
            best so far, with the gap that is proven.
        most_downsets: a graph with more is not searched exhaustively.

    Returns:
        None if no partition fits the devices and their memory, or none was found in time.
    """
    search = _Search(load_model(profile, request), request, expired)
    search.run(most_downsets)
    return None if search.best is None else _answer(profile, search, search.best)


class _Search:
    """Best partition and lower bound so far."""

    def __init__(
        self, model: LoadModel, request: BalanceRequest, expired: Callable[[], bool]
    ) -> None:
        self.model = model
        self.request = request
        self.expired = expired
        self.best: Stages | None = None
        self.value_s = inf
        self.bound_s = work_bound_s(model, request) * (1 - TOLERANCE)
        self.downsets = 0

    @property
    def done(self) -> bool:
        """Whether the best is proven, or time is up."""
        return self.bound_s >= self.value_s * (1 - TOLERANCE) or self.expired()

    def run(self, most_downsets: int) -> None:
        """All steps until the answer is proven."""
        orders = topological_orders(self.model)
        self._take(best_of_orders(self.model, self.request, orders, inf, self.expired))
        if not self.done:
            stage_bound = StageBound(self.model).largest(self.value_s, self.expired)
            self.bound_s = min(max(self.bound_s, stage_bound), self.value_s)
        if not self.done:
            self._exhaust(most_downsets)
        if not self.done and self.best is not None:
            self._take(improved(self.model, self.best, self.expired))

    def _exhaust(self, most_downsets: int) -> None:
        """Improve until no downset helps."""
        lattice = all_downsets(self.model, most_downsets, self.expired)
        if lattice is None:
            return
        self.downsets = len(lattice)
        decider = Decider(self.model, self.request, lattice)
        try:
            while self._take(decider.below(self.value_s * (1 - TOLERANCE), self.expired)):
                pass
            self.bound_s = self.value_s
        except TimeoutError:
            pass

    def _take(self, stages: Stages | None) -> bool:
        """Keep a partition if it is better."""
        value_s = inf if stages is None else stages.value_s(self.model)
        if value_s >= self.value_s:
            return False
        self.best, self.value_s = stages, value_s
        return True


def _answer(profile: Profile, search: _Search, best: Stages) -> Balance:
    """The answer in terms of operators."""
    model = search.model
    numbers = [[n for block in blocks for n in model.operators[block]] for blocks in best.blocks]
    numbers[0] += model.first
    numbers[-1] += model.last
    ids = [operator.id for operator in profile.operators]
    return Balance(
        value_s=search.value_s,
        lower_bound_s=min(search.bound_s, search.value_s),
        stages=tuple(
            BalancedStage(tuple(ids[n] for n in sorted(inside)), device, load_s)
            for inside, device, load_s in zip(
                numbers, best.devices, best.loads_s(model), strict=True
            )
        ),
        downsets=search.downsets,
    )
