"""All partitions of small graphs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice, pairwise

from pipectl.planner.spans import Partition


def every_partition(downsets: Sequence[int], stages: int, most: int) -> list[Partition] | None:
    """Every chain of downsets with so many stages, or None if there are more than ``most``.

    Args:
        downsets: all there are, the empty one first and the full one last.
    """
    if len(downsets) > most + 2:
        return None
    inner, full = downsets[1:-1], downsets[-1]

    def extend(below: int, left: int) -> Iterator[tuple[int, ...]]:
        if left == 0:
            yield (full,)
            return
        for downset in inner:
            if downset != below and not below & ~downset:
                for tail in extend(downset, left - 1):
                    yield (downset, *tail)

    found = list(islice(extend(0, stages - 1), most + 1))
    if len(found) > most:
        return None
    return [tuple(after & ~before for before, after in pairwise((0, *chain))) for chain in found]
