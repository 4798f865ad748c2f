"""Parameters in the memory of others: refused where training would part them, and nowhere else."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipectl.capture import CapturedJob
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
}
APART = {
    "tied": "self.b.weight = self.a.weight",
    "copied": "self.b.weight = nn.Parameter(self.a.weight.data.clone())",
    "neither is trained": (
        "self.a.weight.requires_grad_(False); "
        "self.b.weight = nn.Parameter(self.a.weight.data, False)"
    ),
}


def job_of(make_job: Callable[..., Any], folder: Path, code: str, materialize: str) -> CapturedJob:
    (folder / "parts.py").write_text(SOURCE.format(code=code))
    return make_job(f"{folder / 'parts.py'}:Model", materialize=materialize)


@pytest.mark.parametrize("materialize", ["eager", "per_rank"])
@pytest.mark.parametrize("kind", SHARED)
def test_a_view_of_a_trained_parameter_is_refused(
    kind: str, materialize: str, make_job: Callable[..., Any], tmp_path: Path
) -> None:
    code, name = SHARED[kind]
    with pytest.raises(CaptureError, match=rf"model: a\.weight and {name} share memory") as found:
        job_of(make_job, tmp_path, code, materialize)
    assert ".clone()" in found.value.cure
    assert ("self.b.weight = self.a.weight" in found.value.cure) == (kind != "buffer")


@pytest.mark.parametrize("materialize", ["eager", "per_rank"])
@pytest.mark.parametrize("kind", APART)
def test_one_parameter_of_two_names_and_memory_of_its_own_are_fine(
    kind: str, materialize: str, make_job: Callable[..., Any], tmp_path: Path
) -> None:
    assert job_of(make_job, tmp_path, APART[kind], materialize).states


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


def overlapping() -> dict[str, dict[str, Tensor]]:
    whole, wide = torch.zeros(12), torch.zeros(4, 6)
    return {
        "one element": parameters(a=whole[:7], b=whole[6:]),
        "columns": parameters(a=wide[:, :4], b=wide[:, 3:]),
        "every other": parameters(a=whole[::2], b=whole[4:5]),
        "expanded": parameters(a=whole[:1].expand(5), b=whole),
        "other type": parameters(a=whole[1:3], b=whole.view(torch.float16)[5:6]),
        "by numpy": parameters(a=whole, b=torch.from_numpy(whole.numpy())[3:]),
        "no memory": parameters(**dict.fromkeys("ab", torch.zeros(3, device="meta"))),
        "behind others": parameters(a=whole, b=whole[1:2], c=whole[8:9]),
    }


@pytest.mark.parametrize("kind", overlapping())
def test_any_byte_in_common_counts(kind: str) -> None:
    with pytest.raises(CaptureError, match="a and b share memory"):
        refuse_overlaps(overlapping()[kind])
