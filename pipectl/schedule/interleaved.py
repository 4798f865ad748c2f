"""Schedules with several chunks of the model per rank, which shorten the warm-up and cool-down.

In interleaved 1F1B, stage s is chunk s // p of rank s mod p. Micro-batches form groups of p. A
group passes through a rank's first chunk, then its second, and so on, and back in reverse. With two
ranks and four micro-batches, stages 0 and 2 are on the first rank, which runs one of them at a
time. A backward is drawn twice as long as a forward; digits are forwards, letters (a = micro-batch
0) are backwards::

    stage 0  01..2...3...aa.bb......ccdd
    stage 1  .01......2aa3bb......ccdd
    stage 2  ..01..aa.bb2..3...cc.dd
    stage 3  ...0aa1bb......2cc3dd

Rank r runs 2 (p - 1 - r) + (v - 1) p + 1 forwards before its first backward and then alternates.
The bubble is (p - 1) / (v m + p - 1) of the step, with v times as many messages. Source: Narayanan
et al., "Efficient Large-Scale Language Model Training on GPU Clusters", SC 2021.

The paper requires a multiple of p micro-batches. Here any number works: an incomplete last group
keeps its turns, and the turns of missing micro-batches are left out.

Looped breadth-first sends all micro-batches through one stage before the next. Stage s is on rank s
mod p. On two ranks, with stages 0 and 2 on the first::

    stage 0  0123...............aabbccdd
    stage 1  .0123............aabbccdd
    stage 2  ....0123...aabbccdd
    stage 3  .....0123aabbccdd

The bubble is (p - 1) / (v m + p - 1) of the step, with v stages per rank and m micro-batches. The
gradients of one stage after another are complete early, so their sums over replicas overlap with
most of the backward. Source: Lamy-Poirier, "Breadth-First Pipeline Parallelism", MLSys 2023 (there,
backwards run in descending order of the micro-batches).
"""

from __future__ import annotations

from collections.abc import Sequence

from pipectl.schedule.actions import Integers
from pipectl.schedule.one_f_one_b import every_forward_first
from pipectl.schedule.order import Order, Placement, Schedule, Shape, WarmUp


def _order(shape: Shape, _: Sequence[int] = ()) -> Order:
    """The n-th forward of rank r at turn n + r; its j-th backward half a turn after j + w - r.

    w is p - 1 plus the turn of the last forward that the last rank's first backward waits for.
    Turns are doubled, to be whole numbers.
    """
    ranks, shared_by = shape.ranks, min(shape.replicas or (1,))
    chunks = shape.stages // ranks
    last = (chunks - 1) * ranks + 2 * (ranks - 1)

    def position(chunk: int, micro_batch: Integers) -> Integers:
        index = micro_batch // shared_by
        return index // ranks * (chunks * ranks) + chunk * ranks + index % ranks

    def forward(stage: int, micro_batch: Integers) -> Integers:
        return 2 * (position(stage // ranks, micro_batch) + stage % ranks)

    def backward(stage: int, micro_batch: Integers) -> Integers:
        back = position(chunks - 1 - stage // ranks, micro_batch)
        return 2 * (back + last - stage % ranks) + 1

    return Order(forward, backward)


def _warm_ups(shape: Shape) -> list[WarmUp]:
    return [_order(shape).warm_up(shape.stages, shape.micro_batches)]


def _looped_order(shape: Shape, _: Sequence[int]) -> Order:
    """Stage s, chunk c = s // p: forward of micro-batch i at turn c g + i + s mod p, g = max(m, p).

    Backwards follow after all forwards, in the same way from the last stage to the first.
    """
    stages, ranks = shape.stages, shape.ranks
    group, chunks = max(shape.micro_batches, ranks), stages // ranks
    forwards = chunks * group + ranks

    def forward(stage: int, micro_batch: Integers) -> Integers:
        return micro_batch + (stage // ranks * group + stage % ranks)

    def backward(stage: int, micro_batch: Integers) -> Integers:
        return forward(stages - 1 - stage, micro_batch) + forwards

    return Order(forward, backward)


INTERLEAVED = Schedule(
    "interleaved", _order, _warm_ups, placement=Placement.ROUND, stages_per_rank=(2, 4)
)
LOOPED_BFS = Schedule(
    "looped-bfs",
    _looped_order,
    every_forward_first,
    placement=Placement.ROUND,
    stages_per_rank=(2, 4),
)
