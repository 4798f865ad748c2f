"""The planner of the antichain line of work: one device a stage, the least bottleneck.

States are the prefixes of the antichain sequence, and a dynamic programme over split points finds
the straight pipeline (no replicas) whose slowest stage or message is fastest; micro-batches then
fill it. It is PipeDream's programme without replicas (Narayanan et al., SOSP 2019, section 3.1).
"""

from __future__ import annotations

from pipectl.planner.hybrid.links import LinkRules
from pipectl.planner.policies.pipedream import bandwidth, solved
from pipectl.planner.policies.policy import PolicyPlan, Work
from pipectl.profile import Profile

NAME = "antichain"


def plan(profile: Profile, rules: LinkRules, work: Work) -> PolicyPlan:
    """A straight pipeline on all devices, or on as many as there are states; links count once."""
    devices = len(rules.machine_of)
    between = bandwidth(rules, 0, devices - 1) if devices > 1 else 1.0
    for count in range(devices, 1, -1):
        found = solved(profile, work, [count], [between], straight=True)
        if found.value_s < float("inf"):
            return found
    return solved(profile, work, [], [], straight=True)
