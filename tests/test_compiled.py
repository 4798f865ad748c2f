"""Kernels, and what it takes to compile them."""

from __future__ import annotations

import sys
from types import ModuleType

import numba
import pytest

from pipectl.compiled import _Index, compiling_s


@pytest.mark.skipif(bool(numba.config.DISABLE_JIT), reason="nothing is compiled")
def test_compiling_is_timed_and_calling_is_not() -> None:
    kernel = numba.njit(lambda x: x + 1)
    before = compiling_s()
    assert kernel(1) == 2
    compiled = compiling_s()
    assert compiled > before
    assert kernel(2) == 3
    assert compiling_s() == compiled


def test_kernels_that_another_version_has_left_are_compiled_again(tmp_path, monkeypatch):
    types = ModuleType("moved")
    types.Sums = type("Sums", (), {"__module__": "moved"})
    monkeypatch.setitem(sys.modules, "moved", types)
    index = _Index(str(tmp_path), "kernel", 0.0)
    index._save_index({types.Sums: "kernel.1.nbc"})
    assert list(index._load_index()) == [types.Sums]
    monkeypatch.delitem(sys.modules, "moved")
    assert index._load_index() == {}
