"""What `pipectl plan` answers: the shortest step, numbers of nodes compared, the best balance."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

from pipectl.cluster import Cluster
from pipectl.compiled import compiling_s
from pipectl.errors import InfeasibleError, PipectlError, UsageError
from pipectl.jobs.deadline import Deadline
from pipectl.jobs.plan_question import PlanInputs, Question, shipped_number
from pipectl.jobs.planning import advising_other_micro_batches
from pipectl.plan import Plan
from pipectl.planner import PlanRequest
from pipectl.planner.answers.busiest_link import LinkLoad, busiest_link
from pipectl.planner.answers.data_parallel import Estimate, WithoutPipeline, without_pipeline
from pipectl.planner.answers.explain import Explanation, explain
from pipectl.planner.answers.scaling import Scaling, scaling
from pipectl.planner.answers.step_parts import StepParts, step_parts
from pipectl.planner.exact.balance import balance
from pipectl.planner.exact.request import Balance, BalanceRequest, DeviceKind
from pipectl.planner.folding import folded
from pipectl.planner.machines.other_clusters import with_nodes, with_ranks
from pipectl.planner.plans.given_stages import plan_of_stages
from pipectl.planner.policies import NAMES, OWN
from pipectl.planner.policies.policy_plans import policy_plans
from pipectl.planner.pruning import prepared
from pipectl.planner.request import Planner
from pipectl.planner.search import MOST_ALTERNATIVES, Found, search_plans
from pipectl.profile import Profile
from pipectl.simulate import Simulation, simulate
from pipectl.units import did_you_mean, format_bytes

Searcher = Callable[[Profile, Cluster, PlanRequest], Found]
"""Finds the best plan it can, and the next best."""


def searcher_named(name: str, deadline: Deadline) -> Searcher:
    """The planner of a name, with a budget that begins anew for every plan.

    Raises:
        UsageError: there is none of this name.
    """
    if name not in NAMES:
        raise UsageError(
            f"--planner: there is no planner {name!r}{did_you_mean(name, NAMES)}",
            cure=f"one of: {', '.join(NAMES)}",
        )

    def search(profile: Profile, cluster: Cluster, request: PlanRequest) -> Found:
        deadline.restart()
        if name == OWN:
            return search_plans(profile, cluster, request, deadline)
        if request.listed is not None:
            raise UsageError(
                f"--planner {name}: chooses a schedule, but the job has {request.listed.name}",
                cure="leave --planner out, or set pipeline.schedule: auto",
            )
        started_s = time.perf_counter()
        plan, *others = policy_plans(name, profile, cluster, request, deadline)
        assert plan.search is not None, "planners say how they found a plan"
        searched = replace(plan.search, planning_s=time.perf_counter() - started_s)
        return Found(replace(plan, search=searched), tuple(others[:MOST_ALTERNATIVES]))

    return search


def _best(search: Searcher, profile: Profile, cluster: Cluster, request: PlanRequest) -> Plan:
    return search(profile, cluster, request).plan


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

    def to_json(self) -> dict[str, Any]:
        """The plan as its file holds it, and what was asked: the objective and its value."""
        from pipectl.runtime.supported import unsupported

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
            "cannot_run": unsupported(plan),
            "without_pipeline": self.without and _without_json(plan, self.without),
            "cut_short": bool(self.stopped),
            "compiling_s": self.compiling_s,
        }
        if self.explanation is not None:
            document["explanation"] = _explanation_json(self.explanation)
        return document


def plan_step(
    inputs: PlanInputs,
    planner: str,
    deadline: Deadline,
    tell: Callable[[str], None],
    *,
    explained: bool,
) -> StepAnswer:
    """The plan with the shortest step.

    Args:
        planner: its name.
        tell: called with what goes on next.
        explained: whether to plan anew for other choices and machines, too.

    Raises:
        InfeasibleError: nothing fits; the message says how much is missing.
    """
    subject = inputs.profile, inputs.cluster, inputs.request
    search = searcher_named(planner, deadline)
    with advising_other_micro_batches(inputs.kept):
        before_s = compiling_s()
        first = search(*subject)
        spent_s = compiling_s() - before_s
        stopped = ""
        if deadline.cut_short:
            stopped = "by Ctrl-C" if deadline.interrupted else f"after {deadline.budget_s} s"
        without = explanation = None
        if not deadline.interrupted:
            tell("comparing with other ways to train")
            own: Planner = partial(_best, searcher_named(OWN, deadline))
            without = without_pipeline(*subject, own)
        if explained:
            tell("explaining")
            again: Planner = partial(_best, search)
            explanation = explain(
                first.plan, *subject, again, first.alternatives, lambda: deadline.interrupted
            )
    simulation = simulate(first.plan, inputs.cluster)
    parts = step_parts(first.plan, inputs.cluster, simulation)
    link = busiest_link(first.plan, inputs.cluster)
    return StepAnswer(
        inputs, first.plan, simulation, parts, link, stopped, without, explanation, spent_s
    )


def plan_nodes(
    inputs: PlanInputs,
    nodes: Sequence[int],
    planner: str,
    deadline: Deadline,
    tell: Callable[[str], None],
) -> Scaling:
    """The best plan of the same step on each number of nodes."""
    again: Planner = partial(_best, searcher_named(planner, deadline))
    subject = inputs.profile, inputs.cluster, inputs.request
    return scaling(*subject, nodes, again, lambda count: tell(f"planning for {count} nodes"))


@dataclass(frozen=True)
class Balanced:
    """Stages whose largest load is as small as possible: the objective of related work.

    Args:
        plan: these stages with 1F1B, one device per stage.
    """

    request: BalanceRequest
    balance: Balance
    planning_s: float
    plan: Plan

    def to_json(self) -> dict[str, Any]:
        """The documented object."""
        return {
            "objective": "max-stage-load",
            "value_s": self.balance.value_s,
            "lower_bound_s": self.balance.lower_bound_s,
            "gap": self.balance.gap,
            "exact": self.balance.exact,
            "planning_s": self.planning_s,
            "accelerators": self.request.devices,
            "cpus": self.request.cpus,
            "memory_limit_bytes": self.request.memory_limit_bytes,
            "bandwidth_bytes_per_s": self.request.bandwidth_bytes_per_s,
            "communication_scale": self.request.communication_scale,
            "stages": [
                {
                    "nodes": list(stage.nodes),
                    "replicas": 1,
                    "devices": [index],
                    "device": stage.device,
                    "load_s": stage.load_s,
                }
                for index, stage in enumerate(self.balance.stages)
            ],
            "predicted": self.plan.to_json()["prediction"],
            "assumptions": list(self.plan.assumptions),
        }


def plan_balance(inputs: PlanInputs, question: Question, deadline: Deadline) -> Balanced:
    """Search the stages with the smallest largest load, and predict a step in them.

    Raises:
        InfeasibleError: no partition fits into the memory.
        PipectlError: time was up before any was found.
    """
    cluster, asked, profile = inputs.cluster, inputs.request, prepared(inputs.profile)
    known = question.bandwidth_bytes_per_s is not None or inputs.cluster_file is not None
    request = BalanceRequest(
        devices=cluster.ranks,
        cpus=int(shipped_number(profile, "cpus") or 0),
        memory_limit_bytes=asked.memory_limit_bytes,
        # the scale of messages is in it already
        bandwidth_bytes_per_s=cluster.widest_link.bandwidth_bytes_per_s if known else None,
        communication_scale=question.communication_scale or 1.0,
    )
    began = time.perf_counter()
    deadline.restart()
    result = balance(profile, request, deadline)
    planning_s = time.perf_counter() - began
    if result is None and deadline.cut_short:
        raise PipectlError("planning was ended before any plan was found", cure="allow more time")
    if result is None:
        limit = request.memory_limit_bytes
        within = "" if limit is None else f" of {format_bytes(limit)} each"
        raise InfeasibleError(
            f"no feasible plan: no partition fits on {request.devices} devices{within}",
            cure=f"give {asked.named('ranks')}, or a larger {asked.named('memory_limit')}",
        )
    stages = [stage.nodes for stage in result.stages]
    loads = [
        None if stage.device is DeviceKind.ACCELERATOR else stage.load_s for stage in result.stages
    ]
    ranks = len(stages)  # CPUs beside the devices are further ranks
    machines = with_ranks(with_nodes(cluster, max(len(cluster.nodes), ranks)), ranks)
    plan = plan_of_stages(folded(profile, stages), machines, asked, stages, loads)
    return Balanced(request, result, planning_s, plan)


def scaling_json(result: Scaling) -> dict[str, Any]:
    """The table of ``--nodes``."""
    pays = result.pays_until
    return {
        "objective": "step-time",
        "pays_until_nodes": pays and pays.nodes,
        "counts": [
            {
                "nodes": count.nodes,
                "ranks": count.ranks,
                "feasible": count.plan is not None,
                "reason": count.reason or None,
                "stages": count.plan and len(count.plan.stages),
                "micro_batches": count.plan and count.plan.micro_batches,
                "schedule": count.plan and count.plan.schedule,
                "step_time_s": count.step_s,
                "samples_per_s": count.samples_per_s,
                "efficiency": result.efficiency(count),
                "bubble": count.plan and count.plan.prediction and count.plan.prediction.bubble,
                "node_hours_per_1000_steps": count.node_hours,
            }
            for count in result.counts
        ],
    }


def _explanation_json(explanation: Explanation) -> dict[str, Any]:
    step_s = explanation.plan.predicted_step_s
    return {
        "binds": "link" if explanation.link_binds else "rank",
        "busiest_rank": asdict(explanation.parts),
        "busiest_link": explanation.link and asdict(explanation.link),
        "alternatives": [
            {"difference": other.difference, "step_time_s": other.plan.predicted_step_s}
            for other in explanation.alternatives
        ],
        "offers": [
            {
                "change": offer.change,
                "step_time_s": offer.step_s,
                "gain": offer.gain(step_s),
                "reason": offer.reason or None,
            }
            for offer in explanation.offers
        ],
    }


def _without_json(plan: Plan, without: WithoutPipeline) -> dict[str, Any]:
    def estimate_json(estimate: Estimate | None) -> dict[str, Any] | None:
        if estimate is None:
            return None
        values = asdict(estimate)
        return {"step_time_s": values.pop("step_s"), **values}

    return {
        "single_rank": estimate_json(without.single),
        "data_parallel": estimate_json(without.data_parallel),
        "data_parallel_reason": without.reason or None,
        "pipeline_is_worth_it": without.better_than(plan) is None,
    }
