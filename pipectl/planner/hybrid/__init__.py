"""Hybrid parallelism: stages with unequal numbers of replicas, judged by the closed recurrence."""

from pipectl.planner.hybrid.links import ClusterRules, LinkRules, Message
from pipectl.planner.hybrid.plans import HybridPlan, HybridRequest
from pipectl.planner.hybrid.search import hybrid_plans
from pipectl.planner.hybrid.states import States

__all__ = [
    "ClusterRules",
    "HybridPlan",
    "HybridRequest",
    "LinkRules",
    "Message",
    "States",
    "hybrid_plans",
]
