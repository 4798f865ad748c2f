"""Models and data of jobs that meet bad situations."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset


class Pausing(nn.Module):
    """Takes its time, in one forward; kept as one operator by ``model.opaque``."""

    def __init__(self, width: int, pause_s: float) -> None:
        super().__init__()
        self.pause_s = pause_s
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(self.pause_s)
        return self.linear(x)


class Slow(nn.Module):
    """Six equal layers, of which one pauses."""

    def __init__(self, width: int = 16, pause_s: float = 0.0) -> None:
        super().__init__()
        self.before = nn.Sequential(*[nn.Linear(width, width) for _ in range(2)])
        self.pausing = Pausing(width, pause_s)
        self.after = nn.Sequential(*[nn.Linear(width, width) for _ in range(3)])
        self.dropout = nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(self.after(self.pausing(self.before(x)))).sum(-1)


class Wide(nn.Module):
    """What its layers keep is large enough to be offloaded."""

    def __init__(self, width: int = 1 << 14) -> None:
        super().__init__()
        self.scales = nn.ParameterList([nn.Parameter(torch.ones(width)) for _ in range(6)])

    def forward(self, x: Tensor) -> Tensor:
        for scale in self.scales:
            x = torch.tanh(x.repeat(1, scale.numel() // x.shape[1]) * scale)
        return x.mean(-1)


class Vectors(Dataset):
    """Where the environment names a directory, its file system is full from here on."""

    def __init__(self, width: int = 16) -> None:
        generator = torch.Generator().manual_seed(4)
        self.vectors = torch.randn(24, width, generator=generator)
        if FILLED in os.environ:
            fill(Path(os.environ[FILLED]))

    def __len__(self) -> int:
        return len(self.vectors)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.vectors[index], self.vectors[index].sum()


FILLED = "TEST_FILLED_DIRECTORY"


def fill(directory: Path) -> None:
    """As another job on the node may do."""
    with (directory / f"filler-{os.getpid()}").open("wb", buffering=0) as stream:
        for size in (1 << 16, 1):
            with suppress(OSError):
                while True:
                    stream.write(bytes(size))
