"""Datasets that give every process, or every reading, other samples; and a model that copies them.

A sample is the same vector twice, so that the loss is 0 where input and target are of one reading.
"""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from mpi4py import MPI
from torch import Tensor, nn
from torch.utils.data import Dataset, IterableDataset, default_collate

from pipectl.watch.board import Board

WIDTH = 4


class Copies(Dataset):
    """The same in every process: a vector and its copy."""

    def __init__(self, count: int = 24) -> None:
        generator = torch.Generator().manual_seed(3)
        self.vectors = torch.randn(count, WIDTH, generator=generator)

    def __len__(self) -> int:
        return len(self.vectors)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.vectors[index], self.vectors[index].clone()


class OwnGenerator(Copies):
    """Flips some samples, as libraries for augmentation do."""

    def __init__(self) -> None:
        super().__init__()
        self.random = np.random.default_rng()

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        vector = self.vectors[index] * float(self.random.random())
        return vector, vector.clone()


class ByRank(Copies):
    """The part of a rank, as a sampler for several processes gives it."""

    def __init__(self) -> None:
        super().__init__()
        self.vectors = self.vectors[MPI.COMM_WORLD.rank :: MPI.COMM_WORLD.size].repeat(2, 1)


class StreamByRank(IterableDataset):
    """The same of an iterable."""

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        samples = ByRank()
        return (samples[index] for index in range(len(samples)))


class ByProcess(Copies):
    """Numbered in an order that differs between processes, as that of a set of names does."""

    def __init__(self) -> None:
        super().__init__()
        order = torch.Generator().manual_seed(os.getpid())
        self.vectors = self.vectors[torch.randperm(len(self), generator=order)]


class ByName(Copies):
    """Numbered in the order of a set of names, which follows from the hash seed of the process."""

    def __init__(self) -> None:
        super().__init__()
        names = {f"name {index}" for index in range(len(self))}
        self.vectors = self.vectors[[int(name.removeprefix("name ")) for name in names]]


class Broken(Copies):
    """Its last sample cannot be read."""

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if index == len(self) - 1:
            raise OSError("cannot be read")
        return super().__getitem__(index)


class ByTime(Copies):
    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        vector = self.vectors[index] + time.perf_counter_ns() % 1000 / 1000
        return vector, vector.clone()


class Shifted(Copies):
    """By a number in a file."""

    def __init__(self, file: str) -> None:
        super().__init__()
        self.vectors = self.vectors + float(Path(file).read_text())


class OneOff(Copies):
    """One sample differs."""

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        vector = self.vectors[index]
        if index == 9:
            vector = vector + os.getpid() % 1000
        return vector, vector.clone()


class OwnCollate(Copies):
    """Its collate_fn draws one number for a micro-batch."""

    random = np.random.default_rng(os.getpid())

    def collate_fn(self, samples: list[tuple[Tensor, Tensor]]) -> Any:
        vectors, targets = default_collate(samples)
        factor = float(self.random.random())
        return vectors * factor, targets * factor


class Buffered(IterableDataset):
    """A shuffle buffer seeded by process and time."""

    def __init__(self, count: int = 24) -> None:
        self.copies = Copies(count)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        random = np.random.default_rng((os.getpid(), time.time_ns()))
        return (self.copies[i] for i in random.permutation(len(self.copies)).tolist())


class Stream(IterableDataset):
    """The same in every process."""

    def __init__(self, count: int = 24) -> None:
        self.copies = Copies(count)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return (self.copies[i] for i in range(len(self.copies)))


class Named(Copies):
    """With the place of a file, which differs between nodes and is not computed with."""

    def __getitem__(self, index: int) -> Any:
        vector, target = super().__getitem__(index)
        return {"x": vector, "file": f"/scratch/{os.getpid()}/{index}"}, target


class NamedStream(Stream):
    def __init__(self, count: int = 24) -> None:
        self.copies = Named(count)


class Phased(Stream):
    """Writes down what its rank does when it takes a sample, as the watcher sees it."""

    def __init__(self, file: str) -> None:
        super().__init__()
        self.file = file

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for sample in super().__iter__():
            boards = (each for each in gc.get_objects() if type(each) is Board)
            with Path(self.file).open("a") as stream:
                stream.writelines(f"{board.read().action}\n" for board in boards)
            yield sample


class Copy(nn.Module):
    """The identity at first."""

    def __init__(self, depth: int = 3) -> None:
        super().__init__()
        self.layers = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(depth)])
        for layer in self.layers:
            nn.init.eye_(layer.weight)
            nn.init.zeros_(layer.bias)

    def forward(self, x: Tensor, file: Any = None) -> Tensor:
        return self.layers(x)


class Skewed(Copy):
    """Not the identity, so that weights change."""

    def __init__(self) -> None:
        super().__init__()
        for number, layer in enumerate(self.layers):
            nn.init.constant_(layer.bias, 0.1 * number)


def weight(targets: Tensor) -> Tensor:
    """Of a micro-batch, by its targets."""
    return 1 + targets.abs().sum()
