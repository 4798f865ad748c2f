"""What differs between CPU and accelerator ranks, behind one small interface."""

from __future__ import annotations

from typing import Protocol

import psutil
import torch
from torch import Tensor


class Device(Protocol):
    """The device a rank computes on, and how its tensors reach MPI."""

    torch_device: torch.device

    def synchronize(self) -> None:
        """Return when everything queued on the device is done."""

    def message_buffer(self, count: int, dtype: torch.dtype) -> Tensor:
        """Memory that MPI can write ``count`` elements into."""

    def to_message(self, vector: Tensor) -> Tensor:
        """``vector`` in memory that MPI can read."""

    def from_message(self, buffer: Tensor) -> Tensor:
        """A received buffer as a tensor on the device."""

    def peak_bytes(self) -> int:
        """Most memory this rank has held: resident on the CPU, allocated on an accelerator."""


class CpuDevice:
    """Tensors live in host memory: MPI reads and writes them in place."""

    torch_device = torch.device("cpu")

    def synchronize(self) -> None:
        """Operators on the CPU are done when they return."""

    def message_buffer(self, count: int, dtype: torch.dtype) -> Tensor:
        """Host memory; the allocator hands freed blocks of this size out again."""
        return torch.empty(count, dtype=dtype)

    def to_message(self, vector: Tensor) -> Tensor:
        """The vector itself."""
        return vector

    def from_message(self, buffer: Tensor) -> Tensor:
        """The buffer itself."""
        return buffer

    def peak_bytes(self) -> int:
        """Peak resident memory of the process."""
        return _peak_resident_bytes()


class AcceleratorDevice:
    """Tensors live on an accelerator (CUDA, XPU, ...): messages pass through pinned host memory.

    Args:
        index: of the accelerator on this node.
    """

    def __init__(self, index: int) -> None:
        accelerator = torch.accelerator.current_accelerator()
        assert accelerator is not None
        self.torch_device = torch.device(accelerator.type, index)
        torch.accelerator.set_device_index(index)

    def synchronize(self) -> None:
        """Wait for the current stream, which holds all of the rank's work."""
        torch.accelerator.current_stream().synchronize()

    def message_buffer(self, count: int, dtype: torch.dtype) -> Tensor:
        """Pinned host memory."""
        return torch.empty(count, dtype=dtype, pin_memory=True)

    def to_message(self, vector: Tensor) -> Tensor:
        """A copy in pinned host memory."""
        buffer = self.message_buffer(vector.numel(), vector.dtype)
        buffer.copy_(vector, non_blocking=True)
        self.synchronize()
        return buffer

    def from_message(self, buffer: Tensor) -> Tensor:
        """A copy on the device; complete before the pinned buffer can be reused."""
        tensor = buffer.to(self.torch_device, non_blocking=True)
        self.synchronize()
        return tensor

    def peak_bytes(self) -> int:
        """Most bytes allocated on the accelerator."""
        return int(torch.accelerator.max_memory_allocated(self.torch_device))


def choose_device(accelerators_per_node: int, local_rank: int) -> Device:
    """The accelerator of this rank where the job asks for some, else the CPU.

    Args:
        accelerators_per_node: as the job spec asks; 0 for CPU ranks.
        local_rank: index of the rank on its node; ranks share accelerators in turn.
    """
    if accelerators_per_node == 0 or not torch.accelerator.is_available():
        return CpuDevice()
    count = min(accelerators_per_node, torch.accelerator.device_count())
    return AcceleratorDevice(local_rank % count)


def _peak_resident_bytes() -> int:
    try:
        with open("/proc/self/status", encoding="ascii") as status:  # noqa: PTH123
            peak = next(line for line in status if line.startswith("VmHWM"))
        return int(peak.split()[1]) * 1024
    except (OSError, StopIteration):
        return int(psutil.Process().memory_info().rss)
