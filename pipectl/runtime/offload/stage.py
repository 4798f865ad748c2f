"""The offload of one stage: its micro-batches on their way out and back."""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import Future
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from pipectl.runtime.offload.mover import Mover
from pipectl.runtime.offload.pool import Block, Pool
from pipectl.runtime.offload.stores import Place
from pipectl.schedule import Kind


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
        self._pools: dict[int, Pool] = {}
        self._moving: dict[int, _Leaving | _Away | _Coming] = {}
        self._rows = {
            Kind.OFFLOAD_START: self._leave,
            Kind.OFFLOAD_WAIT: self._left,
            Kind.FETCH_START: self._fetch,
            Kind.FETCH_WAIT: self._fetched,
        }

    def pool(self, micro_batch: int, staying: Iterable[Tensor]) -> Pool:
        """A new pool for what a forward keeps; see :class:`Pool`."""
        pool = Pool(staying, self.least_bytes, self._device, self._mover.housed)
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
