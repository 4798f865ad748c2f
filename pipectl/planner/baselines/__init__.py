"""Planners of the literature, for comparison: profile and links to stages, replicas and ranks."""

from pipectl.planner.baselines import contiguous, dapple, pipedream
from pipectl.planner.baselines.policy import Policy, PolicyPlan, Work

POLICIES: dict[str, Policy] = {
    dapple.NAME: dapple.plan,
    pipedream.NAME: pipedream.plan,
    pipedream.ANTICHAIN: pipedream.straight_plan,
    "gpipe-balance": contiguous.by_time,
    "uniform": contiguous.by_count,
    "parameters": contiguous.by_parameters,
    "hash": contiguous.by_hash,
}
OWN = "pipectl"
"""The name of this project's own search, which is no policy of the literature."""
NAMES = (OWN, *POLICIES)

__all__ = ["NAMES", "OWN", "POLICIES", "Policy", "PolicyPlan", "Work"]
