"""Parameters in the memory of others: refused where training would part them, and nowhere else."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipectl.capture.refusals import refuse_overlaps
from pipectl.errors import CaptureError

SOURCE = """\
from torch import nn

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)
        self.head = nn.Linear(6, 3)
        {code}
    def forward(self, x):
        return self.head(self.b(self.a(x)))
"""
SHARED = {
    "whole": ("self.b.weight = nn.Parameter(self.a.weight.data)", "b.weight"),
    "transposed": ("self.b.weight = nn.Parameter(self.a.weight.data.t())", "b.weight"),
    "row": ("self.b.bias = nn.Parameter(self.a.weight.data[1])", "b.bias"),
    "buffer": ("self.register_buffer('kept', self.a.weight.detach())", "kept"),
    "frozen": ("self.b.bias = nn.Parameter(self.a.weight.data[1], False)", "b.bias"),
    "tied": ("self.b.weight = self.a.weight", ""),
    "copied": ("self.b.weight = nn.Parameter(self.a.weight.data.clone())", ""),
    "neither is trained": (
        "self.a.weight.requires_grad_(False); "
        "self.b.weight = nn.Parameter(self.a.weight.data, False)",
        "",
    ),
}
"""Code, and the name of what shares memory with ``a.weight``; empty if nothing does."""


@pytest.mark.parametrize("materialize", ["eager", "per_rank"])
@pytest.mark.parametrize("kind", SHARED)
def test_memory_that_a_trained_parameter_shares_is_refused(
    kind: str, materialize: str, make_job: Callable[..., Any], tmp_path: Path
) -> None:
    code, name = SHARED[kind]
    path = tmp_path / "parts.py"
    path.write_text(SOURCE.format(code=code))
    if not name:
        assert make_job(f"{path}:Model", materialize=materialize).states
        return
    with pytest.raises(CaptureError, match=rf"model: a\.weight and {name} share memory") as raised:
        make_job(f"{path}:Model", materialize=materialize)
    assert ".clone()" in raised.value.cure
    assert ("self.b.weight = self.a.weight" in raised.value.cure) == (kind != "buffer")


def parameters(**tensors: Tensor) -> dict[str, Tensor]:
    return {name: nn.Parameter(tensor) for name, tensor in tensors.items()}


@pytest.mark.parametrize(
    "states",
    [
        parameters(a=torch.zeros(8)[:3], b=torch.zeros(8)[3:]),
        parameters(**dict(zip("abc", torch.zeros(12).split(4), strict=True))),
        parameters(**dict(zip("ab", torch.zeros(4, 6).split(3, 1), strict=True))),
        parameters(**dict(zip("ab", torch.zeros(8).view(4, 2).unbind(1), strict=True))),
        parameters(a=torch.zeros(0), b=torch.zeros(0)),
        parameters(a=torch.zeros(3, device="meta"), b=torch.zeros(3, device="meta")),
        dict(nn.LSTM(3, 4, num_layers=2).named_parameters()),
        dict(nn.LazyLinear(3).named_parameters()),
    ],
    ids=["halves", "packed", "columns", "interleaved", "empty", "no memory", "recurrent", "lazy"],
)
def test_neighbours_in_one_memory_do_not_overlap(states: dict[str, Tensor]) -> None:
    refuse_overlaps(states)


WHOLE, WIDE = torch.zeros(12), torch.zeros(4, 6)


@pytest.mark.parametrize(
    "states",
    [
        parameters(a=WHOLE[:7], b=WHOLE[6:]),
        parameters(a=WIDE[:, :4], b=WIDE[:, 3:]),
        parameters(a=WHOLE[::2], b=WHOLE[4:5]),
        parameters(a=WHOLE[:1].expand(5), b=WHOLE),
        parameters(a=WHOLE[1:3], b=WHOLE.view(torch.float16)[5:6]),
        parameters(a=WHOLE, b=torch.from_numpy(WHOLE.numpy())[3:]),
        parameters(**dict.fromkeys("ab", torch.zeros(3, device="meta"))),
        parameters(a=WHOLE, b=WHOLE[1:2], c=WHOLE[8:9]),
    ],
    ids=[
        *("one element", "columns", "every other", "expanded", "other type", "by numpy"),
        *("no memory", "after others"),
    ],
)
def test_any_byte_in_common_counts(states: dict[str, Tensor]) -> None:
    with pytest.raises(CaptureError, match="a and b share memory"):
        refuse_overlaps(states)
