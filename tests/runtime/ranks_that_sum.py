"""Replicas that sum gradients, share out updates and agree on buffers.

Started as ``mpiexec -n RANKS python -m mpi4py ranks_that_sum.py FILE MODE``; rank 0 writes FILE:
what every rank found.
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from mpi4py import MPI
from torch import Tensor

from pipectl import graph
from pipectl.plan import Plan, Stage, StageCost
from pipectl.runtime.device import CpuDevice
from pipectl.runtime.reduction import StageReduction
from pipectl.runtime.replicas import Replicas
from pipectl.runtime.transport import Progress, Wire

SIZES = {"a": 7, "b": 1, "c": 40, "unused": 3}


def owners_of(parameters: dict[str, Tensor], replicas: int) -> dict[str, int]:
    return graph.owners_of({name: each.nbytes for name, each in parameters.items()}, replicas)


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


def summed(wire: Wire, dtype: torch.dtype, *, shard: bool) -> dict[str, list[float] | None]:
    """The gradients behind the second of two sums, with buckets of a few numbers."""
    leaves = made(dtype)
    owners = owners_of(leaves, wire.size) if shard else {}
    reduction = StageReduction(wire, leaves, owners, bucket_bytes=32)
    for _ in range(2):
        reduction.arm()
        backward(leaves, wire.rank)
        reduction.advance()
        reduction.start()
        reduction.finish()
    return {n: None if p.grad is None else p.grad.double().tolist() for n, p in leaves.items()}


def branching(wire: Wire) -> dict[str, list[float] | None]:
    """Sums of gradients that all replicas have, that one has, and that none has."""
    leaves = made(torch.float32)
    reduction = StageReduction(wire, leaves)
    for name in "ab" if wire.rank else "abc":
        leaves[name].grad = torch.ones_like(leaves[name])
    reduction.start()
    reduction.finish()
    return {n: None if p.grad is None else p.grad.unique().tolist() for n, p in leaves.items()}


def begun(wire: Wire) -> dict[str, list[bool]]:
    """Whether each bucket is on its way behind a backward, before all are started."""
    leaves, found = made(torch.float32), {}
    del leaves["unused"]
    reduction = StageReduction(wire, leaves, bucket_bytes=32)
    for which in ("earlier", "last"):
        if which == "last":
            reduction.arm()
        backward(leaves, wire.rank)
        found[which] = [bucket.started for bucket in reduction._buckets]
    reduction.start()
    reduction.finish()
    return found


def shared(wire: Wire) -> dict[str, list[float]]:
    """Parameters behind an update of each by its owner alone."""
    leaves = made(torch.float32)
    owners = owners_of(leaves, wire.size)
    with torch.no_grad():
        for name, owner in owners.items():
            if owner == wire.rank:
                leaves[name] += 1 + owner
    StageReduction(wire, leaves, owners, bucket_bytes=32).share()
    return {name: leaf.tolist() for name, leaf in leaves.items()}


def agreed(world: MPI.Intracomm, progress: Progress) -> dict[str, list[float]]:
    """Buffers behind a step of which the first replica computes two micro-batches, others one."""
    count = world.size + 1
    stage = Stage(("n",), tuple(range(world.size)), StageCost(1.0, 2.0, 0.0, 0, 0, 0))
    plan = Plan(
        name="agreed",
        fingerprint=None,
        schedule="1f1b",
        warm_up=(1,),
        batch_size=count,
        micro_batch_size=1,
        micro_batches=count,
        stages=(stage,),
        transfers=(),
        node_of_rank=(0,) * world.size,
    )
    buffers = {
        "mean": torch.tensor([12.0, 24.0]) * world.rank,
        "phase": torch.tensor([12.0j]) * world.rank,
        "same": torch.tensor([0.1, math.inf], dtype=torch.float64),
        "count": torch.tensor([5]),
        "large": torch.tensor([2**60]),
        "place": torch.tensor([7], dtype=torch.int32),
        "seen": torch.tensor([False, True, True]),
    }
    held: Any = {0: SimpleNamespace(buffers=buffers, parameters={}, uses={})}
    replicas = Replicas(world, plan, held, CpuDevice(), progress, buffers)
    buffers["count"] += 1 if world.rank else 2
    buffers["large"] += 1
    buffers["place"].fill_(1 + world.rank)
    buffers["seen"].copy_(torch.tensor([world.rank == 0, False, True]))
    replicas.agree_on_buffers(plan)
    buffers["phase"] = buffers["phase"].imag
    return {name: buffer.tolist() for name, buffer in buffers.items()}


def main(file: Path, mode: str) -> None:
    world = MPI.COMM_WORLD
    with Progress(mode) as progress:
        wire = Wire(world.Dup(), CpuDevice(), progress)
        found = {
            "float32": summed(wire, torch.float32, shard=False),
            "bfloat16": summed(wire, torch.bfloat16, shard=False),
            "sharded": summed(wire, torch.float32, shard=True),
            "branching": branching(wire),
            "begun": begun(wire),
            "shared": shared(wire),
            "agreed": agreed(world, progress),
        }
    everyone = world.gather(found)
    if everyone is not None:
        file.write_text(json.dumps(everyone))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
