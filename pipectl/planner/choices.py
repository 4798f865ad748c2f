"""What a search tries for the open choices of a request: numbers of stages, sizes of micro-batches,
and orders of work."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from math import ceil, floor, log

from pipectl.errors import InfeasibleError
from pipectl.planner.request import OPEN, PlanRequest
from pipectl.profile import Profile
from pipectl.profile_parts import SmallestMicroBatch
from pipectl.schedule.one_f_one_b import ONE_F_ONE_B
from pipectl.schedule.order import Shape
from pipectl.units import plural

NamedOrder = tuple[str, tuple[int, ...]]
"""The name of a schedule, and the warm-up of every stage."""

MICRO_BATCHES_PER_STAGE = 8
"""With more, the step hardly gets shorter: the bubble is then about a tenth."""
MICRO_BATCHES_IF_PROPORTIONAL = 4
"""The same if times of small micro-batches are scaled from a larger size, not measured."""

NEAR_COUNTS, MAX_NEAR = 1.5, 12
"""Factor by which numbers of micro-batches near another one may differ from it, and the most sizes
to try of these."""

_EVERY_STAGE_COUNT = 8
_SNAP = 1.34


def allowed_values(asked: bool | None) -> tuple[bool, ...]:
    """The values of a setting to try, in order; None leaves it open."""
    return (False, True) if asked is None else (asked,)


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


def sizes_near(request: PlanRequest, micro_batches: int) -> list[int]:
    """Sizes that make up to ``NEAR_COUNTS`` times more and fewer micro-batches, the nearest first;
    none if their number is fixed."""
    if request.micro_batches is not None:
        return []
    batch = request.batch_size
    first, last = ceil(micro_batches / NEAR_COUNTS), floor(micro_batches * NEAR_COUNTS)
    counts = range(max(1, first), min(batch, last) + 1)
    sizes = {ceil(batch / count) for count in counts} - {ceil(batch / micro_batches)}
    own = batch / micro_batches
    nearest = sorted(sizes, key=lambda size: (abs(log(size / own)), size))
    taken = (size for size in nearest if ceil(batch / size) in counts and takes(request, size))
    return list(islice(taken, MAX_NEAR))


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
) -> list[NamedOrder]:
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
