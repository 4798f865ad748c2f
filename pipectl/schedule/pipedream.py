"""PipeDream and PipeDream-2BW: 1F1B that is never flushed, so steps overlap.

PipeDream updates after every backward. Four stages, eight steps of one micro-batch each, a backward
drawn twice as long as a forward; digits are forwards, letters (a = step 0) are backwards, each with
an update at its end::

    stage 0  0123......aa4bb5cc6dd7ee.ff.gg.hh
    stage 1  .012....aa3bb4cc5dd6ee7ff.gg.hh
    stage 2  ..01..aa2bb3cc4dd5ee6ff7gg.hh
    stage 3  ...0aa1bb2cc3dd4ee5ff6gg7hh

Where training goes on, nothing waits for the last stages to end: from the first backward on, every
stage computes all the time. The price is staleness. With versions counted by updates, from 0 where
the pipeline was last empty, the forward and the backward of step t (from 0) use, of stage s::

    version(s, t) = max(0, t + 1 - w(s))        w(s) = p - s, its warm-up

while update t makes version t + 1 of version t. So gradients are w(s) - 1 updates old: p - 1 in the
first stage, none in the last. Of the steps drawn above, these use version::

    stage 0  00001234
    stage 1  00012345
    stage 2  00123456
    stage 3  01234567

A backward uses the version of its forward (*weight stashing*), of which stage s holds w(s). A step
is one micro-batch of the whole batch.

Where the forward and the backward of a stage have ranks of their own (PipeFB), a stage has as many
steps in flight as there are ranks from here to the end, and one more while weights follow from the
backward's rank to the forward's: w(s) = 2 (p - s) + 1 if that is so of every stage. The formula is
the same. Update t sends version t + 1, and the forward of step t + w(s) awaits it, whatever has
arrived by then. Two stages on four ranks, a backward drawn as long as a forward; rank 1 has the
backwards of stage 0, rank 3 those of stage 1::

    rank 0  012345678
    rank 1  ...abcdefghi
    rank 2  .012345678
    rank 3  ..abcdefghi

These steps use version::

    stage 0  000001234
    stage 1  000123456

Source: Narayanan et al., "PipeDream", SOSP 2019, whose
formula is w(t+1) = w(t) - rate * gradient(w_1(t-n+1), w_2(t-n+2), ..., w_n(t)).

PipeDream-2BW has two versions of the weights. Three stages, three steps of three micro-batches,
with an update after every third backward, cc, ff and ii::

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

from collections.abc import Sequence
from itertools import accumulate

import numpy as np

from pipectl.schedule import one_f_one_b
from pipectl.schedule.actions import Integers
from pipectl.schedule.order import Schedule, Shape, Staleness, WarmUp


def _warm_up(shape: Shape) -> WarmUp:
    """As many micro-batches in flight as there are ranks from here to the end, and one more for
    stages whose backward is apart."""
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
    """As in PipeDream, but no more than a step has."""
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
