"""Search for a plan within a time limit, and describe its step or its stages."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from math import inf
from typing import Any, TypedDict

from pipectl.cluster import Cluster
from pipectl.compiled import compiling_s
from pipectl.errors import InfeasibleError, PipectlError
from pipectl.jobs.planning import PlanInputs, advise_other_micro_batches
from pipectl.older_python import NotRequired
from pipectl.plan import Plan
from pipectl.planner import PlanRequest
from pipectl.planner.evaluator import plan_of_stages
from pipectl.planner.explain.bottleneck import (
    LinkLoad,
    StepParts,
    busiest_link,
    step_parts,
    step_range,
)
from pipectl.planner.explain.data_parallel import WithoutPipeline, without_pipeline
from pipectl.planner.explain.explain import Explanation, explain
from pipectl.planner.graph.imported import folded, pruned_if_pipedream
from pipectl.planner.search import search_plans
from pipectl.profile import Profile
from pipectl.simulate import Simulation, simulate
from pipectl.units import format_bytes


class PlanSearch:
    """A planner that ends with the best plan so far after a time limit or an interrupt.

    Args:
        budget_s: time limit of each plan; None sets no limit.

    Attributes:
        interrupted: whether the user has interrupted it, which ends all further searches.
        cut_short: whether a search has ended early.
    """

    def __init__(self, budget_s: float | None = None) -> None:
        self.budget_s = budget_s
        self.interrupted = self.cut_short = False
        self.restart()

    def restart(self) -> None:
        """Start the time limit of the next plan."""
        self._started_s = time.monotonic()

    @property
    def elapsed_s(self) -> float:
        """Time since the last restart."""
        return time.monotonic() - self._started_s

    def expired(self) -> bool:
        """Whether the search must end; planners call this regularly."""
        late = self.budget_s is not None and self.elapsed_s >= self.budget_s
        self.cut_short = self.cut_short or late or self.interrupted
        return late or self.interrupted

    def find(self, profile: Profile, cluster: Cluster, request: PlanRequest) -> list[Plan]:
        """Find the best plan, and after it the next best ones."""
        self.restart()
        return search_plans(profile, cluster, request, self.expired)

    def plan(self, profile: Profile, cluster: Cluster, request: PlanRequest) -> Plan:
        """The best plan; see :meth:`find`."""
        return self.find(profile, cluster, request)[0]


class ExplanationJson(TypedDict):
    """The explanation of a plan.

    Args:
        bottleneck: ``rank`` or ``link``.
        busiest_rank: how the rank that computes longest spends the step.
        busiest_link: the link that carries messages longest: ``between`` two of ``rank``, ``node``
            or ``switch``, ``source`` and ``target`` (null for the other end of a node's interface),
            ``busy_s`` and ``bytes_per_step``; null if there are no messages.
        alternatives: the next best plans: ``difference`` and ``step_time_s``.
        offers: other resources or settings: ``change``, ``step_time_s``, ``gain`` (share of the
            step), and ``reason`` if it was not tried.
    """

    bottleneck: str
    busiest_rank: dict[str, Any]
    busiest_link: dict[str, Any] | None
    alternatives: list[dict[str, Any]]
    offers: list[dict[str, Any]]


class AnswerJson(TypedDict):
    """What ``plan --json`` adds to ``plan.json``.

    Args:
        objective, value_s: ``step-time``, and the predicted step.
        lower_bound_s, gap: no plan with the micro-batch sizes that were tried has a shorter step;
            how far the plan is above it at most, as a share; null if nothing is proven.
        planning_s, compiling_s: time of the search, and the part of it that compiled.
        range_s: shortest and longest step if links are assumed and that makes a difference; else
            null.
        cannot_run: what in the plan does not go together, so that no ranks can run it, such as a
            backward on another rank and replicas.
        without_pipeline: ``single_rank`` and ``data_parallel``, each with ``step_time_s``, null if
            it does not fit; ``data_parallel_reason``, if there is no estimate;
            ``pipeline_is_worth_it``. Null if planning was interrupted.
        cut_short: whether ``--budget`` or Ctrl-C ended the search.
        explanation: with ``--explain`` only.
        nodes: of a job with a range of nodes only: the ``nodes`` of each number that was planned,
            and its ``step_time_s``. The rest is the plan for the highest number.
    """

    objective: str
    value_s: float
    lower_bound_s: float | None
    gap: float | None
    planning_s: float | None
    compiling_s: float
    range_s: tuple[float, float] | None
    cannot_run: list[str]
    without_pipeline: dict[str, Any] | None
    cut_short: bool
    explanation: NotRequired[ExplanationJson]
    nodes: NotRequired[list[dict[str, Any]]]


@dataclass(frozen=True)
class StepAnswer:
    """The plan with the shortest step, how it spends its time, and alternatives.

    Args:
        simulation: of the plan, for its timeline; its peaks are those of the stages alone, without
            the process (``plan.prediction`` has those of ranks).
        parts: how the busiest rank spends a step.
        link: the busiest link; None if there are no messages.
        stopped: what ended the search early; empty if nothing did.
        without: time of a step without a pipeline; None if planning was interrupted.
        explanation: None unless requested.
        compiling_s: time of the search that was spent compiling the planner.
        range_s: see :func:`pipectl.planner.explain.bottleneck.step_range`.
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

    @property
    def is_link_bound(self) -> bool:
        """Whether a link is the bottleneck: busy for longer per step than the busiest rank."""
        return self.link is not None and self.link.busy_s > self.parts.busy_s

    def to_json(self) -> dict[str, Any]:
        """The plan as in its file, with the keys of :class:`AnswerJson`."""
        from pipectl.runtime.nodes import unsupported

        plan, search = self.plan, self.plan.search
        answer: AnswerJson = {
            "objective": "step-time",
            "value_s": plan.predicted_step_s,
            "lower_bound_s": None if search is None else search.step_lower_bound_s,
            "gap": None if search is None else search.gap,
            "planning_s": None if search is None else search.planning_s,
            "range_s": self.range_s,
            "cannot_run": unsupported(plan),
            "without_pipeline": None if self.without is None else self.without.to_json(plan),
            "cut_short": bool(self.stopped),
            "compiling_s": self.compiling_s,
        }
        if self.explanation is not None:
            step_s, others = plan.predicted_step_s, self.explanation.alternatives
            answer["explanation"] = {
                "bottleneck": "link" if self.is_link_bound else "rank",
                "busiest_rank": asdict(self.parts),
                "busiest_link": None if self.link is None else asdict(self.link),
                "alternatives": [
                    {"difference": each.difference, "step_time_s": each.plan.predicted_step_s}
                    for each in others
                ],
                "offers": [offer.to_json(step_s) for offer in self.explanation.offers],
            }
        return {**plan.to_json(), **answer}


def plan_step(
    inputs: PlanInputs, search: PlanSearch, tell: Callable[[str], None], *, explained: bool
) -> StepAnswer:
    """Find the plan with the shortest step.

    Args:
        tell: called with a description of what is done next.
        explained: whether to explain the plan, which needs plans for other choices and machines.

    Raises:
        InfeasibleError: nothing fits; the message says how much is missing.
    """
    inputs = inputs.fold()
    subject = inputs.profile, inputs.cluster, inputs.request
    with advise_other_micro_batches(inputs.profile, inputs.request):
        before_s = compiling_s()
        best, *others = search.find(*subject)
        spent_s = compiling_s() - before_s
        stopped = ""
        if search.cut_short:
            stopped = "by Ctrl-C" if search.interrupted else f"after {search.budget_s} s"
        without = explanation = None
        if not search.interrupted:
            tell("comparing with other ways to train")
            without = without_pipeline(*subject, search.plan)
        if explained:
            tell("explaining")
            explanation = explain(
                best, *subject, search.plan, others, lambda: search.interrupted,
                can_add_nodes=inputs.can_add_nodes,
            )  # fmt: skip
    simulation = simulate(best, inputs.cluster)
    return StepAnswer(
        inputs,
        best,
        simulation,
        step_parts(best, inputs.cluster, simulation),
        busiest_link(best, inputs.cluster),
        stopped,
        without,
        explanation,
        spent_s,
        step_range(best, inputs.cluster),
    )


class BalanceJson(TypedDict):
    """The partition with the smallest largest stage load.

    Args:
        objective: ``max-stage-load``.
        value_s: the largest stage load.
        lower_bound_s, gap: no partition has a smaller load; how far the value is above it.
        exact: whether it is proven to be the smallest.
        planning_s: time of the search.
        accelerators: number of devices.
        memory_limit_bytes: memory of the smallest device, or the limit of the job if that is
            smaller; null if not limited.
        bandwidth_bytes_per_s: of a link, for values without ``transfer_s``; null if not given.
        communication_scale: factor of every ``transfer_s``.
        stages: of each stage ``nodes``, ``replicas``, ``devices``, ``device`` and ``load_s``.
        predicted: a simulated step, as in ``plan.json``.
        assumptions: what neither profile nor cluster said.
        cut_short: whether ``--budget`` or Ctrl-C ended the search.
    """

    objective: str
    value_s: float
    lower_bound_s: float
    gap: float
    exact: bool
    planning_s: float
    accelerators: int
    memory_limit_bytes: float | None
    bandwidth_bytes_per_s: float | None
    communication_scale: float
    stages: list[dict[str, Any]]
    predicted: dict[str, Any]
    assumptions: list[str]
    cut_short: bool


def plan_balance(
    inputs: PlanInputs, search: PlanSearch, communication_scale: float, *, links_count: bool
) -> tuple[BalanceJson, Plan]:
    """Minimise the largest stage load, as related work does.

    Args:
        communication_scale: factor of every ``transfer_s``; the cluster's links have it already.
        links_count: whether what values cost on the links of the cluster counts.

    Returns:
        The stages, and a plan of 1F1B with one device per stage.

    Raises:
        InfeasibleError: no partition fits.
        PipectlError: the search ended before any partition was found.
    """
    from pipectl.planner.balance.balance import balance
    from pipectl.planner.balance.load_model import BalanceRequest

    profile, cluster = pruned_if_pipedream(inputs.profile), inputs.cluster
    limits = (
        cluster.memory_of(rank, inputs.request.memory_limit_bytes) for rank in range(cluster.ranks)
    )
    limit_bytes = None if (smallest := min(limits)) == inf else int(smallest)
    request = BalanceRequest(
        devices=cluster.ranks,
        memory_limit_bytes=limit_bytes,
        bandwidth_bytes_per_s=cluster.widest_link.bandwidth_bytes_per_s if links_count else None,
        communication_scale=communication_scale,
    )
    search.restart()
    result = balance(profile, request, search.expired)
    planning_s = search.elapsed_s
    if result is None and search.cut_short:
        raise PipectlError("planning was ended before any plan was found", hint="allow more time")
    if result is None:
        within = "" if limit_bytes is None else f" of {format_bytes(limit_bytes)} each"
        more = inputs.request.more_ranks, inputs.request.more_memory(cluster)
        raise InfeasibleError(
            f"no feasible plan: no partition fits on {request.devices} devices{within}",
            hint=f"give {' or '.join(more)}",
        )
    nodes = [stage.nodes for stage in result.stages]
    machines = cluster.with_ranks(len(nodes))
    plan = plan_of_stages(folded(profile, nodes), machines, inputs.request, nodes)
    answer: BalanceJson = {
        "objective": "max-stage-load",
        "value_s": result.value_s,
        "lower_bound_s": result.lower_bound_s,
        "gap": result.gap,
        "exact": result.exact,
        "planning_s": planning_s,
        "accelerators": request.devices,
        "memory_limit_bytes": request.memory_limit_bytes,
        "bandwidth_bytes_per_s": request.bandwidth_bytes_per_s,
        "communication_scale": request.communication_scale,
        "stages": [
            {"nodes": list(stage.nodes), "replicas": 1, "devices": [index], "device": "acc",
             "load_s": stage.load_s}
            for index, stage in enumerate(result.stages)
        ],
        "predicted": plan.to_json()["predicted"],
        "assumptions": list(plan.assumptions),
        "cut_short": search.cut_short,
    }  # fmt: skip
    return answer, plan
