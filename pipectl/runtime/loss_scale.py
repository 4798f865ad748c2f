"""The scale of the loss in float16, by the rule of ``torch.amp.GradScaler``, for all ranks alike.

Gradients of float16 values are easily too small for their type, so the loss is multiplied by a
scale before the backward. Where that makes a gradient infinite, on any rank, no rank may step.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from pipectl.capture.step import own_name
from pipectl.errors import CaptureError
from pipectl.runs import LossScaleState
from pipectl.spec.models import LossScale as LossScaleSpec

GROWTH, BACKOFF = 2.0, 0.5
"""What the scale is multiplied by, in the end; the defaults of ``GradScaler``."""


class LossScale:
    """The scale of a training, the same on all ranks at all times.

    Args:
        parameters: this rank's trained parameters, by full name.

    Raises:
        CaptureError: a parameter is in float16 itself, so that its gradient cannot be unscaled.
    """

    def __init__(self, spec: LossScaleSpec, parameters: Mapping[str, nn.Parameter]) -> None:
        refuse_half_parameters(parameters)
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
        """Divide this rank's gradients by the scale; whether one is infinite or undefined."""
        inverse = self._scale.double().reciprocal().float()
        overflow = False
        for gradients in alike(p.grad for p in self._parameters if p.grad is not None):
            device = gradients[0].device
            found = torch.zeros((), device=device)
            torch._amp_foreach_non_finite_check_and_unscale_(gradients, found, inverse.to(device))
            overflow = overflow or bool(found)
        return overflow

    def update(self, *, overflow: bool) -> None:
        """Choose the scale of the next step.

        Args:
            overflow: whether any rank found one.
        """
        torch._amp_update_scale_(
            self._scale,
            self._steps_since,
            torch.tensor(float(overflow)),
            GROWTH,
            BACKOFF,
            self._interval,
        )


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
