"""Planners of the literature, for comparison: profile and links to stages, replicas and ranks."""

from pipectl.planner.policies import antichain, dapple, pipedream, uniform
from pipectl.planner.policies.policy import Policy, PolicyPlan, Work

POLICIES: dict[str, Policy] = {
    dapple.NAME: dapple.plan,
    pipedream.NAME: pipedream.plan,
    antichain.NAME: antichain.plan,
    "gpipe-balance": uniform.by_time,
    "uniform": uniform.by_count,
    "parameters": uniform.by_parameters,
    "hash": uniform.by_hash,
}
OWN = "pipectl"
"""The name of this project's own search, which is no policy of the literature."""
NAMES = (OWN, *POLICIES)

__all__ = ["NAMES", "OWN", "POLICIES", "Policy", "PolicyPlan", "Work"]
