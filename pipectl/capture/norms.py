"""Norms that torch refuses: those of a single value per channel.

Torch checks this in Python, before the operator, so that no graph contains the check. The operator
itself gives a variance that is not a number.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from math import prod
from typing import Any

from torch import Tensor, fx

from pipectl.capture.graph import CapturedGraph
from pipectl.capture.model_with_loss import own_path
from pipectl.capture.operators import arguments_by_name, calling_module, with_inner
from pipectl.capture.refusals import Refusal, place_of_node
from pipectl.units import plural


def refuse_single_values(
    graph: CapturedGraph, samples: int, length: int = 0, names: Collection[str] | None = None
) -> None:
    """Raise if torch refuses a norm of the graph in micro-batches of a size.

    Args:
        length: of their sequences.
        names: of the operators that count; all by default.

    Raises:
        RefusedError: naming the norm, its line and the shape of its input.
    """
    if graph.fixed:
        return  # torch itself has checked the only size

    def size_of(value: Any) -> int:
        size: int = graph.size_of(value, samples, length)
        return size

    for node in graph.operators:
        if names is not None and node.name not in names:
            continue
        for norm in with_inner(node, graph.root):
            if (said := _refusal_of(norm, size_of)) is not None:
                module = own_path(calling_module(norm) or calling_module(node))
                raise Refusal.SINGLE_VALUE.error(
                    place_of_node(norm) or place_of_node(node),
                    size=f" of {plural(samples, 'sample')}",
                    name=module or norm.name,
                    why=said,
                )


def _refusal_of(node: fx.Node, size_of: Callable[[Any], int]) -> str | None:
    """Return what torch says if an operator is a norm that it refuses; else None."""
    schema = getattr(node.target, "_schema", None)
    name = "" if schema is None else schema.name
    if "_norm" not in name:
        return None
    arguments = arguments_by_name(schema, node.args, node.kwargs)
    source = arguments.get("input")
    value = source.meta.get("val") if isinstance(source, fx.Node) else None
    if not isinstance(value, Tensor) or value.dim() < 2:
        return None
    try:
        shape = [size_of(size) for size in value.shape]
    except ValueError:  # in a subgraph with sizes of its own
        return None
    samples, channels, *others = shape
    what, count = "value per channel", samples * prod(others)
    if "group_norm" in name:  # torch's rule, in evaluation too
        groups = arguments.get("num_groups", arguments.get("group"))
        count = samples * channels // size_of(groups) * prod(others)
    elif "instance_norm" in name and arguments.get("use_input_stats") is True:
        what, count = "spatial element", prod(others)
    elif "batch_norm" not in name or arguments.get("training", arguments.get("train")) is not True:
        return None
    if count != 1:
        return None
    return f"Expected more than 1 {what} when training, got input size {shape}"
