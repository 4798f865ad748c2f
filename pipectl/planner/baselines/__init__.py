"""Planners of the literature, for comparison: profile and links to stages, replicas and ranks."""

from pipectl.planner.baselines import dapple, pipedream, policy
from pipectl.planner.baselines.policy import Policy, PolicyPlan, Work

POLICIES: dict[str, Policy] = {
    dapple.NAME: dapple.plan,
    pipedream.NAME: pipedream.plan,
    pipedream.ANTICHAIN: pipedream.straight_plan,
    "gpipe-balance": policy.by_time,
    "uniform": policy.by_count,
    "parameters": policy.by_parameters,
    "hash": policy.by_hash,
}
OWN = "pipectl"
"""The name of this project's own search, which is no policy of the literature."""
NAMES = (OWN, *POLICIES)

__all__ = ["NAMES", "OWN", "POLICIES", "Policy", "PolicyPlan", "Work"]
