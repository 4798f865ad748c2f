"""What a message is, in words, so that both of its sides can compare (:data:`CHECK_VARIABLE`).

The sender's words travel in a small message of their own. A difference means that ranks run other
programs than each other, that memory was changed while it was sent, or that MPI damaged it.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import NamedTuple

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


class Part(NamedTuple):
    """One tensor of a message.

    Args:
        value, use: of its slot.
        form: type, sizes and strides in words; empty for a tensor that is not there.
        checksum: CRC-32 of its bytes; None if they are not there yet.
    """

    value: str
    use: str
    form: str
    checksum: int | None = None

    def __str__(self) -> str:
        if not self.form:
            return f"nothing for {self.value!r}"
        known = "" if self.checksum is None else f", checksum {self.checksum:08x}"
        return f"{self.value!r}, {self.form}{known}"


class Note(NamedTuple):
    """A whole message: its name, without its contents, and its tensors."""

    name: str
    parts: tuple[Part, ...]

    @property
    def outline(self) -> Note:
        """The message without its contents' checksums."""
        return Note(self.name, tuple(part._replace(checksum=None) for part in self.parts))

    def check_unchanged(self, buffers: Mapping[Slot, Tensor]) -> None:
        """Compare the memory of a message that was sent with what it was.

        Raises:
            WorkerError: something wrote to it meanwhile.
        """
        present = (part for part in self.parts if part.checksum is not None)
        for part, buffer in zip(present, buffers.values(), strict=True):
            if checksum(buffer) != part.checksum:
                raise WorkerError(
                    f"{part.value!r} changed while it was sent ({self.name})",
                    cure="an operator of the model writes to a value that it does not own",
                )


def note_of(
    message: Message,
    layouts: Mapping[Slot, Layout | None],
    buffers: Mapping[Slot, Tensor] | None = None,
) -> Note:
    """What one side holds of a message, or expects of it before it arrives."""
    parts = []
    for slot, layout in layouts.items():
        if layout is None:
            parts.append(Part(*slot, ""))
            continue
        dtype = str(layout.dtype).removeprefix("torch.")
        form = f"{dtype} {list(layout.sizes)} with strides {list(layout.strides)}"
        parts.append(Part(*slot, form, None if buffers is None else checksum(buffers[slot])))
    (kind, source, target), number = message
    name = f"{kind} of micro-batch {number} from stage {source} to {target}"
    return Note(name, tuple(parts))


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
