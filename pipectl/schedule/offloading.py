"""Offload: where what a micro-batch saved leaves the device, and where it comes back.

Both copies run beside one computation each; steady 1F1B, ``o`` and ``f`` the copies of one
micro-batch::

    compute   F0  F1  F2  B?  F3  B?  F4  B0
    copies        o0                  f0

The device holds about two micro-batches of the stage, whatever the warm-up. Where no computation
runs while a micro-batch is away, nothing would be gained, and it stays.
"""

from __future__ import annotations

import numpy as np

from pipectl.schedule.actions import Kind
from pipectl.schedule.computing import Block
from pipectl.schedule.rows import Phase, Rows

BESIDE = 1
"""Computations during which a copy runs."""


def add(rows: Rows, forward: Block, backward: Block) -> None:
    """The rows that offload and fetch what one stage saves on one rank."""
    stage = forward.role.stage
    gone, back = forward.slots + BESIDE, backward.slots - BESIDE
    away = np.flatnonzero(gone + 1 < back)
    portion = forward.portion.some(away)
    for phase, slots, kind in (
        (Phase.OFFLOAD_START, forward.slots, Kind.OFFLOAD_START),
        (Phase.OFFLOAD_WAIT, gone, Kind.OFFLOAD_WAIT),
        (Phase.FETCH_START, back, Kind.FETCH_START),
        (Phase.FETCH_WAIT, backward.slots, Kind.FETCH_WAIT),
    ):
        rows.add(phase, slots[away], kind, stage, portion)
