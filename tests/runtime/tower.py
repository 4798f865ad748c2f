"""A model whose training state fits no rank of its test: 40 blocks of two million parameters."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

WIDTH = 1448


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        nn.init.normal_(self.linear.weight, std=0.02)
        self.register_buffer("table", torch.linspace(0.9, 1.1, WIDTH).cos())

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(x * self.table))


def tower(depth: int = 40) -> nn.Module:
    return nn.Sequential(*[Block() for _ in range(depth)], nn.Linear(WIDTH, 4))


class Vectors(Dataset):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return torch.randn(WIDTH), index % 4
