"""The planner: from a profile and a cluster to the fastest plan that fits.

A search turns a ``Chain`` of downsets into a ``Cut`` (stages and kinds of device), a ``Layout``
(with ranks), a ``Choice`` (with micro-batch size, schedule and warm-up), a ``Candidate`` (with an
estimate), and a ``Verdict`` (simulated, within memory), which has the plan. Besides the search,
``balance/`` minimises the largest stage load with a proof, and ``explain/`` says what limits a plan
and what would help.

Names of this package load on first use: the search imports LLVM, and the process that measures
the memory of a rank's process (``profiler``) needs only the planner's cost model.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pipectl.planner.request import PlanRequest
    from pipectl.planner.search import make_plan, search_plans

__all__ = ["PlanRequest", "make_plan", "search_plans"]
_MODULES = {"PlanRequest": "request", "make_plan": "search", "search_plans": "search"}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
