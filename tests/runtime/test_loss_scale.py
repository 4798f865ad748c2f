"""The scale of the loss beside torch's own scaler, and what it refuses."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from pipectl.errors import CaptureError
from pipectl.runtime.gradients import LossScale
from pipectl.runtime.manifest import LossScaleState
from pipectl.spec.models import LossScale as Spec

PARTS = Path(__file__).with_name("job_parts.py")


def layer() -> nn.Module:
    torch.manual_seed(2)
    return nn.Linear(3, 2)


@pytest.mark.parametrize("initial", [65536.0, 3e38, 1000.0])
def test_it_unscales_skips_and_grows_as_torchs_scaler_does(initial: float) -> None:
    mine, torchs = layer(), layer()
    scale = LossScale(Spec(initial=initial, growth_interval=2), dict(mine.named_parameters()))
    scaler = torch.amp.GradScaler("cpu", initial, growth_interval=2)
    optimizer = torch.optim.SGD(torchs.parameters(), lr=0.0)
    scaler.scale(torch.zeros(()))
    skipped = []
    for step in range(9):
        bad = [float("inf"), float("nan"), 1.0, 1.0, 1.0, float("inf"), 1.0, 1.0, 1.0][step]
        for model in (mine, torchs):
            for parameter in model.parameters():
                parameter.grad = torch.full_like(parameter, 3.7)
            model.bias.grad[1] *= bad
        before = scaler.get_scale()
        assert scale.value == before
        scaler.unscale_(optimizer)
        skipped.append(scale.unscale())
        scale.update(overflow=skipped[-1])
        scaler.step(optimizer)
        scaler.update()
        assert skipped[-1] is (scaler.get_scale() < before)
        for ours, other in zip(mine.parameters(), torchs.parameters(), strict=True):
            assert torch.equal(ours.grad.nan_to_num(), other.grad.nan_to_num())
    assert skipped == [True, True, False, False, False, True, False, False, False]


def test_a_restored_scale_grows_when_it_would_have_grown() -> None:
    restored = LossScale(Spec(initial=4.0, growth_interval=2), {})
    restored.restore(LossScaleState(8.0, 1))
    assert restored.state == LossScaleState(8.0, 1)
    restored.update(overflow=False)
    assert restored.value == 16.0


def test_parameters_in_half_precision_are_refused() -> None:
    parameters = {"model.head.weight": nn.Parameter(torch.zeros(2, dtype=torch.float16))}
    with pytest.raises(CaptureError, match=r"'head\.weight' is in float16"):
        LossScale(Spec(), parameters)
