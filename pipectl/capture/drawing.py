"""Draws from the generators of python and numpy, which a graph would freeze."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch

_TORCH = str(Path(torch.__file__).parent)


class DrawError(Exception):
    """A model draws from a generator that is not torch's; the text names the function."""


@contextmanager
def refused_draws() -> Iterator[None]:
    """While a model is exported: let the functions of ``random`` and ``numpy.random`` fail.

    Raises:
        DrawError: from the export, where the model calls one of them.
    """
    with ExitStack() as stack:
        for module in (random, np.random):
            for name, function in list(vars(module).items()):
                if _draws(function):
                    refused = _refusing(function, f"{module.__name__}.{name}")
                    stack.enter_context(mock.patch.object(module, name, refused))
        yield


def _draws(function: Any) -> bool:
    """Whether it is a method of the generator that the module's functions share."""
    owner = getattr(function, "__self__", None)
    return callable(function) and isinstance(owner, random.Random | np.random.RandomState)


def _refusing(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        if sys._getframe(1).f_code.co_filename.startswith(_TORCH):
            return function(*args, **kwargs)
        raise DrawError(f"{name}()")

    return refuse
