"""Evaluation: forwards only, micro-batch after micro-batch.

Four stages, four micro-batches::

    stage 0  0123
    stage 1  .0123
    stage 2  ..0123
    stage 3  ...0123
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pipectl.schedule.actions import Actions, Kind


def generate(stages: Sequence[int], micro_batches: int) -> Actions:
    """What a rank that holds ``stages`` evaluates, by micro-batch, then by stage."""
    index = np.repeat(np.arange(micro_batches, dtype=np.int32), len(stages))
    held = np.tile(np.array(sorted(stages), dtype=np.int32), micro_batches)
    return Actions.of_columns(
        kind=np.full(len(held), Kind.EVALUATE, dtype=np.int32), stage=held, micro_batch=index
    )
