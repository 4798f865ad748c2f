"""The device of a rank (CPU or accelerator), and settings of a process that computes.

By default, glibc returns every large block to the system when it is freed, and the next tensor of
that size gets new pages, each of which the system clears at its first use. A training step frees
and allocates the same sizes repeatedly, so this takes up to a third of its time. So the process
keeps freed blocks; its peak is the same, since all of them were in use at the peak. Before the
steps, a rank drops the parameters of other stages. These return to the system: between smaller
blocks that stay, little of their memory would fit what training allocates.
"""

from __future__ import annotations

import ctypes
import gc
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path

import psutil
import torch
from torch import Tensor, nn

from pipectl import torch_api
from pipectl.errors import MismatchError
from pipectl.runtime.nodes import node_name
from pipectl.runtime.pages import MessagePages
from pipectl.runtime.staging import CopyStream, DeviceMemory, Staging, bring
from pipectl.runtime.work_clock import WorkClock
from pipectl.spec.models import Training

_TRIM_THRESHOLD, _MMAP_THRESHOLD, _MMAP_MAX = -1, -3, -4
"""Parameters of ``mallopt``, see its manual page; glibc has no other interface."""
_LARGEST, _LARGE_BYTES, _DEFAULT_MMAP_MAX = 2**31 - 1, 2**17, 2**16
_COLLECTIONS = (700, 10, 10)
"""Thresholds of Python's garbage collector, as it begins."""
_WORKSPACES = ":4096:8"
"""Of cuBLAS, so that kernels of several streams do not share one: torch's own advice."""


class Device:
    """The device of a rank, and how its tensors reach MPI: here in place, as on CPUs.

    Attributes:
        route: a description of how they reach MPI.
        staged: whether messages are copied through host memory, piece by piece.
        messages: how tensors of an accelerator become messages; None on CPUs.
        work_clock: measures the work of an accelerator; None on CPUs, which do it within calls.
        message_pages: for large messages that arrive in host memory.
    """

    torch_device = torch.device("cpu")
    route = "in place"
    staged = False
    messages: Staging | DeviceMemory | None = None
    work_clock: WorkClock | None = None
    _peak_bytes = 0
    _copy_bytes = 0

    @cached_property
    def message_pages(self) -> MessagePages:
        """See the attributes."""
        return MessagePages()

    def enter_thread(self) -> None:
        """Make this the current device of the calling thread, which may pass its memory to MPI."""

    def bring(self, tensor: Tensor) -> Tensor:
        """A tensor of the host on this device."""
        return tensor

    def synchronize(self) -> None:
        """Return when all work queued on the device is done."""

    def peak_bytes(self) -> int:
        """Peak memory of this rank: resident on the CPU, allocated on an accelerator.

        A copy for a checkpoint does not count; see :meth:`copying`.
        """
        self._peak_bytes = max(self._peak_bytes, resident_peak_bytes() - self._copy_bytes)
        return self._peak_bytes

    @contextmanager
    def copying(self) -> Iterator[Callable[[int], None]]:
        """A context for making a copy that the peak leaves out until :meth:`end_copy`.

        Yields:
            A function to call with the bytes of the copy; not if none was made.
        """
        self.peak_bytes()  # what was before the copy counts

        def leave_out(size_bytes: int) -> None:
            self._copy_bytes = max(self._copy_bytes, size_bytes)

        yield leave_out

    def end_copy(self) -> None:
        """Count all memory again, from what is resident now, if the system allows that."""
        if self._copy_bytes and reset_resident_peak():
            self._copy_bytes = 0

    def usable_bytes(self) -> int | None:
        """Memory that tensors of this process can have on an accelerator; None on the CPU."""
        return None

    def free_bytes(self) -> int:
        """Memory that is free now."""
        return int(psutil.virtual_memory().available)


def resident_peak_bytes() -> int:
    """Largest resident memory of this process since it started or :func:`reset_resident_peak`."""
    try:
        status = Path("/proc/self/status").read_text(encoding="ascii")
        peak = next(line for line in status.splitlines() if line.startswith("VmHWM"))
        return int(peak.split()[1]) * 1024
    except (OSError, StopIteration):
        return int(psutil.Process().memory_info().rss)


def reset_resident_peak() -> bool:
    """Begin anew with :func:`resident_peak_bytes`; returns whether the system allows that."""
    try:
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    except OSError:
        return False
    return True


class CpuDevice(Device):
    """Tensors live in host memory: MPI reads and writes them in place."""


class AcceleratorDevice(Device):
    """Tensors live on an accelerator (CUDA, XPU, ...).

    Args:
        index: of the accelerator on this node.
        in_place: whether MPI can read and write its memory; else messages pass through host memory.
    """

    def __init__(self, index: int, *, in_place: bool = False) -> None:
        accelerator = torch_api.current_accelerator()
        assert accelerator is not None
        self.torch_device = torch.device(accelerator.type, index)
        torch.accelerator.set_device_index(index)
        self.staged = not in_place
        self.route = "in place" if in_place else "through pinned host memory"
        self._leaving, self._arriving = (CopyStream(self.torch_device) for _ in range(2))
        self.messages = (
            DeviceMemory(self.torch_device)
            if in_place
            else Staging(self.torch_device, self._leaving, self._arriving)
        )
        self.work_clock = WorkClock(self.torch_device)

    def enter_thread(self) -> None:
        """Set the device: threads start with the first accelerator of the node."""
        torch.accelerator.set_device_index(self.torch_device.index)

    def bring(self, tensor: Tensor) -> Tensor:
        """Copy a tensor of the host to the accelerator, while it computes."""
        return bring(tensor, self._arriving, self.torch_device)

    def synchronize(self) -> None:
        """Wait for the current stream, which holds all of the rank's work."""
        torch.accelerator.current_stream().synchronize()

    def peak_bytes(self) -> int:
        """Most bytes allocated on the accelerator."""
        return torch_api.peak_bytes(self.torch_device)

    def usable_bytes(self) -> int:
        """Bytes that tensors of this process can have there, as it has used it so far."""
        return torch_api.usable_bytes(self.torch_device)

    def free_bytes(self) -> int:
        """Free bytes of the accelerator."""
        return torch_api.free_bytes(self.torch_device)


def choose_device(accelerators_per_node: int, local_rank: int, *, in_place: bool = False) -> Device:
    """The accelerator of this rank if the job asks for accelerators, else the CPU.

    Args:
        accelerators_per_node: as in the job spec; 0 for CPU ranks.
        local_rank: index of the rank on its node; ranks share accelerators round-robin.
        in_place: whether MPI can read and write an accelerator's memory.

    Raises:
        MismatchError: the job asks for accelerators, and torch finds none here.
    """
    if accelerators_per_node == 0:
        return CpuDevice()
    if not torch.accelerator.is_available():
        raise MismatchError(
            "the job asks for accelerators (resources.gpus_per_node), and torch finds none on "
            f"{node_name()}",
            hint="measure in a job on such a node: pipectl profile JOB.yaml --scheduler NAME\n"
            "to use the processors: --set resources.gpus_per_node=0",
        )
    index = accelerator_of(accelerators_per_node, local_rank)
    return AcceleratorDevice(index, in_place=in_place)


def accelerator_of(accelerators_per_node: int, local_rank: int) -> int:
    """The index of a rank's accelerator on its node; ranks share accelerators round-robin."""
    return local_rank % min(accelerators_per_node, torch.accelerator.device_count())


def move(tensor: Tensor, device: torch.device) -> None:
    """Move a parameter or buffer in place, so that all holders see it there."""
    moved = tensor.detach().to(device)
    if torch_api.takes_data_of(tensor, moved):
        tensor.data = moved
        return
    if isinstance(tensor, nn.Parameter):  # to a device outside of torch
        moved = nn.Parameter(moved, tensor.requires_grad)
    torch_api.swap(tensor, moved)


def settle_process(threads: int) -> None:
    """Set the number of threads of this process, and make it keep freed memory.

    It collects garbage as ranks do, because garbage counts as memory; commands do so less often.
    """
    torch.set_num_threads(threads)
    keep_freed_memory()
    gc.set_threshold(*_COLLECTIONS)


def set_arithmetic(training: Training) -> None:
    """Set how this process computes, as the job asks for it; before anything runs on a device."""
    torch.set_float32_matmul_precision(training.float32_matmul_precision)
    if training.deterministic:  # read when cuBLAS is first used
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", _WORKSPACES)
    torch.use_deterministic_algorithms(training.deterministic)


def keep_freed_memory() -> None:
    """Make the C library keep memory that is freed from now on, instead of returning it."""
    _set_allocator(_TRIM_THRESHOLD, _LARGEST)
    _set_allocator(_MMAP_MAX, 0)


def return_freed_memory() -> None:
    """Make the C library return large blocks that are allocated from now on to the system when they
    are freed, also after :func:`keep_freed_memory`."""
    _set_allocator(_MMAP_THRESHOLD, _LARGE_BYTES)
    _set_allocator(_MMAP_MAX, _DEFAULT_MMAP_MAX)


def _set_allocator(parameter: int, value: int) -> None:
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # only glibc has it
    if mallopt is not None:
        mallopt(parameter, value)


def release_freed_memory() -> None:
    """Return the kept memory to the system once: the next phase needs other sizes."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
