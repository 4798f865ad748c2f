"""The tensors and numbers of a batch, by the names that a graph has for them.

Tensors enter the graph; numbers stand in its operators, as they were when it was captured. All
else (names of files, say) it knows nothing of, and batches may hold any number of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree

from pipectl.capture.graph import CapturedGraph
from pipectl.errors import CaptureError

KINDS = {"tensors": (Tensor,), "numbers": (int, float)}


def by_name(graph: CapturedGraph, batch: Any) -> dict[str, Any]:
    """Tensors and numbers of ``(inputs, targets)``.

    Raises:
        CaptureError: there are more of them than were captured, or fewer.
    """
    leaves = pytree.tree_leaves(batch)
    found: dict[str, Any] = {}
    for words, kinds in KINDS.items():
        names = [name for name, value in graph.inputs.items() if isinstance(value, kinds)]
        given = [leaf for leaf in leaves if isinstance(leaf, kinds)]
        if len(given) != len(names):
            raise CaptureError(
                f"data: a batch holds {len(given)} {words}, the one that was captured {len(names)}",
                cure="let all batches hold the same tensors; make one tensor of what every sample "
                "has, with the batch as its first dimension",
            )
        found.update(zip(names, given, strict=True))
    return found


def spared(graph: CapturedGraph, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors of a batch for one forward: those that it writes are copies."""
    return {name: t.clone() if name in graph.written else t for name, t in inputs.items()}
