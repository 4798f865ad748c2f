"""Settings of a process that computes: a rank, or whoever measures what a rank will take.

By default glibc gives every large block back to the system when it is freed, and the next tensor
of that size is made of fresh pages, each of which the system clears at its first use. A training
step frees and allocates the same sizes over and over, so that takes up to a third of its time. Here
blocks stay with the process; its peak is the same, since that is when they were all in use.
"""

from __future__ import annotations

import ctypes

import torch

_TRIM_THRESHOLD, _MMAP_MAX = -1, -4
"""Parameters of ``mallopt``, see its manual page; glibc offers no other way."""
_LARGEST = 2**31 - 1


def settle_process(threads: int) -> None:
    """Let this process compute with so many threads, and keep the memory that it frees."""
    torch.set_num_threads(threads)
    keep_freed_memory()


def release_freed_memory() -> None:
    """Give back once what this process has kept: what comes next needs other sizes."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def keep_freed_memory() -> bool:
    """Whether the C library could be told so; others than glibc have no need or no way."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    return bool(mallopt(_TRIM_THRESHOLD, _LARGEST)) and bool(mallopt(_MMAP_MAX, 0))
