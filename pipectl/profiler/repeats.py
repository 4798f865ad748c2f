"""Recognising operators that do the same as one measured before: those of repeated blocks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from pipectl.capture.regions import region_of
from pipectl.profiler.costs import Call, Ran, Times
from pipectl.profiler.memory import Allocations


@dataclass(frozen=True)
class Shape:
    """A tensor without its values.

    Args:
        origin: index of the argument whose storage it lies in; None for one of its own.
    """

    origin: int | None
    dtype: torch.dtype
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    requires_grad: bool


@dataclass(frozen=True)
class Pattern:
    """What is known of an operator that was measured.

    Args:
        node: the operator.
        names: storages of its arguments by name, in order.
        result: what it gave, with shapes for tensors.
    """

    node: str
    names: tuple[str, ...]
    times: Times
    output_bytes: int
    saved: tuple[tuple[str, int], ...]
    allocations: Allocations
    storage_name: str
    result: Any

    def renamed(self, node: str, names: tuple[str, ...]) -> Mapping[str, str]:
        """Names of storages for an equal operator: those of its own arguments and results."""
        own = {name: name.replace(self.node, node, 1) for name, _ in self.saved}
        return {**own, self.node: node, **dict(zip(self.names, names, strict=True))}

    def value(self, leaves: list[Any], device: torch.device) -> Any:
        """A result of the noted shapes.

        Args:
            leaves: the arguments of the equal operator, flattened.
            device: for tensors with a storage of their own.
        """
        return pytree.tree_map_only(Shape, lambda s: _tensor(s, leaves, device), self.result)


def key_of(node: fx.Node, call: Call, states: frozenset[int]) -> tuple[Any, ...]:
    """Equal for operators of one kind with equal arguments, but for the values of tensors.

    Args:
        call: with arguments that may lack values.
        states: storages of parameters and buffers.
    """
    leaves, structure = pytree.tree_flatten((call.args, dict(call.kwargs)))
    order: dict[int, int] = {}
    described: list[Any] = []
    for leaf in leaves:
        if isinstance(leaf, Tensor):
            storage = leaf.untyped_storage()._cdata
            place = order.setdefault(storage, len(order))
            described.append((_shape(leaf, place), storage in states))
        else:
            described.append((type(leaf).__name__, str(getattr(leaf, "code", leaf))))
    kind = node.target, region_of(node), str(structure)
    return *kind, tuple(described), len(node.all_input_nodes)


def shapes_of(ran: Ran) -> Any:
    """What a call gave, with shapes for tensors."""
    origins: dict[int, int] = {}
    for index, leaf in enumerate(ran.leaves):
        if isinstance(leaf, Tensor):
            origins.setdefault(leaf.untyped_storage()._cdata, index)
    return pytree.tree_map_only(
        Tensor, lambda t: _shape(t, origins.get(t.untyped_storage()._cdata)), ran.result
    )


def _shape(tensor: Tensor, origin: int | None) -> Shape:
    sizes, strides = tuple(tensor.shape), tensor.stride()
    offset = int(tensor.storage_offset())
    return Shape(origin, tensor.dtype, sizes, strides, offset, tensor.requires_grad)


def _tensor(shape: Shape, leaves: list[Any], device: torch.device) -> Tensor:
    if shape.origin is not None:
        storage = leaves[shape.origin].detach().untyped_storage()
        made = torch.empty(0, dtype=shape.dtype, device=device)
        made.set_(storage, shape.offset, shape.sizes, shape.strides)
        return made.requires_grad_(shape.requires_grad)
    made = torch.empty_strided(shape.sizes, shape.strides, dtype=shape.dtype, device=device)
    if shape.dtype.is_floating_point:
        return made.normal_().requires_grad_(shape.requires_grad)
    return made.fill_(shape.dtype is torch.bool)  # a valid index, a mask that hides nothing
