"""Running operators without computing: results have sizes and memory, but no values.

Everything above the operators' kernels is as ever: autograd and autocast see ordinary tensors, so
they record the same graph as with values, views that are written included. (On fake tensors torch
records such views otherwise, and gradients may come in another layout.) Memory that nobody writes
takes no room on a CPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from pipectl.capture.operators import arguments_by_name

_ATEN = torch.ops.aten
_NORMS = frozenset(
    {
        _ATEN.native_layer_norm.default,
        _ATEN.native_group_norm.default,
        _ATEN.native_batch_norm.default,
        _ATEN._native_batch_norm_legit.default,
        _ATEN._native_batch_norm_legit.no_stats,
        _ATEN._batch_norm_with_update.default,
    }
)
"""Operators whose statistics are as wide as their parameters, which fake tensors do not know."""


class Valueless(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While it is entered, operators give tensors of the right form with arbitrary contents.

    Raises:
        RuntimeError: from an operator whose result's form depends on values.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._forms = FakeTensorMode()

    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """The result of one operator."""
        kwargs = kwargs or {}
        if func.is_view:
            return func(*args, **kwargs)
        with self._forms:
            known = pytree.tree_map_only(Tensor, blank, (args, kwargs))
            result = func(*known[0], **known[1])
            if func in _NORMS:
                result = _with_wide_statistics(result, args)
        if func._schema.is_mutable:
            return _in_place(func, result, args, kwargs)
        return pytree.tree_map_only(Tensor, self._real, result)

    def _real(self, form: Tensor) -> Tensor:
        return blank(form)


def _with_wide_statistics(result: tuple[Tensor, ...], args: Sequence[Any]) -> tuple[Tensor, ...]:
    """Results of a norm on a CPU: parameters wider than the values give wider statistics."""
    values, *parameters = (item for item in args if isinstance(item, Tensor))
    if values.device.type != "cpu" or not parameters or parameters[0].dtype == values.dtype:
        return result
    wide = parameters[0].dtype
    return result[0], *(x.to(wide) if x.dtype == values.dtype else x for x in result[1:])


def blank(like: Tensor) -> Tensor:
    """A tensor of the same form in memory of its own."""
    return torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=like.device)


def _in_place(func: OpOverload, result: Any, args: Any, kwargs: Any) -> Any:
    """Results that are arguments are those arguments; the others are new."""
    given = arguments_by_name(func._schema, args, kwargs)
    alone = not isinstance(result, tuple)
    found = []
    for form, returned in zip((result,) if alone else result, func._schema.returns, strict=True):
        written = returned.alias_info
        found.append(_written(func, written, given) if written is not None else _new(form))
    return found[0] if alone else tuple(found)


def _new(form: Any) -> Any:
    return pytree.tree_map_only(Tensor, blank, form)


def _written(func: OpOverload, alias: Any, given: dict[str, Any]) -> Any:
    """The argument that a result is an alias of."""
    return next(
        given[argument.name]
        for argument in func._schema.arguments
        if argument.alias_info is not None and argument.alias_info.before_set == alias.before_set
    )
