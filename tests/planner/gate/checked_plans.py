"""Clusters of nodes, and plans of which all that is promised is checked."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from pipectl.cluster import Cluster, Device, Node
from pipectl.link import Link
from pipectl.plan import Plan
from pipectl.planner import PlanRequest, make_plan
from pipectl.profile import Profile
from pipectl.schedule import lower
from pipectl.simulate import simulate
from tests.schedule.validator import validate

FAST = Link(1e-6, 1e11)


def cluster_of(
    *ranks: int,
    cores: int | None = None,
    speeds: tuple[float, ...] = (1.0,),
    within: Link = FAST,
    between: Link | None = None,
    **device: Any,
) -> Cluster:
    """Nodes of so many ranks each, with a core for each rank.

    Args:
        cores: of every node, if ranks share them.
        speeds: of the nodes' devices, in turn.
        between: the link between nodes, if it is another than that within them.
        device: what else the nodes' devices have.
    """
    devices = [Device("cpu", speed, **device) for speed in speeds]
    nodes = tuple(
        Node(f"n{index}", count, cores or count, devices[index % len(devices)])
        for index, count in enumerate(ranks)
    )
    return Cluster("c", "test", nodes, within, between or within)


def after(looks: int) -> Callable[[], bool]:
    """A clock whose time is up after some looks."""
    left = iter(range(looks))
    return lambda: next(left, None) is None


def planned(
    profile: Profile,
    cluster: Cluster,
    batch: int = 64,
    expired: Callable[[], bool] = lambda: False,
    **asked: Any,
) -> Plan:
    """The checked plan of a request."""
    plan = make_plan(profile, cluster, PlanRequest("job", batch, **asked), expired)
    return checked(plan, cluster, profile)


def checked(plan: Plan, cluster: Cluster, profile: Profile) -> Plan:
    """A plan that does what its prediction says, within what there is, and not below its bounds."""
    baseline = profile.process_baseline_bytes or 0
    validate(plan, [lower(plan, rank) for rank in range(plan.ranks)])
    assert plan.prediction == simulate(plan, cluster, process_baseline_bytes=baseline).prediction
    for rank, peak in enumerate(plan.prediction.peak_memory_bytes):
        assert peak <= cluster.memory_of(rank, plan.memory_limit_bytes)
    search, step_s = plan.search, plan.predicted_step_s
    assert search is not None
    bound_s = search.step_lower_bound_s
    assert bound_s is not None
    assert 0 <= bound_s <= step_s * (1 + 1e-9)
    if bound_s:
        assert search.gap == pytest.approx(step_s / bound_s - 1, abs=1e-9)
    return plan
