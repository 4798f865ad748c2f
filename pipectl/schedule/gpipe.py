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
from pipectl.schedule.actions import Actions

NAME = "gpipe"


def warm_up(stages: int, micro_batches: int) -> tuple[int, ...]:
    """Every forward comes before the first backward."""
    return (micro_batches,) * stages


def generate(stages: Sequence[int], micro_batches: int, _warm_up: Sequence[int]) -> Actions:
    """What a rank that holds ``stages`` computes in one step: 1F1B that never leaves its warm-up.

    Args:
        stages: stages of the rank.
        micro_batches: of the step, at least 1.
    """
    depth = warm_up(1 + max(stages, default=0), micro_batches)
    return one_f_one_b.generate(stages, micro_batches, depth)
