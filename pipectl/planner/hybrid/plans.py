"""What is asked of the hybrid search, and what it answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import ceil

import numpy as np

from pipectl.arrays import Floats, Integers
from pipectl.planner.hybrid.links import LinkRules
from pipectl.planner.hybrid.model import Model
from pipectl.planner.hybrid.placing import Ranks
from pipectl.planner.hybrid.value import Parts


@dataclass(frozen=True)
class HybridRequest:
    """What may be chosen.

    Args:
        batch_size: samples of one optimizer step.
        sizes: of micro-batches, in samples.
        least_samples: that a replica must get of a full micro-batch.
        fractions: whether replicas may get fractions of a sample, at proportional times; otherwise
            the replica with the most samples sets the stage's time.
        scatter: whether stages may be spread over machines in other ways than one device after
            another in the order of the ranks.
        keep: how many of the best plans are returned.
        stages: of every plan; None if any number will do.
        shard_optimizer: whether replicas share out the optimizer's state.
    """

    batch_size: int
    sizes: tuple[int, ...]
    least_samples: float = 1.0
    fractions: bool = False
    scatter: bool = True
    keep: int = 8
    stages: int | None = None
    shard_optimizer: bool = False

    def micro_batches(self, size: int) -> int:
        """Of a step, with micro-batches of ``size`` samples."""
        return ceil(self.batch_size / size)

    def last_share(self, size: int) -> float:
        """Size of the last micro-batch relative to the others."""
        return (self.batch_size - (self.micro_batches(size) - 1) * size) / size


@dataclass(frozen=True)
class HybridPlan:
    """Stages with replicas, and what the recurrence says of them.

    Args:
        cuts: states of the search, one more than stages.
        ranks: of every stage, one a replica.
        warm_up: forwards of every stage before its first backward.
        lower_bound_s: no plan of the search takes less.
    """

    cuts: tuple[int, ...]
    ranks: Ranks
    micro_batch_size: int
    micro_batches: int
    warm_up: tuple[int, ...]
    step_time_s: float
    lower_bound_s: float

    @property
    def replicas(self) -> tuple[int, ...]:
        """Of every stage."""
        return tuple(len(ranks) for ranks in self.ranks)


def placed_parts(
    model: Model, rules: LinkRules, cuts: Sequence[int], picks: Sequence[int], ranks: Ranks
) -> Parts:
    """Costs of a plan whose stages are on any ranks, with the messages' true sizes.

    A border costs the same both ways: the rules see the earlier stage as the sender.
    """
    costs = model.costs
    slow = np.array([1.0 / min(rules.speed(rank) for rank in inside) for inside in ranks])
    start, end, pick = np.array(cuts[:-1]), np.array(cuts[1:]), np.array(picks)
    reduced = costs.reduced_bytes[end] - costs.reduced_bytes[start]
    replicas = np.array([len(inside) for inside in ranks])
    borders = list(zip(cuts[1:-1], pairwise(ranks), strict=True))
    there = [rules.transfer_s(costs.activation_bytes[s], *pair) for s, pair in borders]
    back = [rules.transfer_s(costs.gradient_bytes[s], *pair) for s, pair in borders]
    return Parts(
        forward_s=(_held(costs.forward_s, pick, start, end) + costs.stage_s[0]) * slow,
        backward_s=(_held(costs.backward_s, pick, start, end) + costs.stage_s[1]) * slow,
        reduce_s=np.array(
            [
                rules.reduce_s(float(size), on) if size > 0 else 0.0
                for size, on in zip(reduced, ranks, strict=True)
            ]
        ),
        update_s=(costs.update_s[end] - costs.update_s[start]) * slow,
        activation_s=np.array([message.hold_s for message in there]),
        gradient_s=np.array([message.hold_s for message in back]),
        late_s=np.array([message.late_s for message in there]),
        resident_bytes=_held(costs.resident_bytes, pick, start, end),
        saved_bytes=(costs.saved_bytes[end] - costs.saved_bytes[start]) / replicas,
        summed_bytes=np.where(replicas > 1, reduced * (2.0 - 1.0 / replicas), 0.0),
        limit_bytes=np.array([min(rules.memory_bytes(r) for r in inside) for inside in ranks]),
    )


def _held(costs: Floats, pick: Integers, start: Integers, end: Integers) -> Floats:
    """What lies between two states, for the replicas of every stage."""
    found: Floats = costs[pick, end] - costs[pick, start]
    return found
