"""1F1B: after its warm-up a stage alternates one backward and one forward.

Four stages, eight micro-batches, warm-up (4, 3, 2, 1), a backward drawn twice as long as a
forward; digits are forwards, letters (a = micro-batch 0) are backwards::

    stage 0  0123......aa4bb5cc6dd7ee.ff.gg.hh
    stage 1  .012....aa3bb4cc5dd6ee7ff.gg.hh
    stage 2  ..01..aa2bb3cc4dd5ee6ff7gg.hh
    stage 3  ...0aa1bb2cc3dd4ee5ff6gg7hh

The warm-up of a stage, the forwards it runs before its first backward, bounds the micro-batches
whose activations it keeps. Sources: PipeDream-Flush (Narayanan et al., 2021); the two warm-up
policies are DAPPLE's (Fan et al., PPoPP 2021).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pipectl.schedule.actions import Actions, Kind

NAME = "1f1b"


def policy_a(stages: int, micro_batches: int) -> tuple[int, ...]:
    """The shallowest warm-up that fills the pipeline: min(m, p - s); the least memory."""
    return tuple(min(micro_batches, stages - stage) for stage in range(stages))


def policy_b(stages: int, micro_batches: int) -> tuple[int, ...]:
    """Deeper warm-up, min(m, 2 (p - s) - 1), which hides slow messages for more memory."""
    return tuple(min(micro_batches, 2 * (stages - stage) - 1) for stage in range(stages))


def generate(stages: Sequence[int], micro_batches: int, warm_up: Sequence[int]) -> Actions:
    """What a rank that holds ``stages`` computes in one step.

    Sorts by one order of all actions of all ranks: forward of stage s, micro-batch i at
    (i, 1, s); its backward at (i + warm_up[s], 0, -s). Where the warm-up never rises with the
    stage, this order agrees with every dependency, so no placement of stages can deadlock.

    Args:
        stages: stages of the rank.
        micro_batches: of the step, at least 1.
        warm_up: of every stage of the pipeline; more than ``micro_batches`` means all of them.
    """
    held = np.repeat(np.asarray(stages, dtype=np.int32), micro_batches)
    index = np.tile(np.arange(micro_batches, dtype=np.int32), len(stages))
    depth = np.asarray(warm_up, dtype=np.int32)[held].clip(1, micro_batches)
    kind = np.repeat(np.array([Kind.FORWARD, Kind.BACKWARD], dtype=np.int32), len(held))
    turn = np.concatenate([index, index + depth])
    side = np.concatenate([held + 1, -held])
    order = np.lexsort((side, turn))
    return Actions.of_columns(
        kind=kind[order], stage=np.tile(held, 2)[order], micro_batch=np.tile(index, 2)[order]
    )
