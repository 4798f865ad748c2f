"""What ``torch.compiler.is_compiling()`` answers while a model is exported.

It is true then. A model that computes something else for a compiler would train on this, but in
plain PyTorch and in submodules that are kept whole on the other.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FunctionType
from unittest import mock

import torch

from pipectl.faults import is_user_code

_NAMES = ("is_compiling", "is_exporting")


@contextmanager
def answered_as_uncompiled() -> Iterator[list[bool]]:
    """Let the user's code see no compiler; libraries choose by it what can be exported.

    The code of torch's functions is exchanged, as the user may have imported them by their names.

    Yields:
        What their answers would have been, for those that are others.
    """
    changed: list[bool] = []
    with mock.patch.dict(_asking, clear=True):
        patches = []
        for name in _NAMES:
            function = getattr(torch.compiler, name, None)
            if isinstance(function, FunctionType) and not function.__code__.co_freevars:
                real = FunctionType(function.__code__, function.__globals__, name)
                _asking[name] = real, changed
                patches.append((function, function.__code__))
                function.__code__ = _CODES[name]
        try:
            yield changed
        finally:
            for function, code in patches:
                function.__code__ = code


_asking: dict[str, tuple[FunctionType, list[bool]]] = {}


def answer(name: str) -> bool:
    """Answer as torch's function of a name, but that the user's code is not compiled."""
    real, changed = _asking[name]
    frame = sys._getframe(2)
    while frame.f_code.co_name in _NAMES and frame.f_back is not None:  # older names of it
        frame = frame.f_back
    is_true = bool(real())
    if is_true and is_user_code(frame.f_code.co_filename):
        changed.append(True)
        return False
    return is_true


def _is_compiling() -> bool:
    import sys

    return bool(sys.modules["pipectl.capture.compiling"].answer("is_compiling"))


def _is_exporting() -> bool:
    import sys

    return bool(sys.modules["pipectl.capture.compiling"].answer("is_exporting"))


_CODES = {"is_compiling": _is_compiling.__code__, "is_exporting": _is_exporting.__code__}
"""Run with the variables of torch's module, so that they find this one by its name."""
