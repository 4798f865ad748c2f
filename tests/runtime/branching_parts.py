"""A model that branches on values: which of its parameters get a gradient differs by step."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

WIDTH, SAMPLES = 6, 2
TAKEN = (
    ((1, 0), (0, 0)),
    ((0, 1), (0, 0)),
    ((0, 0), (0, 0)),
    ((1, 1), (0, 1)),
    ((0, 0), (1, 0)),
)
"""By step and micro-batch: which of the two branches are taken. Ranks warm up with the first."""


class Samples(Dataset):
    def __len__(self) -> int:
        return len(TAKEN) * 2 * SAMPLES

    def __getitem__(self, index: int) -> tuple[dict[str, Tensor], Tensor]:
        step, rest = divmod(index, 2 * SAMPLES)
        draw = torch.Generator().manual_seed(index)
        taken = torch.tensor(TAKEN[step][rest // SAMPLES])
        x = torch.randn(WIDTH, generator=draw)
        return {"x": x, "taken": taken}, torch.randn(WIDTH, generator=draw)


class Branch(nn.Module):
    """Uses its parameters where it is told to: one of its own, one that both branches have."""

    def __init__(self, shared: nn.Parameter) -> None:
        super().__init__()
        self.own, self.shared = nn.Parameter(torch.ones(WIDTH)), shared

    def forward(self, x: Tensor, taken: Tensor) -> Tensor:
        return x * self.own + self.shared if taken.any() else x * 1.0


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        shared = nn.Parameter(torch.ones(WIDTH))
        self.before, self.first = nn.Linear(WIDTH, WIDTH), Branch(shared)
        self.second, self.behind = Branch(shared), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, taken: Tensor) -> Tensor:
        x = self.first(self.before(x), taken[:, 0])
        return self.behind(self.second(x.tanh(), taken[:, 1]))
