"""The planner without a planner: as many operators in every stage as in any other."""

from __future__ import annotations

import numpy as np

from pipectl.planner.graphs.condense import condense
from pipectl.planner.graphs.ideals import prefix_downsets
from pipectl.planner.hybrid.links import LinkRules
from pipectl.planner.hybrid.placing import consecutive
from pipectl.planner.hybrid.states import States
from pipectl.planner.policies.policy import PolicyPlan, Prefixes, Work
from pipectl.profile import Profile

NAME = "uniform"


def chain_states(profile: Profile) -> States:
    """The prefixes of the graph's own order."""
    graph = condense(profile)
    downsets = prefix_downsets(graph, 0)
    return States.chosen(graph, downsets, complete=False)


def plan(profile: Profile, rules: LinkRules, work: Work) -> PolicyPlan:
    """Equal numbers of blocks in graph order; the objective is the largest stage's time."""
    states = chain_states(profile)
    count = min(len(rules.machine_of), len(states) - 1)
    cuts = tuple(int(at) for at in np.round(np.linspace(0, len(states) - 1, count + 1)))
    times = Prefixes.of(profile, states, work.micro_batch_size).time_s
    largest_s = float(np.diff(times[list(cuts)]).max())
    return PolicyPlan(states, cuts, consecutive((1,) * count), largest_s)
