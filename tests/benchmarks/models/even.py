"""Models whose layers all cost the same, so that an even cut exists."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

CLASSES = 10


class Convolutions(nn.Module):
    """Two convolutions with BatchNorm beside a skip connection."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(channels, channels, 3, padding=1, bias=False),
            nn.BatchNorm2d(channels),
            nn.ReLU(),
            nn.Conv2d(channels, channels, 3, padding=1, bias=False),
            nn.BatchNorm2d(channels),
        )

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(x + self.layers(x))


class EvenCNN(nn.Module):
    """Equal blocks between a thin beginning and a thin end."""

    def __init__(self, blocks: int, channels: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, channels, 1)
        self.blocks = nn.ModuleList(Convolutions(channels) for _ in range(blocks))
        self.head = nn.Linear(channels, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean((2, 3)))


def cnn(blocks: int = 8, channels: int = 32) -> EvenCNN:
    return EvenCNN(blocks, channels)


class Additions(nn.Module):
    """Hardly anything to compute: in each layer, one parameter is added."""

    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.terms = nn.ParameterList(nn.Parameter(torch.zeros(width)) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for term in self.terms:
            x = x + term
        return x


def additions(layers: int = 2, width: int = 4) -> Additions:
    return Additions(layers, width)


class Vectors(Dataset[tuple[Tensor, Tensor]]):
    """Vectors of ones; the targets are the same."""

    def __init__(self, samples: int, width: int = 4) -> None:
        self.samples, self.width = samples, width

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return torch.ones(self.width), torch.ones(self.width)
