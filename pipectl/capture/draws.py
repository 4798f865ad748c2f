"""Random numbers that no graph can hold: an export would freeze them.

Torch's shared generator is seeded for every operator that draws from it. Draws from any other
generator are refused, and so are seeds of torch's own, which a graph leaves out. Generators that a
model can reach are found among its objects, and show a draw by their states; those that it makes in
its forward without a seed show one by asking the system for random bytes. Generators of numpy's old
kind (``RandomState(0)``) do this even with a seed.
"""

from __future__ import annotations

import contextlib
import os
import random
import secrets
import sys
import sysconfig
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import count
from types import FrameType
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import nn

from pipectl.capture.factories import is_torch_code
from pipectl.capture.python_state import own_generators
from pipectl.capture.randomness import (
    LIBRARY_GENERATORS,
    SHARED_GENERATORS,
    reseeded,
    states_of,
)
from pipectl.capture.refusals import Refusal, place_at, running_line
from pipectl.faults import is_user_code
from pipectl.objects import generator_state, set_state
from pipectl.torch_api import (
    CALL_OF_A_MODULE,
    FILES_THAT_CALL,
    OpOverload,
    TorchDispatchMode,
)

_PYTHON = sysconfig.get_path("stdlib")
_PACKAGES = ("site-packages", "dist-packages")
_IMPORT = "<frozen importlib"
_OF_TORCH = ("/sympy/", "/mpmath/")
"""Packages with which torch reckons sizes."""
_BETWEEN = (
    __file__,
    secrets.__file__,
    random.__file__,
    contextlib.__file__,
    mock.__file__,
    *FILES_THAT_CALL,
)
"""Files of functions that draw or seed for whoever calls them."""
_OF_STATES = {"getstate", "setstate", "get_state", "set_state"}
"""Functions of the shared generators that draw nothing."""
_NAMESPACES = {
    "_c10d_functional", "_c10d_functional_autograd", "aten", "c10d", "mkl", "mkldnn", "onednn",
    "prim", "prims", "profiler", "quantized", "quantized_decomposed", "rngprims", "sparse",
    "torchaudio", "torchvision",
}  # fmt: skip
"""Namespaces whose operators say by a tag whether they draw, or draw nothing."""


@contextmanager
def refused_draws(wrapper: nn.Module, *, locates: bool = False) -> Iterator[None]:
    """Refuse draws that a graph would freeze, and seeds that it would leave out.

    Args:
        locates: whether to find the line of each draw, which makes an export slower.

    Raises:
        RefusedError: from the export; or at its end, without a line, if only the states of the
            generators show a draw.
    """
    own = own_generators(wrapper)  # the use of those of torch is seen as an argument
    generators = [*LIBRARY_GENERATORS, *(g for g in own if not isinstance(g, torch.Generator))]
    states = _States(generators)

    def refuse(refusal: Refusal) -> None:
        raise refusal.error()

    with ExitStack() as stack:
        for module, name, function in _library_functions():
            stack.enter_context(mock.patch.object(module, name, states.guarded(function)))
        stack.enter_context(watched_entropy(partial(refuse, Refusal.DRAW)))
        stack.enter_context(watched_seeds(partial(refuse, Refusal.SEED), of_any=True))
        if locates:
            stack.enter_context(_located(states.have_changed))
        yield
        if states.have_changed():
            raise Refusal.DRAW.error("")


class _States:
    """The states of generators, which only torch may change through the shared ones."""

    def __init__(self, generators: Sequence[Any]) -> None:
        self._generators = generators
        self._first = self._known = states_of(generators)

    def have_changed(self) -> bool:
        """Return whether somebody has drawn in another way than by guarded functions."""
        return states_of(self._generators) != self._known

    def guarded(self, function: Any) -> Callable[..., Any]:
        """Return a function of ``random`` or ``numpy.random`` that only torch may call.

        Others may read a state, and set what it is or was at first: torch.compile does so from
        whatever line it has reached.

        Raises:
            RefusedError: from the function.
        """

        def call(*args: Any, **kwargs: Any) -> Any:
            is_torch = is_torch_code(_caller().f_code.co_filename)
            if not is_torch and function.__name__ not in _OF_STATES:
                raise Refusal.DRAW.error()
            if self.have_changed():
                raise Refusal.DRAW.error("")
            before = generator_state(function.__self__)
            result = function(*args, **kwargs)
            after = states_of(self._generators)
            if not is_torch and after not in (self._first, self._known):
                set_state(function.__self__, before)
                raise Refusal.DRAW.error()
            self._known = after
            return result

        return call


def is_custom(target: Any) -> bool:
    """Return whether an operator was registered by others than torch (``torch.library``)."""
    return isinstance(target, OpOverload) and target.namespace not in _NAMESPACES


class WatchedDraws(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Finds which custom operators draw random numbers, where they run.

    Args:
        generators: of the model.

    Attributes:
        shared, own: those that draw from the shared generators, and from those of the model.
        calls: how often each was called.
    """

    supports_higher_order_operators = True

    def __init__(self, generators: Sequence[Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.shared, self.own = set[OpOverload](), set[OpOverload]()
        self.calls = Counter[OpOverload]()
        pairs = (SHARED_GENERATORS, self.shared), (generators, self.own)
        self._watched: Sequence[tuple[Sequence[Any], set[OpOverload]]] = pairs

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not is_custom(func):
            return func(*args, **(kwargs or {}))
        self.calls[func] += 1
        before = [states_of(generators) for generators, _ in self._watched]
        result = func(*args, **(kwargs or {}))
        for known, (generators, drawing) in zip(before, self._watched, strict=True):
            if states_of(generators) != known:
                drawing.add(func)
        return result


def _library_functions() -> list[tuple[Any, str, Callable[..., Any]]]:
    """Return the functions that draw from the shared generators, with their modules and names."""
    pairs = [(m, *pair) for m in (random, np.random) for pair in vars(m).items()]
    return [each for each in pairs if getattr(each[2], "__self__", None) in LIBRARY_GENERATORS]


@contextmanager
def watched_entropy(notice: Callable[[], int | None]) -> Iterator[None]:
    """Call a function whenever a module draws from the system, as generators without a seed do.

    Torch and Python's library may: for names of files, for example; and so may imports.

    Args:
        notice: returns a seed for what to draw instead, or None to leave the draw as it is.
    """
    plain_seed: Any = random.Random.seed
    plain_bytes: Any = os.urandom

    def noticed() -> int | None:
        return notice() if _is_of_a_module(_caller()) else None

    def seed(generator: random.Random, a: Any = None, version: int = 2) -> None:
        plain_seed(generator, noticed() if a is None else a, version)

    def urandom(size: int) -> bytes:
        value = noticed()
        drawn: bytes = plain_bytes(size)
        return drawn if value is None else random.Random(value).randbytes(size)

    with (
        mock.patch.object(random.Random, "seed", seed),
        mock.patch.object(random, "_urandom", urandom),
        mock.patch.object(os, "urandom", urandom),
    ):
        yield


@contextmanager
def seeded_draws(generators: Sequence[Any]) -> Iterator[None]:
    """Seed generators, and those that are made within the context without a seed, from Python's
    shared one, which has just been seeded.

    Args:
        generators: of a model; afterwards they are as before.
    """
    first = random.getrandbits(32)
    seeds = count(first)
    with reseeded(generators), watched_entropy(lambda: next(seeds)):
        yield


@contextmanager
def watched_seeds(notice: Callable[[], None], *, of_any: bool = False) -> Iterator[None]:
    """Call a function whenever code outside of torch seeds torch's generator, or sets its state.

    Args:
        of_any: whether also without a function of torch. Nothing can draw from the generator as an
            argument then.
    """
    generator = torch.default_generator
    seed, guard = generator.initial_seed(), _Guard(generator, notice)
    with ExitStack() as stack:
        for module in (torch.random, torch)[: 1 + of_any]:
            stack.enter_context(mock.patch.object(module, "default_generator", guard))
        yield
    if of_any and generator.initial_seed() != seed:  # who has imported the generator itself
        notice()


class _Guard:
    """Stands for torch's generator."""

    def __init__(self, generator: torch.Generator, notice: Callable[[], None]) -> None:
        self._generator, self._notice = generator, notice

    def __getattr__(self, name: str) -> Any:
        is_set = name in ("manual_seed", "seed", "set_state")
        if is_set and not is_torch_code(_caller().f_code.co_filename):
            self._notice()
        return getattr(self._generator, name)


def _caller() -> FrameType:
    """Return the frame that asks for a draw or a seed."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename in _BETWEEN:
        frame = frame.f_back
    return frame


def _is_of_a_module(frame: FrameType | None) -> bool:
    """Return whether a frame is of what a module calls, but for torch, Python's library and
    imports.
    """
    name = frame.f_code.co_filename if frame is not None else ""
    is_pythons = name.startswith(_PYTHON) and not any(each in name for each in _PACKAGES)
    if is_pythons or is_torch_code(name):
        return False
    while frame is not None and frame.f_code.co_name != CALL_OF_A_MODULE:
        if frame.f_code.co_filename.startswith(_IMPORT):
            return False
        frame = frame.f_back
    return frame is not None


@contextmanager
def _located(has_drawn: Callable[[], bool]) -> Iterator[None]:
    """Refuse a draw as soon as the line that draws has run.

    Raises:
        RefusedError: from that line.
    """
    last: dict[FrameType, int] = {}

    def check(frame: FrameType, line: int) -> None:
        if has_drawn():
            sys.settrace(None)
            name = frame.f_code.co_filename
            raise Refusal.DRAW.error(place_at(name, line) if is_user_code(name) else running_line())

    def trace_line(frame: FrameType, event: str, _: object) -> Any:
        if event in ("line", "return"):
            check(frame, last.get(frame, frame.f_lineno))
        last[frame] = frame.f_lineno
        if event == "return":
            last.pop(frame, None)
        return trace_line

    def trace(frame: FrameType, _: str, __: object) -> Any:
        name = frame.f_code.co_filename
        if is_torch_code(name) or not (is_user_code(name) or _is_of_a_package(name)):
            return None
        if frame.f_back is not None:
            check(frame.f_back, frame.f_back.f_lineno)
        return trace_line

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(before)


def _is_of_a_package(name: str) -> bool:
    return any(each in name for each in _PACKAGES) and not any(each in name for each in _OF_TORCH)
