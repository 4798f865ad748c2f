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

from collections.abc import Sequence

from pipectl.schedule import one_f_one_b
from pipectl.schedule.order import Order, Schedule, Shape, WarmUp


def every_forward_first(shape: Shape) -> list[WarmUp]:
    """Every forward comes before the first backward."""
    return [(shape.micro_batches,) * shape.stages]


def _order(shape: Shape, _: Sequence[int]) -> Order:
    """1F1B that never leaves its warm-up."""
    return one_f_one_b.order(shape, *every_forward_first(shape))


GPIPE = Schedule("gpipe", _order, every_forward_first, is_local=True)
