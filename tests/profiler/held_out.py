"""Datasets whose factories are also used for held-out data."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, IterableDataset, Subset, TensorDataset, random_split


def build() -> nn.Module:
    return nn.Linear(8, 8)


def of(x: Tensor) -> TensorDataset:
    return TensorDataset(x, x.flip(1))


def drawn(count: int = 64, skip: int = 0, seed: int | None = None) -> TensorDataset:
    """Rows from the generator that pipectl seeds, or from one of their own."""
    generator = None if seed is None else torch.Generator().manual_seed(seed)
    return of(torch.randn(count + skip, 8, generator=generator)[skip:])


def split(part: int = 0) -> Dataset:
    return random_split(of(torch.arange(80.0).view(-1, 1).repeat(1, 8)), [0.75, 0.25])[part]


def subset(seed: int = 0, share: float = 0.75) -> Dataset:
    """A part that a generator of its own has drawn."""
    rows = of(torch.arange(80.0).view(-1, 1).repeat(1, 8))
    order = torch.randperm(80, generator=torch.Generator().manual_seed(seed)).tolist()
    return Subset(rows, order[: int(80 * share)])


class Stream(IterableDataset):
    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return iter(subset())


ORDER = np.random.default_rng().permutation(80).tolist()
NAMES = [int(name[4:]) for name in {f"row {index}" for index in range(80)}]


def by_process(part: int = 0) -> Dataset:
    """A split that each process draws anew."""
    rows = of(torch.arange(80.0).view(-1, 1).repeat(1, 8))
    return Subset(rows, ORDER[:60] if part == 0 else ORDER[60:])


def by_name(part: int = 0) -> Dataset:
    """A split in the order of a set, which is the same in all processes of a run."""
    rows = of(torch.arange(80.0).view(-1, 1).repeat(1, 8))
    return Subset(rows, NAMES[:60] if part == 0 else NAMES[60:])


def constant() -> TensorDataset:
    return of(torch.ones(64, 8))


def few() -> TensorDataset:
    """Three different samples."""
    return of((torch.arange(64.0) % 3).view(-1, 1).repeat(1, 8))
