"""Which stage first made something of a micro-batch that is not finite.

Every stage sums what it hands on, while a cache still has it: a sum is finite only if all elements
are. Nobody looks at the sums before the end of the step, so no accelerator is waited for.
"""

from __future__ import annotations

from collections.abc import Container
from typing import NamedTuple

import torch
from torch import Tensor

from pipectl.capture import Cut
from pipectl.graph import TransferKind
from pipectl.runtime.layout import Tensors


class Origin(NamedTuple):
    """A stage whose output for a micro-batch is not finite."""

    micro_batch: int
    stage: int


class Origins:
    """The sums of one rank, of steps that are not over.

    Args:
        values: operators whose values are looked at.
    """

    def __init__(self, values: Container[str]) -> None:
        self._values = values
        self._sums: list[tuple[Origin, Tensor]] = []

    def note(self, micro_batch: int, stage: int, made: Tensors) -> None:
        """Sum what a stage has made of a micro-batch."""
        for slot, tensor in made.items():
            if tensor is not None and slot.value in self._values:
                wide = torch.promote_types(tensor.dtype, torch.float32)
                self._sums.append((Origin(micro_batch, stage), tensor.sum(dtype=wide)))

    def first(self, micro_batches: Container[int] | None = None) -> Origin | None:
        """The first micro-batch and stage, among some or all, that is not finite.

        They are forgotten.
        """
        mine, others = list[tuple[Origin, Tensor]](), list[tuple[Origin, Tensor]]()
        for origin, total in self._sums:
            wanted = micro_batches is None or origin.micro_batch in micro_batches
            (mine if wanted else others).append((origin, total))
        self._sums = others
        if not mine:
            return None
        finite = torch.stack([total.double() for _, total in mine]).isfinite().tolist()
        found = [origin for (origin, _), good in zip(mine, finite, strict=True) if not good]
        return min(found, default=None)

    def forget(self) -> None:
        """Begin anew."""
        self._sums.clear()


def origins_of(cut: Cut) -> Origins:
    """Of what has a gradient that comes back from another stage: masks may be infinite."""
    lanes = cut.lanes.items()
    back = (slots for lane, slots in lanes if lane.kind is TransferKind.GRADIENT)
    return Origins({slot.value for slots in back for slot in slots})
