"""ZB-H1: 1F1B whose weight gradients are made when it would idle.

Four stages, eight micro-batches; forward, input half and weight half of a backward equally long;
digits are forwards, small letters (a = micro-batch 0) input halves, capitals weight halves::

    stage 0  0123...aA4bB5cC6dD7eEfFgGhH
    stage 1  .012..a3bA4cB5dC6eD7fEgFhGH
    stage 2  ..01.a2b3cA4dB5eC6fD7gEhFGH
    stage 3  ...0a1b2c3dA4eB5fC6gD7hEFGH

Input halves go as soon as they can, since the stage before waits for their gradients. Stage s makes
the weight gradients of a micro-batch s backwards later, so that no stage keeps more than the first
one does in 1F1B; the bubble is (p - 1)(F + I - W) a step instead of (p - 1)(F + I + W). Source: Qi
et al., "Zero Bubble Pipeline Parallelism", ICLR 2024, handcrafted schedule 1.
"""

from __future__ import annotations

from collections.abc import Sequence

from pipectl.schedule import one_f_one_b
from pipectl.schedule.actions import Integers
from pipectl.schedule.order import Order, Schedule, Shape


def _order(shape: Shape, warm_up: Sequence[int]) -> Order:
    """1F1B with turns counted double; a weight half right after the s-th next input half.

    Those without so many input halves after them keep their distances.
    """
    whole = one_f_one_b.order(shape, warm_up)

    def forward(stage: int, micro_batch: Integers) -> Integers:
        return 2 * whole.forward(stage, micro_batch)

    def backward(stage: int, micro_batch: Integers) -> Integers:
        return 2 * whole.backward(stage, micro_batch)

    def weight(stage: int, micro_batch: Integers) -> Integers:
        return 2 * whole.backward(stage, micro_batch + stage) + 1

    return Order(forward, backward, weight)


ZB_H1 = Schedule("zb-h1", _order, one_f_one_b.policies, splits_backward=True, chooses_warm_up=True)
