"""What a model keeps in Python objects: attributes of modules, and what these lead to.

No state dict has it and no graph follows it. Objects of torch and of Python's own library are left
out, but for modules, lists, mappings, sets and generators of random numbers.
"""

from __future__ import annotations

import random
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from types import FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from pipectl.faults import is_user_code

_PLAIN = (str, bytes, int, float, complex, type(None), type, FunctionType, ModuleType, nn.Parameter)
_GENERATORS = (random.Random, np.random.Generator, np.random.RandomState, torch.Generator)
_LIBRARIES: tuple[Any, ...] = (random.getstate, np.random.get_state)
LIBRARY_GENERATORS = tuple(function.__self__ for function in _LIBRARIES)
"""What the functions of ``random`` and ``numpy.random`` draw from."""
SHARED_GENERATORS = (torch.default_generator, *LIBRARY_GENERATORS)
_MAPPINGS = (dict, OrderedDict, defaultdict, Counter)
_CONTAINERS = (*_MAPPINGS, list, deque, set)
_SHARED = frozenset({*sys.stdlib_module_names, "torch"})
"""Packages whose objects other code may use at the same time, such as loggers and locks."""


class Number(NamedTuple):
    """A number or truth value in a Python object.

    Args:
        holder: the attributes, mapping or list that has it.
        key: its name, key or index there.
        module: whose attribute it is; None if it lies deeper.
        path: of that module.
    """

    value: Any
    holder: Any
    key: Any
    module: nn.Module | None
    path: str

    def set(self, value: Any) -> None:
        """Put another number in its place."""
        self.holder[self.key] = value


class _Item(NamedTuple):
    """A container, generator or array that a model leads to; ``module`` if these are its own."""

    value: Any
    path: str
    module: nn.Module | None = None
    are_attributes: bool = False


@contextmanager
def undisturbed(model: nn.Module, tensors: Iterable[Tensor]) -> Iterator[None]:
    """Afterwards these tensors, what modules keep in Python, and generators are as before."""
    own = [item.value for item in _items(model)]
    values = [*SHARED_GENERATORS, *own, *filter(_is_restorable, tensors)]
    before = [(value, _copy(value)) for value in values]
    try:
        yield
    finally:
        for value, copy in before:
            with suppress(RuntimeError, TypeError, ValueError):  # it takes no values
                _restore(value, copy)


def numbers_in(model: nn.Module) -> dict[str, Number]:
    """All numbers by name, such as ``blocks.3.calls`` or ``meter.counts['steps']``."""
    numbers: dict[str, Number] = {}
    for value, path, module, are_attributes in _items(model):
        if type(value) in (*_MAPPINGS, list):
            for key, item in value.items() if isinstance(value, dict) else enumerate(value):
                if isinstance(item, int | float):
                    name = f"{path}.{key}" if are_attributes else f"{path}[{key!r}]"
                    numbers[name] = Number(item, value, key, module, path)
    return numbers


def _items(model: nn.Module) -> Iterator[_Item]:
    """All that a model leads to and that may change, each once."""
    seen = {id(value) for value in (*model.parameters(), *model.buffers(), *model.modules())}
    waiting = [_Item(vars(m), path, m, True) for path, m in model.named_modules()]
    while waiting:
        item = waiting.pop()
        value, path = item.value, item.path
        if id(value) in seen:
            continue
        seen.add(id(value))
        if type(value) in _CONTAINERS:
            yield item
            inner: Iterable[Any] = value.items() if isinstance(value, dict) else enumerate(value)
            waiting += [_Item(v, f"{path}.{k}") for k, v in inner if not isinstance(v, _PLAIN)]
        elif isinstance(value, tuple | frozenset):
            waiting += [_Item(v, path) for v in value if not isinstance(v, _PLAIN)]
        elif isinstance(value, MethodType):
            waiting.append(_Item(value.__self__, path))
        elif isinstance(value, np.ndarray) or _generator_state(value) is not None:
            yield item
        elif type(value) is Tensor:
            if _is_restorable(value):
                yield item
        elif _has_own_attributes(value):
            waiting.append(_Item(vars(value), path, None, True))


def _is_restorable(tensor: Tensor) -> bool:
    """Whether a tensor can be compared with a copy, and copied into."""
    if tensor.layout is not torch.strided or tensor.is_meta:
        return False
    sizes = zip(tensor.shape, tensor.stride(), strict=True)
    overlaps = any(size > 1 and stride == 0 for size, stride in sizes)
    return not (overlaps or tensor.is_quantized or tensor.is_inference())


def _has_own_attributes(value: Any) -> bool:
    if isinstance(value, nn.Module | SimpleNamespace):
        return True
    package = type(value).__module__.partition(".")[0]
    return package not in _SHARED and isinstance(getattr(value, "__dict__", None), dict)


def _copy(value: Any) -> Any:
    """What :func:`_restore` needs of a value."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, np.ndarray):
        return value.copy()
    if type(value) in _MAPPINGS:
        return dict(value)
    return list(value) if type(value) in _CONTAINERS else _generator_state(value)


def _restore(value: Any, copy: Any) -> None:
    """Give an object its former content; one that still has it is left alone."""
    if isinstance(value, Tensor):
        if not torch.equal(value, copy):
            with torch.no_grad():
                if value.shape != copy.shape:
                    value.resize_(copy.shape)
                value.copy_(copy)
    elif isinstance(value, np.ndarray):
        if value.flags.writeable:
            value[...] = copy
    elif type(value) in _CONTAINERS:
        if _identities(value) != _identities(copy):
            value.clear()
            (value.extend if isinstance(value, list | deque) else value.update)(copy)
    elif isinstance(value, random.Random):
        value.setstate(copy)
    elif isinstance(value, np.random.Generator):
        value.bit_generator.state = copy
    else:
        value.set_state(copy)


def _identities(container: Any) -> list[int]:
    pairs = container.items() if isinstance(container, dict) else enumerate(container)
    return [number for key, value in pairs for number in (hash(key), id(value))]


def _generator_state(value: Any) -> Any:
    """The state of a generator of random numbers; None for all else, and for one that has none."""
    if isinstance(value, random.Random) and not isinstance(value, random.SystemRandom):
        return value.getstate()
    if isinstance(value, np.random.Generator):
        return value.bit_generator.state
    return value.get_state() if isinstance(value, torch.Generator | np.random.RandomState) else None


def own_generators(root: nn.Module) -> list[Any]:
    """Generators that modules keep in attributes, and those among the globals of their code.

    Those of the system are left out: they have neither a seed nor a state.
    """
    generators = {id(own[name]): own[name] for own, name in generator_places(root)}
    return [each for each in generators.values() if not isinstance(each, random.SystemRandom)]


def states_of(generators: Sequence[Any]) -> list[str]:
    """What tells whether somebody drew from them."""

    def in_bytes(array: Any) -> bytes:
        return np.asarray(array).tobytes()

    arrays = (Tensor, np.ndarray)
    states = map(_generator_state, generators)
    return [repr(pytree.tree_map_only(arrays, in_bytes, state)) for state in states]


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


def generator_places(root: nn.Module) -> list[tuple[dict[str, Any], str]]:
    """Where generators lie: dictionaries of modules and of the files of users' classes."""
    spaces = [vars(module) for module in root.modules()]
    for kind in {type(module): None for module in root.modules()}:
        code = sys.modules.get(kind.__module__)
        if is_user_code(getattr(code, "__file__", None) or "<"):
            spaces.append(vars(code))
    return [(own, name) for own in spaces for name in own if isinstance(own[name], _GENERATORS)]
