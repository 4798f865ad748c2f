"""Batches as messages: trees of tensors and other Python values.

A message is the tree without the memory of its tensors, preceded by its size, and then the memory
of each tensor. Tensors keep their strides, since sums over another layout differ in bits.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from mpi4py import MPI
from torch import Tensor

from pipectl.capture.tensors import octets_of
from pipectl.errors import CaptureError
from pipectl.runtime.layout import Layout
from pipectl.runtime.transport.transfer import LARGEST_BYTES
from pipectl.runtime.waiting import wait
from pipectl.torch_api import pytree

Octets = npt.NDArray[np.uint8]


class _Sent(NamedTuple):
    """Takes the place of a tensor: its number among those of the message, and its layout."""

    number: int
    layout: Layout


class Parcel:
    """A batch to be sent.

    Args:
        source: names the data, for errors.

    Attributes:
        parts: the bytes of its messages.

    Raises:
        CaptureError: it contains a value that cannot be sent.
    """

    def __init__(self, batch: Any, source: str) -> None:
        numbers: dict[int, _Sent] = {}
        octets: list[Octets] = []

        def replace(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor) or leaf.layout is not torch.strided:
                return leaf
            if id(leaf) not in numbers:  # inputs and targets may be the same mapping
                tensor = leaf.detach().cpu()
                layout = Layout.of(tensor)
                numbers[id(leaf)] = _Sent(len(numbers), layout)
                octets.append(octets_of(layout.flatten(tensor)))
            return numbers[id(leaf)]

        try:
            tree = MPI.pickle.dumps(pytree.tree_map(replace, batch))
        except Exception as error:
            raise CaptureError(
                f"{source}: a batch cannot be sent to the ranks that need it: {error}",
                hint="let samples contain tensors, numbers and text only; or, if all processes "
                "read the same samples, set data.read: everywhere",
            ) from error
        size = np.array([len(tree)], dtype=np.int64)
        pieces = (piece for each in octets for piece in _pieces(each))
        self.parts = [size, np.frombuffer(tree, dtype=np.uint8), *pieces]


class Post:
    """Batches that one rank sends and others receive, each in order.

    Args:
        communicator: used for nothing else.
    """

    def __init__(self, communicator: MPI.Comm) -> None:
        self._communicator = communicator
        self._sent: list[tuple[MPI.Request, Any]] = []

    def send(self, parcel: Parcel, rank: int) -> None:
        """Start to send; MPI may move it only during this rank's calls of it."""
        self._sent = [each for each in self._sent if not each[0].Test()]
        for part in parcel.parts:
            self._sent.append((self._communicator.Isend(part, rank), part))

    def receive(self, rank: int) -> Any:
        """The next batch that a rank sends here."""
        size = np.empty(1, dtype=np.int64)
        wait([self._communicator.Irecv(size, rank)])
        tree = np.empty(int(size[0]), dtype=np.uint8)
        wait([self._communicator.Irecv(tree, rank)])
        batch = MPI.pickle.loads(tree)
        leaves = pytree.tree_leaves(batch, is_leaf=_is_sent)
        layouts = {leaf.number: leaf.layout for leaf in leaves if _is_sent(leaf)}
        memories = {n: torch.empty(each.count, dtype=each.dtype) for n, each in layouts.items()}
        pieces = (piece for each in memories.values() for piece in _pieces(octets_of(each)))
        wait([self._communicator.Irecv(piece, rank) for piece in pieces])
        # Not earlier: a layout with gaps makes a copy.
        tensors = {n: layouts[n].unflatten(memory) for n, memory in memories.items()}
        return pytree.tree_map(
            lambda leaf: tensors[leaf.number] if _is_sent(leaf) else leaf, batch, is_leaf=_is_sent
        )

    def finish(self) -> None:
        """Return when all that was sent has been received."""
        wait([request for request, _ in self._sent])
        self._sent.clear()


def _is_sent(leaf: Any) -> bool:
    return isinstance(leaf, _Sent)


def _pieces(octets: Octets) -> list[Octets]:
    return [octets[i : i + LARGEST_BYTES] for i in range(0, len(octets), LARGEST_BYTES)]
