"""The resident memory of a rank: which part the reported peak counts, and what it keeps.

Started as a program with a name of its functions, it prints what such a rank holds, in bytes.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import psutil
import pytest
import torch

from pipectl.jobs.job import TIGHT_HEAP
from pipectl.runtime.device import CpuDevice, keep_freed_memory, return_freed_memory, settle_process
from pipectl.runtime.offload import DiskStore, Mover
from pipectl.runtime.saved_tensors import SavedTensors
from pipectl.schedule import Kind

MIB = 2**20
CPU, FEW, MANY = torch.device("cpu"), 4, 20


def resident() -> int:
    return psutil.Process().memory_info().rss


def with_a_copy() -> None:
    """Its peak while a copy is made, beside it, after it, and with what is larger then."""
    device = CpuDevice()
    first = device.peak_bytes()
    copy = torch.ones(2**26)
    device.begin_copy(copy.nbytes)
    during = device.peak_bytes()
    kept = [torch.ones(2**24)]
    beside = device.peak_bytes()
    del copy
    device.end_copy()
    after = device.peak_bytes()
    kept.append(torch.ones(2**25))
    print(during - first, beside - first, after - first, device.peak_bytes() - first)


def with_dropped_parameters() -> None:
    """What it keeps of its own parameters and those of others, and what a step adds."""
    return_freed_memory()
    first = resident()
    rows = [(torch.ones(2**18), torch.ones(2**18), torch.ones(8)) for _ in range(64)]
    keep_freed_memory()
    rows = [(own, small) for own, _, small in rows]
    after_drop = resident()
    gradients = [torch.ones(2**18) for _ in range(64)]
    del gradients
    print(after_drop - first, resident() - after_drop)


def with_micro_batches_that_leave() -> None:
    """What a micro-batch saves, and how much the process grows over many of them."""
    settle_process(1)
    weights = [torch.randn(256, 1024, requires_grad=True) for _ in range(4)]
    with tempfile.TemporaryDirectory() as folder:
        mover = Mover(DiskStore(Path(folder), 0), CPU)
        losses, away = [], []
        for micro_batch in range(FEW + MANY):
            away.append(SavedTensors(weights, CPU, mover))
            with away[-1].hooks():
                losses.append(loss(weights))
            saved = sum(block.memory.numel() for block in away[-1].blocks)
            away[-1].move(Kind.OFFLOAD_START)
            away[-1].move(Kind.OFFLOAD_WAIT)
            if micro_batch == FEW:
                before = resident()
        print(saved, resident() - before)
        mover.close()


def loss(weights: list[torch.Tensor]) -> torch.Tensor:
    x = torch.ones(512, 256)
    for weight in weights:
        wide = torch.nn.functional.gelu(x @ weight)
        x = torch.nn.functional.layer_norm(x + wide[:, :256] * wide[:, 256:512], (256,))
    return x.sum()


def measure(what: str, environment: dict[str, str] | None = None) -> list[int]:
    command, environment = [sys.executable, __file__, what], {**os.environ, **(environment or {})}
    return [*map(int, subprocess.check_output(command, env=environment, text=True).split())]


def test_a_copy_for_a_checkpoint_does_not_count() -> None:
    during, beside, after, with_large = measure("with_a_copy")
    assert during < 8 * MIB
    assert beside == pytest.approx(64 * MIB, abs=8 * MIB)
    assert after < 72 * MIB
    assert with_large == pytest.approx(192 * MIB, abs=16 * MIB)  # the copy has 256 MiB


def test_parameters_of_other_ranks_return_to_the_system_and_memory_of_steps_stays() -> None:
    kept, added = measure("with_dropped_parameters")
    assert kept == pytest.approx(64 * MIB, abs=16 * MIB)
    assert added > 48 * MIB


def test_a_rank_does_not_grow_while_micro_batches_leave() -> None:
    saved, grown = measure("with_micro_batches_that_leave", TIGHT_HEAP)
    assert saved > 8 * MIB
    assert grown < saved / 2


if __name__ == "__main__":
    globals()[sys.argv[1]]()
