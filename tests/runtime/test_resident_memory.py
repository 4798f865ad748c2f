"""The resident memory of a rank: which part the reported peak counts, and what it keeps.

Started as a program with the name of a function, it is such a rank.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import psutil
import pytest
import torch

from pipectl.batch.script import TIGHT_HEAP
from pipectl.runtime.device import CpuDevice, keep_freed_memory, return_freed_memory, settle_process
from pipectl.runtime.offload import DiskStore, Mover
from pipectl.runtime.saved_tensors import SavedTensors
from pipectl.schedule import Kind

MIB = 2**20
CPU, FEW, MANY = torch.device("cpu"), 4, 20


def resident() -> int:
    return psutil.Process().memory_info().rss


def a_copy_for_a_checkpoint_does_not_count() -> None:
    """While it is made, beside it, behind it, and where more is needed later."""
    device = CpuDevice()
    first = device.peak_bytes()

    def peak() -> float:
        return (device.peak_bytes() - first) / MIB

    with device.copying() as leave_out:
        copy = torch.ones(2**26)  # of 256 MiB
        leave_out(copy.nbytes)
    assert peak() < 8
    kept = [torch.ones(2**24)]
    assert peak() == pytest.approx(64, abs=8)
    del copy
    device.end_copy()
    assert peak() < 72
    kept.append(torch.ones(2**25))
    assert peak() == pytest.approx(192, abs=16)


def parameters_of_other_ranks_return_to_the_system_and_memory_of_steps_stays() -> None:
    return_freed_memory()
    first = resident()
    rows = [(torch.ones(2**18), torch.ones(2**18), torch.ones(8)) for _ in range(64)]
    keep_freed_memory()
    rows = [(own, small) for own, _, small in rows]
    after_drop = resident()
    assert after_drop - first == pytest.approx(64 * MIB, abs=16 * MIB)
    gradients = [torch.ones(2**18) for _ in range(64)]
    del gradients
    assert resident() - after_drop > 48 * MIB


def a_rank_does_not_grow_while_micro_batches_leave() -> None:
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
        grown = resident() - before
        mover.close()
    assert saved > 8 * MIB
    assert grown < saved / 2


def loss(weights: list[torch.Tensor]) -> torch.Tensor:
    x = torch.ones(512, 256)
    for weight in weights:
        wide = torch.nn.functional.gelu(x @ weight)
        x = torch.nn.functional.layer_norm(x + wide[:, :256] * wide[:, 256:512], (256,))
    return x.sum()


@pytest.mark.parametrize(
    ("rank", "environment"),
    [
        (a_copy_for_a_checkpoint_does_not_count, {}),
        (parameters_of_other_ranks_return_to_the_system_and_memory_of_steps_stays, {}),
        (a_rank_does_not_grow_while_micro_batches_leave, {"GLIBC_TUNABLES": TIGHT_HEAP}),
    ],
)
def test_the_memory_of_a_rank_is_what_is_counted_on(rank, environment) -> None:
    command, variables = [sys.executable, __file__, rank.__name__], {**os.environ, **environment}
    done = subprocess.run(command, env=variables, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


if __name__ == "__main__":
    globals()[sys.argv[1]]()
