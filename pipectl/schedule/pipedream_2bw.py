"""PipeDream-2BW: 1F1B that is never flushed, with two versions of the weights.

Three stages, three steps of three micro-batches, a backward drawn twice as long as a forward;
digits are forwards, letters (a = micro-batch 0 of the first step) are backwards, with an update
after every third, cc, ff and ii::

    stage 0  012....aa3bb4cc5dd6ee7ff8gg.hh.ii
    stage 1  .01..aa2bb3cc4dd5ee6ff7gg8hh.ii
    stage 2  ..0aa1bb2cc3dd4ee5ff6gg7hh8ii

Gradients add up over the micro-batches of a step, as without staleness. With versions counted by
updates, from 0 where the pipeline was last empty, all forwards and backwards of step t (from 0) use
of every stage::

    version(t) = max(0, t - 1)

while update t makes version t + 1 of version t. So gradients are one update old, in every stage
alike, but for the first step, whose are not. Of the micro-batches drawn above, these use version::

    stage 0  000000111
    stage 1  000000111
    stage 2  000000111

Two versions are held: that of the step before stays until the last backward that uses it. The
warm-up, min(m, p - s), is at most m, so that version t - 1 is there when step t begins. Where the
backward of a stage has a rank of its own, its warm-up is PipeDream's, again at most m, and the
forward's rank awaits version t - 1 before step t.
Source: Narayanan et al., "Memory-Efficient Pipeline-Parallel DNN Training", ICML 2021, whose
formula is W(t+1) = W(t) - rate * gradient(W(t-1)).
"""

from __future__ import annotations

import numpy as np

from pipectl.schedule import one_f_one_b, pipedream
from pipectl.schedule.order import Schedule, Shape, Staleness, WarmUp


def _warm_ups(shape: Shape) -> list[WarmUp]:
    """As in PipeDream, but no more than a step has."""
    depths = pipedream.warm_up(shape)
    return [tuple(min(shape.micro_batches, depth) for depth in depths)]


PIPEDREAM_2BW = Schedule(
    "pipedream-2bw",
    one_f_one_b.order,
    _warm_ups,
    staleness=Staleness(
        version=lambda _, steps: np.maximum(0, steps - 1),
        kept=lambda *_: 2,
        words=lambda _: "gradients are of weights that are one update old, whatever the stages",
    ),
)
