"""The GPT, with kernels that sleep in every forward: what does not wait for them reads too soon."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "configs" / "models"))
gpt: Any = importlib.import_module("gpt")


@torch.library.custom_op("gpu_checks::delayed", mutates_args=())
def delayed(value: Tensor) -> Tensor:
    """A copy, after some milliseconds."""
    if value.device.type == "cuda":
        torch.cuda._sleep(2_000_000)
    elif value.device.type != "cpu":
        torch.ops.pretended.sleep(1_000_000)
    return value.clone()


@delayed.register_fake
def _(value: Tensor) -> Tensor:
    return torch.empty_like(value)


delayed.register_autograd(lambda _, gradient: delayed(gradient))


class Sleeping(gpt.GPT):  # type: ignore[misc]
    """See above."""

    def forward(self, tokens: Tensor) -> Tensor:
        return delayed(super().forward(tokens))


def build() -> nn.Module:
    """The model."""
    model = Sleeping(vocabulary=98, length=64, layers=4, width=64, heads=4, dropout=0.0)
    for index, block in enumerate(model.blocks):
        if index % 2:
            block.register_forward_hook(lambda _, __, value: delayed(value))
    return model
