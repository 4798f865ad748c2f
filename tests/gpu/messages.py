"""Two ranks that share an accelerator send tensors to each other through host memory, in turns.

Compared with the copies alone: from the accelerator to pinned memory, and back.
"""

from __future__ import annotations

import json
import os
import statistics
import time

import torch
from mpi4py import MPI

from pipectl.runtime.device import AcceleratorDevice
from pipectl.runtime.transport.choice import HELPED, STAGED_BYTES
from pipectl.runtime.transport.transfer import Pieces, Progress, Wire

WORLD = MPI.COMM_WORLD
OTHER, TAG = 1 - WORLD.rank, 1
SIZES = [2**16, 2**20, 2**24, 2**28]


def pass_on(wire: Wire, device: AcceleratorDevice, vector: torch.Tensor) -> None:
    """Rank 0 sends, rank 1 receives and sends back."""
    for sender in (0, 1):
        if WORLD.rank == sender:
            wire.wait([wire.send(vector, OTHER, TAG)])
        else:
            receiving = wire.receive(vector.numel(), vector.dtype, OTHER, TAG, lambda: "a message")
            wire.wait([receiving])
            arrived = wire.arrived(receiving)
            device.synchronize()
            assert torch.equal(arrived, vector)


def main() -> None:
    """Print the seconds of a message, by its size."""
    device = AcceleratorDevice(0)
    sizes = SIZES[:2] if "PIPECTL_GPU_CHECKS" in os.environ else SIZES
    with Progress(
        "thread", Pieces(STAGED_BYTES, HELPED.under_way), device.enter_thread
    ) as progress:
        wire = Wire(WORLD.Dup(), device, progress)
        for size in sizes:
            vector = torch.full((size // 4,), 1.5, device=device.torch_device)
            pinned = torch.empty(size // 4, pin_memory=True)
            times, copies = [], []
            for _ in range(6):
                WORLD.Barrier()
                device.synchronize()
                start = time.perf_counter()
                pass_on(wire, device, vector)
                times.append((time.perf_counter() - start) / 2)
                start = time.perf_counter()
                pinned.copy_(vector, non_blocking=True)
                device.synchronize()
                vector.copy_(pinned, non_blocking=True)
                device.synchronize()
                copies.append(time.perf_counter() - start)
            if WORLD.rank == 0:
                one, other = (round(statistics.median(each[1:]), 6) for each in (times, copies))
                print(json.dumps({f"{size // 1024} KiB": {"message_s": one, "copies_s": other}}))


if __name__ == "__main__":
    main()
