"""Replicas that sum gradients and share out updates; every rank says what it found.

Started as ``mpiexec -n RANKS python -m mpi4py ranks_that_sum.py FILE MODE``; rank 0 writes FILE.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from mpi4py import MPI
from torch import Tensor

from pipectl.runtime.device import CpuDevice
from pipectl.runtime.exchange import Exchange
from pipectl.runtime.reduction import StageReduction
from pipectl.runtime.sharding import Sharing, owners_of
from pipectl.runtime.transport import Progress

SIZES = {"a": 7, "b": 1, "c": 40, "unused": 3}


def made(dtype: torch.dtype) -> dict[str, Tensor]:
    return {name: torch.zeros(size, dtype=dtype).requires_grad_() for name, size in SIZES.items()}


def gradient(name: str, rank: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(100 * rank + len(name) + SIZES[name])
    return torch.randn(SIZES[name], generator=generator).to(dtype)


def backward(leaves: dict[str, Tensor], rank: int) -> None:
    used = [name for name in SIZES if name != "unused"]
    for name in used:
        leaves[name].grad = None
    sum((leaves[n] * gradient(n, rank, leaves[n].dtype)).sum() for n in used).backward()


def summed(exchange: Exchange, dtype: torch.dtype, *, shard: bool) -> dict[str, list[float] | None]:
    """The gradients behind the second of two sums, with buckets of a few numbers."""
    leaves = made(dtype)
    owners = owners_of(leaves, exchange.replicas) if shard else {}
    reduction = StageReduction(0, exchange, leaves, owners, bucket_bytes=32)
    backward(leaves, exchange.replica)
    reduction.learn()
    for _ in range(2):
        reduction.arm()
        backward(leaves, exchange.replica)
        reduction.advance()
        reduction.start()
        reduction.finish()
    return {n: None if p.grad is None else p.grad.double().tolist() for n, p in leaves.items()}


def shared(exchange: Exchange) -> dict[str, list[float]]:
    """Parameters behind an update of each by its owner alone."""
    leaves = made(torch.float32)
    owners = owners_of(leaves, exchange.replicas)
    with torch.no_grad():
        for name, owner in owners.items():
            if owner == exchange.replica:
                leaves[name] += 1 + owner
    Sharing(exchange, leaves, owners).share()
    return {name: leaf.tolist() for name, leaf in leaves.items()}


def main(file: Path, mode: str) -> None:
    world = MPI.COMM_WORLD
    with Progress(mode) as progress:
        exchange = Exchange(world.Dup(), CpuDevice(), progress)
        found = {
            "float32": summed(exchange, torch.float32, shard=False),
            "bfloat16": summed(exchange, torch.bfloat16, shard=False),
            "sharded": summed(exchange, torch.float32, shard=True),
            "shared": shared(exchange),
        }
    everyone = world.gather(found)
    if everyone is not None:
        file.write_text(json.dumps(everyone))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
