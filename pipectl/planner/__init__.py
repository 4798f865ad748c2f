"""The planner: from a profile and a cluster to the fastest plan that fits."""

from pipectl.planner.request import PlanRequest
from pipectl.planner.search import make_plan

__all__ = ["PlanRequest", "make_plan"]
