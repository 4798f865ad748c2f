"""Prints the bytes that a micro-batch saves, and how much this process grew over many of them."""

import mmap
import tempfile
from pathlib import Path

import torch

from pipectl.runtime.device import settle_process
from pipectl.runtime.offload import DiskStore, Mover
from pipectl.runtime.saved_tensors import SavedTensors
from pipectl.schedule import Kind

CPU, FEW, MANY = torch.device("cpu"), 4, 20


def resident_bytes() -> int:
    pages = Path("/proc/self/statm").read_text(encoding="ascii").split()[1]
    return int(pages) * mmap.PAGESIZE


def forward(saved: SavedTensors, weights: list[torch.Tensor]) -> torch.Tensor:
    x = torch.ones(512, 256)
    with saved.hooks():
        for weight in weights:
            wide = torch.nn.functional.gelu(x @ weight)
            x = torch.nn.functional.layer_norm(x + wide[:, :256] * wide[:, 256:512], (256,))
        return x.sum()


def main() -> None:
    settle_process(1)
    weights = [torch.randn(256, 1024, requires_grad=True) for _ in range(4)]
    with tempfile.TemporaryDirectory() as folder:
        mover = Mover(DiskStore(Path(folder), 0), CPU)
        losses, away = [], []
        for micro_batch in range(FEW + MANY):
            away.append(SavedTensors(weights, CPU, mover))
            losses.append(forward(away[-1], weights))
            blocks = away[-1].blocks
            saved = sum(block.memory.numel() for block in blocks if block.memory is not None)
            away[-1].move(Kind.OFFLOAD_START)
            away[-1].move(Kind.OFFLOAD_WAIT)
            del blocks
            if micro_batch == FEW:
                before = resident_bytes()
        print(saved, resident_bytes() - before)
        mover.close()


if __name__ == "__main__":
    main()
