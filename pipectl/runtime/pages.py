"""Memory of a rank outside the heap of the C library, which is used again.

In the heap, values that live longer than those around them cost more than their size: torch asks
for aligned memory, so glibc cannot give a freed block between two others to the next tensor of its
size. Small pieces of memory have taken the bytes that align it, and the heap grows although much of
it is free. This wastes most with a few values as large as messages. So values that a stage does not
allocate itself have pages of their own: what is offloaded, and what arrives.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable
from math import prod
from weakref import finalize

import torch
from torch import Tensor

PAGE = mmap.PAGESIZE
LARGE_BYTES = 2**20
"""Messages from this size on have pages of their own."""


class Pages:
    """Pages for vectors of a few sizes, such as those of offloading stages."""

    def __init__(self) -> None:
        self._free: dict[int, list[mmap.mmap]] = {}

    def take(self, size: int) -> Tensor:
        """A vector of bytes at the start of pages that it shares with nothing."""
        paged = paged_bytes(size)
        free = self._free.setdefault(paged, [])
        memory = free.pop() if free else new_pages(paged)
        return _lend(memory, free.append)[:size]

    def copy_of(self, vector: Tensor) -> Tensor:
        """A copy of a vector of bytes in such pages."""
        return self.take(vector.numel()).copy_(vector)


class MessagePages:
    """Pages for messages that arrive, which differ in size if sequences differ in length."""

    def __init__(self) -> None:
        self._free: list[mmap.mmap] = []

    def take(self, sizes: int | tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A contiguous tensor; a small one is in the heap.

        Args:
            sizes: of its dimensions, or the elements of a vector.
        """
        count = sizes if isinstance(sizes, int) else prod(sizes)
        size = count * dtype.itemsize
        if size < LARGE_BYTES:
            return torch.empty(sizes, dtype=dtype)
        near = [free for free in self._free if size <= 2 * len(free) <= 4 * size]
        fitting = [free for free in near if len(free) >= size]
        if near:  # larger pages than these serve instead of them
            memory = min(fitting, key=len) if fitting else max(near, key=len)
            self._free.remove(memory)
        if not fitting:
            memory = new_pages(size)
        return _lend(memory, self._free.append)[:size].view(dtype).view(sizes)


def paged_bytes(size: int) -> int:
    """The size in bytes of the pages that hold ``size`` bytes."""
    return -(-size // PAGE) * PAGE


def whole_pages(vector: Tensor) -> memoryview | None:
    """The pages that hold a vector of bytes; None if it shares them with others."""
    every = torch.empty(0, dtype=torch.uint8).set_(vector.untyped_storage())
    alone = vector.data_ptr() == every.data_ptr() and every.numel() == paged_bytes(vector.numel())
    return every.numpy().data if alone and every.data_ptr() % PAGE == 0 else None


def new_pages(size: int) -> mmap.mmap:
    """Pages for ``size`` bytes from the system."""
    return mmap.mmap(-1, paged_bytes(size), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


def _lend(memory: mmap.mmap, give_back: Callable[[mmap.mmap], None]) -> Tensor:
    """The bytes of some pages, which are given back once no tensor lies in them."""
    shared = memoryview(memory)
    finalize(shared, give_back, memory).atexit = False
    return torch.frombuffer(shared, dtype=torch.uint8)
