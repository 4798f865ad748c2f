"""A request to the planner: what is fixed, and which choices are open."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import ceil, log

from pipectl.cluster import Cluster, OffloadTarget
from pipectl.errors import InfeasibleError, OutOfTimeError
from pipectl.plan import Plan, Replication
from pipectl.profile import Profile, SmallestMicroBatch
from pipectl.schedule import SCHEDULES
from pipectl.schedule.interleaved import INTERLEAVED
from pipectl.schedule.listed import Listed
from pipectl.schedule.one_f_one_b import GPIPE, ONE_F_ONE_B
from pipectl.schedule.order import Shape
from pipectl.units import plural

Order = tuple[str, tuple[int, ...]]
"""Schedule and warm-up."""

OPEN = (ONE_F_ONE_B, GPIPE)
"""Schedules that the search itself tries."""
OTHER_SCHEDULES = tuple(name for name, schedule in SCHEDULES.items() if schedule not in OPEN)
"""Planned from plans of the search, if they are named or ``every_schedule`` allows them."""
COMPARED = (*OPEN, INTERLEAVED)
"""Those that plans are compared with; others assume what half a backward takes."""

MICRO_BATCHES_PER_STAGE = 8
"""With more, the step hardly gets shorter: the bubble is then about a tenth."""
MICRO_BATCHES_IF_PROPORTIONAL = 4
"""The same if times of small micro-batches are scaled from a larger size, not measured."""

_EVERY_STAGE_COUNT = 8
_SNAP = 1.34


def out_of_time() -> OutOfTimeError:
    """The error for no plan in time."""
    return OutOfTimeError("planning was ended before any plan was found", hint="allow more time")


def choices(asked: bool | None) -> tuple[bool, ...]:
    """The values of a setting to try, in order; None leaves it open."""
    return (False, True) if asked is None else (asked,)


@dataclass(frozen=True)
class PlanRequest:
    """A job as the planner sees it; None leaves a choice to the planner.

    The checks of job specs (:mod:`pipectl.spec.checks`) exclude choices that contradict each other.

    Args:
        batch_size: samples of one optimizer step.
        warm_up: forwards each stage runs before its first backward, one entry per stage.
        memory_limit_bytes: resident memory of any rank, its process included.
        memory_shared_by: ranks per node if the limit is a rank's share of
            ``resources.memory_per_node``; None if there is no limit, or it is
            ``pipeline.memory_limit``.
        recompute: whether stages recompute their forward for their backward instead of keeping its
            saved values: all stages, none, or those that do not fit otherwise.
        segments: whether stages that recompute do so segment by segment: all that hold less then,
            none, or those that do not fit otherwise.
        replicas: of every stage; None leaves it to the planner, stage by stage.
        replication: how replicas share the work; None tries both ways. Split micro-batches change
            results if an operator uses the whole micro-batch, as BatchNorm does.
        offload: whether stages move saved values off the device until their backward: all stages,
            none, or those that gain.
        offload_to: where offloaded values are kept.
        backward_apart: whether the backward of a stage has a separate rank: all stages, none, or
            those that gain.
        every_schedule: whether an open schedule may be any that keeps the results of one rank, or
            only one with one stage per rank and whole backwards.
        listed: a user's own schedule, which also fixes the numbers of stages and micro-batches.
        shard_optimizer: whether each replica of a stage keeps a part of its optimizer state.
        updates_together, reproducible: as in the plan.
        correct_delay: whether updates are corrected, for which the last one is kept.
        key: recorded in the plan; see :class:`pipectl.plan.Plan`.
        from_job: whether the request is from a job file; errors then name keys, otherwise options.
        keeps_micro_batches: whether ``micro_batches`` is that of an earlier plan of the job.
        smallest: the smallest micro-batch that the model takes; None if it takes single samples.
        batches: the sizes of the batches of an epoch; empty if all have ``batch_size``. Copies of
            a pipeline share them.
    """

    name: str
    batch_size: int
    micro_batches: int | None = None
    stages: int | None = None
    schedule: str | None = None
    warm_up: tuple[int, ...] | None = None
    memory_limit_bytes: int | None = None
    memory_shared_by: int | None = None
    recompute: bool | None = False
    segments: bool | None = False
    replicas: int | None = 1
    replication: Replication | None = Replication.WHOLE
    offload: bool | None = False
    offload_to: OffloadTarget = OffloadTarget.HOST
    backward_apart: bool | None = False
    every_schedule: bool = False
    listed: Listed | None = None
    shard_optimizer: bool = False
    updates_together: bool = True
    reproducible: bool = False
    correct_delay: bool = False
    key: str | None = None
    from_job: bool = True
    keeps_micro_batches: bool = False
    smallest: SmallestMicroBatch | None = None
    batches: tuple[int, ...] = ()

    @property
    def memory_key(self) -> str:
        """The key of the job that sets the memory limit."""
        shared = self.memory_shared_by is not None
        return "resources.memory_per_node" if shared else "pipeline.memory_limit"

    @property
    def more_ranks(self) -> str:
        """What gives the job more ranks, for errors."""
        return "more ranks in resources" if self.from_job else "more --devices"

    def more_memory(self, cluster: Cluster) -> str:
        """What gives the ranks more memory, for errors: the limit, or else their devices."""
        smallest = min(cluster.memory_of(rank, None) for rank in range(cluster.ranks))
        if self.memory_limit_bytes is None or self.memory_limit_bytes > smallest:
            return "ranks with more memory"
        return f"a larger {self.memory_key}"

    @property
    def has_variants(self) -> bool:
        """Whether plans are derived from plain plans of the search.

        True if offload, backwards on other ranks, other schedules or recomputation by segments are
        open or required; open segments count only with one rank per stage.
        """
        varied = self.offload is not False or self.backward_apart is not False
        plain = self.replicas == 1 and self.schedule not in OTHER_SCHEDULES
        return varied or self.every_schedule or self.segments or (plain and self.segments is None)

    @property
    def without_variants(self) -> PlanRequest:
        """The request for plain plans."""
        return replace(
            self, offload=False, backward_apart=False, every_schedule=False, segments=False
        )

    @property
    def replications(self) -> tuple[Replication, ...]:
        """The allowed ways in which replicas share the work."""
        return tuple(Replication) if self.replication is None else (self.replication,)

    @property
    def fixed_stages(self) -> int | None:
        """The number of stages, if any field of the request fixes it."""
        return len(self.warm_up) if self.warm_up is not None else self.stages


Planner = Callable[[Profile, Cluster, PlanRequest], Plan]
"""Makes the best plan it can; raises InfeasibleError if none fits."""


def stage_counts(request: PlanRequest, ranks: int, blocks: int) -> list[int]:
    """Numbers of stages to try: the requested one, or from 1 to the number of ranks.

    Raises:
        InfeasibleError: more stages than ranks, or than the graph can be cut into.
    """
    fixed = request.fixed_stages
    if fixed is None:
        return _thinned(min(ranks, blocks))
    check_cuts(fixed, blocks, f"set pipeline.stages to {blocks} or less, or to auto")
    if fixed > ranks:
        raise InfeasibleError(
            f"no feasible plan: {fixed} stages, but only {ranks} ranks, and each stage takes one",
            hint=f"set pipeline.stages to {ranks} or less, or give {request.more_ranks}",
        )
    return [fixed]


def numbers_of_copies(ranks: int) -> list[int]:
    """Numbers of copies of a pipeline that share the ranks evenly: from two to one per rank."""
    return [copies for copies in range(2, ranks + 1) if ranks % copies == 0]


def check_cuts(stages: int, blocks: int, hint: str) -> None:
    """Check that a graph can be cut into a number of stages.

    Raises:
        InfeasibleError: it has fewer blocks.
    """
    if stages > blocks:
        raise InfeasibleError(
            f"no feasible plan: {stages} stages, but the graph has {blocks - 1} possible "
            f"cuts: at most {blocks} stages",
            hint=hint,
        )


def _thinned(most: int) -> list[int]:
    """1 to 8, then about four per doubling, and ``most``."""
    counts = list(range(1, min(most, _EVERY_STAGE_COUNT) + 1))
    while counts[-1] < most:
        counts.append(min(most, ceil(counts[-1] * 1.2)))
    return counts


def micro_batch_sizes(request: PlanRequest, most: int) -> list[int]:
    """Micro-batch sizes to try, largest first.

    Args:
        most: largest number of micro-batches.

    Raises:
        InfeasibleError: more micro-batches than samples.
    """
    batch = request.batch_size
    if request.micro_batches is not None:
        if request.micro_batches > batch:
            raise InfeasibleError(
                f"no feasible plan: {request.micro_batches} micro-batches of {batch} samples",
                hint=f"set pipeline.micro_batches to {batch} or less, or leave it out",
            )
        return accepted(request, [ceil(batch / request.micro_batches)], fixed=True)
    most = min(batch, most)
    counts = [1 << power for power in range(most.bit_length()) if 1 << power <= most]
    divisors = [size for size in range(1, batch + 1) if batch % size == 0]
    sizes = {_snapped(ceil(batch / count), divisors) for count in counts}
    return accepted(request, sorted(sizes, reverse=True))


def sizes_of_stages(request: PlanRequest, profile: Profile, stages: int) -> list[int]:
    """Micro-batch sizes to try with a number of stages, largest first."""
    several = profile.has_several_sizes
    most = MICRO_BATCHES_PER_STAGE if several else MICRO_BATCHES_IF_PROPORTIONAL
    return micro_batch_sizes(request, stages * most)


def accepted(request: PlanRequest, sizes: Sequence[int], *, fixed: bool = False) -> list[int]:
    """Micro-batch sizes with the nearest one in the place of each that the model refuses.

    Args:
        fixed: whether no other may take its place.

    Raises:
        InfeasibleError: the model refuses all.
    """
    if request.smallest is None or all(takes(request, size) for size in sizes):
        return [*sizes]
    every = [size for size in range(1, request.batch_size + 1) if takes(request, size)]
    if fixed or not every:
        raise _too_small(request, request.smallest, max(sizes))
    near = (min(every, key=lambda other: (abs(log(other / size)), -other)) for size in sizes)
    return list(dict.fromkeys(near))


def takes(request: PlanRequest, size: int, parts: int = 1) -> bool:
    """Whether the model takes all micro-batches of an epoch: the last one of a batch may be small.

    Args:
        size: of the others.
        parts: of every micro-batch, if replicas split it.
    """
    if request.smallest is None:  # replicas may be without a sample, too
        return True
    least = request.smallest.samples
    return all(_least_part(batch, size) // parts >= least for batch in _batches(request))


def _too_small(request: PlanRequest, smallest: SmallestMicroBatch, size: int) -> InfeasibleError:
    batch = min(_batches(request), key=lambda batch: _least_part(batch, size))
    least, reason = _least_part(batch, size), smallest.reason.removeprefix("model: ")
    where = f"with micro-batches of {plural(size, 'sample')}, " * (least < batch)
    return InfeasibleError(
        f"no feasible plan: {where}a batch of {batch} has a micro-batch of "
        f"{plural(least, 'sample')}: {reason}",
        hint="change training.batch_size or pipeline.micro_batches; if it is the last batch of an "
        "epoch, data.drop_last: true leaves it out",
    )


def _batches(request: PlanRequest) -> tuple[int, ...]:
    return request.batches or (request.batch_size,)


def _least_part(batch: int, size: int) -> int:
    """Samples of the smallest micro-batch of a batch."""
    return batch - (ceil(batch / size) - 1) * size


def _snapped(size: int, divisors: Sequence[int]) -> int:
    """The divisor of the batch nearest to a size, or the size itself if none is near."""
    nearest = min(divisors, key=lambda divisor: abs(log(divisor / size)))
    return nearest if max(nearest / size, size / nearest) <= _SNAP else size


def open_orders(
    request: PlanRequest,
    stages: int,
    micro_batches: int,
    replicas: tuple[int, ...] | None = None,
) -> list[Order]:
    """Orders to try, without duplicates, the one with the fewest micro-batches in flight first.

    Args:
        replicas: of every stage, if they take whole micro-batches in turn.
    """
    if request.warm_up is not None:
        return [(ONE_F_ONE_B.name, tuple(min(depth, micro_batches) for depth in request.warm_up))]
    shape = Shape(stages, stages, micro_batches, replicas)
    names: dict[tuple[int, ...], str] = {}
    for schedule in OPEN:
        if request.schedule in (None, schedule.name):
            for warm_up in schedule.warm_ups(shape):
                names.setdefault(warm_up, schedule.name)
    return [(name, warm_up) for warm_up, name in names.items()]
