"""A batch: its inputs and targets, and what a graph knows of them.

Tensors of a batch are inputs of the graph; numbers are constants in its operators. The graph
ignores everything else (names of files, for example). Only the number of samples is free, and the
sequence length if there are buckets: other sizes are constants in the operators, so a batch of
another shape (padded to its longest sample, for example) would fail inside torch, or train on
something else.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from math import isnan
from typing import Any

from torch import Tensor

from pipectl.capture.graph import CapturedGraph, Place
from pipectl.capture.leaves import open_containers
from pipectl.capture.opaque import Opaque
from pipectl.capture.tensors import tensors_in
from pipectl.errors import CaptureError
from pipectl.torch_api import pytree
from pipectl.units import plural, shorten

_MAX_NAMED = 3
"""Differences that a message names."""


def split_sample(batch: Any) -> tuple[Any, Any]:
    """Return a collated batch as (inputs, targets).

    A pair is used as it is, and so is ``{"inputs": ..., "targets": ...}``; any other mapping goes
    to the model as keyword arguments and, as a whole, to the loss.
    """
    batch = open_containers(batch)
    if isinstance(batch, Mapping):
        if set(batch) == {"inputs", "targets"}:
            return batch["inputs"], batch["targets"]
        return dict(batch), dict(batch)
    if isinstance(batch, tuple | list) and len(batch) == 2:
        return batch[0], batch[1]
    kind = type(batch).__name__
    if isinstance(batch, tuple | list):  # collating makes lists of tuples
        kind = f"tuple or list of {len(batch)}"
    raise CaptureError(
        f"data: a sample must be (inputs, targets) or a mapping, not a {kind}",
        hint="let the dataset return pairs: several inputs as a mapping, which gives the model "
        'keyword arguments, and several targets in a tuple or mapping: ({"a": ..., "b": ...}, '
        "(targets, weights)); a collate_fn returns such a pair of tensors for all its samples",
    )


def check_samples(inputs: Any, targets: Any, size: int) -> None:
    """Raise unless a batch has tensors, with ``size`` samples in the first dimension of each."""
    leaves = tensors_in((inputs, targets))
    if not leaves:
        raise CaptureError(
            "data: a sample contains no tensor", hint="return tensors, arrays or numbers"
        )
    for leaf in leaves:
        if leaf.is_nested:
            raise CaptureError(
                "data: a batch has a nested tensor, whose samples have sizes of their own",
                hint="pad samples to one size in the dataset or its collate_fn",
            )
        if leaf.dim() == 0 or leaf.shape[0] != size:
            raise CaptureError(
                f"data: a batch of {size} samples has a tensor of shape {list(leaf.shape)}",
                hint="the first dimension of every tensor must be the batch: a collate_fn that "
                "gives lists of samples is to torch.stack them",
            )


class Reader:
    """Finds the tensors and numbers of batches by their names in a graph, and checks them.

    They are identified by their places in ``(inputs, targets)``, so that keys of dictionaries may
    come in any order. The places are looked up once for each structure of a batch.

    Args:
        training: whether it reads batches of ``data``, or of ``evaluation.data``.
        length: padded length of sequences; 0 without buckets.

    Attributes:
        checked: the captured tensors and numbers that are checked, by name. Tensors that only
            opaque submodules read are left out; the shapes of their results are checked instead.
    """

    def __init__(self, graph: CapturedGraph, *, training: bool = True, length: int = 0) -> None:
        self._graph = graph
        self._section = "data" if training else "evaluation.data"
        self._structure: tuple[pytree.TreeSpec | None, list[type]] | None = None
        self._index: dict[str, int] = {}
        own = {node.name for node in graph.operators if isinstance(node.target, Opaque)}
        self.checked: dict[str, Any] = {
            name: value
            for name, value in graph.inputs.items()
            if _kind(value) == "number"
            or (_kind(value) == "tensor" and not own.issuperset(graph.users.get(name, ())))
        }
        # Asking the tensors of a graph for their sizes takes as long as a small operator.
        tensors = {name: v for name, v in self.checked.items() if isinstance(v, Tensor)}
        shapes = {name: graph.input_shape(name, 0, length) for name in tensors}
        self._forms = {name: (shapes[name][1:], t.dtype) for name, t in tensors.items()}

    @property
    def has_fixed(self) -> bool:
        """Whether the graph depends on numbers of a batch, or on what else it holds."""
        return len(self.checked) > len(self._forms) or bool(self._graph.beside.fixed)

    def read(self, batch: Any) -> dict[str, Any]:
        """Return tensors and numbers by name.

        Raises:
            CaptureError: they differ from those that were captured.
        """
        spec: pytree.TreeSpec | None = None
        if all(type(part) is Tensor for part in batch):  # most often
            leaves = batch
        else:
            leaves, spec = pytree.tree_flatten(batch)
        structure = spec, list(map(type, leaves))
        if structure != self._structure:
            self._index = self._index_by_name(batch)
            self._structure = structure
        return {name: leaves[index] for name, index in self._index.items()}

    def check(self, values: Mapping[str, Any], samples: int, names: Container[str]) -> None:
        """Raise unless values are like those that were captured.

        Args:
            values: as from :meth:`read`.
            samples: number of samples that tensors must have.
            names: of the tensors to check.

        Raises:
            CaptureError: a value differs.
        """
        for name, expected in self.checked.items():
            if name in self._forms:
                if name in names:
                    self._check_tensor(name, values[name], samples)
                continue
            number = values[name]  # of the whole micro-batch, whose rows replicas may share
            if number != expected and not (isnan(number) and isnan(expected)):
                raise CaptureError(
                    f"{self._section}: {name!r} of a batch is the number {number}, but the model "
                    f"was captured with {expected}, and computes with that",
                    hint="make it a tensor with an entry per sample in the collate_fn, or leave "
                    "it out",
                )

    def _check_tensor(self, name: str, tensor: Tensor, samples: int) -> None:
        sizes, dtype = self._forms[name]
        if tensor.shape[1:] != sizes or tensor.dtype is not dtype or not tensor.dim():
            raise CaptureError(
                f"{self._section}: {name!r} of a batch is {_shape(tensor.shape)} of "
                f"{tensor.dtype}, but the model was captured with {_shape(('samples', *sizes))} of "
                f"{dtype}",
                hint=(
                    "name every field whose length differs under data.pad"
                    if self._graph.length
                    else "name lengths to pad to under data.buckets, or pad all samples to one "
                    "length in the dataset or its collate_fn"
                )
                + "; if the new shape is right, profile and plan again",
            )
        if tensor.shape[0] != samples:
            raise CaptureError(
                f"{self._section}: {name!r} of a micro-batch has "
                f"{plural(tensor.shape[0], 'sample')}, not {samples}",
                hint="the collate_fn must keep all samples: remove bad ones from the dataset",
            )

    def _index_by_name(self, batch: Any) -> dict[str, int]:
        """Return the index of every tensor and number among all leaves."""
        leaves = enumerate(pytree.tree_flatten_with_path(batch)[0])
        batch_leaves = {
            (_kind(leaf), place): index for index, (place, leaf) in leaves if _kind(leaf)
        }
        captured = self._graph.inputs.items()
        captured_leaves = {
            (_kind(v), self._graph.places[name]): name for name, v in captured if _kind(v)
        }
        if batch_leaves.keys() == captured_leaves.keys():
            self._refuse_other_items(batch)
            return {name: batch_leaves[key] for key, name in captured_leaves.items()}
        differences = [
            f"{_describe(*key)} is missing" for key in captured_leaves if key not in batch_leaves
        ]
        differences += [
            f"{_describe(*key)} is new" for key in batch_leaves if key not in captured_leaves
        ]
        raise CaptureError(
            f"{self._section}: a batch differs from the training batch that was "
            f"captured: {', '.join(shorten(differences, _MAX_NAMED))}",
            hint="all batches must have the same tensors under the same keys, each with the batch "
            "as its first dimension",
        )

    def _refuse_other_items(self, batch: Any) -> None:
        beside = self._graph.beside
        difference = beside.difference(batch, may_have_more=self._section != "data")
        if difference is not None:
            raise CaptureError(
                f"{self._section}: a batch differs from the training batch that was captured: "
                f"{difference}, and the model or the loss computes something else for it",
                hint="take the number of samples from a tensor (len(x)); let all batches have the "
                "same keys, texts in the same places, and None in the same places, or tensors in "
                "their place",
            )


def by_name(graph: CapturedGraph, batch: Any, *, training: bool = True) -> dict[str, Any]:
    """Read one batch by a :class:`Reader`."""
    return Reader(graph, training=training).read(batch)


def _kind(leaf: Any) -> str:
    """Return what a leaf is to the graph; empty if the graph ignores it."""
    if isinstance(leaf, Tensor):
        return "tensor"
    return "number" if isinstance(leaf, int | float) else ""


def _describe(kind: str, place: Place) -> str:
    """Describe a leaf of ``(inputs, targets)``."""
    part = place[0].get(("inputs", "targets"))
    return f"{kind} {part}{pytree.keystr(place[1:])}"


def _shape(sizes: Any) -> str:
    return f"[{', '.join(map(str, sizes))}]"


def copy_written_inputs(graph: CapturedGraph, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors of a batch for one forward, with copies of those that it writes."""
    return {name: t.clone() if name in graph.written else t for name, t in inputs.items()}
