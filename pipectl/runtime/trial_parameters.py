"""Parameters for trials of an optimizer, while the model's own have no values.

An optimizer's hooks, a list of its own, or a learning-rate schedule may reach the parameters of the
model by another way than the groups. In a trial they cannot write into the model's weights. The
optimizer of a script finds what it finds on a rank: values and gradients of the parameters that it
updates there, and nothing of others.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor, nn

from pipectl.capture import CapturedJob
from pipectl.capture.tensors import is_deferred
from pipectl.objects import seed_everything


@contextmanager
def lent(job: CapturedJob, values: Mapping[str, Tensor]) -> Iterator[dict[str, nn.Parameter]]:
    """Give parameters of some values to a trial, and take the values of the model away meanwhile.

    Those for a script's optimizer are its own parameters.

    Args:
        values: by full name, of any size and type.
    """
    states = [each for each in job.states.values() if not is_deferred(each)]
    kept = [(each.data, each.grad, dict(vars(each))) for each in states]
    own = job.states if job.spec.optimizer.is_of_script else {}
    for each in states:
        put(each, each.data.new_empty(0))
    try:
        yield {name: _holding(own.get(name), value) for name, value in values.items()}
    finally:
        for tensor, (data, gradient, attributes) in zip(states, kept, strict=True):
            put(tensor, data)
            tensor.grad = gradient
            vars(tensor).clear()
            vars(tensor).update(attributes)


def put(tensor: Tensor, value: Tensor) -> None:
    """Give a tensor another value, of any size and type, without writing into its memory."""
    tensor.grad = None  # of the other size
    tensor.data = value


def _holding(tensor: Tensor | None, value: Tensor) -> nn.Parameter:
    if not isinstance(tensor, nn.Parameter) or is_deferred(tensor):
        return nn.Parameter(value)
    put(tensor, value)
    return tensor


@contextmanager
def same_draws(seed: int = 0) -> Iterator[None]:
    """Let every trial draw the same numbers, and leave all generators as they are."""
    python, numpy = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=[]):
            seed_everything(seed)
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
