"""All downsets of the stage graph: what the stages up to some point of a pipeline can hold.

Breadth first, so by rising size; each downset is a row of 64-bit words. With every downset come the
ways to make it larger by one block, which is how the search moves from the start of a stage towards
its end.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from pipectl.arrays import Integers
from pipectl.planner.exact.arrays import Growth, Steps
from pipectl.planner.exact.lattice_kernel import flip, grow, rehash
from pipectl.planner.exact.load_model import LoadModel

_ROOM = 1 << 10
_CHUNK = 1 << 12


@dataclass(frozen=True)
class Lattice:
    """Downsets from the empty to the full one.

    Args:
        parents, last_added: of every downset, a smaller one and the block that it lacks.
    """

    steps: Steps
    parents: Integers
    last_added: Integers

    def __len__(self) -> int:
        return len(self.parents)

    def members(self, downset: int) -> list[int]:
        """The blocks of a downset, ascending."""
        words = self.steps.sets[downset].astype("<u8")
        inside = np.unpackbits(words.view(np.uint8), bitorder="little")
        return [int(block) for block in np.flatnonzero(inside)]


def all_downsets(model: LoadModel, cap: int, expired: Callable[[], bool]) -> Lattice | None:
    """Every downset, or None if there are more than ``cap`` or time is up."""
    growth = _first(model)
    while growth.counts[0] < growth.counts[1]:
        if growth.counts[1] > cap or expired():
            return None
        if not grow(growth, model.arcs, _CHUNK):
            growth = _with_room(growth)
    return _lattice(growth)


def _first(model: LoadModel) -> Growth:
    """The empty downset."""
    rows = _ROOM + 2 * len(model)
    sets = np.zeros((rows, (len(model) + 63) // 64), dtype=np.uint64)
    addable = np.zeros_like(sets)
    for block in np.flatnonzero(np.diff(model.predecessors.starts) == 0):
        flip(addable, 0, int(block))
    table = np.full(4 << rows.bit_length(), -1, dtype=np.int64)
    rehash(sets, 1, table)
    arcs = np.zeros((8 * rows, 3), dtype=np.int64)
    return Growth(sets, addable, table, arcs, np.array([0, 1, 0], dtype=np.int64))


def _with_room(growth: Growth) -> Growth:
    """The same with all arrays twice as long."""
    sets, arcs = _doubled(growth.sets), _doubled(growth.arcs)
    table = np.full(2 * len(growth.table), -1, dtype=np.int64)
    rehash(sets, int(growth.counts[1]), table)
    return Growth(sets, _doubled(growth.addable), table, arcs, growth.counts)


def _doubled(rows: npt.NDArray[Any]) -> npt.NDArray[Any]:
    return np.concatenate([rows, np.zeros_like(rows)])


def _lattice(growth: Growth) -> Lattice:
    """What was found, once all was extended: arcs are by rising smaller downset, then block."""
    count = int(growth.counts[1])
    source, block, target = np.ascontiguousarray(growth.arcs[: growth.counts[2]].T)
    starts = np.searchsorted(source, np.arange(count + 1)).astype(np.int64)
    parents, last_added = np.zeros(count, dtype=np.int64), np.zeros(count, dtype=np.int64)
    parents[target], last_added[target] = source, block
    return Lattice(Steps(growth.sets[:count], starts, target, block), parents, last_added)
