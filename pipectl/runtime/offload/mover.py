"""Copies in the background, one at a time in each direction, as the simulator has it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from pipectl.plan import OffloadTarget, Plan
from pipectl.runtime.offload.pages import Pages, paged_bytes
from pipectl.runtime.offload.stores import DiskStore, HostStore, Place, Store

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
