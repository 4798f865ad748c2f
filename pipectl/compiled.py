"""Machine code for the inner loops of planner and simulator.

A kernel is a plain function of numbers and NumPy arrays. numba compiles it when it is first called
with given types, and keeps the result on disk, so a fresh installation is slow once. Kernels follow
IEEE arithmetic in the order written (no ``fastmath``, no threads): results are the same on every
machine, and the same as Python's with ``NUMBA_DISABLE_JIT=1``, which is the way to debug one.
A stale cache shows by the time of a kernel's own file: after a change, touch those that call it.

Importing numba takes a third of a second: only what plans or simulates imports this module.
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
    """Seconds that this process has spent on compiling kernels which it did not find on disk."""
    return float(_TIMER.duration) if _TIMER.done else 0.0


def compiled(function: Callable[P, R]) -> Callable[P, R]:
    """Decorate a kernel; kernels may call each other."""
    return _jit(function, _FROM_PYTHON)


def compiled_in_place(function: Callable[P, R]) -> Callable[P, R]:
    """Decorate a kernel that makes no arrays.

    It does not count references to the arrays it is given, which for many small steps takes longer
    than the steps. (``_nrt`` is an option that numba has but does not document.)
    """
    return _jit(function, _IN_PLACE)


def part_of_kernel(function: Callable[P, R]) -> Callable[P, R]:
    """Decorate a function that makes no arrays and that only kernels call.

    It needs no way in from Python, which takes longest to compile.
    """
    return _jit(function, _PART)


class _Index(IndexDataCacheFile):
    """The kernels on disk, none if a version left them whose types were in other modules."""

    def _load_index(self) -> Any:
        try:
            return super()._load_index()  # type: ignore[no-untyped-call]
        except (ImportError, AttributeError):
            return {}


def _jit(function: Callable[P, R], options: dict[str, Any]) -> Callable[P, R]:
    kernel: Callable[P, R]
    try:
        kernel = numba.njit(cache=True, **options)(function)
        if cache := getattr(kernel, "_cache", None):  # not where NUMBA_DISABLE_JIT is set
            cache._cache_file.__class__ = _Index
    except RuntimeError:  # no folder can be written: compile in every process
        kernel = numba.njit(**options)(function)
    if template := getattr(kernel, "get_call_template", None):
        # Calls with a constant would compile a kernel of their own.
        vars(kernel)["get_call_template"] = lambda given, named: template(
            tuple(map(types.unliteral, given)), named
        )
    return kernel
