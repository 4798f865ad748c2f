"""What stages hold, as sums over the states that they may begin and end at."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from pipectl.arrays import Floats
from pipectl.planner.costs.liveness import trained_bytes
from pipectl.profile import Profile


class Held(NamedTuple):
    """Bytes by state.

    Args:
        parameters, trained: all, and those with a gradient; shape (states,).
        saved: what a micro-batch of the profile's size keeps for its backward; shape (states,).
        resident: parameters, gradients and a replica's part of the optimizer's state; shape
            (replica counts, states).
    """

    parameters: Floats
    trained: Floats
    saved: Floats
    resident: Floats


def held_bytes(
    profile: Profile, members: Floats, replicas: Sequence[int], *, shard_optimizer: bool
) -> Held:
    """What the operators of each state hold.

    Args:
        members: 1 where a state has an operator; shape (states, operators).
        replicas: numbers of replicas that a stage may have.
        shard_optimizer: whether replicas share out the optimizer's state.
    """
    operators = profile.operators
    parameters = members @ np.array([float(o.parameter_bytes) for o in operators])
    trained = members @ np.array([float(trained_bytes(o)) for o in operators])
    saved = members @ np.array([float(sum(size for _, size in o.saved)) for o in operators])
    shared_by = np.array(replicas if shard_optimizer else [1] * len(replicas), np.float64)
    shares = 1.0 + profile.optimizer_cost.state_bytes_per_parameter_byte / shared_by
    resident = np.ascontiguousarray(parameters + np.outer(shares, trained))
    return Held(parameters, trained, saved, resident)
