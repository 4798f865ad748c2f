"""Handing tensors to code that runs eagerly, and its results back, always in the same way.

What such code does may depend on values: an input may have no gradient today, or one in another
layout. A stage must know beforehand what it receives and sends, so inputs always get a gradient,
in the layout of the input, and results that may have a gradient always do.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def enter(tensors: Sequence[Tensor]) -> tuple[list[Tensor], Tensor]:
    """Aliases of tensors that require a gradient, and an anchor for :func:`leave`.

    Where any result of :func:`leave` gets a gradient, each of the tensors gets one, zeros if need
    be, and only once: the sum over its uses inside.
    """
    if not tensors:
        return [], torch.empty(0, requires_grad=True)
    *aliases, anchor = _Enter.apply(*tensors)  # type: ignore[no-untyped-call]
    return aliases, anchor


def leave(anchor: Tensor, tensors: Sequence[Tensor]) -> list[Tensor]:
    """The tensors, all with gradient, as values of their own that may be written in place."""
    return list(_Leave.apply(anchor, *tensors)) if tensors else []  # type: ignore[no-untyped-call]


def anchored(tensor: Tensor) -> Tensor:
    """A tensor with a gradient that leads nowhere, and that may be written in place."""
    return leave(torch.empty(0, requires_grad=True), [tensor])[0]


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.layouts = [_gradient_layout(tensor) for tensor in tensors]
        return (*(tensor.view_as(tensor) for tensor in tensors), torch.empty(0))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor, ...]:
        return tuple(map(_in_layout, gradients, ctx.layouts))


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, _: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        return tuple(tensor.detach() for tensor in tensors)

    @staticmethod
    def backward(_: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        return (torch.zeros(0), *gradients)


def _gradient_layout(tensor: Tensor) -> tuple[Any, ...]:
    """That of the tensor, but for tensors whose elements share memory."""
    strides = torch.empty_like(tensor, device="meta").stride()
    return tensor.shape, strides, tensor.dtype, tensor.device


def _in_layout(gradient: Tensor | None, layout: tuple[Any, ...]) -> Tensor:
    sizes, strides, dtype, device = layout
    if gradient is not None and gradient.stride() == strides:
        return gradient
    made = torch.empty_strided(sizes, strides, dtype=dtype, device=device)
    return made.zero_() if gradient is None else made.copy_(gradient)
