"""Planners of the literature, for comparison: profile and links to stages, replicas and ranks."""

from pipectl.planner.policies import antichain, dapple, gpipe_balance, pipedream, uniform
from pipectl.planner.policies.policy import Policy, PolicyPlan, Work

POLICIES: dict[str, Policy] = {
    module.NAME: module.plan for module in (dapple, pipedream, antichain, gpipe_balance, uniform)
}
OWN = "pipectl"
"""The name of this project's own search, which is no policy of the literature."""
NAMES = (OWN, *POLICIES)

__all__ = ["NAMES", "OWN", "POLICIES", "Policy", "PolicyPlan", "Work"]
