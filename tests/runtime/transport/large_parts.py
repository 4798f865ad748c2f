"""A model whose stages send more than one piece for every micro-batch."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

WIDTH = 600_000


class Wide(nn.Module):
    """Every operator gives, for two samples, more than 4 MiB."""

    def __init__(self) -> None:
        super().__init__()
        self.scales = nn.ParameterList(torch.linspace(0.5, 1.5, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for scale in self.scales:
            x = torch.tanh(x * scale)
        return x


class WideSamples(Dataset):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        draw = torch.Generator().manual_seed(index)
        return torch.randn(WIDTH, generator=draw), torch.randn(WIDTH, generator=draw)
