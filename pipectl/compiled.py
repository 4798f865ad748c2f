"""Compilation of the inner loops of the planner and the simulator with numba.

A kernel is a plain function of numbers and NumPy arrays. numba compiles it on the first call with
given argument types and caches the result on disk, so only the first run after an installation is
slow. Kernels follow IEEE arithmetic in the order written (no ``fastmath``, no threads), so results
are the same on every machine, and the same as in Python with ``NUMBA_DISABLE_JIT=1``, which is how
to debug a kernel. numba checks only the modification time of a kernel's own file: after a change to
a kernel, touch the files of the kernels that call it.

Importing numba takes a third of a second; only modules that plan or simulate import this module.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import numba
from numba.core import types
from numba.core.caching import IndexDataCacheFile
from numba.core.event import TimingListener, register

P = ParamSpec("P")
R = TypeVar("R")

_FROM_PYTHON = {"no_cfunc_wrapper": True, "error_model": "numpy"}
_IN_PLACE = {"_nrt": False, **_FROM_PYTHON}
_TIMER = TimingListener()  # type: ignore[no-untyped-call]
register("numba:compile", _TIMER)  # type: ignore[no-untyped-call]
_PART = {"no_cpython_wrapper": True, **_IN_PLACE}


def compiling_s() -> float:
    """Return the seconds that this process has spent compiling kernels that were not cached."""
    return float(_TIMER.duration) if _TIMER.done else 0.0


def compiled(function: Callable[P, R]) -> Callable[P, R]:
    """Compile a kernel (decorator). Kernels may call each other."""
    return _jit(function, _FROM_PYTHON)


def compiled_in_place(function: Callable[P, R]) -> Callable[P, R]:
    """Compile a kernel that allocates no arrays (decorator).

    The kernel does not count references to its arguments, which would take longer than many small
    steps. (``_nrt`` is an undocumented option of numba.)
    """
    return _jit(function, _IN_PLACE)


def part_of_kernel(function: Callable[P, R]) -> Callable[P, R]:
    """Compile a function that allocates no arrays and is called only by kernels (decorator).

    It gets no entry point for Python, which is the slowest part to compile.
    """
    return _jit(function, _PART)


class _Index(IndexDataCacheFile):
    """A cache index that reads as empty if this version cannot load it."""

    def _load_index(self) -> Any:
        try:
            return super()._load_index()  # type: ignore[no-untyped-call]
        except (ImportError, AttributeError):
            return {}


def _jit(function: Callable[P, R], options: dict[str, Any]) -> Callable[P, R]:
    kernel: Callable[P, R]
    try:
        kernel = numba.njit(cache=True, **options)(function)
        if cache := getattr(kernel, "_cache", None):  # absent if NUMBA_DISABLE_JIT is set
            cache._cache_file.__class__ = _Index
    except RuntimeError:  # no cache directory is writable: compile in every process
        kernel = numba.njit(**options)(function)
    if template := getattr(kernel, "get_call_template", None):
        # Otherwise a call with a constant compiles a kernel of its own.
        vars(kernel)["get_call_template"] = lambda types_by_place, types_by_name: template(
            tuple(map(types.unliteral, types_by_place)), types_by_name
        )
    return kernel
