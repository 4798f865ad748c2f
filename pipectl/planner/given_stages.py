"""A plan with given stages, one a rank, for partitions that no search of ours has chosen."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from math import ceil

from pipectl.cluster import Cluster
from pipectl.graph import TransferKind
from pipectl.plan import Plan, Stage, StageCost, Transfer
from pipectl.planner.costs import Footprints, operator_times, scaled_transfers, stage_costs
from pipectl.planner.problem import DEFAULT_BASELINE_BYTES
from pipectl.planner.request import PlanRequest
from pipectl.profile import Profile
from pipectl.schedule import default_warm_up
from pipectl.schedule.one_f_one_b import NAME as ONE_F_ONE_B
from pipectl.simulate import simulate


def plan_of_stages(
    profile: Profile,
    cluster: Cluster,
    request: PlanRequest,
    stages: Sequence[Sequence[str]],
    loads_s: Sequence[float | None],
) -> Plan:
    """The plan, with its prediction, that runs each stage on the rank of its number.

    Args:
        cluster: with at least as many ranks as there are stages.
        request: without micro-batches, those of the profile's size are taken.
        stages: ids of the operators of each, in the order of the pipeline.
        loads_s: forward and backward of one micro-batch of the profile's size, for stages that run
            on another kind of device than the profile was measured on; None elsewhere.
    """
    count = request.micro_batches or ceil(request.batch_size / profile.micro_batch_size)
    size = ceil(request.batch_size / count)
    count, scale = ceil(request.batch_size / size), size / profile.micro_batch_size
    index = {operator.id: number for number, operator in enumerate(profile.operators)}
    parts = Footprints(profile).of([sorted(index[node] for node in nodes) for nodes in stages])
    costs = stage_costs(parts, operator_times(profile, size), scale, profile)
    timed = (
        cost if load_s is None else _taking(cost, load_s * scale)
        for cost, load_s in zip(costs, loads_s, strict=True)
    )
    plan = Plan(
        name=request.name,
        fingerprint=profile.fingerprint,
        schedule=ONE_F_ONE_B,
        warm_up=default_warm_up(ONE_F_ONE_B, len(stages), count),
        batch_size=request.batch_size,
        micro_batch_size=size,
        micro_batches=count,
        stages=tuple(
            Stage(nodes, (rank,), cost)
            for rank, (nodes, cost) in enumerate(zip(parts.nodes, timed, strict=True))
        ),
        transfers=_directed(scaled_transfers(parts, scale)),
        node_of_rank=cluster.node_of_rank,
        memory_limit_bytes=request.memory_limit_bytes,
        assumptions=(*profile.assumptions, *cluster.assumptions),
    )
    baseline = profile.process_baseline_bytes
    found = simulate(
        plan,
        cluster,
        process_baseline_bytes=DEFAULT_BASELINE_BYTES if baseline is None else baseline,
    )
    return replace(plan, prediction=found.prediction)


def _directed(transfers: Iterable[Transfer]) -> tuple[Transfer, ...]:
    """What goes to an earlier stage is sent by a backward, whatever the profile calls it.

    Where forward and backward are operators of their own, values of the second are no gradients of
    another value.
    """
    sizes: dict[tuple[TransferKind, int, int], int] = {}
    for item in transfers:
        forward = item.source < item.target
        kind = TransferKind.ACTIVATION if forward else TransferKind.GRADIENT
        key = kind, item.source, item.target
        sizes[key] = sizes.get(key, 0) + item.size_bytes
    return tuple(Transfer(*key, size) for key, size in sorted(sizes.items()))


def _taking(cost: StageCost, load_s: float) -> StageCost:
    """The cost of a stage on a device on which it takes so long, split as it was before."""
    before_s = cost.forward_s + cost.backward_s
    forward_s = load_s * cost.forward_s / before_s if before_s else load_s
    return replace(cost, forward_s=forward_s, backward_s=load_s - forward_s)
