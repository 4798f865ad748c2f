"""GPipe and looped breadth-first: all forwards, then all backwards.

GPipe with four stages and four micro-batches. A backward is drawn twice as long as a forward;
digits are forwards, letters (a = micro-batch 0) are backwards::

    stage 0  0123.........aabbccdd
    stage 1  .0123......aabbccdd
    stage 2  ..0123...aabbccdd
    stage 3  ...0123aabbccdd

Activations of every micro-batch are kept. Gradients accumulate in ascending order of the
micro-batches, as in every schedule here (in the paper, backwards run in reverse). Source: Huang et
al., "GPipe", NeurIPS 2019.

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

from pipectl.schedule import one_f_one_b
from pipectl.schedule.actions import Integers
from pipectl.schedule.order import Order, Placement, Schedule, Shape, WarmUp


def _every_forward_first(shape: Shape) -> list[WarmUp]:
    return [(shape.micro_batches,) * shape.stages]


def _order(shape: Shape, _: Sequence[int]) -> Order:
    """Return 1F1B whose warm-up is the whole step."""
    return one_f_one_b.order(shape, *_every_forward_first(shape))


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


GPIPE = Schedule("gpipe", _order, _every_forward_first, is_local=True)
LOOPED_BFS = Schedule(
    "looped-bfs",
    _looped_order,
    _every_forward_first,
    placement=Placement.ROUND,
    stages_per_rank=(2, 4),
)
