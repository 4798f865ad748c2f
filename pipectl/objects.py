"""What objects of Python refer to, and how it is set back to what it was at one time.

Objects of torch and of the standard library are ignored, except modules, lists, mappings, sets and
random number generators.
"""

from __future__ import annotations

import operator
import random
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from itertools import chain, islice
from types import BuiltinMethodType, FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, Sampler

from pipectl.errors import CaptureError
from pipectl.units import format_bytes

PLAIN = (str, bytes, int, float, complex, type(None), type, FunctionType, ModuleType, nn.Parameter)
"""Of what nothing is to be looked at."""
CONTAINERS = (dict, OrderedDict, defaultdict, Counter, list, deque, set)
SHARED = frozenset({*sys.stdlib_module_names, "torch"})
"""Packages whose objects other code may use at the same time, such as loggers and locks."""
MAX_ARRAY_BYTES = 2**24
"""Of an array that is compared; a larger one is a table, or data."""
_MAX_ENTRIES = 2**16
"""Of a container of data whose entries are looked at; those of a larger one are samples."""
_MAX_LOOKED_AT = 2**16
"""Objects of data in all; beyond these, they are samples."""
_MAX_KEPT_BYTES = 2**26
"""Of data in all that are copied."""
_SAMPLED = 64
"""Entries of what is not copied that show whether it has changed."""


class Holder(NamedTuple):
    """What has state.

    Args:
        value: a list, a deque, a mapping, or a function with a cache.
        name: for messages; the names of its entries begin with it.
        owner: the class of the object whose attributes these are; None for a container.
    """

    value: Any
    name: str
    owner: type | None = object

    def name_of(self, key: Any) -> str:
        """The name of an entry: ``model.py:STEPS``, ``Net.calls``, ``model.py:COUNTS['a']``."""
        if self.owner is None:
            return f"{self.name}[{key!r}]"
        return f"{self.name}{key}" if self.name.endswith(":") else f"{self.name}.{key}"


class Kept:
    """What datasets and samplers, and the objects that they refer to, keep in Python, as it was at
    one time: counts, lists, generators, small arrays.

    Files that they have opened, and iterators, stay as they are. So do large arrays; large
    containers, which are not copied, must not change. Generators are always set back.

    Args:
        roots: the objects; anything else is ignored.
        besides: what is left as it is.
    """

    def __init__(self, *roots: Any, besides: Iterable[Any] = ()) -> None:
        waiting, known = [Holder([*roots], "", None)], {id(each) for each in besides}
        found = [*islice(items_in(waiting, known, data=True), _MAX_LOOKED_AT)]
        self._restores: list[Callable[[], None]] = []
        self._large: list[tuple[Holder, int, int, list[Any]]] = []
        left = _MAX_KEPT_BYTES
        for holder in sorted(found, key=_is_array):  # what is deep comes last, too
            if (size := _size_of(holder)) <= left:
                left -= size
                self._restores.append(restore_of(holder.value))
            elif type(holder.value) in CONTAINERS and len(holder.value) > _SAMPLED:
                self._large.append((holder, size, len(holder.value), _some_of(holder.value)))

    def restore(self) -> None:
        """Set all back to that time.

        Raises:
            CaptureError: what has changed is too large for that.
        """
        for restore in self._restores:
            with suppress(RuntimeError, TypeError, ValueError):  # it takes no values
                restore()
        for holder, size, count, some in self._large:
            others = _some_of(holder.value)
            if count != len(holder.value) or not all(map(operator.is_, some, others)):
                raise CaptureError(
                    f"data: {holder.name.rpartition('.')[2]!r}, of {count:,} entries "
                    f"({format_bytes(size)}), has changed as data were read, and cannot be set "
                    "back to read them again: with what the dataset and the sampler keep besides, "
                    f"a copy takes more than {format_bytes(_MAX_KEPT_BYTES)}",
                    hint="let the dataset and the sampler keep what changes apart from large data: "
                    "draw an order anew in every epoch (torch.randperm), instead of shuffling one "
                    "that they keep",
                )


@contextmanager
def restoring(*restores: Callable[[], None]) -> Iterator[None]:
    """Call these after the block, the one that may raise last. An error of the block itself comes
    before theirs.
    """
    try:
        yield
    except BaseException:
        for restore in restores:
            with suppress(CaptureError):
                restore()
        raise
    for restore in restores:
        restore()


def _is_array(holder: Holder) -> bool:
    return isinstance(holder.value, np.ndarray | Tensor)


def _size_of(holder: Holder) -> int:
    """The memory in bytes that a copy takes, without what its entries refer to; none for the state
    of a generator.
    """
    value = holder.value
    if _is_array(holder):
        return int(value.nbytes)
    return sys.getsizeof(value) if type(value) in CONTAINERS else 0


def _some_of(value: Any) -> list[Any]:
    """Some of the entries of a container; of a mapping, keys."""
    if isinstance(value, list | deque):
        last = len(value) - 1
        return [value[i * last // (_SAMPLED - 1)] for i in range(_SAMPLED)] if value else []
    return [*islice(_entries(value), _SAMPLED)]


def items_in(
    waiting: list[Holder], visited: set[int], *, modules: bool = True, data: bool = False
) -> Iterator[Holder]:
    """Yield what has to be looked at, and what that refers to.

    Args:
        visited: identities of what is left out.
        modules: whether to look into modules.
        data: whether these are data: to look into datasets and samplers, but neither into modules
            nor into the entries of large containers.
    """
    queue = deque(waiting)
    while queue:
        item = queue.popleft() if data else queue.pop()
        value, path = item.value, item.name
        if id(value) in visited:
            continue
        visited.add(id(value))
        if type(value) in CONTAINERS:
            yield item
            if not data or len(value) <= _MAX_ENTRIES:
                queue += _inside(value, path)
        elif isinstance(value, tuple | frozenset):
            queue += _inside(value, path)
        elif isinstance(value, MethodType | BuiltinMethodType):
            queue.append(Holder(value.__self__, path, None))
        elif _has_content(value):
            yield item
        elif _is_looked_into(value, modules=modules and not data, data=data):
            queue.append(Holder(vars(value), path, type(value)))


def _inside(container: Any, path: str) -> Iterator[Holder]:
    pairs = container.items() if isinstance(container, dict) else enumerate(container)
    return (Holder(v, f"{path}.{k}", None) for k, v in pairs if not isinstance(v, PLAIN))


def _has_content(value: Any) -> bool:
    """Return whether a value is an array, a plain tensor or a generator that can be set back."""
    if type(value) is Tensor:
        return is_restorable(value)
    return isinstance(value, np.ndarray) or generator_state(value) is not None


def _is_looked_into(value: Any, *, modules: bool, data: bool) -> bool:
    if isinstance(value, nn.Module):
        return modules
    return has_attributes(value) or (data and isinstance(value, Dataset | Sampler))


def has_attributes(value: Any) -> bool:
    """Return whether a value is an object of the user, a module or a namespace."""
    return isinstance(value, nn.Module | SimpleNamespace) or (
        type(value).__module__.partition(".")[0] not in SHARED
        and isinstance(getattr(value, "__dict__", None), dict)
    )


def is_restorable(tensor: Tensor) -> bool:
    """Return whether a tensor can be compared with a copy, and written."""
    if tensor.layout is not torch.strided or tensor.is_meta:
        return False
    sizes = zip(tensor.shape, tensor.stride(), strict=True)
    overlaps = any(size > 1 and stride == 0 for size, stride in sizes)
    return not (overlaps or tensor.is_quantized or tensor.is_inference())


def restore_of(value: Any) -> Callable[[], None]:
    """Return a function that restores the present content of an object, if it has changed."""
    if isinstance(value, Tensor):
        return partial(_restore_tensor, value, value.detach().clone())
    if isinstance(value, np.ndarray):
        return partial(_restore_array, value, value.copy())
    if type(value) in CONTAINERS:
        # No copy of a set: that may have another order.
        content = dict(value) if isinstance(value, dict) else list(value)
        return partial(_restore_container, value, content)
    return partial(set_state, value, generator_state(value))


def _restore_tensor(tensor: Tensor, content: Tensor) -> None:
    if not torch.equal(tensor, content):
        with torch.no_grad():
            if tensor.shape != content.shape:
                tensor.resize_(content.shape)
            tensor.copy_(content)


def _restore_array(array: np.ndarray[Any, Any], content: np.ndarray[Any, Any]) -> None:
    if array.flags.writeable:
        array[...] = content


def _restore_container(container: Any, content: Any) -> None:
    if len(container) != len(content) or not all(
        map(operator.is_, _entries(container), _entries(content))
    ):
        container.clear()
        (container.extend if isinstance(container, list | deque) else container.update)(content)


def _entries(container: Any) -> Iterable[Any]:
    return chain(container, container.values()) if isinstance(container, dict) else container


def generator_state(value: Any) -> Any:
    """Return the state of a random number generator; None for anything else, or without a state."""
    if isinstance(value, random.Random) and not isinstance(value, random.SystemRandom):
        return value.getstate()
    if isinstance(value, np.random.Generator):
        return value.bit_generator.state
    return value.get_state() if isinstance(value, torch.Generator | np.random.RandomState) else None


def set_state(generator: Any, state: Any) -> None:
    """Set a generator to a state from :func:`generator_state`."""
    if isinstance(generator, random.Random):
        generator.setstate(state)
    elif isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    else:
        generator.set_state(state)


def seed_everything(seed: int) -> None:
    """Seed Python, NumPy and torch, so that code of the user draws the same everywhere."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
