"""Measuring one operator: its times, what it saves for backward, and how large its value is."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils import _pytree as pytree

from pipectl.profiler.marks import Clock, clock_of
from pipectl.runtime.device import Device

_LEAST_REPEATS = 3
_MOST_REPEATS = 15
_LONG_S = 2.0
"""An operator that takes longer is steady, and not repeated more than it must be."""


@dataclass(frozen=True)
class Times:
    """Medians over repeats, in seconds."""

    forward_s: float
    backward_s: float


@dataclass(frozen=True)
class Call:
    """One operator with real arguments.

    Args:
        mutates: whether it writes into its arguments, which are then copied for every repeat.
    """

    target: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    mutates: bool

    def prepared(self) -> tuple[tuple[Any, ...], dict[str, Any], list[Tensor]]:
        """Fresh arguments, and those among them whose gradient is wanted."""
        leaves, spec = pytree.tree_flatten((self.args, dict(self.kwargs)))
        fresh = [self._fresh(leaf) for leaf in leaves]
        wanted = [leaf for leaf in fresh if isinstance(leaf, Tensor) and leaf.requires_grad]
        args, kwargs = pytree.tree_unflatten(fresh, spec)
        return args, kwargs, wanted

    def _fresh(self, leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        alias = leaf.detach().requires_grad_(leaf.requires_grad)
        return alias.clone() if self.mutates else alias


@dataclass(frozen=True)
class Ran:
    """One call of an operator.

    Args:
        kept: the tensors autograd keeps for backward.
        leaves: the arguments it was called with, flattened: aliases or copies of the call's own.
    """

    result: Any
    kept: list[Tensor]
    leaves: list[Any]


def run(call: Call) -> Ran:
    """Call the operator once and see what autograd keeps."""
    kept: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    args, kwargs, _ = call.prepared()
    with saved_tensors_hooks(pack, lambda tensor: tensor):
        result = call.target(*args, **kwargs)
    return Ran(result, kept, pytree.tree_leaves((args, kwargs)))


def measure(call: Call, device: Device, budget_s: float) -> Times:
    """Time forward and backward until the figures are steady or the budget is used.

    The median drops repeats that something else on the machine disturbed.
    """
    clock = clock_of(device)
    forward: list[float] = []
    backward: list[float] = []
    _once(call, clock)
    spent = 0.0
    while len(forward) < _MOST_REPEATS and spent < _LONG_S:
        if len(forward) >= _LEAST_REPEATS and spent > budget_s:
            break
        times = _once(call, clock)
        forward.append(times.forward_s)
        backward.append(times.backward_s)
        spent += times.forward_s + times.backward_s
    return Times(statistics.median(forward), statistics.median(backward))


def _once(call: Call, clock: Clock) -> Times:
    args, kwargs, wanted = call.prepared()
    start = clock()
    result = call.target(*args, **kwargs)
    middle = clock()
    roots = [t for t in pytree.tree_leaves(result) if isinstance(t, Tensor) and t.requires_grad]
    if not wanted or not roots:
        return Times(middle - start, 0.0)
    seeds = [torch.ones_like(root) for root in roots]
    begin = clock()
    torch.autograd.grad(roots, wanted, seeds, allow_unused=True)
    return Times(middle - start, clock() - begin)


def value_bytes(value: Any) -> int:
    """Bytes of a tensor; 0 for anything else (tuples travel by their items)."""
    return value.numel() * value.element_size() if isinstance(value, Tensor) else 0
