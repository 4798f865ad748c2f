"""Step times without a pipeline: on one rank, and with data parallelism.

Both are estimates to compare a plan with. Data parallelism is modelled as one sum of the gradients
after the last backward, with the cost of a plan's sums over as many ranks; see
:mod:`pipectl.simulate.network`. Overlap of the sum with the backward, as in libraries, is ignored.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from math import ceil
from typing import Any

from pipectl.cluster import Cluster
from pipectl.errors import InfeasibleError, OutOfTimeError
from pipectl.plan import Plan
from pipectl.planner.request import Planner, PlanRequest
from pipectl.profile import Profile
from pipectl.simulate.network import reduction_s

CLEARLY = 0.95
"""An estimate is clearly faster if its step is below this share of the pipeline's."""
_NO_SIZE = "the profile has no parameter bytes, which say how large the sum of gradients is"
_NO_ROOM = "the whole model with a share of the batch does not fit into a rank's memory"


@dataclass(frozen=True)
class Estimate:
    """A step without a pipeline.

    Args:
        ranks: number of ranks, each with the whole model.
        reduction_s: sum of the gradients over the ranks, included in ``step_s``.
        peak_memory_bytes: of the fullest rank.
    """

    ranks: int
    step_s: float
    reduction_s: float
    peak_memory_bytes: int

    def to_json(self) -> dict[str, Any]:
        """The documented object."""
        values = asdict(self)
        return {"step_time_s": values.pop("step_s"), **values}


@dataclass(frozen=True)
class WithoutPipeline:
    """Estimates; None if the model does not fit into a rank's memory, or its size is unknown.

    Args:
        reason: why data parallelism was not estimated; empty if it was, or if there are no ranks
            for it.
    """

    single: Estimate | None
    data_parallel: Estimate | None
    reason: str = ""

    def better_than(self, plan: Plan) -> Estimate | None:
        """The fastest estimate that is clearly faster than a plan; None if there is none."""
        step_s = plan.predicted_step_s
        estimates = [each for each in (self.single, self.data_parallel) if each is not None]
        fast = [each for each in estimates if each.step_s < CLEARLY * step_s]
        return min(fast, key=lambda each: each.step_s, default=None)

    def to_json(self, plan: Plan) -> dict[str, Any]:
        """The documented object, beside a plan."""
        return {
            "single_rank": self.single and self.single.to_json(),
            "data_parallel": self.data_parallel and self.data_parallel.to_json(),
            "data_parallel_reason": self.reason or None,
            "pipeline_is_worth_it": self.better_than(plan) is None,
        }


def without_pipeline(
    profile: Profile, cluster: Cluster, request: PlanRequest, planner: Planner
) -> WithoutPipeline:
    """Estimates for the same step on one rank, and with data parallelism on all ranks."""
    alone = _whole(profile, cluster.with_nodes(1).with_ranks(1), request, planner, ranks=1)
    if min(cluster.ranks, request.batch_size) == 1:
        return WithoutPipeline(alone, None)
    if not _gradient_bytes(profile):
        return WithoutPipeline(alone, None, _NO_SIZE)
    shared = _data_parallel(profile, cluster, request, planner)
    return WithoutPipeline(alone, shared, _NO_ROOM if shared is None else "")


def _data_parallel(
    profile: Profile, cluster: Cluster, request: PlanRequest, planner: Planner
) -> Estimate | None:
    ranks = min(cluster.ranks, request.batch_size)
    distinct = {node.device: node for node in cluster.nodes}.values()
    estimates = [
        _whole(
            profile, replace(cluster, nodes=(node,)).with_ranks(1), request, planner, ranks=ranks
        )
        for node in distinct
    ]
    fitting = [each for each in estimates if each is not None]
    if len(fitting) < len(estimates):
        return None
    slowest = max(fitting, key=lambda each: each.step_s)
    crowding = max(1.0, max(node.ranks / node.cores for node in cluster.nodes))
    sum_s = reduction_s(cluster, cluster.node_of_rank, range(ranks), _gradient_bytes(profile))
    step_s = slowest.step_s * crowding + sum_s
    return Estimate(ranks, step_s, sum_s, slowest.peak_memory_bytes)


def _whole(
    profile: Profile, cluster: Cluster, request: PlanRequest, planner: Planner, *, ranks: int
) -> Estimate | None:
    """One rank with the whole model and its share of the batch."""
    share = ceil(request.batch_size / ranks)
    alone = replace(request, stages=1, schedule=None, listed=None, warm_up=None, replicas=1)
    wanted = replace(alone, backward_apart=False, batch_size=share, key=None)
    if ranks > 1:
        wanted = replace(wanted, micro_batches=None)
    try:
        plan = planner(profile, cluster, wanted)
    except (InfeasibleError, OutOfTimeError):
        return None
    assert plan.prediction is not None
    return Estimate(ranks, plan.predicted_step_s, 0.0, max(plan.prediction.peak_memory_bytes))


def _gradient_bytes(profile: Profile) -> int:
    return sum(dict(pair for pairs in profile.trained_parameters for pair in pairs).values())
