"""The tensors and numbers of a batch, by the names that a graph has for them.

Tensors enter the graph; numbers stand in its operators, as they were when it was captured. All
else (names of files, say) it knows nothing of, and batches may hold any number of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree

from pipectl.capture.graph import CapturedGraph, Place
from pipectl.errors import CaptureError

_NAMED = 3
"""So many differences a message names."""


def by_name(graph: CapturedGraph, batch: Any, *, training: bool = True) -> dict[str, Any]:
    """Tensors and numbers of ``(inputs, targets)``, which are known by their places in it.

    So keys of dictionaries may come in any order.

    Args:
        training: whether it is a batch of ``data``, or of ``evaluation.data``.

    Raises:
        CaptureError: there are others of them than were captured.
    """
    leaves = pytree.tree_flatten_with_path(batch)[0]
    given = {(_kind(leaf), place): leaf for place, leaf in leaves if _kind(leaf)}
    captured = graph.inputs.items()
    wanted = {(_kind(v), graph.places[name]): name for name, v in captured if _kind(v)}
    if given.keys() != wanted.keys():
        missing = [f"{_words(*key)} is missing" for key in wanted if key not in given]
        new = [f"{_words(*key)} is new" for key in given if key not in wanted]
        raise _other(missing + new, "data" if training else "evaluation.data")
    return {name: given[key] for key, name in wanted.items()}


def _kind(leaf: Any) -> str:
    """What a leaf is to the graph; empty for what it knows nothing of."""
    if isinstance(leaf, Tensor):
        return "tensor"
    return "number" if isinstance(leaf, int | float) else ""


def _words(kind: str, place: Place) -> str:
    """A leaf of ``(inputs, targets)`` in words."""
    part = place[0].get(("inputs", "targets"))
    return f"{kind} {part}{pytree.keystr(place[1:])}"


def _other(differences: list[str], section: str) -> CaptureError:
    named, more = differences[:_NAMED], len(differences) - _NAMED
    words = ", ".join([*named, f"and {more} more"] if more > 0 else named)
    return CaptureError(
        f"{section}: a batch differs from the training batch that was captured: {words}",
        cure="let all batches hold the same tensors under the same keys; make one tensor of what "
        "every sample has, with the batch as its first dimension",
    )


def spared(graph: CapturedGraph, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors of a batch for one forward: those that it writes are copies."""
    return {name: t.clone() if name in graph.written else t for name, t in inputs.items()}
