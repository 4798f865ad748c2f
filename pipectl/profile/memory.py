"""What one operator, and an optimizer's step, allocate: optional parts of ``profile.json``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import ceil

from pipectl.fields import NamedBytes


@dataclass(frozen=True)
class OperatorMemory:
    """Live bytes of one operator, for one micro-batch of the profile's size.

    Args:
        made_bytes: storages that its value brings; 0 where it lies in memory of another value.
        storage: the value whose memory its own lies in; its own id if it brings storages.
        forward_bytes: most it allocates at once in its forward, value and saved bytes included.
        backward_bytes: most it allocates at once in its backward, gradients included.
        gradients: (value or parameter, bytes) of what its backward gives; 0 bytes where that is
            the memory of the gradient it got.
        buffers: (full name, bytes) of each buffer it uses.
    """

    made_bytes: int
    storage: str
    forward_bytes: int
    backward_bytes: int
    gradients: NamedBytes = ()
    buffers: NamedBytes = ()


@dataclass(frozen=True)
class StepMemory:
    """Temporary values of an optimizer's step, in bytes per byte of parameters.

    Args:
        current: of the parameter that is being updated.
        previous: of the one before it, whose temporary values a loop may still hold.
        everything: of all parameters, where they are updated together.
    """

    current: float = 0.0
    previous: float = 0.0
    everything: float = 0.0

    def peak_bytes(self, parameters: Sequence[int]) -> int:
        """The most at once, for parameters of these sizes in the optimizer's order."""
        pairs = pairwise((0, *parameters))
        alone = max((self.current * now + self.previous * last for last, now in pairs), default=0)
        return ceil(alone + self.everything * sum(parameters))
