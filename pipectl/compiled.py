"""Machine code for the inner loops of planner and simulator.

A kernel is a plain function of numbers and NumPy arrays. numba compiles it when it is first called
with given types, and keeps the result on disk, so a fresh installation is slow once. Kernels follow
IEEE arithmetic in the order written (no ``fastmath``, no threads): results are the same on every
machine, and the same as Python's with ``NUMBA_DISABLE_JIT=1``, which is the way to debug one.

Importing numba takes a third of a second: only what plans or simulates imports this module.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar

import numba

P = ParamSpec("P")
R = TypeVar("R")


def compiled(function: Callable[P, R]) -> Callable[P, R]:
    """Decorate a kernel; kernels may call each other."""
    kernel: Callable[P, R]
    try:
        kernel = numba.njit(cache=True)(function)
    except RuntimeError:  # no folder can be written: compile in every process
        kernel = numba.njit()(function)
    return kernel
