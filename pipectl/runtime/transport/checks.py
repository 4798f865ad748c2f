"""What a message is, in words, so that both of its sides can compare (:data:`CHECK_VARIABLE`).

The sender's words travel in a small message of their own. A difference means that ranks run other
programs than each other, that memory was changed while it was sent, or that MPI damaged it.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pipectl.capture import Lane, Slot
from pipectl.errors import WorkerError
from pipectl.runtime.layout import Layout

CHECK_VARIABLE = "PIPECTL_CHECK_MESSAGES"
"""In the environment of rank 0: every message is compared, which is slow."""


class Message(NamedTuple):
    """One message of a pass."""

    lane: Lane
    micro_batch: int


@dataclass(frozen=True)
class Part:
    """One tensor of a message.

    Args:
        dtype: empty for a tensor that is not there.
        checksum: CRC-32 of its bytes; None where they are not there yet.
    """

    value: str
    use: str
    dtype: str
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    checksum: int | None

    def __str__(self) -> str:
        if not self.dtype:
            return f"nothing for {self.value!r}"
        what = f"{self.dtype} {list(self.sizes)} with strides {list(self.strides)}"
        known = "" if self.checksum is None else f", checksum {self.checksum:08x}"
        return f"{self.value!r}, {what}{known}"


@dataclass(frozen=True)
class Note:
    """A whole message."""

    kind: str
    source: int
    target: int
    micro_batch: int
    parts: tuple[Part, ...]

    @property
    def name(self) -> str:
        """The message without its contents."""
        return (
            f"{self.kind} of micro-batch {self.micro_batch} "
            f"from stage {self.source} to {self.target}"
        )

    @property
    def outline(self) -> Note:
        """The message without its contents' checksums."""
        return replace(self, parts=tuple(replace(part, checksum=None) for part in self.parts))

    def to_json(self) -> dict[str, Any]:
        """For the message that accompanies a message."""
        return asdict(self)

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> Note:
        """The inverse of :meth:`to_json`."""
        parts = tuple(
            Part(**{**part, "sizes": tuple(part["sizes"]), "strides": tuple(part["strides"])})
            for part in fields["parts"]
        )
        return cls(**{**fields, "parts": parts})

    def check_unchanged(self, buffers: Mapping[Slot, Tensor]) -> None:
        """Compare the memory of a message that was sent with what it was.

        Raises:
            WorkerError: something wrote to it meanwhile.
        """
        for part in self.parts:
            buffer = buffers.get(Slot(part.value, part.use))
            if buffer is not None and checksum(buffer) != part.checksum:
                raise WorkerError(
                    f"{part.value!r} changed while it was sent ({self.name})",
                    cure="an operator of the model writes to a value that it does not own",
                )


def note_of(
    message: Message, layouts: Mapping[Slot, Layout | None], buffers: Mapping[Slot, Tensor]
) -> Note:
    """What one side holds of a message."""
    sums = {slot: checksum(buffers[slot]) for slot, layout in layouts.items() if layout is not None}
    return _note(message, layouts, sums)


def outline_of(message: Message, layouts: Mapping[Slot, Layout | None]) -> Note:
    """What one side expects of a message before it arrives."""
    return _note(message, layouts, {})


def differences(said: Note, arrived: Note) -> list[str]:
    """What differs between the sender's words and the receiver's, in sentences."""
    if said.name != arrived.name:
        return [f"the sender sent the {said.name}, the receiver expects the {arrived.name}"]
    if len(said.parts) != len(arrived.parts):
        counts = len(said.parts), len(arrived.parts)
        return ["{}: {} tensors were sent, {} expected".format(said.name, *counts)]
    return [
        f"{said.name}: sent was {one}, arrived is {other}"
        for one, other in zip(said.parts, arrived.parts, strict=True)
        if one != other
    ]


def checksum(buffer: Tensor) -> int:
    """CRC-32 of a contiguous tensor's bytes."""
    host = buffer.cpu().view(-1)
    return zlib.crc32(host.view(torch.uint8).numpy().data) if host.numel() else 0


def _note(
    message: Message, layouts: Mapping[Slot, Layout | None], sums: Mapping[Slot, int]
) -> Note:
    lane = message.lane
    parts = tuple(_part(slot, layout, sums.get(slot)) for slot, layout in layouts.items())
    return Note(str(lane.kind), lane.source, lane.target, message.micro_batch, parts)


def _part(slot: Slot, layout: Layout | None, known: int | None) -> Part:
    if layout is None:
        return Part(slot.value, slot.use, "", (), (), None)
    dtype = str(layout.dtype).removeprefix("torch.")
    return Part(slot.value, slot.use, dtype, layout.sizes, layout.strides, known)
