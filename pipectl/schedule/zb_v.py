"""ZB-V: two stages a rank in a V, and no idle time but the start and the end.

Four stages on two ranks, six micro-batches; stages 0 and 3 are the first rank's. Forward, input
half and weight half of a backward equally long; digits are forwards, small letters (a = micro-batch
0) input halves, capitals weight halves::

    stage 0  012......3aA...4bB...5cC...dD...eEfF
    stage 1  .0.1...2aA...3bB...4cC...5dD...e.fE.F
    stage 2  ..0.1aA...2bB...3cC...4dD...5eE.f..F
    stage 3  ...0aA1bB...2cC...3dD...4eE..5fF

A rank keeps at most p whole micro-batches, as the first stage of 1F1B does, and every rank keeps
the same. Sources: Qi et al., "Zero Bubble Pipeline Parallelism", ICLR 2024, and "Pipeline
Parallelism with Controllable Memory", NeurIPS 2024.
"""

from __future__ import annotations

from pipectl.schedule.actions import Integers
from pipectl.schedule.sequences import F0, F1, I0, I1, W0, W1, Listing, orders_of, v_shaped


def _listed(rank: int, ranks: int, micro_batches: int) -> Integers:
    """With fewer than 2p - 1 micro-batches, the turns of the missing ones are empty."""
    count, behind = max(micro_batches, 2 * ranks - 1), ranks - rank
    listing = Listing(rank, ranks)
    listing.repeat(2 * behind - 1, F0)
    listing.repeat(rank, F1, F0)
    listing.repeat(behind, F1, I1, W1)
    listing.repeat(count - ranks, F0, I0, W0, F1, I1, W1)
    listing.repeat(rank, I0, I1)
    listing.repeat(behind, I0, W0)
    listing.repeat(rank, W1)
    listing.repeat(rank, W0)
    return listing.up_to(micro_batches)


ZB_V = v_shaped("zb-v", orders_of(_listed))
