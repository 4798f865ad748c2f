"""Small models of the kinds that other pipelines get wrong, written as a user would write them."""

from __future__ import annotations

import random

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset


class Attention(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        b, t, c = x.shape
        q, k, v = self.qkv(x).view(b, t, 3, self.heads, c // self.heads).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.dropout(self.out(y.transpose(1, 2).reshape(b, t, c)))


class GptBlock(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, heads, dropout)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(dropout)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm_1(x))
        return x + self.mlp(self.norm_2(x))


class Gpt(nn.Module):
    def __init__(self, dropout: float = 0.1, tied: bool = False) -> None:
        super().__init__()
        self.tokens = nn.Embedding(37, 24)
        self.positions = nn.Embedding(12, 24)
        self.blocks = nn.ModuleList([GptBlock(24, 3, dropout) for _ in range(2)])
        self.norm = nn.LayerNorm(24)
        self.head = nn.Linear(24, 37, bias=False)
        if tied:
            self.head.weight = self.tokens.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Residual(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv_1 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm_1 = nn.BatchNorm2d(channels)
        self.conv_2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm_2 = nn.BatchNorm2d(channels)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        y = self.relu(self.norm_1(self.conv_1(x)))
        y = self.norm_2(self.conv_2(y))
        y += x
        return self.relu(y)


class Cnn(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())
        self.blocks = nn.Sequential(*[Residual(8) for _ in range(3)])
        self.head = nn.Linear(8, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.stem(x)).mean((2, 3)))


class Dense(nn.Module):
    """DenseNet-style: every layer reads all before it, so skips cross several stages.

    It also assigns a buffer that autograd has kept for the backward.
    """

    def __init__(self, dropout: float = 0.2) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, 6, 3, padding=1)
        self.layers = nn.ModuleList(
            [
                nn.Sequential(
                    nn.BatchNorm2d(6 + 4 * i), nn.ReLU(), nn.Conv2d(6 + 4 * i, 4, 3, padding=1)
                )
                for i in range(5)
            ]
        )
        self.dropout = nn.Dropout2d(dropout)
        self.head = nn.Linear(26, 10)
        self.register_buffer("scale", torch.ones(26))

    def forward(self, x: Tensor) -> Tensor:
        features = [self.stem(x)]
        for layer in self.layers:
            features.append(self.dropout(layer(torch.cat(features, 1))))
        # The first feature is used once more at the very end, beside uses in every layer.
        total = torch.cat(features, 1).mean((2, 3))
        scaled = total * self.scale
        if self.training:
            self.scale = 0.9 * self.scale + 0.1 * total.detach().mean(0)
        return self.head(scaled) * features[0].mean()


class OwnPrecision(nn.Module):
    """Half precision by its own autocast, with a float32 island, and a part without gradients."""

    def __init__(self, dropout: float = 0.1) -> None:
        super().__init__()
        self.gpt = Gpt(dropout)
        self.register_buffer("usual", torch.zeros(24))

    @torch.autocast("cpu", torch.bfloat16)
    def forward(self, ids: Tensor) -> Tensor:
        x = self.gpt.tokens(ids)
        for block in self.gpt.blocks:
            x = block(x)
            with torch.autocast("cpu", enabled=False):
                weights = x.float().softmax(-1)
                if self.training:
                    with torch.no_grad():
                        self.usual.lerp_(weights.mean((0, 1)), 0.1)
            x = x * (weights - self.usual + 1)
        return self.gpt.head(self.gpt.norm(x)) + self.gpt.positions.weight.mean()


class Gate(nn.Linear):
    """Branches on values, so it is kept whole, and draws random numbers."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return F.dropout(y if float(x.detach().sum()) > 0 else -y, 0.25, self.training)


def gated(dropout: float = 0.1) -> nn.Module:
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(64, 16),
        nn.Tanh(),
        nn.Linear(16, 16),
        Gate(16, 16),
        nn.Dropout(dropout),
        nn.Linear(16, 16),
        nn.Tanh(),
        nn.Linear(16, 10),
    )


class Frozen(nn.Module):
    """Frozen weights, weights that no gradient reaches, and weights that are not used at all."""

    def __init__(self, dropout: float = 0.1) -> None:
        super().__init__()
        self.gpt = Gpt(dropout)
        self.gpt.tokens.requires_grad_(False)
        self.gpt.blocks[0].requires_grad_(False)
        self.gpt.blocks[1].norm_1.weight.requires_grad_(False)
        self.constant = nn.Linear(37, 37)
        self.unused = nn.Linear(3, 3)

    def forward(self, ids: Tensor) -> Tensor:
        outputs = self.gpt(ids)
        return outputs + self.constant(outputs.detach()).detach()


def tied(dropout: float = 0.1) -> nn.Module:
    return Gpt(dropout, tied=True)


gpt, cnn, dense, own_precision, frozen = Gpt, Cnn, Dense, OwnPrecision, Frozen


def token_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs.flatten(0, 1), targets.flatten())


class Tokens(Dataset):
    def __init__(self, count: int = 45) -> None:
        generator = torch.Generator().manual_seed(5)
        self.ids = torch.randint(0, 37, (count, 13), generator=generator)

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.ids[index, :-1], self.ids[index, 1:]


class Sentences(Tokens):
    """Sequences of different lengths, as they are before a job pads them."""

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        inputs, targets = super().__getitem__(index)
        length = 1 + index * 5 % 12
        return inputs[:length], targets[:length]


def valid_tokens(targets: Tensor) -> Tensor:
    return (targets >= 0).sum()


class Images(Dataset):
    """With random augmentation, which every rank that loads a sample must see alike.

    The label depends on it too, so ranks that load inputs and ranks that load targets must agree.
    """

    def __init__(self, count: int = 45) -> None:
        generator = torch.Generator().manual_seed(6)
        self.images = torch.randn(count, 1, 8, 8, generator=generator)
        self.labels = torch.randint(0, 10, (count,), generator=generator)

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        image = self.images[index] * np.random.uniform(0.8, 1.2) + 0.1 * torch.randn(1, 8, 8)
        flipped = random.random() < 0.5
        label = int(self.labels[index])
        return (image.flip(-1), (label + 1) % 10) if flipped else (image, label)


class SpoiltImages(Images):
    """One of them cannot be computed with."""

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        image, label = super().__getitem__(index)
        return (image * float("nan") if index == 13 else image), label


def accuracy(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs.argmax(-1) == targets).float().mean()
