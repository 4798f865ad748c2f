"""Sets of small numbers, such as blocks of a graph, as integers: bit b is number b.

Many sets at once are rows of booleans, or of 64-bit words.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from pipectl.arrays import Flags, Words


def bits(members: int) -> Iterator[int]:
    """Positions of the set bits, ascending."""
    while members:
        low = members & -members
        yield low.bit_length() - 1
        members ^= low


def bitset(positions: Iterable[int]) -> int:
    """The integer with these bits set; positions must be distinct."""
    return sum(1 << position for position in positions)


def membership(bitsets: Sequence[int], width: int) -> Flags:
    """Bitsets as rows of booleans; shape [bitsets, width]."""
    size = -(-width // 8)
    packed = b"".join(members.to_bytes(size, "little") for members in bitsets)
    rows = np.frombuffer(packed, dtype=np.uint8).reshape(len(bitsets), size)
    return np.unpackbits(rows, axis=1, bitorder="little")[:, :width].astype(np.bool_)


def words_of(rows: Flags) -> Words:
    """Rows of booleans, packed; shape [rows, words]. Which bit is which does not matter."""
    packed = np.packbits(rows, axis=1)
    packed = np.pad(packed, ((0, 0), (0, -packed.shape[1] % 8)))
    return np.ascontiguousarray(packed).view(np.uint64)


def follows(rows: Flags) -> Flags:
    """Which set holds all of which other, and more; shape [rows, rows], the larger one last."""
    words = words_of(rows)
    inside = np.ones((len(words), len(words)), np.bool_)
    for column in words.T:
        inside &= (column[:, None] & ~column[None, :]) == 0
    np.fill_diagonal(inside, val=False)
    return inside
