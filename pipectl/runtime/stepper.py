"""The optimizer over a set of parameters, and its learning-rate schedule."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from pipectl.capture import CapturedJob
from pipectl.capture.factories import call
from pipectl.errors import CaptureError


@dataclass
class Stepper:
    """Optimizer and learning-rate schedule of one rank; both None where it trains nothing."""

    optimizer: torch.optim.Optimizer | None
    lr_scheduler: Any | None

    @property
    def learning_rate(self) -> float:
        """Of the first parameter group; NaN without one."""
        return float(self.optimizer.param_groups[0]["lr"]) if self.optimizer else float("nan")

    def step(self) -> None:
        """Update the parameters, then the learning rate."""
        if self.optimizer is not None:
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
        if self.lr_scheduler is not None:
            self.lr_scheduler.step()


def make_stepper(job: CapturedJob, parameters: Mapping[str, nn.Parameter]) -> Stepper:
    """The optimizer of a job over some of its parameters, and its schedule.

    Args:
        parameters: by full name; frozen ones are left out.

    Raises:
        CaptureError: a factory fails, or the schedule needs a loss to step.
    """
    trained = [parameter for parameter in parameters.values() if parameter.requires_grad]
    schedule = _schedule(job)
    if not trained:
        return Stepper(None, None)
    spec = job.spec.optimizer
    optimizer = call(job.find(spec), spec.factory, trained, **spec.kwargs)
    return Stepper(optimizer, None if schedule is None else schedule(optimizer))


def _schedule(job: CapturedJob) -> Any | None:
    """The learning-rate schedule of a job, to be called with the optimizer."""
    spec = job.spec.lr_scheduler
    if spec is None:
        return None
    function = job.find(spec)
    if function is torch.optim.lr_scheduler.ReduceLROnPlateau:
        raise CaptureError(
            "lr_scheduler: ReduceLROnPlateau needs a measured loss, which only one rank has",
            cure="use a schedule of the step number, such as CosineAnnealingLR",
        )
    return lambda optimizer: call(function, spec.factory, optimizer, **spec.kwargs)
