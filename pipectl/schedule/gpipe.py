"""GPipe: all forwards, then all backwards.

Four stages, four micro-batches, a backward drawn twice as long as a forward; digits are
forwards, letters (a = micro-batch 0) are backwards::

    stage 0  0123.........aabbccdd
    stage 1  .0123......aabbccdd
    stage 2  ..0123...aabbccdd
    stage 3  ...0123aabbccdd

Activations of every micro-batch are kept; gradients accumulate in ascending micro-batch order
like in every schedule here (the paper runs the backwards in reverse). Source: Huang et al.,
"GPipe", NeurIPS 2019.
"""

from __future__ import annotations

from pipectl.schedule import one_f_one_b
from pipectl.schedule.order import Order

NAME = "gpipe"


def warm_up(stages: int, micro_batches: int) -> tuple[int, ...]:
    """Every forward comes before the first backward."""
    return (micro_batches,) * stages


def order(stages: int, micro_batches: int) -> Order:
    """1F1B that never leaves its warm-up."""
    return one_f_one_b.order(warm_up(stages, micro_batches), micro_batches)
