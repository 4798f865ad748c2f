"""What the planners of the literature have in common here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from pipectl.arrays import Floats
from pipectl.planner.costs.links import Links
from pipectl.planner.partition.cut_space import CutSpace
from pipectl.planner.partition.layout import Ranks
from pipectl.profile import Profile


@dataclass(frozen=True)
class Work:
    """One optimizer step.

    Args:
        batch_size: samples.
        micro_batch_size: samples of a micro-batch.
    """

    batch_size: int
    micro_batch_size: int

    @property
    def micro_batches(self) -> float:
        """How many micro-batches a step has."""
        return self.batch_size / self.micro_batch_size


@dataclass(frozen=True)
class PolicyPlan:
    """The stages a policy chose, and what its own objective says of them.

    Args:
        cuts: entries of ``states``, one more than stages.
        ranks: of every stage, one a replica.
        value_s: the policy's objective; not comparable with other policies'.
    """

    states: CutSpace
    cuts: tuple[int, ...]
    ranks: Ranks
    value_s: float

    @property
    def members(self) -> tuple[tuple[int, ...], ...]:
        """Indices of the operators of every stage, in graph order."""
        return tuple(tuple(self.states.between(*ends)) for ends in pairwise(self.cuts))


Policy = Callable[[Profile, Links, Work], PolicyPlan]


@dataclass(frozen=True)
class Prefixes:
    """What states hold, for one micro-batch of a given size on one device.

    Args:
        time_s: forward and backward of all that is inside.
        parameter_bytes: of all that is inside.
        output_bytes: of what is read after the state.
    """

    time_s: Floats
    parameter_bytes: Floats
    output_bytes: Floats

    @classmethod
    def of(cls, profile: Profile, states: CutSpace, size: float) -> Prefixes:
        """Times and messages in proportion to ``size`` samples."""
        scale = size / profile.micro_batch_size
        inside = states.operators
        members = inside.astype(np.float64)
        read = np.zeros_like(inside)
        for source, target in profile.edge_indices:
            read[:, source] |= ~inside[:, target]
        crossing = (read & inside).astype(np.float64)
        operators = profile.operators
        return cls(
            members @ np.array([o.forward_s + o.backward_s for o in operators]) * scale,
            members @ np.array([float(o.parameter_bytes) for o in operators]),
            crossing @ np.array([float(o.output_bytes) for o in operators]) * scale,
        )
