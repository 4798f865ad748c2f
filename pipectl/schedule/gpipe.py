"""All forwards, then all backwards: GPipe, and looped breadth-first with several stages per rank.

GPipe with four stages, four micro-batches, a backward drawn twice as long as a forward; digits are
forwards, letters (a = micro-batch 0) are backwards::

    stage 0  0123.........aabbccdd
    stage 1  .0123......aabbccdd
    stage 2  ..0123...aabbccdd
    stage 3  ...0123aabbccdd

Activations of every micro-batch are kept; gradients accumulate in ascending micro-batch order
like in every schedule here (the paper runs the backwards in reverse). Source: Huang et al.,
"GPipe", NeurIPS 2019.

Looped breadth-first takes every micro-batch through one stage before the next. Stage s is on rank
s mod p; on two ranks, stages 0 and 2 are the first rank's::

    stage 0  0123...............aabbccdd
    stage 1  .0123............aabbccdd
    stage 2  ....0123...aabbccdd
    stage 3  .....0123aabbccdd

The bubble is that of GPipe in v-th parts, (p - 1) / (v m + p - 1) of the step; a stage's gradients
are complete early, one stage after the other, so sums over replicas have most of the backward to
hide behind. Source: Lamy-Poirier, "Breadth-First Pipeline Parallelism", MLSys 2023 (there the
backwards run by falling micro-batch).
"""

from __future__ import annotations

from collections.abc import Sequence

from pipectl.schedule import one_f_one_b
from pipectl.schedule.actions import Integers
from pipectl.schedule.order import Order, Placement, Schedule, Shape, WarmUp


def _every_forward_first(shape: Shape) -> list[WarmUp]:
    """Every forward comes before the first backward."""
    return [(shape.micro_batches,) * shape.stages]


def _order(shape: Shape, _: Sequence[int]) -> Order:
    """1F1B that never leaves its warm-up."""
    return one_f_one_b.order(shape, *_every_forward_first(shape))


def _looped_order(shape: Shape, _: Sequence[int]) -> Order:
    """Stage s, chunk c = s // p: forward of micro-batch i at c g + i + s mod p, g = max(m, p).

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


GPIPE = Schedule("gpipe", _order, _every_forward_first, is_local=True)
LOOPED_BFS = Schedule(
    "looped-bfs",
    _looped_order,
    _every_forward_first,
    placement=Placement.ROUND,
    stages_per_rank=(2, 4),
)
