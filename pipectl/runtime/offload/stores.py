"""Where offloaded bytes wait: memory of the host, or a file that has no name.

Stores are called from background threads, with vectors of bytes in memory of the host.

Memory of whole pages lies beside the C library's heap, in sizes that come again and again. What a
forward saves lives longer than what else it makes. Side by side in one heap, the first leaves holes
between the second when it goes, and blocks that do not fit them make the heap grow although much of
it is free. In pages of their own, saved values leave nothing behind: every micro-batch needs the
sizes that the one before gave back, so no page is taken from the system twice.

Files are written past the system's cache, where the disk allows it. Through the cache a core copies
every byte, and a node's memory holds it for a while. Past it, the disk reads and writes a vector's
own memory, and no core has work. It takes whole pages only, in memory as in the file.

"""

from __future__ import annotations

import errno
import mmap
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from threading import Lock
from typing import NamedTuple, Protocol
from weakref import finalize

import torch
from torch import Tensor

from pipectl.errors import WorkerError
from pipectl.units import format_bytes

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


class DiskFile:
    """A file without a name, which goes with the process, however that ends.

    Args:
        opened: its descriptor.
        name: which is removed.

    Attributes:
        descriptor: of the open file.
        is_direct: whether it is written past the cache.

    Raises:
        OSError: the disk fails.
    """

    def __init__(self, opened: int, name: str) -> None:
        self.descriptor = opened
        self.is_direct = _is_direct(opened, name)
        os.unlink(name)  # noqa: PTH108

    def write(self, vector: Tensor, offset: int) -> int:
        """Write a vector at an offset of whole pages; returns that behind it.

        Raises:
            OSError: the disk is full, or fails.
        """
        rest = whole_pages(vector)
        if rest is None:
            rest = new_pages(vector.numel())
            rest[: vector.numel()] = vector.numpy().data
        while len(rest):  # one call moves 2 GiB at most
            done = os.pwrite(self.descriptor, rest, offset)
            rest, offset = rest[done:], offset + done
        return offset

    def read(self, vector: Tensor, offset: int) -> int:
        """Fill a vector from an offset of whole pages; returns that behind it.

        Raises:
            OSError: the disk fails.
        """
        own = whole_pages(vector)
        pages = new_pages(vector.numel()) if own is None else own
        rest = pages
        while len(rest):
            done = os.preadv(self.descriptor, [rest], offset)
            if not done:
                raise OSError(errno.EIO, "the file is shorter than what was written")
            rest, offset = rest[done:], offset + done
        if own is None:
            vector.numpy().data[:] = pages[: vector.numel()]
        return offset

    def close(self) -> None:
        """Give its space back."""
        os.close(self.descriptor)


def _is_direct(opened: int, name: str) -> bool:
    """Whether a page can be written past the cache and read again.

    If so, the descriptor from then on stands for the file past the cache.
    """
    flag = getattr(os, "O_DIRECT", 0)
    if not flag:
        return False
    page, direct = new_pages(PAGE), -1
    try:
        direct = os.open(name, os.O_RDWR | flag)
        works = os.pwrite(direct, page, 0) == os.preadv(direct, [page], 0) == PAGE
        if works:
            os.dup2(direct, opened, inheritable=False)
        return works
    except OSError:
        return False
    finally:
        if direct >= 0:
            os.close(direct)


class Place(Protocol):
    """Where something waits."""


class Store(Protocol):
    """Takes vectors of bytes and gives them back once."""

    def write(self, pieces: Sequence[Tensor]) -> Place:
        """Copy them; their memory may be reused afterwards."""

    def read(self, place: Place, into: Sequence[Tensor]) -> None:
        """Copy them back into vectors of the same lengths and forget them."""

    def close(self) -> None:
        """Free everything."""


class HostStore:
    """Memory of the process itself.

    On ranks that compute on the CPU this moves bytes from memory to the same memory, which frees
    nothing; it is there so that a job for accelerators gives the same results without them.
    """

    class Kept(NamedTuple):
        """Copies."""

        pieces: list[Tensor]

    def write(self, pieces: Sequence[Tensor]) -> Place:
        """Clones on the CPU."""
        return HostStore.Kept([piece.clone() for piece in pieces])

    def read(self, place: Place, into: Sequence[Tensor]) -> None:
        """Copy them back."""
        assert isinstance(place, HostStore.Kept)
        for piece, target in zip(place.pieces, into, strict=True):
            target.copy_(piece)
        place.pieces.clear()

    def close(self) -> None:
        """Nothing is left behind."""


class DiskStore:
    """A file whose name is removed at once, so that it goes with the process, however that ends.

    Micro-batches are written one behind the other; the place of one that came back is used again.

    Args:
        directory: on a file system of the node itself.
        rank: for errors.

    Raises:
        WorkerError: the directory cannot be written.
    """

    class Extent(NamedTuple):
        """A part of the file."""

        offset: int
        size: int

    def __init__(self, directory: Path, rank: int) -> None:
        self._directory, self._rank = directory, rank
        try:
            self._file = DiskFile(*tempfile.mkstemp(prefix="pipectl-offload-", dir=directory))
        except OSError as error:
            raise self._failure(error, 0) from None
        self._end = 0
        self._free: list[DiskStore.Extent] = []
        self._lock = Lock()

    @property
    def is_direct(self) -> bool:
        """Whether bytes go between memory and disk without the system's cache between them."""
        return self._file.is_direct

    def write(self, pieces: Sequence[Tensor]) -> Place:
        """Write them into the file.

        Raises:
            WorkerError: the disk is full, or fails.
        """
        needed = sum(paged_bytes(piece.numel()) for piece in pieces)
        extent = self._take(needed)
        offset = extent.offset
        try:
            for piece in pieces:
                offset = self._file.write(piece, offset)
        except OSError as error:
            raise self._failure(error, needed) from None
        return extent

    def read(self, place: Place, into: Sequence[Tensor]) -> None:
        """Read them from the file.

        Raises:
            WorkerError: the disk fails.
        """
        assert isinstance(place, DiskStore.Extent)
        offset = place.offset
        try:
            for piece in into:
                offset = self._file.read(piece, offset)
        except OSError as error:
            raise self._failure(error, 0) from None
        with self._lock:
            self._free.append(place)

    def close(self) -> None:
        """Give the disk's space back."""
        self._file.close()

    def _take(self, size: int) -> DiskStore.Extent:
        """The smallest free part that is large enough, or a new one at the end."""
        with self._lock:
            fitting = [extent for extent in self._free if extent.size >= size]
            if fitting:
                best = min(fitting, key=lambda extent: extent.size)
                self._free.remove(best)
                return best
            extent = DiskStore.Extent(self._end, size)
            self._end += size
            return extent

    def _failure(self, error: OSError, needed: int) -> WorkerError:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            return WorkerError(
                f"rank {self._rank}: offload in {self._directory} fails: {error.strerror}",
                cure="set TMPDIR in environment.variables to another directory on the nodes",
            )
        return WorkerError(
            f"rank {self._rank}: no space for offload in {self._directory}: {format_bytes(needed)} "
            f"more are needed beside {format_bytes(self._end - needed)}, and the disk is full",
            cure="set TMPDIR in environment.variables to a directory with more space",
        )
