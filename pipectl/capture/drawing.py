"""Draws from generators other than torch's own, which a graph would freeze."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import nn

from pipectl.capture.factories import is_torch_code
from pipectl.faults import is_user_code


class DrawError(Exception):
    """A model draws from a generator that is not torch's; the text names the function."""


_OWN = (random.Random, np.random.Generator, np.random.RandomState, torch.Generator)
_Place = tuple[dict[str, Any], str]


def own_generators(root: nn.Module) -> list[Any]:
    """Generators that modules keep in attributes, and those among the globals of their code.

    Those of the system are left out: they have neither a seed nor a state.
    """
    generators = {id(own[name]): own[name] for own, name in _places(root)}
    return [each for each in generators.values() if not isinstance(each, random.SystemRandom)]


def states_of(generators: Sequence[Any]) -> list[str]:
    """What tells whether somebody drew from them."""
    return [repr(_state(generator)) for generator in generators]


def reseed(generators: Sequence[Any]) -> None:
    """Seed generators of a model's own from python's shared one, which was seeded just before."""
    for generator in generators:
        seed = random.getrandbits(32)
        if isinstance(generator, torch.Generator):
            generator.manual_seed(seed)
        elif isinstance(generator, np.random.Generator):
            fresh: Any = type(generator.bit_generator)
            generator.bit_generator.state = fresh(seed).state
        else:
            generator.seed(seed)


def _state(generator: Any) -> Any:
    if isinstance(generator, torch.Generator):
        return generator.get_state().tolist()
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    if isinstance(generator, np.random.RandomState):
        _, keys, *rest = generator.get_state(legacy=True)
        return np.asarray(keys).tobytes(), rest
    return generator.getstate()


def _places(root: nn.Module) -> list[_Place]:
    """Where generators lie: dictionaries of modules and of the files of users' classes."""
    spaces = [vars(module) for module in root.modules()]
    for kind in {type(module): None for module in root.modules()}:
        code = sys.modules.get(kind.__module__)
        if is_user_code(getattr(code, "__file__", None) or "<"):
            spaces.append(vars(code))
    return [(own, name) for own in spaces for name in own if isinstance(own[name], _OWN)]


class _Refusing:
    """Stands in for a generator of the model's own."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, method: str) -> Any:
        raise DrawError(f"{self._name}.{method}()")


@contextmanager
def refused_draws(step: nn.Module) -> Iterator[None]:
    """While a model is exported: let the functions of ``random`` and ``numpy.random`` fail.

    So do generators of the model's own, but for those of torch, whose use is seen elsewhere.

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
        for name in ("random", "getrandbits"):  # of the system: also of one made in the forward
            drawn = f"random.SystemRandom().{name}"
            stack.enter_context(mock.patch.object(random.SystemRandom, name, _raising(drawn)))
        for own, name in _places(step):
            if not isinstance(own[name], torch.Generator):
                stack.enter_context(mock.patch.dict(own, {name: _Refusing(name)}))
        yield
        generators.check()


def _raising(name: str) -> Callable[..., Any]:
    def refuse(*_: Any) -> Any:
        raise DrawError(f"{name}()")

    return refuse


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
