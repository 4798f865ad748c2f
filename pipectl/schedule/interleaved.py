"""Interleaved 1F1B: several chunks of the model a rank, which shorten the pipeline's start and end.

Stage s is chunk s // p of rank s mod p. Micro-batches go in groups of as many as there are ranks;
a group passes through a rank's first chunk, then its second, and so on, and back in reverse. Two
ranks, four micro-batches; stages 0 and 2 are the first rank's, which runs one of them at a time; a
backward is drawn twice as long as a forward; digits are forwards, letters (a = micro-batch 0) are
backwards::

    stage 0  01..2...3...aa.bb......ccdd
    stage 1  .01......2aa3bb......ccdd
    stage 2  ..01..aa.bb2..3...cc.dd
    stage 3  ...0aa1bb......2cc3dd

A rank runs 2 (p - 1 - r) + (v - 1) p + 1 forwards before its first backward and then alternates
them; the bubble is (p - 1) / (v m + p - 1) of the step, for v times as many messages. Source:
Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters", SC 2021.

The paper asks for a multiple of p micro-batches. Here any number works: a last group that is not
full keeps its turns, and those without a micro-batch are left out.
"""

from __future__ import annotations

from pipectl.schedule.actions import Integers
from pipectl.schedule.order import Order, first_forwards

NAME = "interleaved"


def order(stages: int, ranks: int, group: int | None = None, shared_by: int = 1) -> Order:
    """The n-th forward of rank r at turn n + r; its j-th backward half a turn behind j + w - r.

    w is the turn of the last forward that the first backward of the last rank waits for, plus
    p - 1. Turns are counted double, to be whole numbers.

    Args:
        ranks: over which the stages go round; divides ``stages``.
        group: turns of a group, at least ``ranks``, which is the default.
        shared_by: replicas of a stage, each of which takes every so many-th micro-batch.
    """
    group, chunks = group or ranks, stages // ranks
    last = (chunks - 1) * group + 2 * (ranks - 1)

    def position(chunk: int, micro_batch: Integers) -> Integers:
        index = micro_batch // shared_by
        return index // group * (chunks * group) + chunk * group + index % group

    def forward(stage: int, micro_batch: Integers) -> Integers:
        return 2 * (position(stage // ranks, micro_batch) + stage % ranks)

    def backward(stage: int, micro_batch: Integers) -> Integers:
        back = position(chunks - 1 - stage // ranks, micro_batch)
        return 2 * (back + last - stage % ranks) + 1

    return Order(forward, backward)


def warm_up(stages: int, micro_batches: int, ranks: int, shared_by: int = 1) -> tuple[int, ...]:
    """Forwards of each stage before its first backward."""
    return first_forwards(order(stages, ranks, shared_by=shared_by), stages, micro_batches)
