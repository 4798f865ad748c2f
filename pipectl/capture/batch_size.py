"""The number of samples in a captured graph: its symbols, and what the model asked of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from pipectl.capture.factories import is_torch_code


def batch_symbols(inputs: Mapping[str, Any]) -> dict[Any, Any]:
    """Symbols of the number of samples, each with where it is from; none where it is a number.

    A tensor that nobody reads has one of its own, also where all others have numbers.
    """
    tensors = [value for value in inputs.values() if isinstance(value, Tensor) and value.dim()]
    sizes: list[Any] = [tensor.shape[0] for tensor in tensors]
    if not all(isinstance(size, torch.SymInt) and size.node.expr.is_Symbol for size in sizes):
        return {}
    return {size.node.expr: size.node.shape_env for size in sizes}


def conditions_on(symbols: Mapping[Any, Any]) -> tuple[Any, ...]:
    """What was asked of the number of samples by code outside torch, as it was answered.

    What torch asks it asks again for every size.
    """
    environments = {id(environment): environment for environment in symbols.values()}
    asked = [
        environment.replace(guard.expr)  # symbols that turned out to be equal have one name
        for environment in environments.values()
        for guard in environment.guards
        if not _is_of_torch(guard.sloc.framework_loc)
    ]
    return tuple(condition for condition in asked if condition.free_symbols <= symbols.keys())


def _is_of_torch(place: Any) -> bool:
    return is_torch_code(str(getattr(place, "filename", place)))
