"""What `pipectl plan --json` prints."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from pipectl.jobs.wishes import Objective
from pipectl.plan import Plan
from pipectl.planner.answers.data_parallel import Estimate, WithoutPipeline
from pipectl.planner.answers.explain import Explanation
from pipectl.planner.answers.scaling import Count, Scaling


def plan_json(plan: Plan, without: WithoutPipeline | None) -> dict[str, Any]:
    """A plan as its file holds it, and what was asked: the objective and its value.

    Args:
        without: None where no estimate was made.
    """
    from pipectl.runtime.supported import unsupported

    document = plan.to_json()
    for stage in document["stages"]:
        stage |= {"replicas": len(stage["ranks"]), "devices": stage["ranks"]}
    search = plan.search
    return {
        **document,
        "objective": Objective.STEP_TIME,
        "value_s": plan.predicted_step_s,
        "lower_bound_s": search and search.step_lower_bound_s,
        "gap": search and search.gap,
        "planning_s": search and search.planning_s,
        "predicted": document["prediction"],
        "cannot_run": unsupported(plan),
        "without_pipeline": without and _without_json(plan, without),
    }


def explanation_json(found: Explanation) -> dict[str, Any]:
    """All answers of ``--explain``."""
    step_s = found.plan.predicted_step_s
    return {
        "binds": "link" if found.link_binds else "rank",
        "busiest_rank": asdict(found.parts),
        "busiest_link": found.link and asdict(found.link),
        "alternatives": [
            {"difference": other.difference, "step_time_s": other.plan.predicted_step_s}
            for other in found.alternatives
        ],
        "offers": [
            {
                "change": offer.change,
                "step_time_s": offer.step_s,
                "gain": offer.gain(step_s),
                "reason": offer.reason or None,
            }
            for offer in found.offers
        ],
    }


def scaling_json(found: Scaling) -> dict[str, Any]:
    """The table of ``--nodes``."""
    pays = found.pays_until
    return {
        "objective": Objective.STEP_TIME,
        "pays_until_nodes": pays and pays.nodes,
        "counts": [_count_json(found, count) for count in found.counts],
    }


def _count_json(found: Scaling, count: Count) -> dict[str, Any]:
    plan = count.plan
    return {
        "nodes": count.nodes,
        "ranks": count.ranks,
        "feasible": plan is not None,
        "reason": count.reason or None,
        "stages": plan and len(plan.stages),
        "micro_batches": plan and plan.micro_batches,
        "schedule": plan and plan.schedule,
        "step_time_s": count.step_s,
        "samples_per_s": count.samples_per_s,
        "efficiency": found.efficiency(count),
        "bubble": plan and plan.prediction and plan.prediction.bubble,
        "node_hours_per_1000_steps": count.node_hours,
    }


def _without_json(plan: Plan, without: WithoutPipeline) -> dict[str, Any]:
    better = without.better_than(plan)
    return {
        "single_rank": _estimate_json(without.single),
        "data_parallel": _estimate_json(without.data_parallel),
        "data_parallel_reason": without.reason or None,
        "pipeline_is_worth_it": better is None,
    }


def _estimate_json(estimate: Estimate | None) -> dict[str, Any] | None:
    if estimate is None:
        return None
    found = asdict(estimate)
    return {"step_time_s": found.pop("step_s"), **found}
