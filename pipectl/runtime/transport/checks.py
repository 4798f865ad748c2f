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


class Note(NamedTuple):
    """A whole message, as one of its sides has it.

    Args:
        tensors: of every slot, its name and form in words.
        checksums: CRC-32 of the bytes of each; None for those that are not there, or not yet.
    """

    name: str
    tensors: tuple[str, ...]
    checksums: tuple[int | None, ...]

    @classmethod
    def of(
        cls,
        lane: Lane,
        micro_batch: int,
        layouts: Mapping[Slot, Layout | None],
        buffers: Mapping[Slot, Tensor],
    ) -> Note:
        """What one side holds of a message, or expects of it before it arrives."""
        tensors = []
        for slot, layout in layouts.items():
            if layout is None:
                tensors.append(f"nothing for {slot.value!r}")
            else:
                dtype = str(layout.dtype).removeprefix("torch.")
                form = f"{dtype} {list(layout.sizes)} with strides {list(layout.strides)}"
                tensors.append(f"{slot.value!r}, {form}")
        checksums = tuple(checksum(buffers[s]) if s in buffers else None for s in layouts)
        name = f"{lane.kind} of micro-batch {micro_batch} from stage {lane.source} to {lane.target}"
        return cls(name, tuple(tensors), checksums)

    def differences(self, arrived: Note) -> list[str]:
        """What differs between the sender's words, these, and the receiver's, in sentences."""
        if self.name != arrived.name:
            return [f"the sender sent the {self.name}, the receiver expects the {arrived.name}"]
        counts = len(self.tensors), len(arrived.tensors)
        if counts[0] != counts[1]:
            return ["{}: {} tensors were sent, {} expected".format(self.name, *counts)]
        differences = []
        mine = zip(self.tensors, self.checksums, strict=True)
        theirs = zip(arrived.tensors, arrived.checksums, strict=True)
        for (one, ours), (other, found) in zip(mine, theirs, strict=True):
            if one != other:
                differences.append(f"{self.name}: sent was {one}, arrived is {other}")
            elif ours is not None and found is not None and ours != found:
                differences.append(
                    f"{self.name}: sent was {one}, checksum {ours:08x}, arrived is {other}, "
                    f"checksum {found:08x}"
                )
        return differences

    def check_unchanged(self, buffers: Mapping[Slot, Tensor]) -> None:
        """Compare the memory of a message that was sent with what it was.

        Raises:
            WorkerError: something wrote to it meanwhile.
        """
        sent = [each for each in self.checksums if each is not None]
        for (slot, buffer), before in zip(buffers.items(), sent, strict=True):
            if checksum(buffer) != before:
                raise WorkerError(
                    f"{slot.value!r} changed while it was sent ({self.name})",
                    cure="an operator of the model writes to a value that it does not own",
                )


def checksum(buffer: Tensor) -> int:
    """CRC-32 of a contiguous tensor's bytes."""
    host = buffer.cpu().view(-1)
    return zlib.crc32(host.view(torch.uint8).numpy().data) if host.numel() else 0
