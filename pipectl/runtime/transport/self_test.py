"""A message from a device to itself: ``python -m mpi4py -m pipectl.runtime.transport.self_test``.

Its only argument is torch's name of the device. It exits with 0 if the message arrives whole; where
MPI cannot read the device's memory, it may as well crash.
"""

from __future__ import annotations

import sys

import torch
from mpi4py import MPI

from pipectl.runtime.transport.transfer import memory

SIZES = (8, 2**16, 2**23)
"""Bytes: the three ways in which MPIs usually send."""


def arrives(device: torch.device, size_bytes: int) -> bool:
    """Whether a vector of random bytes arrives as it was sent."""
    sent = torch.randint(256, (size_bytes,), dtype=torch.uint8, device=device)
    received = torch.zeros_like(sent)
    if device.type != "cpu":
        torch.accelerator.synchronize()
    receiving = MPI.COMM_SELF.Irecv(memory(received, 0, size_bytes), 0, 1)
    MPI.COMM_SELF.Send(memory(sent, 0, size_bytes), 0, 1)
    receiving.Wait()
    return torch.equal(sent, received)


if __name__ == "__main__":
    sys.exit(not all(arrives(torch.device(sys.argv[1]), size_bytes) for size_bytes in SIZES))
