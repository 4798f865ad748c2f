"""1F1B, GPipe and ZB-H1: after its warm-up, a stage alternates one backward and one forward.

1F1B with four stages, eight micro-batches and warm-up (4, 3, 2, 1). A backward is drawn twice as
long as a forward; digits are forwards, letters (a = micro-batch 0) are backwards::

    stage 0  0123......aa4bb5cc6dd7ee.ff.gg.hh
    stage 1  .012....aa3bb4cc5dd6ee7ff.gg.hh
    stage 2  ..01..aa2bb3cc4dd5ee6ff7gg.hh
    stage 3  ...0aa1bb2cc3dd4ee5ff6gg7hh

The warm-up of a stage is the number of forwards before its first backward. It bounds the number of
micro-batches whose activations the stage keeps. Sources: PipeDream-Flush (Narayanan et al., 2021);
the two warm-up policies are DAPPLE's (Fan et al., PPoPP 2021).

GPipe is 1F1B whose warm-up is the whole step: all forwards, then all backwards. With four
micro-batches::

    stage 0  0123.........aabbccdd
    stage 1  .0123......aabbccdd
    stage 2  ..0123...aabbccdd
    stage 3  ...0123aabbccdd

Activations of every micro-batch are kept. Gradients accumulate in ascending order of the
micro-batches, as in every schedule here (in the paper, backwards run in reverse). Source: Huang et
al., "GPipe", NeurIPS 2019.

ZB-H1 is 1F1B that computes weight gradients in otherwise idle time. Forward, input half and weight
half of a backward are drawn equally long; small letters are input halves, capitals weight halves::

    stage 0  0123...aA4bB5cC6dD7eEfFgGhH
    stage 1  .012..a3bA4cB5dC6eD7fEgFhGH
    stage 2  ..01.a2b3cA4dB5eC6fD7gEhFGH
    stage 3  ...0a1b2c3dA4eB5fC6gD7hEFGH

Input halves run as early as possible, since the previous stage waits for their gradients. Stage s
computes the weight gradients of a micro-batch s backwards later, so that no stage keeps more than
the first one does in 1F1B. The bubble is (p - 1)(F + I - W) per step instead of (p - 1)(F + I + W).
Source: Qi et al., "Zero Bubble Pipeline Parallelism", ICLR 2024, handcrafted schedule 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from pipectl.schedule.actions import Integers
from pipectl.schedule.order import Order, Schedule, Shape, WarmUp


def policy_a(stages: int, micro_batches: int, replicas: Sequence[int] | None = None) -> WarmUp:
    """Return the shortest warm-up that fills the pipeline, min(m, p - s), with the least memory.

    Args:
        replicas: number per stage, if they take whole micro-batches: the warm-up is then the number
            of replicas from the stage to the end (PipeDream's number of active micro-batches).
    """
    return tuple(min(micro_batches, depth) for depth in _replicas_to_end(stages, replicas))


def policy_b(stages: int, micro_batches: int, replicas: Sequence[int] | None = None) -> WarmUp:
    """Return a longer warm-up, min(m, 2 (p - s) - 1), which hides slow messages in more memory."""
    counts = replicas or (1,) * stages
    depths = zip(_replicas_to_end(stages, replicas), counts, strict=True)
    return tuple(min(micro_batches, 2 * depth - count) for depth, count in depths)


def policies(shape: Shape) -> list[WarmUp]:
    """Return the warm-ups of both policies."""
    sizes = shape.stages, shape.micro_batches, shape.replicas
    return [policy_a(*sizes), policy_b(*sizes)]


def _replicas_to_end(stages: int, replicas: Sequence[int] | None) -> list[int]:
    return list(accumulate(reversed(replicas or (1,) * stages)))[::-1]


def order(shape: Shape, warm_up: Sequence[int]) -> Order:
    """Forward of stage s, micro-batch i at (i, 1, s); its backward at (i + warm_up[s], 0, -s).

    If the warm-up never rises from a stage to the next, this order respects every dependency.

    Args:
        warm_up: of each stage; at most the number of micro-batches counts.
    """
    stages, micro_batches = len(warm_up), shape.micro_batches
    width = 2 * stages + 2

    def forward(stage: int, micro_batch: Integers) -> Integers:
        return micro_batch * width + (stages + 1 + stage)

    def backward(stage: int, micro_batch: Integers) -> Integers:
        depth = min(max(1, warm_up[stage]), micro_batches)
        return micro_batch * width + (depth * width + stages - stage)

    return Order(forward, backward)


def every_forward_first(shape: Shape) -> list[WarmUp]:
    """Return the warm-up of schedules whose backwards follow all forwards."""
    return [(shape.micro_batches,) * shape.stages]


def _gpipe_order(shape: Shape, _: Sequence[int]) -> Order:
    """Return 1F1B whose warm-up is the whole step."""
    return order(shape, *every_forward_first(shape))


def _split_order(shape: Shape, warm_up: Sequence[int]) -> Order:
    """Return 1F1B with doubled turns, and each weight half right after the s-th next input half.

    Weight halves without as many input halves after them keep their distances.
    """
    whole = order(shape, warm_up)

    def forward(stage: int, micro_batch: Integers) -> Integers:
        return 2 * whole.forward(stage, micro_batch)

    def backward(stage: int, micro_batch: Integers) -> Integers:
        return 2 * whole.backward(stage, micro_batch)

    def weight(stage: int, micro_batch: Integers) -> Integers:
        return 2 * whole.backward(stage, micro_batch + stage) + 1

    return Order(forward, backward, weight)


ONE_F_ONE_B = Schedule("1f1b", order, policies, chooses_warm_up=True, is_local=True)
ZB_H1 = Schedule("zb-h1", _split_order, policies, splits_backward=True, chooses_warm_up=True)
GPIPE = Schedule("gpipe", _gpipe_order, every_forward_first, is_local=True)
