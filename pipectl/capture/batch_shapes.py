"""What a batch must look like: the captured graph holds for one shape alone.

Only the number of samples is free in it. Other sizes stand in its operators as numbers, so a batch
of another shape (padded to its longest sample, say) would fail deep inside of torch, or train on
something else. So do numbers that a batch brings along.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import isnan
from typing import Any

import torch
from torch import Tensor

from pipectl.capture.graph import CapturedGraph
from pipectl.capture.opaque import Opaque
from pipectl.errors import CaptureError


@dataclass(frozen=True)
class Sample:
    """One tensor of the batch, as it was captured.

    Args:
        sizes: all but the first, which counts samples.
    """

    sizes: tuple[int, ...]
    dtype: torch.dtype

    def check(self, name: str, found: Tensor, samples: int, *, training: bool) -> None:
        """Raise unless a loaded tensor is alike.

        Args:
            name: of the tensor in the graph.
            samples: that it must have.

        Raises:
            CaptureError: it is not.
        """
        data = _key(training=training)
        if found.shape[1:] != self.sizes or found.dtype is not self.dtype or not found.dim():
            raise CaptureError(
                f"{data}: {name!r} of a batch is {_words(found.shape)} of {found.dtype}, but the "
                f"model was captured with {_words(('samples', *self.sizes))} of {self.dtype}",
                cure="let all batches have one shape and type: pad all samples to one length in "
                "the data set or its collate_fn; if all have the new one by now, profile and plan "
                "again",
            )
        if found.shape[0] != samples:
            raise CaptureError(
                f"{data}: {name!r} of a micro-batch has {found.shape[0]} samples, not {samples}",
                cure="let the collate_fn keep all samples it gets: leave those that are no good "
                "out of the data set",
            )


@dataclass(frozen=True)
class Number:
    """A number of the batch, which the graph has for ever."""

    value: float

    def check(self, name: str, found: float, samples: int, *, training: bool) -> None:  # noqa: ARG002
        """Raise unless a loaded number is the same.

        Raises:
            CaptureError: it is not.
        """
        if found != self.value and not (isnan(found) and isnan(self.value)):
            raise CaptureError(
                f"{_key(training=training)}: {name!r} of a batch is the number {found}, but the "
                f"model was captured with {self.value}, and computes with that",
                cure="let the collate_fn make a tensor of it, with an entry for every sample, or "
                "leave it out",
            )


def expected_of(graph: CapturedGraph) -> dict[str, Sample | Number]:
    """What the batch's tensors and numbers must be, by their names in a graph.

    Tensors that only the user's own code reads are left out: it takes what it is made for, and the
    shape of what it gives is looked at.
    """
    own = {node.name for node in graph.operators if isinstance(node.target, Opaque)}
    found: dict[str, Sample | Number] = {}
    for name, value in graph.inputs.items():
        if isinstance(value, int | float):
            found[name] = Number(value)
        elif isinstance(value, Tensor) and not own.issuperset(graph.users.get(name, ())):
            found[name] = Sample(tuple(value.shape[1:]), value.dtype)
    return found


def _key(*, training: bool) -> str:
    return "data" if training else "evaluation.data"


def _words(sizes: Any) -> str:
    return f"[{', '.join(map(str, sizes))}]"
