"""The offload of a rank's stages: their micro-batches on their way out and back.

Copies run in the background, one at a time in each direction, as the simulator has it. Whether the
disks of all nodes hold what their ranks will offload is known before anything starts.

"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, NamedTuple, TypeVar

import torch
from torch import Tensor

from pipectl.errors import WorkerError
from pipectl.plan import OffloadTarget, Plan
from pipectl.runtime.offload.stores import DiskStore, HostStore, Pages, Place, Store, paged_bytes
from pipectl.runtime.saved_tensors import Block, SavedTensors
from pipectl.runtime.waiting import gather_all
from pipectl.schedule import Kind, lower, peak_host_bytes
from pipectl.units import format_bytes

if TYPE_CHECKING:
    from mpi4py import MPI


T = TypeVar("T")


class Mover:
    """Moves vectors of bytes between a rank's device and a store.

    On accelerators, copies have a stream of their own, behind what the device has been given to do
    when they begin, and pass through pinned memory of the host.
    """

    def __init__(self, store: Store, device: torch.device) -> None:
        self._store = store
        self._device = device
        self._out, self._in = ThreadPoolExecutor(1), ThreadPoolExecutor(1)
        self._stream = None if device.type == "cpu" else torch.Stream(device)
        self._pages = Pages()

    def housed(self, vector: Tensor) -> Tensor:
        """A vector of bytes where it can wait and leave from.

        That is where it is on accelerators, whose allocators keep blocks of sizes that recur.
        """
        return self._pages.copy_of(vector) if self._stream is None else vector

    def leave(self, pieces: Sequence[Tensor]) -> Future[Place]:
        """Begin to copy them out."""
        return self._begin(self._out, lambda: self._store.write(self._on_host(pieces)))

    def fetch(self, place: Place, sizes: Sequence[int]) -> Future[list[Tensor]]:
        """Begin to copy them back; their memory is taken at once."""
        into = [self._empty(size) for size in sizes]
        return self._begin(self._in, lambda: self._read(place, into))

    def close(self) -> None:
        """End the threads and free the store."""
        self._out.shutdown()
        self._in.shutdown()
        self._store.close()

    def _empty(self, size: int) -> Tensor:
        if self._stream is None:
            return self._pages.take(size)
        return torch.empty(size, dtype=torch.uint8, device=self._device)

    def _begin(self, threads: ThreadPoolExecutor, work: Callable[[], T]) -> Future[T]:
        if self._stream is None:
            return threads.submit(work)
        given = torch.Event(self._device)
        given.record()
        return threads.submit(self._behind, given, work)

    def _behind(self, given: torch.Event, work: Callable[[], T]) -> T:
        """Work on the copies' stream behind an event."""
        assert self._stream is not None
        self._stream.wait_event(given)
        with self._stream:
            return work()

    def _on_host(self, pieces: Sequence[Tensor]) -> Sequence[Tensor]:
        if self._stream is None:
            return pieces
        copies = [_pinned(piece).copy_(piece, non_blocking=True) for piece in pieces]
        self._stream.synchronize()
        return copies

    def _read(self, place: Place, into: list[Tensor]) -> list[Tensor]:
        if self._stream is None:
            self._store.read(place, into)
            return into
        found = [_pinned(piece) for piece in into]
        self._store.read(place, found)
        for piece, target in zip(found, into, strict=True):
            target.copy_(piece, non_blocking=True)
        self._stream.synchronize()
        return into


def mover_of(plan: Plan, rank: int, device: torch.device, directory: Path) -> Mover | None:
    """What moves what the stages of a rank offload; None if they offload nothing.

    Args:
        directory: of the node, for what waits on a disk.
    """
    if not any(plan.stages[index].offload for index in plan.stages_of_rank(rank)):
        return None
    on_disk = plan.offload_to is OffloadTarget.DISK
    return Mover(DiskStore(directory, rank) if on_disk else HostStore(), device)


def _pinned(like: Tensor) -> Tensor:
    pages = torch.empty(paged_bytes(like.numel()), dtype=torch.uint8, pin_memory=True)
    return pages[: like.numel()]


class _Found(NamedTuple):
    """What one rank needs, and where.

    Args:
        disk: tells file systems of a node apart.
        free_bytes: None where the directory cannot be written.
    """

    node: str
    disk: int
    need_bytes: int
    free_bytes: int | None


def offload_directory() -> Path:
    """``TMPDIR`` of this node, even if it cannot be written, or else what the system has."""
    return Path(os.environ.get("TMPDIR") or tempfile.gettempdir())


def check_space(communicator: MPI.Comm, plan: Plan, node: str, directory: Path) -> None:
    """Compare needs and free space on every node; collective.

    Args:
        node: of this rank.

    Raises:
        WorkerError: on all ranks, naming the first one whose disk is too small.
    """
    if plan.offload_to is not OffloadTarget.DISK or not any(s.offload for s in plan.stages):
        return
    need = peak_host_bytes(plan, lower(plan, communicator.rank))
    everybody = gather_all(communicator, (_look(node, directory, need), str(directory)))
    for rank, (mine, where) in enumerate(everybody):
        if not mine.need_bytes:
            continue
        together = sum(
            other.need_bytes
            for other, _ in everybody
            if (other.node, other.disk) == (mine.node, mine.disk)
        )
        if mine.free_bytes is None or together > mine.free_bytes:
            raise _too_small(rank, mine, where, together)


def _look(node: str, directory: Path, need: int) -> _Found:
    try:
        writable = os.access(directory, os.W_OK | os.X_OK)
        free = shutil.disk_usage(directory).free if writable else None
        return _Found(node, directory.stat().st_dev, need, free)
    except OSError:
        return _Found(node, -1, need, None)


def _too_small(rank: int, found: _Found, directory: str, together: int) -> WorkerError:
    where = f"rank {rank}: no space for offload in {directory} on {found.node}"
    cure = "set TMPDIR in environment.variables to a directory with more space on the nodes"
    if found.free_bytes is None:
        return WorkerError(f"{where}: it is no directory that can be written", cure=cure)
    return WorkerError(
        f"{where}: need {format_bytes(together)} for all its ranks there, "
        f"have {format_bytes(found.free_bytes)}",
        cure=cure,
    )


class _Leaving(NamedTuple):
    blocks: list[Block]
    copied: Future[Place]


class _Away(NamedTuple):
    blocks: list[Block]
    sizes: list[int]
    place: Place


class _Coming(NamedTuple):
    blocks: list[Block]
    copied: Future[list[Tensor]]


class StageOffload:
    """Pools by micro-batch, and where each is.

    Attributes:
        least_bytes: smaller storages stay: statistics of norms, and other vectors.
    """

    least_bytes: ClassVar[int] = 16 << 10

    def __init__(self, mover: Mover, device: torch.device) -> None:
        self._mover = mover
        self._device = device
        self._pools: dict[int, SavedTensors] = {}
        self._moving: dict[int, _Leaving | _Away | _Coming] = {}
        self._rows = {
            Kind.OFFLOAD_START: self._leave,
            Kind.OFFLOAD_WAIT: self._left,
            Kind.FETCH_START: self._fetch,
            Kind.FETCH_WAIT: self._fetched,
        }

    def pool(self, micro_batch: int, staying: Iterable[Tensor]) -> SavedTensors:
        """A new pool for what a forward keeps; see :class:`SavedTensors`."""
        pool = SavedTensors(staying, self.least_bytes, self._device, self._mover.housed)
        self._pools[micro_batch] = pool
        return pool

    def run(self, kind: Kind, micro_batch: int) -> None:
        """Do what one of the four kinds of rows says.

        Raises:
            WorkerError: the store is full, or fails.
        """
        self._rows[kind](micro_batch)

    def end(self, micro_batch: int) -> None:
        """A backward begins: nothing of it leaves any more."""
        self._pools.pop(micro_batch, None)

    def forget(self) -> None:
        """Drop what is unfinished."""
        self._pools.clear()
        self._moving.clear()

    def _leave(self, micro_batch: int) -> None:
        blocks = self._pools.pop(micro_batch).blocks
        copied = self._mover.leave([block.memory for block in blocks if block.memory is not None])
        self._moving[micro_batch] = _Leaving(blocks, copied)

    def _left(self, micro_batch: int) -> None:
        leaving = self._moving[micro_batch]
        assert isinstance(leaving, _Leaving)
        place = leaving.copied.result()
        sizes = []
        for block in leaving.blocks:
            assert block.memory is not None
            sizes.append(block.memory.numel())
            block.memory = None
        self._moving[micro_batch] = _Away(leaving.blocks, sizes, place)

    def _fetch(self, micro_batch: int) -> None:
        away = self._moving[micro_batch]
        assert isinstance(away, _Away)
        copied = self._mover.fetch(away.place, away.sizes)
        self._moving[micro_batch] = _Coming(away.blocks, copied)

    def _fetched(self, micro_batch: int) -> None:
        coming = self._moving.pop(micro_batch)
        assert isinstance(coming, _Coming)
        for block, memory in zip(coming.blocks, coming.copied.result(), strict=True):
            block.memory = memory
