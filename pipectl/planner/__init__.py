"""The planner: from a profile and a cluster to the fastest plan that fits."""

from pipectl.planner.request import PlanRequest
from pipectl.planner.search import Found, make_plan, search_plans

__all__ = ["Found", "PlanRequest", "make_plan", "search_plans"]
