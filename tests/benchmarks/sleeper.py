"""A model whose operators take a given time and no processor: ranks do not disturb each other."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

WIDTH = 32
FACTORS = Path(os.environ.get("SLEEPER_FACTORS", "/nonexistent"))
"""A rank takes as many times longer as the file says that has its number as its name."""


def _factor() -> float:
    with suppress(OSError, ValueError):
        return float((FACTORS / os.environ.get("PMI_RANK", "0")).read_text())
    return 1.0


@torch.library.custom_op("sleeper::work", mutates_args=())
def work(x: Tensor, seconds: float) -> Tensor:
    """A copy, after some time."""
    time.sleep(seconds * _factor())
    return x.clone()


@work.register_fake
def _(x: Tensor, seconds: float) -> Tensor:
    return torch.empty_like(x)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.seconds = inputs[1]


def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
    return work(gradient, 2 * ctx.seconds), None


work.register_autograd(_backward, setup_context=_keep)


class Block(nn.Module):
    """Takes twice as long backward as forward."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.linear, self.seconds = nn.Linear(WIDTH, WIDTH), seconds

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(work(self.linear(x), self.seconds))


def build(blocks: int = 16, seconds: float = 0.0015) -> nn.Module:
    """The model."""
    return nn.Sequential(*(Block(seconds) for _ in range(blocks)), nn.Linear(WIDTH, 4))


def samples() -> TensorDataset:
    """Random vectors of random classes."""
    draw = torch.Generator().manual_seed(1)
    vectors = torch.randn(512, WIDTH, generator=draw)
    return TensorDataset(vectors, torch.randint(0, 4, (512,), generator=draw))


def job(**more: Any) -> dict[str, Any]:
    """The document of a job that trains the model."""
    return {
        "version": 1,
        "name": "sleeper",
        "site_defaults": False,
        "model": {"factory": f"{__file__}:build"},
        "loss": {"factory": "torch.nn:CrossEntropyLoss"},
        "data": {"factory": f"{__file__}:samples"},
        "optimizer": {"factory": "torch.optim:AdamW", "kwargs": {"lr": 1e-3}},
        **more,
    }
