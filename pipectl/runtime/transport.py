"""Messages of tensors over MPI: nonblocking, without copies, without headers.

A lane (one direction between two stages) carries the same tensors for every micro-batch of one
size. Their layouts are announced once, in the first exchange of that size (``learn``), and known
to both ends from then on.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

import torch
from mpi4py import MPI
from torch import Tensor

from pipectl.capture import Lane, Slot
from pipectl.errors import WorkerError
from pipectl.runtime.device import Device
from pipectl.runtime.layout import Layout
from pipectl.runtime.waiting import wait, wait_for_message

Tensors = dict[Slot, Tensor | None]
"""Tensors of one message; None where a slot has no gradient."""


@dataclass
class Posted:
    """A transfer under way. Holds the memory MPI reads or writes until it is complete."""

    requests: list[MPI.Request]
    buffers: dict[Slot, Tensor] = field(default_factory=dict)
    layouts: dict[Slot, Layout | None] = field(default_factory=dict)


class Transport:
    """Sends and receives along the lanes of one cut.

    Args:
        communicator: of its own, so that no other message can match.
        lanes: every lane of the cut with its slots, the same on all ranks.
    """

    def __init__(
        self, communicator: MPI.Comm, device: Device, lanes: dict[Lane, list[Slot]]
    ) -> None:
        self._communicator = communicator
        self._device = device
        self._lanes = lanes
        self._tags: dict[Lane, int] = {}
        self._layouts: dict[tuple[Lane, int], dict[Slot, Layout | None]] = {}
        self._sending: list[Posted] = []
        tag = 0
        for lane, slots in lanes.items():  # one tag a slot, and one for the header
            self._tags[lane] = tag
            tag += len(slots) + 1

    def start_send(self, lane: Lane, size: int, rank: int, tensors: Tensors) -> Posted:
        """Begin to send; ``tensors`` must not change until the transfer is complete."""
        layouts = self._layouts.get((lane, size))
        posted = Posted([])
        if layouts is None:
            layouts = self._announce(lane, size, rank, tensors, posted)
        self._device.synchronize()
        for index, (slot, layout) in enumerate(layouts.items()):
            if layout is not None:
                vector = self._outgoing(lane, slot, layout, tensors.get(slot))
                posted.buffers[slot] = vector
                posted.requests.append(
                    self._communicator.Isend(_memory(vector), rank, self._tags[lane] + index)
                )
        self._sending.append(posted)
        return posted

    def start_receive(self, lane: Lane, size: int, rank: int) -> Posted | None:
        """Post the buffers of a message; None while its layouts are not known."""
        layouts = self._layouts.get((lane, size))
        return None if layouts is None else self._post(lane, layouts, rank)

    def finish_receive(self, lane: Lane, size: int, rank: int, posted: Posted | None) -> Tensors:
        """Wait for a message; its tensors lie in memory of their own."""
        if posted is None:
            posted = self._post(lane, self._learn(lane, size, rank), rank)
        wait(posted.requests, self.progress)
        found: Tensors = {}
        for slot, layout in posted.layouts.items():
            found[slot] = None
            if layout is not None:
                found[slot] = layout.unflatten(self._device.from_message(posted.buffers[slot]))
        return found

    def finish_send(self, posted: Posted) -> None:
        """Wait until the memory of a message may be reused."""
        wait(posted.requests, self.progress)
        self._sending = [other for other in self._sending if other is not posted]

    def progress(self) -> None:
        """Let MPI work on what is under way; to be called between operators and actions."""
        for posted in self._sending:
            MPI.Request.Testall(posted.requests)

    def _post(self, lane: Lane, layouts: dict[Slot, Layout | None], rank: int) -> Posted:
        posted = Posted([], layouts=layouts)
        for index, (slot, layout) in enumerate(layouts.items()):
            if layout is not None:
                buffer = self._device.message_buffer(layout.count, layout.dtype)
                posted.buffers[slot] = buffer
                posted.requests.append(
                    self._communicator.Irecv(_memory(buffer), rank, self._tags[lane] + index)
                )
        return posted

    def _outgoing(self, lane: Lane, slot: Slot, layout: Layout, tensor: Tensor | None) -> Tensor:
        if tensor is None or tensor.dtype != layout.dtype or tuple(tensor.shape) != layout.sizes:
            found = "nothing" if tensor is None else f"{tensor.dtype} {list(tensor.shape)}"
            raise WorkerError(
                f"the {lane.kind} of {slot.value!r} from stage {lane.source} to {lane.target} "
                f"should be {layout.dtype} {list(layout.sizes)}, but is {found}",
                cure="a model whose shapes depend on the data cannot be split here",
            )
        return self._device.to_message(layout.flatten(tensor.detach()))

    def _announce(
        self, lane: Lane, size: int, rank: int, tensors: Tensors, posted: Posted
    ) -> dict[Slot, Layout | None]:
        layouts = {slot: _layout(tensors.get(slot)) for slot in self._lanes[lane]}
        text = json.dumps([layout and layout.to_json() for layout in layouts.values()])
        header = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
        posted.buffers[Slot("header")] = header
        tag = self._tags[lane] + len(layouts)
        posted.requests.append(self._communicator.Isend(_memory(header), rank, tag))
        self._layouts[lane, size] = layouts
        return layouts

    def _learn(self, lane: Lane, size: int, rank: int) -> dict[Slot, Layout | None]:
        slots = self._lanes[lane]
        tag = self._tags[lane] + len(slots)
        header = bytearray(wait_for_message(self._communicator, rank, tag, self.progress))
        self._communicator.Recv([header, MPI.BYTE], rank, tag)
        fields: list[Any] = json.loads(header)
        layouts = {
            slot: item and Layout.from_json(item) for slot, item in zip(slots, fields, strict=True)
        }
        self._layouts[lane, size] = layouts
        return layouts


def _layout(tensor: Tensor | None) -> Layout | None:
    return None if tensor is None else Layout.of(tensor)


def _memory(vector: Tensor) -> Any:
    """The bytes of a contiguous tensor as an MPI buffer; far cheaper than passing the tensor."""
    size_bytes = vector.numel() * vector.element_size()
    return [MPI.memory.fromaddress(vector.data_ptr(), size_bytes), MPI.BYTE]
