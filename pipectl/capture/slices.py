"""Stages that compute a part of a micro-batch: where samples lie, and random draws of the whole.

A replica that computes some rows of a micro-batch must draw what one process draws for them. So it
runs a random operator on a tensor as large as the whole micro-batch, with its own rows in place,
and keeps these rows of the result.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from pipectl.capture.graph import CapturedGraph
from pipectl.errors import CaptureError

_CURE = "let replicas take whole micro-batches"


class Rows(NamedTuple):
    """Samples ``start`` to ``stop`` of a micro-batch of ``whole``."""

    start: int
    stop: int
    whole: int

    @classmethod
    def of(cls, samples: int) -> Rows:
        """All samples of a micro-batch."""
        return cls(0, samples, samples)

    @property
    def size(self) -> int:
        """How many samples."""
        return self.stop - self.start

    @property
    def is_whole(self) -> bool:
        """Whether these are all samples of the micro-batch."""
        return self.stop - self.start == self.whole


def batch_dimension(graph: CapturedGraph, node: fx.Node) -> int | None:
    """The dimension of a value that counts samples; None if all samples share the value.

    Raises:
        CaptureError: samples are merged with something else, so that rows cannot be told.
    """
    return _batch_dimension(graph, node.name, node.meta.get("val"))


def _batch_dimension(graph: CapturedGraph, name: str, value: Any) -> int | None:
    sizes: Sequence[Any] = value.shape if isinstance(value, Tensor) else ()
    found = [
        (dim, size.node.expr)
        for dim, size in enumerate(sizes)
        if isinstance(size, torch.SymInt) and size.node.expr.free_symbols & graph.symbols
    ]
    if not found:
        return None
    dim, expression = found[0]
    if len(found) > 1 or expression not in graph.symbols:
        raise CaptureError(
            f"model: the samples of {name!r} are not one dimension of it "
            f"({[str(size) for size in sizes]}), so replicas cannot share them",
            cure=f"{_CURE}, or cut elsewhere",
        )
    return dim


def whole_draw(graph: CapturedGraph, node: fx.Node, rows: Rows) -> Callable[..., Any]:
    """A random operator as a function of some rows, which draws for the whole micro-batch.

    Raises:
        CaptureError: the operator is a user's code, of which nobody knows what it draws.
    """
    target: Any = node.target
    schema = getattr(target, "_schema", None)
    if schema is None:
        raise CaptureError(
            f"model: {node.name!r} may draw random numbers, and replicas cannot share its samples",
            cure=_CURE,
        )
    leaves = pytree.tree_leaves((node.args, node.kwargs))
    dims = [batch_dimension(graph, x) if isinstance(x, fx.Node) else None for x in leaves]
    values = pytree.tree_leaves(node.meta.get("val"))  # one tensor, or several
    results = [_batch_dimension(graph, node.name, value) for value in values]

    def draw(*args: Any, **kwargs: Any) -> Any:
        given, spec = pytree.tree_flatten((args, kwargs))
        pairs = zip(given, dims, strict=True)
        grown = [_grown(x, dim, rows) if isinstance(x, Tensor) else x for x, dim in pairs]
        args, kwargs = pytree.tree_unflatten(grown, spec)
        drawn, several = pytree.tree_flatten(target(*args, **kwargs))
        mine = [
            x if dim is None else x.narrow(dim, rows.start, rows.stop - rows.start)
            for x, dim in zip(drawn, results, strict=True)
        ]
        return (
            given[0].copy_(mine[0]) if schema.is_mutable else pytree.tree_unflatten(mine, several)
        )

    return draw


def _grown(tensor: Tensor, dim: int | None, rows: Rows) -> Tensor:
    """A tensor of the whole micro-batch, in the same layout, with some rows in their place."""
    if dim is None:
        return tensor
    sizes = list(tensor.shape)
    sizes[dim] = rows.whole
    strides = tensor.stride()
    order = sorted(range(tensor.dim()), key=lambda d: (-strides[d], d))
    whole = torch.empty_permuted(sizes, order, dtype=tensor.dtype, device=tensor.device).zero_()
    return torch.slice_scatter(whole, tensor, dim, rows.start, rows.stop)
