"""Weights in bfloat16 for the arithmetic, and in float32 for the optimizer (``bf16-weights``).

The parameters of the job stay float32: the optimizer, clipping, checkpoints and exports see nothing
else. The model computes with copies of them in bfloat16, gets its inputs in bfloat16, and its
outputs go to the loss in float32. The gradient that a micro-batch gives a copy is bfloat16; it is
converted and added to the parameter's own gradient in float32. This is what PyTorch's
``MixedPrecisionPolicy(param_dtype=bfloat16, reduce_dtype=float32, output_dtype=float32)`` computes.

Buffers keep their types, and so do the parameters of norms with running statistics: torch's kernels
want them in the type of the statistics, which would lose small changes in bfloat16.

A model is captured while it holds the copies (:func:`half_weights`), so a graph knows from the
types of its parameters which ones a stage has to copy; see :mod:`.casts`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch
from torch import nn

from pipectl.capture.deferred import Deferred
from pipectl.capture.model_with_loss import NORMS, ModelWithLoss
from pipectl.torch_api import parameters_of

BF16_WEIGHTS = "bf16-weights"
"""The value of ``training.precision``."""


@contextmanager
def half_weights(
    wrapper: ModelWithLoss, precision: str, deferred: Deferred | None = None
) -> Iterator[None]:
    """Let a model compute with bfloat16 copies of its float32 parameters.

    At the end, the gradients that the copies have are added to those of the parameters. Nothing
    happens in another precision.

    Args:
        precision: as in the spec.
        deferred: makes the parameters, if they have no memory.
    """
    if precision != BF16_WEIGHTS:
        yield
        return
    kept = [(p, p.data, p.grad) for p in _copied(wrapper.model)]
    with nullcontext() if deferred is None else deferred.recording():
        halves = [values.to(torch.bfloat16) for _, values, _ in kept]
    for (parameter, _, _), half in zip(kept, halves, strict=True):
        parameter.grad, parameter.data = None, half
    wrapper.arithmetic = torch.bfloat16
    try:
        yield
    finally:
        wrapper.arithmetic = None
        for parameter, values, total in kept:
            found, parameter.grad = parameter.grad, None
            parameter.data = values
            if found is None:
                parameter.grad = total
            else:
                gradient = found.to(values.dtype)
                parameter.grad = gradient if total is None else total.add_(gradient)


def _copied(model: nn.Module) -> list[nn.Parameter]:
    """The parameters that are copied, tied ones once."""
    in_norms = {
        id(each) for m in model.modules() if type(m) in NORMS for each in parameters_of(m).values()
    }
    return [
        each
        for each in model.parameters()
        if each.dtype is torch.float32 and id(each) not in in_norms
    ]
