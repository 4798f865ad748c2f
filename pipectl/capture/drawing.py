"""Draws from the generators of python and numpy, which a graph would freeze."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import numpy as np

from pipectl.capture.factories import is_torch_code


class DrawError(Exception):
    """A model draws from a generator that is not torch's; the text names the function."""


@contextmanager
def refused_draws() -> Iterator[None]:
    """While a model is exported: let the functions of ``random`` and ``numpy.random`` fail.

    Raises:
        DrawError: from the export, where the model calls one of them; or when it is over, where
            that was seen by their generators alone.
    """
    with ExitStack() as stack:
        generators = _Generators()
        for module in (random, np.random):
            for name, function in list(vars(module).items()):
                if _draws(function):
                    refused = _refusing(function, f"{module.__name__}.{name}", generators)
                    stack.enter_context(mock.patch.object(module, name, refused))
        yield
        generators.check()


class _Generators:
    """Those that the functions of ``random`` and ``numpy.random`` share; made before these fail."""

    def __init__(self) -> None:
        self._python, self._numpy = random.getstate, np.random.get_state
        self._known = self._states()

    def check(self) -> None:
        """Raise if somebody drew."""
        if self._states() != self._known:
            raise DrawError("a function of random or numpy.random, imported by its name")

    def skip(self) -> None:
        """What was drawn since the last look is torch's own."""
        self._known = self._states()

    def _states(self) -> tuple[Any, ...]:
        _, keys, *rest = self._numpy()
        return self._python(), np.asarray(keys).tobytes(), *rest


def _draws(function: Any) -> bool:
    """Whether it is a method of the generator that the module's functions share."""
    owner = getattr(function, "__self__", None)
    return callable(function) and isinstance(owner, random.Random | np.random.RandomState)


def _refusing(
    function: Callable[..., Any], name: str, generators: _Generators
) -> Callable[..., Any]:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        if is_torch_code(sys._getframe(1).f_code.co_filename):
            generators.check()
            found = function(*args, **kwargs)
            generators.skip()
            return found
        raise DrawError(f"{name}()")

    return refuse
