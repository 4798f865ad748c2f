"""Parameters and buffers to measure operators with."""

from __future__ import annotations

from math import prod

import torch
from torch import Tensor, nn

from pipectl.capture import CapturedJob
from pipectl.capture.step import is_deferred


class SampleStates:
    """A job's own parameters and buffers, or, where they have no memory, stand-ins for a while.

    A stand-in of a parameter is random, in the range that layers are usually initialised in; a
    buffer has the values that the factory gives it, since it may hold indices. Nothing keeps a
    stand-in but its user, so a model of any size can be measured operator by operator.

    Args:
        device: where the tensors are wanted.
    """

    def __init__(self, job: CapturedJob, device: torch.device) -> None:
        self._job = job
        self._device = device

    def __getitem__(self, name: str) -> Tensor:
        """The parameter or buffer of that full name."""
        tensor = self._job.states[name]
        if not is_deferred(tensor):
            return tensor
        if not (isinstance(tensor, nn.Parameter) and tensor.is_floating_point()):
            return self._job.made(name).to(self._device)
        bound = prod(tensor.shape[1:]) ** -0.5
        made = torch.empty_strided(
            tensor.shape, tensor.stride(), dtype=tensor.dtype, device=self._device
        )
        return nn.Parameter(made.uniform_(-bound, bound), tensor.requires_grad)

    def outline(self, name: str) -> Tensor:
        """The same, without values where it has none: for its shape, layout and type."""
        return self._job.states[name]
