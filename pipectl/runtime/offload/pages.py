"""Memory of whole pages beside the C library's heap, of sizes that come again and again.

What a forward saves lives longer than what else it makes. Side by side in one heap, the first
leaves holes between the second when it goes, and blocks that do not fit them make the heap grow
although much of it is free. In pages of their own, saved values leave nothing behind: every
micro-batch needs the sizes that the one before gave back, so no page is taken from the system
twice. Disks, too, read and write whole pages past the system's cache; see
:mod:`pipectl.runtime.offload.disk_file`.
"""

from __future__ import annotations

import mmap
from weakref import finalize

import torch
from torch import Tensor

PAGE = mmap.PAGESIZE


class Pages:
    """What the offloading stages of a rank hold in its memory."""

    def __init__(self) -> None:
        self._free: dict[int, list[mmap.mmap]] = {}

    def take(self, size: int) -> Tensor:
        """A vector of bytes at the start of pages that are its own until it is gone."""
        paged = paged_bytes(size)
        free = self._free.setdefault(paged, [])
        memory = free.pop() if free else _new(paged)
        shared = memoryview(memory)
        finalize(shared, free.append, memory).atexit = False
        return torch.frombuffer(shared, dtype=torch.uint8)[:size]

    def copy_of(self, vector: Tensor) -> Tensor:
        """A vector of bytes moved here."""
        return self.take(vector.numel()).copy_(vector)


def paged_bytes(size: int) -> int:
    """The size of the pages that hold so many bytes."""
    return -(-size // PAGE) * PAGE


def whole_pages(vector: Tensor) -> memoryview | None:
    """The pages that hold a vector of bytes; None where it shares them with others."""
    every = torch.empty(0, dtype=torch.uint8).set_(vector.untyped_storage())
    own = vector.data_ptr() == every.data_ptr() and every.numel() == paged_bytes(vector.numel())
    return every.numpy().data if own and every.data_ptr() % PAGE == 0 else None


def new_pages(size: int) -> memoryview:
    """Pages for so many bytes, to be used once."""
    return memoryview(_new(paged_bytes(size)))


def _new(size: int) -> mmap.mmap:
    return mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
