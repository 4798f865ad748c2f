"""Evaluation: forwards only, micro-batch after micro-batch.

Four stages, four micro-batches::

    stage 0  0123
    stage 1  .0123
    stage 2  ..0123
    stage 3  ...0123
"""

from __future__ import annotations

from pipectl.schedule.actions import Integers
from pipectl.schedule.order import Order


def order(stages: int) -> Order:
    """By micro-batch, then by stage.

    Args:
        stages: more than any stage's index.
    """

    def forward(stage: int, micro_batch: Integers) -> Integers:
        return micro_batch * stages + stage

    return Order(forward, forward)
