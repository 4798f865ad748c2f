"""PipeDream and PipeDream-2BW: 1F1B without flushes, so that steps overlap.

PipeDream updates after every backward. Four stages, eight steps of one micro-batch each. A backward
is drawn twice as long as a forward; digits are forwards, letters (a = step 0) are backwards, each
with an update at its end::

    stage 0  0123......aa4bb5cc6dd7ee.ff.gg.hh
    stage 1  .012....aa3bb4cc5dd6ee7ff.gg.hh
    stage 2  ..01..aa2bb3cc4dd5ee6ff7gg.hh
    stage 3  ...0aa1bb2cc3dd4ee5ff6gg7hh

In a longer run the pipeline does not drain: from the first backward on, every stage computes all
the time. The price is staleness. Versions count updates, from 0 when the pipeline was last empty.
In stage s, the forward and the backward of step t (from 0) use::

    version(s, t) = max(0, t + 1 - w(s))        w(s) = p - s, its warm-up

Update t makes version t + 1 from version t, so gradients are w(s) - 1 updates old: p - 1 in the
first stage, none in the last. The steps drawn above use these versions::

    stage 0  00001234
    stage 1  00012345
    stage 2  00123456
    stage 3  01234567

A backward uses the version of its forward (*weight stashing*); stage s holds w(s) versions. A step
is one micro-batch, the whole batch.

If the forward and the backward of a stage run on different ranks (PipeFB), a stage has as many
steps in flight as there are ranks from there to the end, plus one while weights go from the
backward's rank to the forward's: w(s) = 2 (p - s) + 1 if this holds for every stage. The formula is
the same. Update t sends version t + 1, and the forward of step t + w(s) waits for exactly this
version. Two stages on four ranks, a backward drawn as long as a forward; rank 1 runs the backwards
of stage 0, rank 3 those of stage 1::

    rank 0  012345678
    rank 1  ...abcdefghi
    rank 2  .012345678
    rank 3  ..abcdefghi

These steps use these versions::

    stage 0  000001234
    stage 1  000123456

Source: Narayanan et al., "PipeDream", SOSP 2019, with the formula w(t+1) = w(t) - rate *
gradient(w_1(t-n+1), w_2(t-n+2), ..., w_n(t)).

PipeDream-2BW keeps two versions of the weights. Three stages, three steps of three micro-batches,
with an update after every third backward (cc, ff and ii)::

    stage 0  012....aa3bb4cc5dd6ee7ff8gg.hh.ii
    stage 1  .01..aa2bb3cc4dd5ee6ff7gg8hh.ii
    stage 2  ..0aa1bb2cc3dd4ee5ff6gg7hh8ii

Gradients accumulate over the micro-batches of a step, as without staleness. Versions count updates,
from 0 when the pipeline was last empty. In every stage, all forwards and backwards of step t use::

    version(t) = max(0, t - 1)

Update t makes version t + 1 from version t, so gradients are one update old in every stage, except
those of the first step. The micro-batches drawn above use these versions::

    stage 0  000000111
    stage 1  000000111
    stage 2  000000111

The version of the previous step is kept until the last backward that uses it. The warm-up,
min(m, p - s), is at most m, so that version t - 1 exists when step t begins. If the backward of a
stage runs on a rank of its own, its warm-up is PipeDream's, also at most m, and the forward's rank
waits for version t - 1 before step t. Source: Narayanan et al., "Memory-Efficient Pipeline-Parallel
DNN Training", ICML 2021, with the formula W(t+1) = W(t) - rate * gradient(W(t-1)).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import numpy as np

from pipectl.schedule import one_f_one_b
from pipectl.schedule.actions import Integers
from pipectl.schedule.order import Schedule, Shape, Staleness, WarmUp


def _warm_up(shape: Shape) -> WarmUp:
    """Return the number of ranks from each stage to the end, plus one for a backward elsewhere."""
    apart = shape.apart or (False,) * shape.stages
    ranks = list(accumulate(1 + two for two in reversed(apart)))[::-1]
    return tuple(count + two for count, two in zip(ranks, apart, strict=True))


def _version(depth: int, steps: Integers) -> Integers:
    return np.maximum(0, steps + 1 - max(1, depth))


def _words(depths: Sequence[int]) -> str:
    ages, last = ", ".join(str(depth - 1) for depth in depths), len(depths) - 1
    stale = f"gradients are of weights that are {ages} updates old in stages 0 to {last}"
    return f"{stale}, so results depend on the stages"


def _bounded_warm_up(shape: Shape) -> list[WarmUp]:
    """Return the warm-up of PipeDream, but at most the micro-batches of a step."""
    depths = _warm_up(shape)
    return [tuple(min(shape.micro_batches, depth) for depth in depths)]


PIPEDREAM = Schedule(
    "pipedream",
    one_f_one_b.order,
    lambda shape: [_warm_up(shape)],
    staleness=Staleness(
        version=_version,
        kept=lambda depth, apart: depth if apart else 1,
        words=_words,
        one_micro_batch=True,
    ),
)
PIPEDREAM_2BW = Schedule(
    "pipedream-2bw",
    one_f_one_b.order,
    _bounded_warm_up,
    staleness=Staleness(
        version=lambda _, steps: np.maximum(0, steps - 1),
        kept=lambda *_: 2,
        words=lambda _: "gradients are of weights that are one update old, whatever the stages",
    ),
)
