"""Rows of messages between replicas that split micro-batches.

A value has a row for every sample, and replicas exchange the rows that both compute. A value that
all samples share (positions of tokens, say) is the same on all replicas that make it; each reader
takes it from the first of them, which also gets the reader's gradient, so that every part of the
gradient arrives once.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from pipectl.capture import CapturedGraph, Slot
from pipectl.capture.slices import Rows, batch_dimension
from pipectl.runtime.layout import Tensors


class Piece(NamedTuple):
    """What arrived of a micro-batch from one replica."""

    rows: Rows
    tensors: Tensors


class Slicing:
    """Cuts and joins the values of one graph."""

    def __init__(self, graph: CapturedGraph) -> None:
        self._graph = graph
        self._nodes = {node.name: node for node in graph.operators}
        self._dimension = cache(self._dimension_of)

    def part(self, made: Tensors, origin: int, rows: Rows, *, leads: bool) -> Tensors:
        """Rows of what a replica made.

        Args:
            origin: first sample of what it made.
            rows: wanted, counted from the first sample of the micro-batch.
            leads: whether shared values go along.
        """
        return {
            slot: None if tensor is None else self._rows(slot, tensor, origin, rows, leads)
            for slot, tensor in made.items()
        }

    def joined(self, pieces: Sequence[Piece]) -> Tensors:
        """What arrived from all replicas, as one."""
        if all(piece.rows.is_whole for piece in pieces):
            return {slot: tensor for piece in pieces for slot, tensor in piece.tensors.items()}
        found: dict[Slot, list[Tensor]] = {}
        for piece in sorted(pieces, key=lambda item: item.rows):
            for slot, tensor in piece.tensors.items():
                kept = found.setdefault(slot, [])
                if tensor is not None:
                    kept.append(tensor)
        return {slot: self._join(slot, tensors) for slot, tensors in found.items()}

    def _rows(
        self, slot: Slot, tensor: Tensor, origin: int, rows: Rows, leads: bool
    ) -> Tensor | None:
        dim = self._dimension(slot.value)
        if dim is None:
            return tensor if leads else None
        if tensor.shape[dim] == rows.size:
            return tensor
        return tensor.narrow(dim, rows.start - origin, rows.size).contiguous()

    def _join(self, slot: Slot, tensors: Sequence[Tensor]) -> Tensor | None:
        if len(tensors) < 2:
            return tensors[0] if tensors else None
        dim = self._dimension(slot.value)
        if dim is not None:
            return torch.cat(list(tensors), dim)
        total = tensors[0].clone()
        for tensor in tensors[1:]:
            total += tensor
        return total

    def _dimension_of(self, value: str) -> int | None:
        return batch_dimension(self._graph, self._nodes[value])
