"""Prints the bytes that a micro-batch saves, and how much this process grew over many of them."""

import mmap
import tempfile
from pathlib import Path

import torch

from pipectl.runtime.offload import DiskStore, Mover, StageOffload
from pipectl.runtime.process import settle_process
from pipectl.schedule import Kind

CPU, FEW, MANY = torch.device("cpu"), 4, 20


def resident_bytes() -> int:
    pages = Path("/proc/self/statm").read_text(encoding="ascii").split()[1]
    return int(pages) * mmap.PAGESIZE


def forward(offload: StageOffload, micro_batch: int, weights: list[torch.Tensor]) -> torch.Tensor:
    x = torch.ones(512, 256)
    with offload.pool(micro_batch, weights).hooks():
        for weight in weights:
            wide = torch.nn.functional.gelu(x @ weight)
            x = torch.nn.functional.layer_norm(x + wide[:, :256] * wide[:, 256:512], (256,))
        return x.sum()


def main() -> None:
    settle_process(1)
    weights = [torch.randn(256, 1024, requires_grad=True) for _ in range(4)]
    with tempfile.TemporaryDirectory() as folder:
        mover = Mover(DiskStore(Path(folder), 0), CPU)
        offload = StageOffload(mover, CPU)
        losses = []
        for micro_batch in range(FEW + MANY):
            losses.append(forward(offload, micro_batch, weights))
            blocks = offload._pools[micro_batch].blocks
            saved = sum(block.memory.numel() for block in blocks if block.memory is not None)
            offload.run(Kind.OFFLOAD_START, micro_batch)
            offload.run(Kind.OFFLOAD_WAIT, micro_batch)
            del blocks
            if micro_batch == FEW:
                before = resident_bytes()
        print(saved, resident_bytes() - before)
        mover.close()


if __name__ == "__main__":
    main()
