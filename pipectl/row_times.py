"""What a rank's program takes besides computing and waiting: time per row, message and step.

Measured by ranks that train a small model (:mod:`pipectl.runtime.row_probe`).
All are seconds of the rank's own time, which nothing hides; how long a message is on its way is a
matter of the link (:mod:`pipectl.link`).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Annotated

from pipectl.fields import Rule


def _rises(rows: Sequence[tuple[int, float]]) -> bool:
    return all(a[0] < b[0] for a, b in pairwise(rows))


BySize = Annotated[tuple[tuple[int, float], ...], Rule(_rises, "of rising sizes")]
"""(bytes, seconds), by rising size; empty where nothing was measured."""


@dataclass(frozen=True)
class RowTimes:
    """Seconds that rows take on a rank of one kind of node.

    Args:
        send_start, send_wait: of a message, for its sender, by bytes.
        receive_start, receive_wait: the same for its receiver; ``receive_wait`` counts from when
            the message is there.
        compute: from the end of a forward or backward to the next row.
        begin: from the begin of a step to its first row.
        end: of an update, besides what the optimizer takes for parameters.
        agree: from when the last rank comes to its update until all go on.
    """

    send_start: BySize = ()
    send_wait: BySize = ()
    receive_start: BySize = ()
    receive_wait: BySize = ()
    compute: float = 0.0
    begin: float = 0.0
    end: float = 0.0
    agree: float = 0.0


FREE_ROWS = RowTimes()
"""Taken where nobody measured."""


@lru_cache(maxsize=4096)
def seconds_of(rows: BySize, size_bytes: float) -> float:
    """The time for a size: linear between measured sizes, and on beyond the last two of them."""
    if not rows:
        return 0.0
    if len(rows) == 1 or size_bytes <= rows[0][0]:
        return rows[0][1]
    above = min(max(1, bisect_left(rows, (size_bytes,))), len(rows) - 1)
    (low, low_s), (high, high_s) = rows[above - 1 : above + 1]
    return max(0.0, low_s + (high_s - low_s) * (size_bytes - low) / (high - low))
