"""What only `pipectl lab plan` asks: other planners, techniques, links and objectives."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from pipectl.errors import InfeasibleError, PipectlError, UsageError
from pipectl.jobs.plan_answers import Deadline, PlanInputs
from pipectl.plan import Plan, Replication
from pipectl.planner.balance.balance import balance
from pipectl.planner.balance.load_model import Balance, BalanceRequest
from pipectl.planner.baselines import NAMES, OWN
from pipectl.planner.explain.what_if import with_bandwidth, with_ranks, with_slower_links
from pipectl.planner.graph.imported import folded, prepared
from pipectl.planner.judge import plan_of_stages
from pipectl.units import did_you_mean, format_bytes

TECHNIQUES: dict[str, dict[str, Any]] = {
    "replicas": {"replicas": None, "replication": Replication.WHOLE},
    "split": {"replicas": None, "replication": Replication.SPLIT},
    "recompute": {"recompute": None, "blocks": None},
    "offload": {"offload": None},
    "pipefb": {"backward_apart": None},
    "schedules": {"every_schedule": True},
}
"""Changes of the request that leave a technique to the planner. Split samples change results."""


def adapt(
    inputs: PlanInputs,
    *,
    planner: str = OWN,
    techniques: Sequence[str] = (),
    bandwidth_bytes_per_s: float | None = None,
    communication_scale: float | None = None,
) -> PlanInputs:
    """The inputs for another planner, with more techniques or with other links.

    Args:
        planner: name of the one to ask.
        techniques: what the planner may choose although the job has not asked for it.
        bandwidth_bytes_per_s: of every link.
        communication_scale: how many times as long every message takes.

    Raises:
        UsageError: a name is unknown, or the planner cannot plan for the job's own schedule.
    """
    request, cluster, listed = inputs.request, inputs.cluster, inputs.request.listed
    if planner not in NAMES:
        raise UsageError(
            f"--planner: there is no planner {planner!r}{did_you_mean(planner, NAMES)}",
            cure=f"one of: {', '.join(NAMES)}",
        )
    if planner != OWN and listed is not None:
        raise UsageError(
            f"--planner {planner}: chooses a schedule, but the job has {listed.name}",
            cure="leave --planner out, or set pipeline.schedule: auto",
        )
    for name in techniques:
        if name not in TECHNIQUES:
            raise UsageError(
                f"--allow: there is no technique {name!r}{did_you_mean(name, list(TECHNIQUES))}",
                cure=f"any of: {', '.join(TECHNIQUES)}",
            )
        request = replace(request, **TECHNIQUES[name])
    if {"replicas", "split"} <= set(techniques):
        request = replace(request, replication=None)
    if bandwidth_bytes_per_s is not None:
        cluster = with_bandwidth(cluster, bandwidth_bytes_per_s)
    if communication_scale is not None:
        cluster = with_slower_links(cluster, communication_scale)
    if cluster is not inputs.cluster:  # the plan is not the job's
        request = replace(request, key=None)
    return replace(inputs, planner=planner, request=request, cluster=cluster)


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
            "memory_limit_bytes": self.request.memory_limit_bytes,
            "bandwidth_bytes_per_s": self.request.bandwidth_bytes_per_s,
            "communication_scale": self.request.communication_scale,
            "stages": [
                {
                    "nodes": list(stage.nodes),
                    "replicas": 1,
                    "devices": [index],
                    "device": "acc",
                    "load_s": stage.load_s,
                }
                for index, stage in enumerate(self.balance.stages)
            ],
            "predicted": self.plan.to_json()["prediction"],
            "assumptions": list(self.plan.assumptions),
        }


def plan_balance(
    inputs: PlanInputs,
    deadline: Deadline,
    bandwidth_bytes_per_s: float | None = None,
    communication_scale: float | None = None,
) -> Balanced:
    """Search the stages with the smallest largest load, and predict a step in them.

    Args:
        bandwidth_bytes_per_s, communication_scale: as for :func:`adapt`. What values cost counts if
            the bandwidth is given, by a cluster file or here.

    Raises:
        InfeasibleError: no partition fits into the memory.
        PipectlError: time was up before any was found.
    """
    cluster, request, profile = inputs.cluster, inputs.request, prepared(inputs.profile)
    counts = bandwidth_bytes_per_s is not None or inputs.cluster_file is not None
    devices = BalanceRequest(
        devices=cluster.ranks,
        memory_limit_bytes=request.memory_limit_bytes,
        # the scale of messages is in it already
        bandwidth_bytes_per_s=cluster.widest_link.bandwidth_bytes_per_s if counts else None,
        communication_scale=communication_scale or 1.0,
    )
    began = time.perf_counter()
    deadline.restart()
    result = balance(profile, devices, deadline)
    planning_s = time.perf_counter() - began
    if result is None and deadline.cut_short:
        raise PipectlError("planning was ended before any plan was found", cure="allow more time")
    if result is None:
        limit = devices.memory_limit_bytes
        within = "" if limit is None else f" of {format_bytes(limit)} each"
        raise InfeasibleError(
            f"no feasible plan: no partition fits on {devices.devices} devices{within}",
            cure=f"give {request.named('ranks')}, or a larger {request.named('memory_limit')}",
        )
    stages = [stage.nodes for stage in result.stages]
    machines = with_ranks(cluster, len(stages))
    plan = plan_of_stages(folded(profile, stages), machines, request, stages)
    return Balanced(devices, result, planning_s, plan)
