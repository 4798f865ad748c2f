"""Balance by time, as torchgpipe does: contiguous blocks with the smallest largest sum.

The blocks, in graph order, are cut into as many partitions as there are devices; messages and
replicas do not count. Source: Kim et al., "torchgpipe: On-the-fly Pipeline Parallelism for Training
Giant Models", 2020, section on automatic balancing, which cites Barany and Grinberg, "Block
Partitions of Sequences", 2015. Here the least largest sum is found exactly, by a dynamic programme.
"""

from __future__ import annotations

import numpy as np

from pipectl.arrays import Floats
from pipectl.planner.hybrid.links import LinkRules
from pipectl.planner.hybrid.placing import consecutive
from pipectl.planner.policies.policy import PolicyPlan, Prefixes, Work
from pipectl.planner.policies.uniform import chain_states
from pipectl.profile import Profile

NAME = "gpipe-balance"


def plan(profile: Profile, rules: LinkRules, work: Work) -> PolicyPlan:
    """A straight pipeline over all devices; the objective is the largest stage's time."""
    states = chain_states(profile)
    count = min(len(rules.machine_of), len(states) - 1)
    times = Prefixes.of(profile, states, work.micro_batch_size).time_s
    cuts, largest_s = balanced(times, count)
    return PolicyPlan(states, cuts, consecutive((1,) * count), largest_s)


def balanced(times: Floats, count: int) -> tuple[tuple[int, ...], float]:
    """Cuts of rising sums into ``count`` blocks, none empty, with the least largest block.

    Args:
        times: shape (blocks + 1); what lies in front of every possible cut.
    """
    size = len(times)
    apart = np.where(np.arange(size)[:, None] < np.arange(size)[None, :], 0.0, np.inf)
    block = times[None, :] - times[:, None] + apart
    largest = block[0]
    begins = []
    for _ in range(count - 1):
        values = np.maximum(largest[:, None], block)
        begins.append(values.argmin(axis=0))
        largest = values.min(axis=0)
    cuts = [size - 1]
    for begin in reversed(begins):
        cuts.append(int(begin[cuts[-1]]))
    return (0, *cuts[::-1]), float(largest[-1])
