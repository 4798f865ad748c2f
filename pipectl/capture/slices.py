"""The samples of a micro-batch in the values of a graph, and random draws for whole micro-batches.

A replica that computes some samples of a micro-batch must draw the numbers that one process draws
for them. It runs each random operator on a tensor for the whole micro-batch, with its own samples
in place, and keeps these samples of the result.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from pipectl.capture.draws import is_custom
from pipectl.capture.graph import CapturedGraph
from pipectl.capture.operators import arguments_by_name
from pipectl.errors import CaptureError
from pipectl.torch_api import pytree

_ALONG = {
    "softmax", "_softmax", "log_softmax", "_log_softmax", "cumsum", "cumprod", "logcumsumexp",
    "cummax", "cummin", "sort", "argsort", "flip", "roll",
}  # fmt: skip
"""Operators that compute along a dimension and keep it."""
_BY_INDEX = {"index", "index_select", "gather"}
_HINT = "let replicas take whole micro-batches"


class Span(NamedTuple):
    """Samples ``start`` to ``stop`` of a micro-batch of ``whole`` samples.

    Args:
        length: of its sequences; 0 without buckets.
    """

    start: int
    stop: int
    whole: int
    length: int = 0

    @classmethod
    def of(cls, samples: int, length: int = 0) -> Span:
        """Return all samples of a micro-batch."""
        return cls(0, samples, samples, length)

    @property
    def shape(self) -> tuple[int, int]:
        """Samples of the micro-batch and sequence length, which determine the shapes of values."""
        return self.whole, self.length

    @property
    def size(self) -> int:
        """Number of samples."""
        return self.stop - self.start

    @property
    def is_whole(self) -> bool:
        """Whether these are all samples of the micro-batch."""
        return self.stop - self.start == self.whole


def batch_dimension(graph: CapturedGraph, node: fx.Node, value: Any = None) -> int | None:
    """Return the dimension of a value that counts samples; None if all samples share the value.

    Args:
        value: one of several results of the node.

    Raises:
        CaptureError: the samples are merged with another dimension.
    """
    value = node.meta.get("val") if value is None else value
    dims = graph.sample_dimensions(value)
    if not dims:
        return None
    if len(dims) > 1 or value.shape[dims[0]].node.expr not in graph.symbols:
        raise CaptureError(
            f"model: the samples of {node.name!r} are not one dimension of it "
            f"({[str(size) for size in value.shape]}), so replicas cannot share them",
            hint=f"{_HINT}, or cut elsewhere",
        )
    return dims[0]


def whole_draw(graph: CapturedGraph, node: fx.Node, span: Span) -> Callable[..., Any]:
    """Return a random operator as a function of some samples that draws for the whole micro-batch.

    Raises:
        CaptureError: the operator runs user code, whose draws are not known, or draws numbers of
            samples.
    """
    target: Any = node.target
    schema = getattr(target, "_schema", None)
    if schema is None or is_custom(target) or _draws_samples(graph, node, schema):
        raise CaptureError(
            f"model: {node.name!r} may draw random numbers, and replicas cannot share its samples",
            hint=_HINT,
        )
    leaves = pytree.tree_leaves((node.args, node.kwargs))
    dims = [batch_dimension(graph, x) if isinstance(x, fx.Node) else None for x in leaves]
    values = pytree.tree_leaves(node.meta.get("val"))  # one tensor, or several
    results = [batch_dimension(graph, node, value) for value in values]

    def draw(*args: Any, **kwargs: Any) -> Any:
        inputs, spec = pytree.tree_flatten((args, kwargs))
        pairs = zip(inputs, dims, strict=True)
        grown = [_grown(x, dim, span) if isinstance(x, Tensor) else x for x, dim in pairs]
        args, kwargs = pytree.tree_unflatten(grown, spec)
        drawn, several = pytree.tree_flatten(target(*args, **kwargs))
        mine = [
            x if dim is None else x.narrow(dim, span.start, span.stop - span.start)
            for x, dim in zip(drawn, results, strict=True)
        ]
        return (
            inputs[0].copy_(mine[0]) if schema.is_mutable else pytree.tree_unflatten(mine, several)
        )

    return draw


def _draws_samples(graph: CapturedGraph, node: fx.Node, schema: Any) -> bool:
    """Return whether an operator may draw numbers of samples, as a permutation of them does."""
    arguments = arguments_by_name(schema, node.args, node.kwargs)
    if "randperm" in schema.name:
        return True
    if "randint" in schema.name:
        return not isinstance(arguments.get("high"), int)
    source = arguments.get("self")
    if "multinomial" not in schema.name or not isinstance(source, fx.Node):
        return False
    value = source.meta["val"]
    return value.dim() - 1 in graph.sample_dimensions(value)


def _grown(tensor: Tensor, dim: int | None, span: Span) -> Tensor:
    """Return a tensor for the whole micro-batch in the same layout, with the samples in place."""
    if dim is None:
        return tensor
    sizes = list(tensor.shape)
    sizes[dim] = span.whole
    strides = tensor.stride()
    order = sorted(range(tensor.dim()), key=lambda d: (-strides[d], d))
    whole = torch.empty_permuted(sizes, order, dtype=tensor.dtype, device=tensor.device).zero_()
    return torch.slice_scatter(whole, tensor, dim, span.start, span.stop)


def coupled_operators(graph: CapturedGraph) -> list[int]:
    """Return the positions of operators through which samples of a micro-batch depend on each
    other.

    These are batch norms, operators that combine a value of all samples (their mean, for example)
    with values of single samples, operators that relate samples to samples, such as ``x @ x.T``,
    operators along the samples (a softmax or a cumulative sum), and those that take samples in a
    random order. The mean at the end of a loss is none. A graph for one batch size does not show
    which dimensions count samples: there, only batch norms are known.
    """
    places = []
    of_all: set[fx.Node] = set()
    shuffled: set[fx.Node] = set()
    for place, node in enumerate(graph.operators):
        if "randperm" in str(node.target) or shuffled.intersection(node.all_input_nodes):
            shuffled.add(node)
        sources = [s for s in graph.tensor_inputs(node) if s.name not in graph.states]
        here = _sample_dimensions(graph, node)
        before = max((_sample_dimensions(graph, source) for source in sources), default=0)
        mixed = bool(of_all.intersection(sources))
        along = here and _goes_along_samples(graph, node, shuffled)
        if is_batch_norm(node) or here > before > 0 or (here and mixed) or along:
            places.append(place)
        elif not here and (before or mixed):
            of_all.add(node)
    return places


def _goes_along_samples(graph: CapturedGraph, node: fx.Node, shuffled: set[fx.Node]) -> bool:
    """Return whether each sample of a result depends on others, by their order.

    Args:
        shuffled: nodes that follow from a random order.
    """
    schema = getattr(node.target, "_schema", None)
    if schema is None:
        return False
    name, arguments = (
        schema.name.partition("::")[2],
        arguments_by_name(schema, node.args, node.kwargs),
    )
    source, dims = arguments.get("self"), arguments.get("dim", arguments.get("dims"))
    value = source.meta.get("val") if isinstance(source, fx.Node) else None
    samples = graph.sample_dimensions(value)
    if value is None or not samples:
        return False
    if name in _BY_INDEX:
        indices = arguments.get("indices", arguments.get("index"))
        places = enumerate(indices) if isinstance(indices, list | tuple) else [(dims, indices)]
        return any(each in shuffled and dim in samples for dim, each in places)
    if name not in _ALONG:
        return False
    given = dims if isinstance(dims, list | tuple) else [dims]
    return any(isinstance(dim, int) and dim % value.dim() in samples for dim in given)


def _sample_dimensions(graph: CapturedGraph, node: fx.Node) -> int:
    """Return how many dimensions of a value count samples."""
    values = pytree.tree_leaves(node.meta.get("val"))
    return max((len(graph.sample_dimensions(value)) for value in values), default=0)


def is_batch_norm(node: fx.Node) -> bool:
    """Return whether an operator is a batch norm with the statistics of the micro-batch."""
    schema = getattr(node.target, "_schema", None)
    if "batch_norm" not in str(node.target) or schema is None:
        return False
    arguments = arguments_by_name(schema, node.args, node.kwargs)
    return bool(arguments.get("training", arguments.get("train", True)))
