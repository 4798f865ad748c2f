"""Whether MPI can read and write an accelerator's memory.

A wrong yes means a crash, or data that never arrive. So MPI's own answer counts only if a test
message of a device to itself arrives too, in a separate process: ``python -m mpi4py -m
pipectl.runtime.transport.gpu_aware DEVICE``, with torch's name of the device. Between processes and
nodes, messages take other ways. So the ranks that will exchange messages try these, too.
"""

from __future__ import annotations

import ctypes
import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from mpi4py import MPI
from torch import Tensor

from pipectl.batch import process
from pipectl.batch.launchers import local_environment
from pipectl.errors import PipectlError
from pipectl.runtime.transport.transfer import memory
from pipectl.runtime.waiting import gather_all, wait
from pipectl.torch_api import current_accelerator

_MODULE = "pipectl.runtime.transport.gpu_aware"
_TIMEOUT_S = 120.0
_SIZES = (8, 2**16, 2**23)
"""Sizes in bytes, one for each of the three ways in which MPIs usually send."""
_QUERIES = {
    "cuda": ("MPIX_Query_cuda_support", 0),
    "rocm": ("MPIX_Query_rocm_support", 2),
    "xpu": ("MPIX_Query_ze_support", 1),
}
"""By kind of accelerator: Open MPI's function, and the number in MPICH's MPIX_GPU_query_support."""
_SWITCHES = ("MPICH_GPU_SUPPORT_ENABLED", "MV2_USE_CUDA", "MV2_USE_ROCM", "PSP_CUDA")


Pair = tuple[int, int]
"""Two ranks: the first sends to the second."""


@dataclass(frozen=True)
class Finding:
    """Whether MPI may use the accelerator's memory, and why."""

    able: bool
    why: str


def find(communicator: MPI.Comm, wanted: str, *, asks: bool) -> Finding:
    """Whether MPI may use the accelerator's memory, the same on all ranks. Collective.

    Args:
        wanted: ``auto``, ``always`` or ``never``, as in the job spec.
        asks: whether this rank runs the test message; one rank per node is enough.
    """
    if wanted != "auto":
        return Finding(wanted == "always", "set in the job")
    mine = judge(_kind(), os.environ, passes_self_test if asks else lambda _: True)
    findings = gather_all(communicator, mine)
    return next((finding for finding in findings if not finding.able), findings[0])


def confirm(
    communicator: MPI.Comm, finding: Finding, pairs: Iterable[Pair], device: torch.device
) -> Finding:
    """The finding after messages between the ranks of a job. Collective.

    Args:
        pairs: the ranks that will send (first) and receive (second).
        device: of this rank.
    """
    own, rank = communicator.Dup(), communicator.rank  # no other message matches
    sent, received = list[Tensor](), dict[Pair, list[Tensor]]()
    requests, numbers = list[MPI.Request](), dict[Pair, int]()
    for number, (source, target) in enumerate(sorted(pairs)):
        numbers[source, target] = number
        if rank == target:
            buffers = [torch.zeros(size, dtype=torch.uint8, device=device) for size in _SIZES]
            _synchronize(device)
            received[source, target] = buffers
            requests += [own.Irecv(memory(buffer, 0, buffer.nbytes), source) for buffer in buffers]
    for pair in numbers:
        if rank == pair[0]:
            vectors = [_random(size, numbers[pair]).to(device) for size in _SIZES]
            _synchronize(device)
            sent += vectors
            requests += [own.Isend(memory(vector, 0, vector.nbytes), pair[1]) for vector in vectors]
    wait(requests)
    own.Free()
    wrong = [
        pair
        for pair, buffers in received.items()
        for buffer in buffers
        if not torch.equal(buffer.cpu(), _random(buffer.numel(), numbers[pair]))
    ]
    first = min((pair for each in gather_all(communicator, wrong) for pair in each), default=None)
    if first is None:
        return finding
    source, target = first
    words = f"a test message from rank {source} to rank {target} arrives with other bytes"
    return Finding(False, f"{finding.why}, but {words}")


def judge(kind: str, environment: Mapping[str, str], test: Callable[[str], bool]) -> Finding:
    """The finding from the answers of MPI and the environment, and the test.

    Args:
        kind: of accelerator: ``cuda``, ``rocm`` or ``xpu``.
        test: sends the message, given torch's name of the device.
    """
    claimed, source = _claim(kind, environment)
    if claimed is False:
        return Finding(False, f"{source} says that MPI cannot")
    if not test("cuda" if kind == "rocm" else kind):
        return Finding(False, f"{source} says that MPI can, but a test message does not arrive")
    return Finding(True, f"{source} says that MPI can, and a test message arrives")


def passes_self_test(device: str) -> bool:
    """Whether a message from the device to itself arrives, in a process that may crash."""
    command = [sys.executable, "-m", "mpi4py", "-m", _MODULE, device]
    try:
        result = process.run(command, hint="", env=local_environment(), timeout_s=_TIMEOUT_S)
    except PipectlError:
        return False
    return result.returncode == 0


def _claim(kind: str, environment: Mapping[str, str]) -> tuple[bool | None, str]:
    """The first definite answer of the environment or MPI, and its source."""
    queried = _queried(kind)
    if queried is not None:
        return queried, "its own query"
    kinds = MPI.COMM_WORLD.Get_info().get("mpi_memory_alloc_kinds")
    if kinds is not None:
        return any(name.split(":")[0] == kind for name in kinds.split(",")), "its list of memory"
    switches = [name for name in _SWITCHES if name in environment]
    if switches:
        return any(environment[name] not in ("", "0") for name in switches), switches[0]
    return False, "nobody"


def _queried(kind: str) -> bool | None:
    """The answer of the library's extension functions; None if it has none."""
    library = _library()
    open_mpi, number = _QUERIES.get(kind, ("", -1))
    query = getattr(library, open_mpi, None) if open_mpi else None
    if query is not None:
        return bool(query())
    query = getattr(library, "MPIX_GPU_query_support", None)
    if query is None:
        return None
    supported = ctypes.c_int(0)
    failed = query(ctypes.c_int(number), ctypes.byref(supported))
    return None if failed else bool(supported.value)


def _library() -> ctypes.CDLL | None:
    try:
        mapped = Path("/proc/self/maps").read_text(encoding="utf-8")
        match = re.search(r"\S+/libmpi(_\w+|ch)?\.so\S*", mapped)
        return ctypes.CDLL(match[0]) if match else None
    except OSError:
        return None


def _kind() -> str:
    accelerator = current_accelerator()
    if accelerator is None:
        return "none"
    return "rocm" if accelerator.type == "cuda" and torch.version.hip else accelerator.type


def _random(size: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(256, (size,), dtype=torch.uint8, generator=generator, device="cpu")


def _synchronize(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize()


def arrives(device: torch.device, size_bytes: int) -> bool:
    """Whether a vector of random bytes arrives as it was sent."""
    sent = _random(size_bytes, 0).to(device)
    received = torch.zeros_like(sent)
    _synchronize(device)
    receiving = MPI.COMM_SELF.Irecv(memory(received, 0, size_bytes), 0, 1)
    MPI.COMM_SELF.Send(memory(sent, 0, size_bytes), 0, 1)
    receiving.Wait()
    return torch.equal(sent, received)


if __name__ == "__main__":
    sys.exit(not all(arrives(torch.device(sys.argv[1]), size_bytes) for size_bytes in _SIZES))
