"""What the tensors of a batch must look like: the captured graph holds for one shape alone.

Only the number of samples is free in it. Other sizes stand in its operators as numbers, so a batch
of another shape (padded to its longest sample, say) would fail deep inside of torch, or train on
something else.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pipectl.capture import CapturedGraph
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

    def check(self, name: str, found: Any, *, training: bool) -> None:
        """Raise unless a loaded tensor is alike.

        Args:
            name: of the tensor in the graph.

        Raises:
            CaptureError: it is not.
        """
        if isinstance(found, Tensor):
            if found.shape[1:] == self.sizes and found.dtype is self.dtype and found.dim():
                return
            given = f"{_words(found.shape)} of {found.dtype}"
        else:
            given = f"a {type(found).__name__}"
        data = "data" if training else "evaluation.data"
        raise CaptureError(
            f"{data}: {name!r} of a batch is {given}, but the model was captured with "
            f"{_words(('samples', *self.sizes))} of {self.dtype}",
            cure="let all batches have one shape and type: pad all samples to one length in the "
            "data set or its collate_fn; if all have the new one by now, profile and plan again",
        )


def samples_of(graph: CapturedGraph) -> dict[str, Sample]:
    """What the batch's tensors must be, by their names in a graph.

    Those that only the user's own code reads are left out: it takes what it is made for, and the
    shape of what it gives is looked at.
    """
    own = {node.name for node in graph.operators if isinstance(node.target, Opaque)}
    names = {name for name in graph.inputs if not own.issuperset(graph.users.get(name, ()))}
    values = {n.name: n.meta.get("val") for n in graph.graph.nodes if n.name in names}
    return {
        name: Sample(tuple(value.shape[1:]), value.dtype)
        for name, value in values.items()
        if isinstance(value, Tensor)
    }


def _words(sizes: Any) -> str:
    return f"[{', '.join(map(str, sizes))}]"
