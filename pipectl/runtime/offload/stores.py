"""Where offloaded bytes wait: memory of the host, or a file that has no name.

Both are called from background threads, with vectors of bytes in memory of the host.
"""

from __future__ import annotations

import errno
import tempfile
from collections.abc import Sequence
from pathlib import Path
from threading import Lock
from typing import NamedTuple, Protocol

from torch import Tensor

from pipectl.errors import WorkerError
from pipectl.runtime.offload.disk_file import DiskFile
from pipectl.runtime.offload.pages import paged_bytes
from pipectl.units import format_bytes


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
