"""Tensors of an accelerator as messages of MPI, and copies between it and the host.

Copies have streams of their own, one per direction, so that neither direction waits for the other,
nor for the kernels of the rank. A copy waits for the kernel that computed what it copies; a kernel
waits for the copies of what it reads. Memory that such a copy fills is allocated on the stream of
the copy: elsewhere, the copy would have to wait for all kernels that are queued before.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

from pipectl.torch_api import on_stream

Sizes = int | tuple[int, ...]
"""Sizes of a contiguous tensor's dimensions, or the number of elements of a vector."""


class CopyStream:
    """A stream for copies of one direction."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.Stream(device)

    @contextmanager
    def entered(self, after: torch.Event | None = None) -> Iterator[None]:
        """Queue copies, after an event."""
        if after is not None:
            self._stream.wait_event(after)
        with on_stream(self._stream):
            yield

    def empty(self, sizes: Sizes, dtype: torch.dtype) -> Tensor:
        """Memory of the accelerator that these copies fill, for kernels of the current stream.

        It is allocated on the stream of the copies, and kept, when it is freed, until those kernels
        have read it.
        """
        with self.entered():
            memory = torch.empty(sizes, dtype=dtype, device=self._device)
        memory.record_stream(torch.accelerator.current_stream(self._device))
        return memory

    def synchronize(self) -> None:
        """Wait for the copies that are queued."""
        self._stream.synchronize()


class Landing:
    """Memory of an accelerator that gets what arrives in host memory, as soon as it arrives.

    It is for kernels of the stream that is current when it is made.

    Args:
        buffer: contiguous, pinned.
        stream: of the copies.
    """

    def __init__(self, buffer: Tensor, stream: CopyStream, device: torch.device) -> None:
        self._stream, self._device, self._copied_bytes = stream, device, 0
        self._buffer, self._target = buffer, stream.empty(buffer.shape, buffer.dtype)

    def take(self, arrived_bytes: int) -> None:
        """Queue the copy of the bytes up to ``arrived_bytes`` that are not yet copied."""
        if arrived_bytes > self._copied_bytes:
            part = slice(self._copied_bytes, arrived_bytes)
            with self._stream.entered():
                _bytes(self._target)[part].copy_(_bytes(self._buffer)[part], non_blocking=True)
            self._copied_bytes = arrived_bytes

    def finish(self) -> Tensor:
        """The tensor on the accelerator, for kernels of the current stream."""
        self.take(self._buffer.nbytes)
        with self._stream.entered():
            copied = mark(self._device)
        torch.accelerator.current_stream(self._device).wait_event(copied)
        return self._target


class Message(NamedTuple):
    """A message that MPI may send or receive.

    Args:
        buffer: contiguous memory that MPI reads or writes.
        free: events after which MPI may use each of its pieces: one per piece, one for all, or none
            if MPI may use it now.
        landing: gets what is received, if MPI cannot access the memory of the accelerator.
        source: what is copied into the buffer; kept until the message has left.
    """

    buffer: Tensor
    free: Sequence[torch.Event] = ()
    landing: Landing | None = None
    source: Tensor | None = None


class Staging:
    """Messages that are copied through pinned host memory, which MPI can access.

    Args:
        device: of the tensors.
        leaving, arriving: for copies to the host and to the device.
    """

    def __init__(self, device: torch.device, leaving: CopyStream, arriving: CopyStream) -> None:
        self._device, self._leaving, self._arriving = device, leaving, arriving

    def buffer(self, sizes: Sizes, dtype: torch.dtype) -> Message:
        """Host memory to receive a tensor."""
        buffer = torch.empty(
            sizes, dtype=dtype, device="cpu", pin_memory=True
        )  # torch keeps freed blocks
        return Message(buffer, landing=Landing(buffer, self._arriving, self._device))

    def outgoing(self, vector: Tensor, piece_bytes: int) -> Message:
        """Queue the copies of all pieces; the first can leave while the second is copied."""
        buffer = torch.empty(vector.numel(), dtype=vector.dtype, device="cpu", pin_memory=True)
        source, target = _bytes(vector), _bytes(buffer)
        copied = []
        with self._leaving.entered(after=mark(self._device)):
            for offset in range(0, target.numel(), piece_bytes):
                piece = slice(offset, offset + piece_bytes)
                target[piece].copy_(source[piece], non_blocking=True)
                copied.append(mark(self._device))
        return Message(buffer, copied, source=vector)


class DeviceMemory:
    """Messages in the memory of an accelerator that MPI can access; see :class:`Staging`."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def buffer(self, sizes: Sizes, dtype: torch.dtype) -> Message:
        """Memory of the accelerator, once kernels no longer use it."""
        return Message(torch.empty(sizes, dtype=dtype, device=self._device), [mark(self._device)])

    def outgoing(self, vector: Tensor, piece_bytes: int) -> Message:  # noqa: ARG002
        """The tensor itself, once it is computed."""
        return Message(vector, [mark(self._device)])


def bring(tensor: Tensor, stream: CopyStream, device: torch.device) -> Tensor:
    """A tensor of the host on the accelerator, for kernels of the current stream."""
    pinned = tensor.cpu().contiguous()
    landing = Landing(pinned if pinned.is_pinned() else pinned.pin_memory(), stream, device)
    return landing.finish()


def mark(device: torch.device) -> torch.Event:
    """An event after the work that is now queued on the current stream."""
    event = torch.Event(device)
    event.record()
    return event


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.view(-1).view(torch.uint8) if tensor.numel() else tensor.view(-1)[:0]
