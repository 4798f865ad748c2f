"""Interleaved 1F1B: several chunks of the model per rank, which shorten the warm-up and cool-down.

Stage s is chunk s // p of rank s mod p. Micro-batches form groups of p. A group passes through a
rank's first chunk, then its second, and so on, and back in reverse. With two ranks and four
micro-batches, stages 0 and 2 are on the first rank, which runs one of them at a time. A backward is
drawn twice as long as a forward; digits are forwards, letters (a = micro-batch 0) are backwards::

    stage 0  01..2...3...aa.bb......ccdd
    stage 1  .01......2aa3bb......ccdd
    stage 2  ..01..aa.bb2..3...cc.dd
    stage 3  ...0aa1bb......2cc3dd

Rank r runs 2 (p - 1 - r) + (v - 1) p + 1 forwards before its first backward and then alternates.
The bubble is (p - 1) / (v m + p - 1) of the step, with v times as many messages. Source: Narayanan
et al., "Efficient Large-Scale Language Model Training on GPU Clusters", SC 2021.

The paper requires a multiple of p micro-batches. Here any number works: an incomplete last group
keeps its turns, and the turns of missing micro-batches are left out.
"""

from __future__ import annotations

from collections.abc import Sequence

from pipectl.schedule.actions import Integers
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


INTERLEAVED = Schedule(
    "interleaved", _order, _warm_ups, placement=Placement.ROUND, stages_per_rank=(2, 4)
)
