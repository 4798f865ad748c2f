"""Replicas that sum gradients and agree on buffers; a difference aborts all.

Started as ``mpiexec -n RANKS python -m mpi4py ranks_that_sum.py MODE``.
"""

from __future__ import annotations

import math
import sys
from functools import reduce
from types import SimpleNamespace
from typing import Any

import torch
from mpi4py import MPI
from torch import Tensor

from pipectl.plan import Plan, Stage, StageCost
from pipectl.runtime.device import CpuDevice
from pipectl.runtime.reduction import StageReduction
from pipectl.runtime.replicas import Replicas
from pipectl.runtime.transport import Progress, Wire

SIZES = {"a": 7, "b": 1, "c": 40}


def gradient(name: str, rank: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(100 * rank + len(name) + SIZES[name])
    return torch.randn(SIZES[name], generator=generator).to(dtype)


def check_sums(wire: Wire, dtype: torch.dtype, owners: dict[str, int]) -> None:
    """Every replica has the sum in float32 by rising replica, after the second of two sums.

    Sums begin within the last backward, before all are started, and within no earlier one. The sums
    of leaves with an owner are on this replica alone, and all get what it makes of the leaf.
    """
    leaves = {name: torch.zeros(n, dtype=dtype).requires_grad_() for name, n in SIZES.items()}
    unused = torch.zeros(3, dtype=dtype).requires_grad_()
    buckets = StageReduction(wire, {**leaves, "unused": unused}, owners, bucket_bytes=32)
    for is_last in (False, True, False, True):
        if is_last:
            buckets.arm()
        for leaf in leaves.values():
            leaf.grad = None
        sum((leaves[n] * gradient(n, wire.rank, dtype)).sum() for n in SIZES).backward()
        assert any(bucket.started for bucket in buckets._buckets) is is_last
        if is_last:
            buckets.advance()
            buckets.start()
            buckets.finish()
    assert unused.grad is None
    sums = {}
    for name, leaf in leaves.items():
        parts = [gradient(name, rank, dtype).float() for rank in range(wire.size)]
        sums[name] = reduce(torch.add, parts).to(dtype)
        if owners.get(name, wire.rank) != wire.rank:
            assert leaf.grad is None
            continue
        assert torch.equal(leaf.grad, sums[name]), name
        with torch.no_grad():
            leaf += leaf.grad
    buckets.share()
    assert all(torch.equal(leaf, sums[name]) for name, leaf in leaves.items())


def check_buffers(world: MPI.Intracomm, progress: Progress) -> None:
    """Statistics are means over micro-batches, and counts are sums.

    The first replica computes two micro-batches of the step, others one.
    """
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
    held: Any = {0: SimpleNamespace(buffers=buffers, parameters={}, uses={}, sums=None)}
    replicas = Replicas(world, plan, held, CpuDevice(), progress, buffers)
    buffers["count"] += 1 if world.rank else 2
    buffers["large"] += 1
    buffers["place"].fill_(1 + world.rank)
    buffers["seen"].copy_(torch.tensor([world.rank == 0, False, True]))
    replicas.agree_on_buffers(plan)
    buffers["phase"] = buffers["phase"].imag
    mean = sum(12.0 * replica for replica in range(world.size)) / count
    assert {name: buffer.tolist() for name, buffer in buffers.items()} == {
        "mean": [mean, 2 * mean],
        "phase": [mean],
        "same": [0.1, math.inf],
        "count": [5 + count],
        "large": [2**60 + world.size],
        "place": [1],
        "seen": [True, False, True],
    }


if __name__ == "__main__":
    with Progress(sys.argv[1]) as progress:
        wire = Wire(MPI.COMM_WORLD.Dup(), CpuDevice(), progress)
        for dtype in (torch.float32, torch.bfloat16):
            check_sums(wire, dtype, {})
            check_sums(wire, dtype, {"a": 0, "b": 1})
        check_buffers(MPI.COMM_WORLD, progress)
