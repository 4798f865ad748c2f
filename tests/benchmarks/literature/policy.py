"""What planners of the literature are given and what they choose."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pipectl.arrays import Floats
from pipectl.planner.graph.downsets import CutSpace, Partition
from pipectl.planner.partition.layout import Ranks
from pipectl.profile import Profile
from pipectl.profile_parts import Operator


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
    """The stages that a policy chose, and the value of its objective.

    Args:
        cuts: entries of ``states``, one more than stages.
        ranks: of every stage, one per replica.
        value_s: the policy's objective; not comparable with other policies'.
    """

    states: CutSpace
    cuts: tuple[int, ...]
    ranks: Ranks
    value_s: float

    @property
    def partition(self) -> Partition:
        """The blocks of every stage."""
        return self.states.partition(self.cuts)


@dataclass(frozen=True)
class Prefixes:
    """Sums over the blocks of each state, for one micro-batch on one device.

    Args:
        time_s: forward and backward.
        parameter_bytes: bytes of parameters.
        trained_bytes: of those that are trained, whose gradients replicas sum.
        output_bytes: values that are read after the state.
    """

    time_s: Floats
    parameter_bytes: Floats
    trained_bytes: Floats
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
            members @ np.array([trained_bytes(o) for o in operators]),
            crossing @ np.array([float(o.output_bytes) for o in operators]) * scale,
        )


def trained_bytes(operator: Operator) -> float:
    """The bytes of an operator's parameters without those of which it computes no gradient."""
    trained = {name for name, _ in operator.parameter_gradients}
    frozen = sum(size for name, size in operator.parameters if name not in trained)
    return float(operator.parameter_bytes - frozen)
