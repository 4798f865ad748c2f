"""Losses, some of which are no mean over samples, with models and data for them."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset, IterableDataset

WORDS, LENGTH = 11, 9


class Vectors(Dataset):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        x = torch.randn(8, generator=torch.Generator().manual_seed(index))
        return x, x.flip(0)


class Stream(IterableDataset):
    def __iter__(self) -> Any:
        return map(Vectors().__getitem__, range(64))


class Classes(Vectors):
    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return super().__getitem__(index)[0], index % 5


class Named(Vectors):
    def __getitem__(self, index: int) -> dict[str, Tensor]:
        x, y = super().__getitem__(index)
        return {"x": x, "y": y}


class Texts(Dataset):
    """Sequences of which some are padded."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        draw = torch.Generator().manual_seed(index)
        words = torch.randint(WORDS, (LENGTH,), generator=draw)
        targets = words.clone()
        targets[3 + index % (LENGTH - 3) :] = -100
        return words, targets


def plain() -> nn.Module:
    layers = nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(0.3), nn.ReLU(), nn.Linear(16, 8)
    return nn.Sequential(*layers)


def linear() -> nn.Module:
    return nn.Linear(8, 8)


class Language(nn.Module):
    """With ``flat``, samples and positions are one dimension; all words are as likely at first."""

    def __init__(self, flat: bool = False, p: float = 0.0) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(WORDS, 12), nn.Linear(12, WORDS)
        self.flat, self.drop = flat, nn.Dropout(p)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def forward(self, words: Tensor) -> Tensor:
        hidden = self.embed(words)
        return self.head(self.drop(hidden.view(-1, 12) if self.flat else hidden))


class Denoiser(nn.Module):
    """Computes its loss from noise that it draws, as diffusion models do."""

    def __init__(self, reduction: str = "mean") -> None:
        super().__init__()
        self.layer, self.reduction = nn.Linear(9, 8), reduction

    def forward(self, x: Tensor) -> Tensor:
        share, noise = torch.rand(x.shape[0], 1), torch.randn_like(x)
        found = self.layer(torch.cat([x * (1 - share) + noise * share, share], 1))
        return F.mse_loss(found, noise, reduction=self.reduction)


class Branching(nn.Module):
    """Its forward cannot be exported, so it stays one operator, with its loss."""

    def __init__(self, reduction: str, p: float) -> None:
        super().__init__()
        self.layers, self.reduction, self.p = plain(), reduction, p

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        if float(x.sum()) > 1e9:
            x = x * 2
        x = F.dropout(x, self.p, self.training) if self.p else x
        return F.mse_loss(self.layers(x), y, reduction=self.reduction)


class Kept(nn.Module):
    def __init__(self, reduction: str = "mean", p: float = 0.0) -> None:
        super().__init__()
        self.inner = Branching(reduction, p)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.inner(x, y)


class Margin(nn.Module):
    """Has parameters of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.centres = nn.Parameter(torch.eye(8, 5))

    def forward(self, outputs: Tensor, classes: Tensor) -> Tensor:
        return F.cross_entropy(8 * F.normalize(outputs, dim=1) @ self.centres, classes)


class FromCentre(nn.Module):
    """Moves a buffer in every forward."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("centre", torch.zeros(8))

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        loss = F.mse_loss(outputs - self.centre, targets)
        with torch.no_grad():
            self.centre.mul_(0.5).add_(outputs.detach().mean(0))
        return loss


class Random(nn.Module):
    """Draws noise, negatives from all classes, or pairs of samples."""

    def __init__(self, kind: str, reduction: str = "mean") -> None:
        super().__init__()
        self.kind, self.reduction = kind, reduction

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        if self.kind == "noise":
            outputs = F.dropout(outputs, 0.2) + torch.randn_like(outputs)
        elif self.kind == "negatives":
            others = torch.randint(8, (outputs.shape[0], 3))
            outputs = outputs - outputs.gather(1, others).mean(1, keepdim=True)
        elif self.kind == "pairs":
            targets = targets[torch.randperm(targets.shape[0])]
        elif self.kind == "contrast":
            return contrast(outputs + 0.1 * torch.randn_like(outputs), targets)
        return F.mse_loss(outputs, targets, reduction=self.reduction)


def by_batch_size_of_the_job(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs - targets).square().sum() / 16


def by_samples(outputs: Tensor, targets: Tensor) -> Tensor:
    return ((outputs - targets).square() / outputs.shape[0]).sum()


def in_place(outputs: Tensor, targets: Tensor) -> Tensor:
    outputs = outputs * 1
    outputs[:, 0] = 0
    return outputs.sub_(targets).square_().mean()


def contrast(outputs: Tensor, targets: Tensor) -> Tensor:
    scores = F.normalize(outputs, dim=1) @ F.normalize(targets, dim=1).T
    return F.cross_entropy(scores, torch.arange(scores.shape[0]))


def of_words(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs.reshape(-1, WORDS), targets.reshape(-1))


def of_words_by_time(outputs: Tensor, targets: Tensor) -> Tensor:
    return of_words(outputs.transpose(0, 1), targets.T)


def masked(outputs: Tensor, targets: Tensor) -> Tensor:
    mask = targets != -100
    losses = F.cross_entropy(outputs.transpose(1, 2), targets, reduction="none")
    return (losses * (mask / mask.sum())).sum()


def of_texts(outputs: Tensor, targets: Tensor) -> Tensor:
    """A mean over texts of means over their words."""
    mask = targets != -100
    losses = F.cross_entropy(outputs.transpose(1, 2), targets, reduction="none")
    return ((losses * mask).sum(1) / mask.sum(1)).mean()


def undefined(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs - outputs.detach()).sqrt().mean()


def valid(targets: Tensor) -> Tensor:
    return (targets != -100).sum()
