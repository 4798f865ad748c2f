"""Offload: saved values of a micro-batch leave the device's memory until its backward.

Copies run in the background, one at a time per direction, as in the simulator. Offloaded bytes wait
in host memory, or in an unnamed file. Before training starts, each node is checked for the disk
space that its ranks need.

*Accelerators* have a stream per direction, so that both directions of their link work at once, and
copy at its full speed only from and to pinned memory. So offloaded bytes wait in pinned memory, one
vector after the other in chunks of a few sizes: blocks of the sizes of single vectors would be
rounded up to powers of two.

*Pages.* Saved values have pages of their own (:mod:`pipectl.runtime.pages`): every micro-batch
needs the sizes that the one before released, so that no page is taken from the system twice.

*Files* are written past the system's cache, if the disk allows it. Through the cache, a core copies
every byte, and the copy stays in the node's memory for a while. Past it, the disk reads and writes
a vector's own memory without using a core. This requires whole pages, in memory and in the file.
"""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext, suppress
from functools import partial
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import torch
from torch import Tensor

from pipectl.cluster import OffloadTarget
from pipectl.errors import WorkerError
from pipectl.plan import Plan
from pipectl.runtime.pages import PAGE, Pages, new_pages, paged_bytes, whole_pages
from pipectl.runtime.staging import CopyStream, mark
from pipectl.runtime.waiting import gather_all
from pipectl.schedule import lower
from pipectl.simulate.memory import peak_host_bytes
from pipectl.units import format_bytes

if TYPE_CHECKING:
    from mpi4py import MPI

T = TypeVar("T")
CHUNK = 2**24
"""Largest chunk of pinned memory, in bytes."""


class PinnedChunks:
    """Pinned host memory in which the offloaded vectors of a rank's accelerator wait."""

    def __init__(self) -> None:
        self._free: dict[int, list[Tensor]] = {}
        self._lock = Lock()

    def take(self, total: int) -> list[Tensor]:
        """Chunks that hold ``total`` bytes together; all but the last are full."""
        chunks, size = [], min(CHUNK, 1 << max(0, total - 1).bit_length())
        while total > 0:
            with self._lock:
                free = self._free.setdefault(size, [])
                chunk = free.pop() if free else None
            if chunk is None:
                chunk = torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=True)
            chunks.append(chunk)
            total -= size
        return chunks

    def put_back(self, chunks: Sequence[Tensor]) -> None:
        """Allow that chunks are used again; nothing reads or writes them any longer."""
        with self._lock:
            for chunk in chunks:
                self._free.setdefault(chunk.numel(), []).append(chunk)


def _parts(chunks: Sequence[Tensor], vectors: Sequence[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
    """Parts of chunks in which vectors lie one after the other, each with its part of a vector."""
    rest, at = iter(chunks), 0
    chunk = torch.empty(0)
    for vector in vectors:
        done = 0
        while done < vector.numel():
            if at == chunk.numel():
                chunk, at = next(rest), 0
            size = min(vector.numel() - done, chunk.numel() - at)
            yield chunk[at : at + size], vector[done : done + size]
            done, at = done + size, at + size


class Extent(NamedTuple):
    """A part of a file."""

    offset: int
    size: int


class DiskStore:
    """A file whose name is removed at once, so that it disappears with the process in any case.

    Micro-batches are written one after the other; the place of one that was read is used again.

    Args:
        directory: on a file system of the node itself.
        rank: for errors.

    Attributes:
        descriptor: of the open file.
        is_direct: whether bytes bypass the system's cache.

    Raises:
        WorkerError: the directory is not writable.
    """

    def __init__(self, directory: Path, rank: int) -> None:
        self._directory, self._rank = directory, rank
        self._end = 0
        self._free: list[Extent] = []
        self._lock = Lock()
        try:
            self.descriptor, name = tempfile.mkstemp(prefix="pipectl-offload-", dir=directory)
            os.unlink(name)  # noqa: PTH108
            self.is_direct = _is_direct(self.descriptor)
        except OSError as error:
            raise self._failure(error, 0) from None

    def write(self, pieces: Sequence[Tensor]) -> Extent:
        """Write vectors of bytes into the file.

        Raises:
            WorkerError: the disk is full, or fails.
        """
        needed = sum(paged_bytes(piece.numel()) for piece in pieces)
        extent = self._take(needed)
        offset = extent.offset
        try:
            for piece in pieces:
                rest = whole_pages(piece)
                if rest is None:
                    rest = memoryview(new_pages(piece.numel()))
                    rest[: piece.numel()] = piece.numpy().data
                while len(rest):  # one call moves 2 GiB at most
                    done = os.pwrite(self.descriptor, rest, offset)
                    rest, offset = rest[done:], offset + done
        except OSError as error:
            raise self._failure(error, needed) from None
        return extent

    def read(self, place: Extent, into: Sequence[Tensor]) -> None:
        """Read the vectors back, once.

        Raises:
            WorkerError: the disk fails.
        """
        offset = place.offset
        try:
            for vector in into:
                whole = whole_pages(vector)
                pages = memoryview(new_pages(vector.numel())) if whole is None else whole
                rest = pages
                while len(rest):
                    done = os.preadv(self.descriptor, [rest], offset)
                    if not done:
                        raise OSError(errno.EIO, "the file is shorter than what was written")
                    rest, offset = rest[done:], offset + done
                if whole is None:
                    vector.numpy().data[:] = pages[: vector.numel()]
        except OSError as error:
            raise self._failure(error, 0) from None
        with self._lock:
            self._free.append(place)

    def close(self) -> None:
        """Release the disk space."""
        os.close(self.descriptor)

    def _take(self, size: int) -> Extent:
        """The smallest free part that is large enough, or a new one at the end."""
        with self._lock:
            fitting = [extent for extent in self._free if extent.size >= size]
            if fitting:
                best = min(fitting, key=lambda extent: extent.size)
                self._free.remove(best)
                return best
            extent = Extent(self._end, size)
            self._end += size
            return extent

    def _failure(self, error: OSError, needed: int) -> WorkerError:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            return WorkerError(
                f"rank {self._rank}: offload in {self._directory} fails: {error.strerror}",
                hint="set TMPDIR in environment.variables to another directory on the nodes",
            )
        return WorkerError(
            f"rank {self._rank}: no space for offload in {self._directory}: {format_bytes(needed)} "
            f"more are needed in addition to {format_bytes(self._end - needed)}, and the disk is "
            "full",
            hint="set TMPDIR in environment.variables to a directory with more space",
        )


Place = list[Tensor] | Extent
"""Where offloaded vectors wait: on the host (in chunks, if they come from an accelerator), or in a
file."""


def _is_direct(opened: int) -> bool:
    """Whether a page can be written past the cache and read again.

    If so, the descriptor bypasses the cache from then on.
    """
    flag = getattr(os, "O_DIRECT", 0)
    if not flag:
        return False
    page, direct = memoryview(new_pages(PAGE)), -1
    try:
        # The same file, whatever has its name now.
        direct = os.open(f"/proc/self/fd/{opened}", os.O_RDWR | flag)
        works = os.pwrite(direct, page, 0) == os.preadv(direct, [page], 0) == PAGE
        if works:
            os.dup2(direct, opened, inheritable=False)
        return works
    except OSError:
        return False
    finally:
        if direct >= 0:
            os.close(direct)


class Mover:
    """Moves vectors of bytes from a rank's device to memory of the host or a file, and back.

    On accelerators, copies use streams of their own, after the work that is queued on the device
    when they begin. On ranks that compute on the CPU, moves to the host free nothing; they exist so
    that a job for accelerators gives the same results without accelerators.

    Args:
        store: the file; None for memory of the host.
    """

    def __init__(self, store: DiskStore | None, device: torch.device) -> None:
        self._store = store
        self._device = device
        self._on_accelerator = device.type != "cpu"
        self._out, self._in = (_Direction(device) for _ in range(2))
        self._pages, self._chunks = Pages(), PinnedChunks()

    def housed(self, vector: Tensor) -> Tensor:
        """A vector of bytes in memory from which it can be offloaded.

        On accelerators it stays in place, since their allocators keep blocks of recurring sizes.
        """
        return vector if self._on_accelerator else self._pages.copy_of(vector)

    def leave(self, pieces: Sequence[Tensor]) -> Future[Place]:
        """Start copying vectors out."""
        if not self._on_accelerator:
            write = self._store.write if self._store is not None else _copies
            return self._out.begin(partial(write, list(pieces)))
        computed = mark(self._device)

        def work() -> Place:
            place: list[Tensor] = []
            if self._store is None:
                place = self._chunks.take(sum(piece.numel() for piece in pieces))
                self._out.copy(_parts(place, pieces), after=computed)
                return place
            place = [_pinned(piece) for piece in pieces]
            self._out.copy(zip(place, pieces, strict=True), after=computed)
            return self._store.write(place)

        return self._out.begin(work)

    def fetch(self, place: Place, sizes: Sequence[int]) -> Future[list[Tensor]]:
        """Start copying vectors back, once; allocates their memory at once."""
        into = [self._empty(size) for size in sizes]

        def work() -> list[Tensor]:
            if isinstance(place, Extent):
                assert self._store is not None
                copies = [_pinned(piece) for piece in into] if self._on_accelerator else into
                self._store.read(place, copies)
                if self._on_accelerator:
                    self._in.copy(zip(into, copies, strict=True))
            elif self._on_accelerator:
                self._in.copy((part, chunk) for chunk, part in _parts(place, into))
                self._chunks.put_back(place)
            else:
                self._in.copy(zip(into, place, strict=True))
            return into

        return self._in.begin(work)

    def close(self) -> None:
        """End the threads and free the store; copies that have not begun are not made."""
        self._out.close()
        self._in.close()
        if self._store is not None:
            self._store.close()

    def _empty(self, size: int) -> Tensor:
        if self._on_accelerator:
            return self._in.empty(size)
        return self._pages.take(size)


class _Direction:
    """Copies of one direction, one after the other: a thread, and on accelerators a stream."""

    def __init__(self, device: torch.device) -> None:
        self._stream = None
        enter = _do_nothing
        if device.type != "cpu":
            self._stream = CopyStream(device)
            enter = partial(torch.accelerator.set_device_index, device.index)
        self._thread = ThreadPoolExecutor(1, initializer=enter)

    def begin(self, work: Callable[[], T]) -> Future[T]:
        """Do some work in the thread."""
        return self._thread.submit(work)

    def copy(
        self, pairs: Iterable[tuple[Tensor, Tensor]], after: torch.Event | None = None
    ) -> None:
        """Copy tensors (target, source) after an event, and wait for that; called in the thread."""
        with nullcontext() if self._stream is None else self._stream.entered(after):
            for target, source in pairs:
                target.copy_(source, non_blocking=True)
        if self._stream is not None:
            self._stream.synchronize()

    def empty(self, size: int) -> Tensor:
        """Bytes of an accelerator for copies of this direction."""
        assert self._stream is not None
        return self._stream.empty(size, torch.uint8)

    def close(self) -> None:
        """End the thread; work that has not begun is not done."""
        self._thread.shutdown(cancel_futures=True)


def _do_nothing() -> None:
    pass


def mover_of(plan: Plan, rank: int, device: torch.device, directory: Path) -> Mover | None:
    """The mover for what the stages of a rank offload; None if they offload nothing.

    Args:
        directory: of the node, for offload to a disk.
    """
    if not any(plan.stages[index].offload for index in plan.stages_of_rank(rank)):
        return None
    on_disk = plan.offload_to is OffloadTarget.DISK
    return Mover(DiskStore(directory, rank) if on_disk else None, device)


def _copies(vectors: Sequence[Tensor]) -> list[Tensor]:
    return [vector.clone() for vector in vectors]


def _pinned(like: Tensor) -> Tensor:
    size = paged_bytes(like.numel())
    pages = torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=True)
    return pages[: like.numel()]


def offload_directory() -> Path:
    """``TMPDIR`` of this node, even if it is not writable, or else the system's default."""
    return Path(os.environ.get("TMPDIR") or tempfile.gettempdir())


def check_space(communicator: MPI.Comm, plan: Plan, node: str, directory: Path) -> None:
    """Compare required and free disk space on every node; collective.

    Args:
        node: of this rank.

    Raises:
        WorkerError: on all ranks, naming the first one whose disk is too small.
    """
    if plan.offload_to is not OffloadTarget.DISK or not any(s.offload for s in plan.stages):
        return
    need_bytes = peak_host_bytes(plan, lower(plan, communicator.rank))
    disk, free_bytes = -1, None  # if the directory is not writable
    with suppress(OSError):
        if os.access(directory, os.W_OK | os.X_OK):
            free_bytes = shutil.disk_usage(directory).free
        disk = directory.stat().st_dev  # identifies a file system of a node
    everybody = gather_all(
        communicator, (need_bytes, free_bytes, (node, disk), f"{directory} on {node}")
    )
    for rank, (need, free, place, where) in enumerate(everybody):
        together = sum(other for other, _, there, _ in everybody if there == place)
        if not need or (free is not None and together <= free):
            continue
        why = "it is no directory that can be written"
        if free is not None:
            needed = format_bytes(together)
            why = f"need {needed} for all its ranks there, have {format_bytes(free)}"
        raise WorkerError(
            f"rank {rank}: no space for offload in {where}: {why}",
            hint="set TMPDIR in environment.variables to a directory with more space on the nodes",
        )
