"""A batch: its inputs and targets, and what a graph knows of them.

Tensors of a batch enter the graph; numbers stand in its operators, as they were when it was
captured. It knows nothing of all else (names of files, say). Only the number of samples is free:
other sizes stand in the operators as numbers, so a batch of another shape (padded to its longest
sample, say) would fail deep inside of torch, or train on something else.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import isnan
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from pipectl.capture.graph import CapturedGraph, Place
from pipectl.capture.opaque import Opaque
from pipectl.errors import CaptureError

_MAX_NAMED = 3
"""Differences that a message names."""


def split_sample(batch: Any) -> tuple[Any, Any]:
    """A collated batch as (inputs, targets).

    A pair is taken as such, ``{"inputs": ..., "targets": ...}`` likewise; any other mapping goes
    to the model as keywords and, whole, to the loss.
    """
    if isinstance(batch, Mapping):
        if set(batch) == {"inputs", "targets"}:
            return batch["inputs"], batch["targets"]
        return dict(batch), dict(batch)
    if isinstance(batch, tuple | list) and len(batch) == 2:
        return batch[0], batch[1]
    length = f" of {len(batch)}" if isinstance(batch, tuple | list) else ""
    raise CaptureError(
        "data: a sample must be (inputs, targets) or a mapping, not "
        f"a {type(batch).__name__}{length}",
        cure="let the data set return pairs: several inputs or targets are a tuple or a dictionary "
        "in one, as in (inputs, (targets, weights))",
    )


def check_samples(inputs: Any, targets: Any, size: int) -> None:
    """Raise unless a batch has tensors, and ``size`` samples in the first dimension of each."""
    leaves = [leaf for leaf in pytree.tree_leaves((inputs, targets)) if isinstance(leaf, Tensor)]
    if not leaves:
        raise CaptureError(
            "data: a sample holds no tensor", cure="return tensors, arrays or numbers"
        )
    for leaf in leaves:
        if leaf.dim() == 0 or leaf.shape[0] != size:
            raise CaptureError(
                f"data: a batch of {size} samples has a tensor of shape {list(leaf.shape)}",
                cure="let the first dimension of every tensor be the batch",
            )


class Reader:
    """Finds the tensors and numbers of batches by their names in a graph.

    They are known by their places in ``(inputs, targets)``, so keys of dictionaries may come in any
    order. Where a name is follows from the structure of a batch; it is found once for each.

    Args:
        training: whether it reads batches of ``data``, or of ``evaluation.data``.
    """

    def __init__(self, graph: CapturedGraph, *, training: bool = True) -> None:
        self._graph = graph
        self._training = training
        self._structure: tuple[pytree.TreeSpec, list[type]] | None = None
        self._index: dict[str, int] = {}

    def read(self, batch: Any) -> dict[str, Any]:
        """Tensors and numbers by name.

        Raises:
            CaptureError: there are others of them than were captured.
        """
        leaves, spec = pytree.tree_flatten(batch)
        structure = spec, list(map(type, leaves))
        if structure != self._structure:
            self._index = _index_by_name(self._graph, batch, training=self._training)
            self._structure = structure
        return {name: leaves[index] for name, index in self._index.items()}


def by_name(graph: CapturedGraph, batch: Any, *, training: bool = True) -> dict[str, Any]:
    """What a :class:`Reader` reads of one batch."""
    return Reader(graph, training=training).read(batch)


def _index_by_name(graph: CapturedGraph, batch: Any, *, training: bool) -> dict[str, int]:
    """The index among all leaves of every tensor and number, by name.

    Raises:
        CaptureError: there are others of them than were captured.
    """
    leaves = enumerate(pytree.tree_flatten_with_path(batch)[0])
    given = {(_kind(leaf), place): index for index, (place, leaf) in leaves if _kind(leaf)}
    captured = graph.inputs.items()
    wanted = {(_kind(v), graph.places[name]): name for name, v in captured if _kind(v)}
    if given.keys() == wanted.keys():
        return {name: given[key] for key, name in wanted.items()}
    differences = [f"{_describe(*key)} is missing" for key in wanted if key not in given]
    differences += [f"{_describe(*key)} is new" for key in given if key not in wanted]
    more = len(differences) - _MAX_NAMED
    rest = [f"and {more} more"] if more > 0 else []
    raise CaptureError(
        f"{_section(training=training)}: a batch differs from the training batch that was "
        f"captured: {', '.join([*differences[:_MAX_NAMED], *rest])}",
        cure="let all batches hold the same tensors under the same keys; make one tensor of what "
        "every sample has, with the batch as its first dimension",
    )


def _section(*, training: bool) -> str:
    return "data" if training else "evaluation.data"


def _kind(leaf: Any) -> str:
    """What a leaf is to the graph; empty for what it knows nothing of."""
    if isinstance(leaf, Tensor):
        return "tensor"
    return "number" if isinstance(leaf, int | float) else ""


def _describe(kind: str, place: Place) -> str:
    """A leaf of ``(inputs, targets)`` in words."""
    part = place[0].get(("inputs", "targets"))
    return f"{kind} {part}{pytree.keystr(place[1:])}"


def spared(graph: CapturedGraph, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors of a batch for one forward: those that it writes are copies."""
    return {name: t.clone() if name in graph.written else t for name, t in inputs.items()}


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
        section = _section(training=training)
        if found.shape[1:] != self.sizes or found.dtype is not self.dtype or not found.dim():
            raise CaptureError(
                f"{section}: {name!r} of a batch is {_shape(found.shape)} of {found.dtype}, but "
                f"the model was captured with {_shape(('samples', *self.sizes))} of {self.dtype}",
                cure="let all batches have one shape and type: pad all samples to one length in "
                "the data set or its collate_fn; if all have the new one by now, profile and plan "
                "again",
            )
        if found.shape[0] != samples:
            raise CaptureError(
                f"{section}: {name!r} of a micro-batch has {found.shape[0]} samples, not {samples}",
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
                f"{_section(training=training)}: {name!r} of a batch is the number {found}, but "
                f"the model was captured with {self.value}, and computes with that",
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


def _shape(sizes: Any) -> str:
    return f"[{', '.join(map(str, sizes))}]"
