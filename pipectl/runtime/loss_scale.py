"""The scale of the loss in float16, by the rule of ``torch.amp.GradScaler``, for all ranks alike.

Gradients of float16 values are easily too small for their type, so the loss is multiplied by a
scale before the backward. Where that makes a gradient infinite, on any rank, no rank may step.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np
import torch
from mpi4py import MPI
from torch import Tensor, nn

from pipectl.capture.step import own_name
from pipectl.errors import CaptureError
from pipectl.runs import LossScaleState
from pipectl.runtime.waiting import wait
from pipectl.spec.models import LossScale as LossScaleSpec

GROWTH, BACKOFF = 2.0, 0.5
"""What the scale is multiplied by, in the end; the defaults of ``GradScaler``."""


class LossScale:
    """The scale of a training, the same on all ranks at all times.

    Args:
        communicator: of its own.
        parameters: this rank's trained parameters, by full name.

    Raises:
        CaptureError: a parameter is in float16 itself, so that its gradient cannot be unscaled.
    """

    def __init__(
        self,
        communicator: MPI.Comm,
        spec: LossScaleSpec,
        parameters: Mapping[str, nn.Parameter],
    ) -> None:
        refuse_half_parameters(parameters)
        self._communicator = communicator
        self._parameters = tuple(parameters.values())
        self._interval = spec.growth_interval
        self._scale = torch.tensor(spec.initial, dtype=torch.float32)
        self._steps_since = torch.zeros((), dtype=torch.int32)

    @property
    def value(self) -> float:
        """What the loss of the next step is to be multiplied by."""
        return float(self._scale)

    @property
    def state(self) -> LossScaleState:
        """For a checkpoint."""
        return LossScaleState(float(self._scale), int(self._steps_since))

    def restore(self, state: LossScaleState) -> None:
        """Go on from a checkpoint."""
        self._scale.fill_(state.scale)
        self._steps_since.fill_(state.steps_since)

    def unscale(self) -> bool:
        """Divide all gradients by the scale and choose the next one. Collective.

        Returns:
            Whether every gradient of every rank is finite: otherwise the step must be skipped.
        """
        found = np.array([self._unscale_own()], dtype=np.float32)
        wait([self._communicator.Iallreduce(MPI.IN_PLACE, found, MPI.MAX)])
        overflow = torch.from_numpy(found)[0]
        torch._amp_update_scale_(
            self._scale, self._steps_since, overflow, GROWTH, BACKOFF, self._interval
        )
        return not overflow

    def _unscale_own(self) -> float:
        """1 if a gradient of this rank is infinite or undefined, else 0."""
        inverse = self._scale.double().reciprocal().float()
        overflow = 0.0
        for gradients in alike(p.grad for p in self._parameters if p.grad is not None):
            device = gradients[0].device
            found = torch.zeros((), device=device)
            torch._amp_foreach_non_finite_check_and_unscale_(gradients, found, inverse.to(device))
            overflow = max(overflow, float(found))
        return overflow


def refuse_half_parameters(parameters: Mapping[str, nn.Parameter]) -> None:
    """Raise for parameters that are in float16 themselves, as torch does.

    Raises:
        CaptureError: naming the first.
    """
    half = next((n for n, p in parameters.items() if p.dtype == torch.float16), None)
    if half is not None:
        raise CaptureError(
            f"training.precision: float16 trains parameters in float32, but "
            f"{own_name(half)!r} is in float16",
            cure="build the model without .half(); autocast casts where it helps",
        )


def alike(gradients: Iterable[Tensor]) -> list[list[Tensor]]:
    """Gradients in lists of one device and type, as kernels for several tensors want them."""
    found: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for gradient in gradients:
        found.setdefault((gradient.device, gradient.dtype), []).append(gradient)
    return list(found.values())
