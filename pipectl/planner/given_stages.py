"""Plans with given stages, for partitions that no search of ours has chosen."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import ceil

from pipectl.cluster import Cluster
from pipectl.plan import Plan, Replication, Stage, StageCost, StagePeaks
from pipectl.planner.costs import (
    Footprint,
    Footprints,
    operator_times,
    scaled_transfers,
    stage_costs,
)
from pipectl.planner.problem import DEFAULT_BASELINE_BYTES, baseline_bytes
from pipectl.planner.request import PlanRequest
from pipectl.profile import Profile
from pipectl.schedule import default_warm_up
from pipectl.schedule.one_f_one_b import NAME as ONE_F_ONE_B
from pipectl.simulate import simulate


@dataclass(frozen=True)
class GivenStages:
    """Stages, and who runs them.

    Args:
        nodes: ids of the operators of each, in the order of the pipeline.
        ranks: of each, one a replica.
        replication: how replicas share the work.
    """

    nodes: tuple[tuple[str, ...], ...]
    ranks: tuple[tuple[int, ...], ...]
    replication: Replication = Replication.WHOLE


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
    ranks = tuple((rank,) for rank in range(len(stages)))
    given = GivenStages(tuple(map(tuple, stages)), ranks)
    plan = Maker(profile, cluster, request, given).plan(size, ONE_F_ONE_B)
    scale = size / profile.micro_batch_size
    timed = tuple(
        stage if load_s is None else replace(stage, cost=_taking(stage.cost, load_s * scale))
        for stage, load_s in zip(plan.stages, loads_s, strict=True)
    )
    return predicted(replace(plan, stages=timed), profile, cluster)


class Maker:
    """Makes plans with the same stages and ranks.

    Args:
        cluster: has the ranks that are given.
    """

    def __init__(
        self, profile: Profile, cluster: Cluster, request: PlanRequest, given: GivenStages
    ) -> None:
        self._profile, self._cluster, self._request = profile, cluster, request
        self._given = given
        index = {operator.id: number for number, operator in enumerate(profile.operators)}
        members = [sorted(index[node] for node in nodes) for nodes in given.nodes]
        self._parts = Footprints(profile).of(members)

    def plan(self, size: int, schedule: str, warm_up: tuple[int, ...] | None = None) -> Plan:
        """A plan without prediction.

        Args:
            size: samples of a micro-batch.
            warm_up: None for the schedule's own.
        """
        profile, request, given = self._profile, self._request, self._given
        count, scale = ceil(request.batch_size / size), size / profile.micro_batch_size
        whole = given.replication is Replication.WHOLE
        replicas = [len(ranks) for ranks in given.ranks] if whole else None
        stages = zip(self._parts.nodes, given.ranks, self._costs(size), strict=True)
        return Plan(
            name=request.name,
            fingerprint=profile.fingerprint,
            schedule=schedule,
            warm_up=warm_up
            or default_warm_up(schedule, len(given.nodes), count, replicas=replicas),
            batch_size=request.batch_size,
            micro_batch_size=size,
            micro_batches=count,
            stages=tuple(Stage(nodes, ranks, cost) for nodes, ranks, cost in stages),
            transfers=scaled_transfers(self._parts, scale),
            node_of_rank=self._cluster.node_of_rank,
            memory_limit_bytes=request.memory_limit_bytes,
            key=request.key,
            assumptions=tuple(_assumptions(profile, self._cluster, size)),
            replication=given.replication,
        )

    def _costs(self, size: int) -> Iterator[StageCost]:
        """Costs of whole micro-batches; what a replica allocates at once is for its samples."""
        profile, parts = self._profile, self._parts
        own = profile.micro_batch_size
        costs = stage_costs(parts, operator_times(profile, size), size / own, profile)
        for index, (cost, ranks) in enumerate(zip(costs, self._given.ranks, strict=True)):
            if len(ranks) > 1 and self._given.replication is Replication.SPLIT:
                samples = ceil(size / len(ranks))
                yield replace(cost, peaks=_peaks(parts, index, samples / own, profile))
            else:
                yield cost


def predicted(plan: Plan, profile: Profile, cluster: Cluster) -> Plan:
    """The plan with its prediction."""
    found = simulate(plan, cluster, process_baseline_bytes=baseline_bytes(profile))
    return replace(plan, prediction=found.prediction)


def _peaks(parts: Footprint, index: int, scale: float, profile: Profile) -> StagePeaks | None:
    return parts.memory[index].peaks(scale, profile.optimizer)


def _assumptions(profile: Profile, cluster: Cluster, size: int) -> Iterator[str]:
    """What neither profile nor cluster says."""
    yield from profile.assumptions
    if profile.process_baseline_bytes is None:
        yield f"a process without a stage takes {DEFAULT_BASELINE_BYTES >> 20} MiB"
    yield from cluster.assumptions
    measured = profile.micro_batch_size
    if size != measured and not any(operator.timings for operator in profile.operators):
        yield f"times of {size} samples are taken as proportional to those of {measured}"


def _taking(cost: StageCost, load_s: float) -> StageCost:
    """The cost of a stage on a device on which it takes so long, split as it was before."""
    before_s = cost.forward_s + cost.backward_s
    forward_s = load_s * cost.forward_s / before_s if before_s else load_s
    return replace(cost, forward_s=forward_s, backward_s=load_s - forward_s)
