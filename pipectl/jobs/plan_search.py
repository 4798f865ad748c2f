"""Searching a plan: within a time limit, and with what to know of the step it makes."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from pipectl.cluster import Cluster
from pipectl.compiled import compiling_s
from pipectl.jobs.planning import PlanInputs, advise_other_micro_batches
from pipectl.plan import Plan
from pipectl.planner import PlanRequest
from pipectl.planner.baselines import OWN
from pipectl.planner.baselines.plans import policy_plans
from pipectl.planner.explain.bottleneck import LinkLoad, StepParts, busiest_link, step_parts
from pipectl.planner.explain.data_parallel import WithoutPipeline, without_pipeline
from pipectl.planner.explain.explain import Explanation, explain
from pipectl.planner.explain.what_if import step_range
from pipectl.planner.search import MAX_ALTERNATIVES, Found, search_plans
from pipectl.profile import Profile
from pipectl.simulate import Simulation, simulate


class PlanSearch:
    """A planner, which ends with the best plan so far after a time limit or an interrupt.

    Args:
        planner: its name.
        budget_s: for each plan; None for as long as it takes.

    Attributes:
        interrupted: whether the user ended it, which holds for all further plans.
        cut_short: whether a planner was told that time is up.
    """

    def __init__(self, planner: str = OWN, budget_s: float | None = None) -> None:
        self.planner, self.budget_s = planner, budget_s
        self.interrupted = self.cut_short = False
        self.restart()

    def restart(self) -> None:
        """Begin the budget of the next plan."""
        self._started_s = time.monotonic()

    @property
    def elapsed_s(self) -> float:
        """Since the last restart."""
        return time.monotonic() - self._started_s

    def expired(self) -> bool:
        """Whether time is up; planners ask now and then."""
        late = self.budget_s is not None and self.elapsed_s >= self.budget_s
        self.cut_short = self.cut_short or late or self.interrupted
        return late or self.interrupted

    def find(
        self, profile: Profile, cluster: Cluster, request: PlanRequest, planner: str | None = None
    ) -> Found:
        """The best plan, and the next best.

        Args:
            planner: name of another planner.
        """
        self.restart()
        if (planner := planner or self.planner) == OWN:
            return search_plans(profile, cluster, request, self.expired)
        plan, *others = policy_plans(planner, profile, cluster, request, self.expired)
        assert plan.search is not None, "planners say how they found a plan"
        searched = replace(plan.search, planning_s=self.elapsed_s)
        return Found(replace(plan, search=searched), tuple(others[:MAX_ALTERNATIVES]))

    def plan(
        self, profile: Profile, cluster: Cluster, request: PlanRequest, planner: str | None = None
    ) -> Plan:
        """The best plan; see :meth:`find`."""
        return self.find(profile, cluster, request, planner).plan


@dataclass(frozen=True)
class StepAnswer:
    """The plan with the shortest step, where its time goes, and what else would do.

    Args:
        simulation: of the plan.
        parts: how the busiest rank spends a step.
        link: that carries messages longest; None if there are none.
        stopped: what ended the search early; empty if nothing did.
        without: what a step takes without a pipeline; None if planning was interrupted.
        explanation: None unless asked for.
        compiling_s: of the search, what compiling the planner took.
        range_s: of a step, see :func:`pipectl.planner.explain.what_if.step_range`.
    """

    inputs: PlanInputs
    plan: Plan
    simulation: Simulation
    parts: StepParts
    link: LinkLoad | None
    stopped: str
    without: WithoutPipeline | None
    explanation: Explanation | None
    compiling_s: float
    range_s: tuple[float, float] | None = None

    def to_json(self) -> dict[str, Any]:
        """The plan as its file holds it, and what was asked: the objective and its value."""
        from pipectl.runtime.nodes import unsupported

        plan, search = self.plan, self.plan.search
        document = plan.to_json()
        for stage in document["stages"]:
            stage |= {"replicas": len(stage["ranks"]), "devices": stage["ranks"]}
        document |= {
            "objective": "step-time",
            "value_s": plan.predicted_step_s,
            "lower_bound_s": search and search.step_lower_bound_s,
            "gap": search and search.gap,
            "planning_s": search and search.planning_s,
            "predicted": document["prediction"],
            "range_s": self.range_s,
            "cannot_run": unsupported(plan),
            "without_pipeline": self.without and self.without.to_json(plan),
            "cut_short": bool(self.stopped),
            "compiling_s": self.compiling_s,
        }
        if self.explanation is not None:
            document["explanation"] = self.explanation.to_json()
        return document


def plan_step(
    inputs: PlanInputs, search: PlanSearch, tell: Callable[[str], None], *, explained: bool
) -> StepAnswer:
    """The plan with the shortest step.

    Args:
        tell: called with what goes on next.
        explained: whether to plan anew for other choices and machines, too.

    Raises:
        InfeasibleError: nothing fits; the message says how much is missing.
    """
    subject = inputs.profile, inputs.cluster, inputs.request
    with advise_other_micro_batches(inputs.kept_micro_batches):
        before_s = compiling_s()
        best = search.find(*subject)
        spent_s = compiling_s() - before_s
        stopped = ""
        if search.cut_short:
            stopped = "by Ctrl-C" if search.interrupted else f"after {search.budget_s} s"
        without = explanation = None
        if not search.interrupted:
            tell("comparing with other ways to train")
            without = without_pipeline(*subject, partial(search.plan, planner=OWN))
        if explained:
            tell("explaining")
            explanation = explain(
                best.plan, *subject, search.plan, best.alternatives, lambda: search.interrupted
            )
    simulation = simulate(best.plan, inputs.cluster)
    return StepAnswer(
        inputs,
        best.plan,
        simulation,
        step_parts(best.plan, inputs.cluster, simulation),
        busiest_link(best.plan, inputs.cluster),
        stopped,
        without,
        explanation,
        spent_s,
        step_range(best.plan, inputs.cluster),
    )
