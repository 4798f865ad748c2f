"""Kernels, and what it takes to compile them."""

from __future__ import annotations

import numba
import pytest

from pipectl.compiled import compiling_s


@pytest.mark.skipif(bool(numba.config.DISABLE_JIT), reason="nothing is compiled")
def test_compiling_is_timed_and_calling_is_not() -> None:
    kernel = numba.njit(lambda x: x + 1)
    before = compiling_s()
    assert kernel(1) == 2
    compiled = compiling_s()
    assert compiled > before
    assert kernel(2) == 3
    assert compiling_s() == compiled
