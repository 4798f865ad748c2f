"""The search for stages with replicas: seeds, the best move from each while there is one, kicks.

1. For every micro-batch size and order of the devices, a few seeds show what it is worth.
2. Those near the best get more seeds; from the best seeds, the best move is made until none is
   left.
3. From the best plans found, every merge and every split is made although it is worse, and
   improved again.
4. The best few get their ranks and warm-up, each chosen by the exact recurrence.

Deterministic; with a deadline only the amount of search differs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from math import log

import numpy as np

from pipectl.planner.hybrid.finish import best_ranks, rank_choices
from pipectl.planner.hybrid.links import LinkRules
from pipectl.planner.hybrid.model import (
    Costs,
    Layout,
    Model,
    costs_of,
    layout_of,
    replica_counts,
)
from pipectl.planner.hybrid.moves import Sketch, improved, kicks
from pipectl.planner.hybrid.placing import device_orders
from pipectl.planner.hybrid.plans import HybridPlan, HybridRequest
from pipectl.planner.hybrid.seeds import first_seeds, more_seeds
from pipectl.planner.hybrid.states import States
from pipectl.planner.hybrid.value import DOES_NOT_FIT_S, value_s
from pipectl.profile import Profile

MICRO_BATCHES_PER_DEVICE = 2
"""Sizes that give about so many micro-batches are looked at first."""
FIRST_DESCENTS = 2
"""Seeds of each micro-batch size that are improved at first."""
MORE_DESCENTS = 10
"""The same for promising sizes."""
PROMISING = 1.2
"""A size is, if its best plan takes at most so many times as long as the best of all."""
KICKED = 3
"""So many of the best plans of a size are disturbed and improved again."""
FINALISTS = 2
"""Plans that get ranks and warm-up, for every one that is asked for."""

Expired = Callable[[], bool]


@dataclass
class _Field:
    """One micro-batch size on one order of the devices: its model and the plans found.

    Args:
        found: local optima, or where time was up what came before, with their step times.
    """

    size: int
    order: Sequence[int]
    model: Model
    found: dict[Sketch, float] = field(default_factory=dict)
    seen: set[Sketch] = field(default_factory=set)

    @property
    def best_s(self) -> float:
        return min(self.found.values(), default=float("inf"))

    def ranked(self) -> list[tuple[float, Sketch]]:
        """The plans, best first; of equals the one with fewer stages."""
        order = [(step_s, len(plan[1]), plan) for plan, step_s in self.found.items()]
        return [(step_s, plan) for step_s, _, plan in sorted(order)]

    def value_s(self, plan: Sketch) -> float:
        cuts, picks = (np.array(part, np.int64) for part in plan)
        return value_s(self.model, cuts, picks, np.inf)

    def descend(self, plan: Sketch, expired: Expired) -> None:
        """Make the best move until there is none."""
        step_s = self.value_s(plan)
        while plan not in self.seen and not expired():
            self.seen.add(plan)
            better, better_s = improved(self.model, plan, step_s)
            if better == plan:
                break
            plan, step_s = better, better_s
        self.found[plan] = step_s


def hybrid_plans(
    profile: Profile,
    states: States,
    rules: LinkRules,
    request: HybridRequest,
    expired: Expired = lambda: False,
) -> list[HybridPlan]:
    """The best plans found, best first, at most ``request.keep``; none if nothing fits memory.

    Args:
        states: of the profile; see :meth:`States.of`.
        rules: devices and links.
        expired: whether time is up; the best so far is returned then.
    """
    fields = _fields(profile, states, rules, request)
    for number, place in enumerate(fields):
        if number == 0 or not expired():
            _descend(place, first_seeds(place.model), FIRST_DESCENTS, expired)
    for place in _promising(fields):
        if not expired():
            _descend(place, more_seeds(place.model), MORE_DESCENTS, expired)
    for place in _promising(fields)[:2]:
        _kick(place, expired)
    return _finished(fields, rules, request)


def _fields(
    profile: Profile, states: States, rules: LinkRules, request: HybridRequest
) -> list[_Field]:
    orders = device_orders(rules.machine_of)
    devices = len(rules.machine_of)
    replicas = replica_counts(devices)
    layouts = {
        order: layout_of(rules, order, replicas)
        for order in (orders if request.scatter else orders[:1])
    }
    several = MICRO_BATCHES_PER_DEVICE * len(rules.machine_of)
    sizes = sorted(request.sizes, key=lambda size: abs(log(request.micro_batches(size) / several)))
    found = []
    for size in sizes:
        if size >= request.least_samples:
            costs = costs_of(
                profile,
                states,
                size,
                replicas.tolist(),
                fractions=request.fractions,
                shard_optimizer=request.shard_optimizer,
            )
            for order, layout in layouts.items():
                model = _model(states, costs, request, size, layout)
                found.append(_Field(size, order, model))
    return found


def _model(
    states: States, costs: Costs, request: HybridRequest, size: int, layout: Layout
) -> Model:
    counts = layout.replicas
    samples = request.least_samples if request.fractions else max(1.0, request.least_samples)
    allowed = counts if samples == 0 else counts[counts * samples <= size * (1 + 1e-12)]
    most = max(len(allowed), 1) - 1
    count, share = request.micro_batches(size), request.last_share(size)
    return Model(costs, layout, states.follows, most, count, share, request.stages or 0)


def _descend(place: _Field, plans: Iterable[Sketch], most: int, expired: Expired) -> None:
    """Improve the best of some plans."""
    ranked = sorted((place.value_s(plan), len(plan[1]), plan) for plan in plans)
    for _, _, plan in ranked[:most]:
        if not (place.found and expired()):
            place.descend(plan, expired)


def _promising(fields: Sequence[_Field]) -> list[_Field]:
    """Fields whose best plan is near the best of all, best first."""
    ranked = sorted(fields, key=lambda place: place.best_s)
    return [place for place in ranked if place.best_s <= ranked[0].best_s * PROMISING]


def _kick(place: _Field, expired: Expired) -> None:
    """Improve again what is a merge or a split away from one of the best plans, till none helps."""
    kicked: set[Sketch] = set()
    while not expired():
        fresh = [plan for _, plan in place.ranked()[:KICKED] if plan not in kicked]
        if not fresh:
            return
        kicked.add(fresh[0])
        for plan in kicks(place.model, fresh[0]):
            if not expired():
                place.descend(plan, expired)


def _finished(
    fields: Sequence[_Field], rules: LinkRules, request: HybridRequest
) -> list[HybridPlan]:
    """The best plans with ranks and warm-up."""
    bound_s = min((_least_s(place.model) for place in fields), default=0.0)
    close = [
        (value, len(plan[1]), number, plan)
        for number, place in enumerate(fields)
        for value, plan in place.ranked()[: request.keep]
        if value < DOES_NOT_FIT_S
    ]
    found = {}
    for _, _, number, plan in sorted(close)[: request.keep * FINALISTS]:
        chosen = _chosen(fields[number], plan, rules, request, bound_s)
        found[chosen.cuts, chosen.ranks, chosen.micro_batch_size] = chosen
    ranked = sorted(
        found.values(), key=lambda p: (p.step_time_s, len(p.ranks), p.micro_batches, p.cuts)
    )
    return ranked[: request.keep]


def _chosen(
    place: _Field, plan: Sketch, rules: LinkRules, request: HybridRequest, bound_s: float
) -> HybridPlan:
    """The plan on its best ranks with its best warm-up."""
    cuts, picks = plan
    replicas = [int(place.model.layout.replicas[pick]) for pick in picks]
    choices = rank_choices(rules, place.order, replicas, scatter=request.scatter)
    step_s, ranks, depths = best_ranks(place.model, rules, cuts, picks, choices)
    count = place.model.micro_batches
    return HybridPlan(cuts, ranks, place.size, count, depths, step_s, bound_s)


def _least_s(model: Model) -> float:
    """All work on all devices without a pause: replicas never do more together than one apart."""
    costs, layout = model.costs, model.layout
    work = (costs.forward_s[:, -1] + costs.backward_s[:, -1]) * layout.replicas
    total = model.micro_batches - 1 + model.last_share
    speed = layout.devices / float(layout.slowness.min())
    return float(work[: model.most + 1].min()) * total / speed
