"""DualPipeV: two stages a rank in a V; a forward of one beside every backward of the other.

Four stages on two ranks, six micro-batches; stages 0 and 3 are the first rank's. Forward, input
half and weight half of a backward equally long; digits are forwards, small letters (a = micro-batch
0) input halves, capitals weight halves::

    stage 0  012....3...aA4...bB5...cC...dD..eE.fF
    stage 1  .0.1.2...aA3...bB4...cC5...dD..eE.f.F
    stage 2  ..0.1.aA2...bB3...cC4...dD5..eE..f.F
    stage 3  ...0aA1.bB2...cC3...dD4..eE5..fF

In its long middle part a rank goes through forward of the first stage, backward of the second,
forward of the second, backward of the first: what one of them sends has the next to hide behind. A
rank keeps p + 1/2 whole micro-batches. Source: DeepSeek-AI's DualPipe, cut in half (DualPipeV);
here a forward and a backward run one after the other instead of at the same time, and every
backward is split.
"""

from __future__ import annotations

from pipectl.schedule.actions import Integers
from pipectl.schedule.sequences import F0, F1, I0, I1, W0, W1, Listing, orders_of, v_shaped


def _listed(rank: int, ranks: int, micro_batches: int) -> Integers:
    """With fewer than 2p micro-batches, the turns of the missing ones are empty."""
    count, behind = max(micro_batches, 2 * ranks), ranks - rank - 1
    listing = Listing(rank, ranks)
    listing.repeat(2 * behind, F0)
    listing.repeat(rank + 1, F0, F1)
    listing.repeat(behind, I1, W1, F1)
    listing.repeat(count - 2 * ranks + rank + 1, F0, I1, W1, F1, I0, W0)
    listing.repeat(behind, I1, W1, F1, I0, W0)
    _end(listing, rank, behind)
    return listing.up_to(micro_batches)


def _end(listing: Listing, rank: int, behind: int) -> None:
    """Only backwards are left; in the second half of them, weight halves wait for idle time."""
    waiting = []
    for place in range(2 * (rank + 1)):
        half, weight = ((I1, W1), (I0, W0))[place % 2]
        listing.repeat(1, half)
        if place > rank:
            waiting.append(weight)
        else:
            listing.repeat(1, weight)
    for _ in range(behind):
        listing.repeat(1, waiting.pop(0), I0)
        waiting.append(W0)
    for weight in waiting:
        listing.repeat(1, weight)


DUAL_PIPE_V = v_shaped("dualpipev", orders_of(_listed))
