"""The state of an optimizer by parameter name, so that another cut of the model can take it up.

Optimizers keep a dictionary for each parameter: mostly tensors and numbers, in some inside lists
and dictionaries of their own. It is written down as JSON in which tensors are named.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from pipectl.capture.step import own_name
from pipectl.errors import CaptureError

_TENSOR, _TUPLE, _DICT, _FLOAT = "tensor", "tuple", "dict", "float"
_PLAIN = (bool, int, str, type(None))
_COMPARED = (*_PLAIN, float)
_COUNTERS = frozenset({"step", "mu_product"})
"""What optimizers of torch count steps in; all else, also numbers, is where the parameter is."""


def take(
    optimizer: torch.optim.Optimizer, parameters: Mapping[str, nn.Parameter]
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """What an optimizer remembers of some of its parameters.

    Returns:
        Tensors by name, not copied; and by parameter, the JSON of its dictionary.

    Raises:
        CaptureError: it keeps something that cannot be written down.
    """
    tensors: dict[str, Tensor] = {}
    states = {
        name: _encoded(optimizer.state[parameter], name, tensors)
        for name, parameter in parameters.items()
        if parameter in optimizer.state
    }
    return tensors, states


def give(
    optimizer: torch.optim.Optimizer,
    parameter: nn.Parameter,
    state: Any,
    tensor: Callable[[str], Tensor],
) -> None:
    """Put back what an optimizer remembered of a parameter.

    Args:
        state: JSON of :func:`take`.
        tensor: one of its tensors by name, on the CPU.
    """

    def placed(name: str) -> Tensor:
        stored, key = tensor(name), name.rpartition("/")[2]
        on_host = not stored.dim() and _counts_on_host(optimizer, parameter, key)
        return stored if on_host else stored.to(parameter.device)

    optimizer.state[parameter] = _decoded(state, placed)


def of_groups(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """What the parameter groups hold beside parameters, to be compared with later."""
    return [
        {key: _mark(value) for key, value in group.items() if key != "params"}
        for group in optimizer.param_groups
    ]


def refuse_changes(optimizer: torch.optim.Optimizer, before: list[dict[str, Any]]) -> None:
    """Refuse an optimizer that has itself changed its groups since, in a step.

    What a learning-rate schedule changes there comes back when it is walked again. What the
    optimizer counts there would begin anew when a run goes on, as only the state of parameters is
    saved.

    Raises:
        CaptureError: naming what it has changed.
    """
    for now, then in zip(of_groups(optimizer), before, strict=False):
        changed = [key for key in now if key not in then or now[key] != then[key]]
        if changed:
            raise CaptureError(
                f"optimizer: {type(optimizer).__name__} keeps {changed[0]!r} in its parameter "
                "groups and changes it in every step, which a checkpoint cannot hold",
                cure="use an optimizer that keeps its counters in the state of each parameter",
            )


def _mark(value: Any) -> Any:
    """What shows whether a value was changed, without waiting for a device."""
    if isinstance(value, Tensor):
        return id(value), value._version
    if isinstance(value, tuple):
        return tuple(map(_mark, value))
    return value if isinstance(value, _COMPARED) else id(value)


def _counts_on_host(optimizer: torch.optim.Optimizer, parameter: nn.Parameter, key: str) -> bool:
    """Whether what has a name is a number of steps, which torch keeps on the CPU.

    Except where kernels need it, and in ASGD.
    """
    if key not in _COUNTERS or isinstance(optimizer, torch.optim.ASGD):
        return False
    group = next(g for g in optimizer.param_groups if any(p is parameter for p in g["params"]))
    return not (group.get("capturable") or group.get("fused"))


def _encoded(value: Any, path: str, tensors: dict[str, Tensor]) -> Any:
    if isinstance(value, Tensor):
        tensors[path] = value.detach()
        return {_TENSOR: path}
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {_FLOAT: str(value)}
    if isinstance(value, list | tuple):
        items = [_encoded(item, f"{path}/{index}", tensors) for index, item in enumerate(value)]
        return items if isinstance(value, list) else {_TUPLE: items}
    if isinstance(value, dict) and all(isinstance(key, str | int) for key in value):
        pairs = [[key, _encoded(item, f"{path}/{key}", tensors)] for key, item in value.items()]
        return {_DICT: pairs}
    raise CaptureError(
        f"optimizer: the state of {own_name(path)} is a {type(value).__name__}, "
        "which a checkpoint cannot hold",
        cure="use an optimizer whose state is tensors, numbers, and lists and mappings of them",
    )


def _decoded(value: Any, tensor: Callable[[str], Tensor]) -> Any:
    if isinstance(value, list):
        return [_decoded(item, tensor) for item in value]
    if not isinstance(value, dict):
        return value
    ((kind, inner),) = value.items()
    if kind == _TENSOR:
        return tensor(inner)
    if kind == _FLOAT:
        return float(inner)
    if kind == _TUPLE:
        return tuple(_decoded(item, tensor) for item in inner)
    return {key: _decoded(item, tensor) for key, item in inner}
