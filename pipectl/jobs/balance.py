"""The objective of related work: stages whose largest load is as small as possible."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from pipectl.cluster import Cluster
from pipectl.errors import InfeasibleError, PipectlError
from pipectl.jobs.deadline import Deadline
from pipectl.jobs.subject import Subject, cpus
from pipectl.jobs.wishes import Objective, Wishes
from pipectl.plan import Plan
from pipectl.planner.exact.balance import balance
from pipectl.planner.exact.request import Balance, BalanceRequest, DeviceKind
from pipectl.planner.folding import folded
from pipectl.planner.machines.other_clusters import with_nodes, with_ranks
from pipectl.planner.plans.given_stages import plan_of_stages
from pipectl.planner.pruning import prepared
from pipectl.units import format_bytes


@dataclass(frozen=True)
class Balanced:
    """The stages, and what a training step in them would take.

    Args:
        plan: these stages with 1F1B, one device a stage.
    """

    request: BalanceRequest
    balance: Balance
    planning_s: float
    plan: Plan

    def to_json(self) -> dict[str, Any]:
        """The documented object."""
        found, prediction = self.balance, self.plan.to_json()["prediction"]
        return {
            "objective": Objective.MAX_STAGE_LOAD,
            "value_s": found.value_s,
            "lower_bound_s": found.lower_bound_s,
            "gap": found.gap,
            "exact": found.exact,
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
                for index, stage in enumerate(found.stages)
            ],
            "predicted": prediction,
            "assumptions": list(self.plan.assumptions),
        }


def find_balance(subject: Subject, wishes: Wishes, deadline: Deadline) -> Balanced:
    """Search, and predict a step.

    Raises:
        InfeasibleError: no partition fits into the memory.
    """
    request, profile = _request(subject, wishes), prepared(subject.profile)
    began = time.perf_counter()
    deadline.restart()
    found = balance(profile, request, deadline)
    planning_s = time.perf_counter() - began
    if found is None:
        raise _nothing(subject, request, deadline)
    stages = [stage.nodes for stage in found.stages]
    plan = plan_of_stages(
        folded(profile, stages),
        _machines(subject.cluster, len(stages)),
        subject.request,
        stages,
        [
            None if stage.device is DeviceKind.ACCELERATOR else stage.load_s
            for stage in found.stages
        ],
    )
    return Balanced(request, found, planning_s, plan)


def _nothing(subject: Subject, request: BalanceRequest, deadline: Deadline) -> PipectlError:
    """The error where there is no partition."""
    if deadline.cut_short:
        return PipectlError("planning was ended before any plan was found", cure="allow more time")
    limit, asked = request.memory_limit_bytes, subject.request
    within = "" if limit is None else f" of {format_bytes(limit)} each"
    return InfeasibleError(
        f"no feasible plan: no partition fits on {request.devices} devices{within}",
        cure=f"give {asked.named('ranks')}, or a larger {asked.named('memory_limit')}",
    )


def _request(subject: Subject, wishes: Wishes) -> BalanceRequest:
    return BalanceRequest(
        devices=subject.cluster.ranks,
        cpus=cpus(subject.profile, wishes),
        memory_limit_bytes=subject.request.memory_limit_bytes,
        bandwidth_bytes_per_s=_bandwidth(subject, wishes),
        communication_scale=wishes.communication_scale or 1.0,
    )


def _bandwidth(subject: Subject, wishes: Wishes) -> float | None:
    """Of the links, if the user says what they are; the scale of messages is already in it."""
    said = wishes.bandwidth_bytes_per_s is not None or subject.file is not None
    return subject.cluster.widest_link.bandwidth_bytes_per_s if said else None


def _machines(cluster: Cluster, ranks: int) -> Cluster:
    """So many ranks of a cluster; CPUs beside the devices are further ones of them."""
    return with_ranks(with_nodes(cluster, max(len(cluster.nodes), ranks)), ranks)
