"""Gradients at the end of a step: clipping and loss scales as torch has them."""

from __future__ import annotations

import pytest
import torch
from mpi4py import MPI
from torch import Tensor, nn

from pipectl.errors import CaptureError
from pipectl.runtime.gradients import (
    LossScale,
    clip_gradients,
    gradient_norms,
    total_norm,
)
from pipectl.runtime.manifest import LossScaleState
from pipectl.runtime.vote import Vote
from pipectl.spec.models import LossScale as Spec


def parameters(size: float, dtypes: tuple[torch.dtype, ...]) -> dict[str, nn.Parameter]:
    """So many that the order of sums shows; the last has no gradient."""
    torch.manual_seed(1)
    found = {}
    for index in range(300):
        dtype = dtypes[index % len(dtypes)]
        gradient = torch.randn(9) * 10.0 ** (index % 4 - 2) * size
        found[str(index)] = nn.Parameter(torch.zeros(9, dtype=dtype))
        found[str(index)].grad = gradient.to(dtype)
    found["299"].grad = None
    return found


def clip(given: dict[str, nn.Parameter], max_norm: float) -> Tensor:
    """Clip by norms that have travelled in a vote; the norm before."""
    vote = Vote(MPI.COMM_SELF, list(given), with_norms=True)
    vote.cast(1, norms=gradient_norms(given))
    result = vote.count()
    assert result is not None
    total = total_norm(result.norms, [parameter.dtype for parameter in given.values()])
    clip_gradients(given.values(), total, max_norm)
    return total


FLOAT, WIDE, BRAIN, HALF = torch.float32, torch.float64, torch.bfloat16, torch.float16


@pytest.mark.parametrize(
    ("largest", "size", "dtypes"),
    [
        *((largest, 1.0, (FLOAT,)) for largest in (1e-3, 0.5, 30.0, 1e9)),
        (1e-6, 1e-9, (FLOAT,)),  # a norm as small as what torch adds to it
        *((0.5, 1.0, dtypes) for dtypes in ((WIDE,), (BRAIN,), (FLOAT, WIDE), (FLOAT, BRAIN))),
        (0.5, 1.0, (FLOAT, BRAIN, HALF, WIDE)),
    ],
    ids=str,
)
def test_clipping_on_one_rank_is_torchs_to_the_bit(
    largest: float, size: float, dtypes: tuple[torch.dtype, ...]
) -> None:
    mine, torchs = parameters(size, dtypes), parameters(size, dtypes)
    expected = nn.utils.clip_grad_norm_(torchs.values(), largest)
    assert torch.equal(clip(mine, largest), expected)
    assert mine.pop("299").grad is None
    assert all(torch.equal(mine[name].grad, torchs[name].grad) for name in mine)
    assert clip({"w": nn.Parameter(torch.zeros(2))}, 1.0) == 0.0  # without any gradient


@pytest.mark.parametrize("initial", [65536.0, 3e38, 1000.0])
def test_a_loss_scale_unscales_skips_and_grows_as_torchs_does(initial: float) -> None:
    mine, torchs = nn.Linear(3, 2), nn.Linear(3, 2)
    scale = LossScale(Spec(initial=initial, growth_interval=2), dict(mine.named_parameters()))
    scaler = torch.amp.GradScaler("cpu", initial, growth_interval=2)
    optimizer = torch.optim.SGD(torchs.parameters(), lr=0.0)
    scaler.scale(torch.zeros(()))
    skipped = []
    for bad in [float("inf"), float("nan"), 1.0, 1.0, 1.0, float("inf"), 1.0, 1.0, 1.0]:
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


def test_a_restored_loss_scale_grows_in_its_time_and_one_of_half_precision_is_refused() -> None:
    restored = LossScale(Spec(initial=4.0, growth_interval=2), {})
    restored.restore(LossScaleState(8.0, 1))
    assert restored.state == LossScaleState(8.0, 1)
    restored.update(overflow=False)
    assert restored.value == 16.0
    half = {"model.head.weight": nn.Parameter(torch.zeros(2, dtype=HALF))}
    with pytest.raises(CaptureError, match=r"'head\.weight' is in float16"):
        LossScale(Spec(), half)
