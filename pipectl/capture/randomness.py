"""Random number generators, and seeds from (run seed, step, micro-batch, operator).

With these seeds a dropout mask is the same in every plan, whatever ran before on the same rank.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pipectl.capture.regions import accelerator, accelerator_in_use
from pipectl.capture.tensors import is_deferred, octets_of
from pipectl.objects import generator_state, set_state
from pipectl.torch_api import pytree

_MASK = (1 << 64) - 1
GENERATORS = (random.Random, np.random.Generator, np.random.RandomState, torch.Generator)
_LIBRARIES: tuple[Any, ...] = (random.getstate, np.random.get_state)
LIBRARY_GENERATORS = tuple(function.__self__ for function in _LIBRARIES)
"""What the functions of ``random`` and ``numpy.random`` draw from."""
SHARED_GENERATORS = (torch.default_generator, *LIBRARY_GENERATORS)


def seed_of(*parts: int | str) -> int:
    """Return a 64-bit seed that depends on all parts."""
    text = "\0".join(str(part) for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def seed_operator(base: int, key: int) -> None:
    """Seed torch's generators for one random operator.

    ``torch.manual_seed`` does the same, 80 times slower.

    Args:
        base: seed of (run, step, micro-batch).
        key: seed of the operator.
    """
    seed = _mix(base ^ key)
    torch.default_generator.manual_seed(seed)
    if accelerator_in_use() is None:
        return
    _, module = accelerator()
    generators = getattr(module, "default_generators", None)
    if generators:  # of the current one alone, and much faster
        generators[module.current_device()].manual_seed(seed)
    else:
        module.manual_seed(seed)


def seed_libraries(base: int, key: int) -> None:
    """Seed Python's, numpy's and torch's generators, for an operator that runs user code."""
    seed = _mix(base ^ key)
    random.seed(seed)
    np.random.seed(seed % 2**32)
    seed_operator(base, key)


_BACKWARD = 0x5851F42D4C957F2D
"""Makes the seed of a backward another one than that of its forward."""
_SEEDED = "pipectl_seeded"
_replayed: list[int] = []
"""The seed of the micro-batch whose backward runs, in a graph that was recorded for another one."""


def seed_backward(result: Any, base: int, key: int) -> None:
    """Let the backward of user code, which may draw too, begin with generators that are seeded.

    Args:
        result: of an operator that runs user code; the nodes that lead to it are those of the code.
        base, key: as in :func:`seed_operator`.
    """

    def seed(_: Any) -> None:
        seed_libraries(_replayed[-1] if _replayed else base, key ^ _BACKWARD)

    leaves = (leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, Tensor))
    for node in {leaf.grad_fn for leaf in leaves if leaf.grad_fn is not None}:
        notes: Any = node.metadata
        if _SEEDED not in notes:  # else it leads to an argument that the code has returned
            notes[_SEEDED] = True
            node.register_prehook(seed)


@contextmanager
def replayed(base: int) -> Iterator[None]:
    """Let a recorded graph draw in its backward for a micro-batch with another seed."""
    _replayed.append(base)
    try:
        yield
    finally:
        _replayed.pop()


Seeder = Callable[[int, int], None]
SEEDERS: tuple[Seeder, ...] = (seed_operator, seed_libraries)


def _mix(value: int) -> int:
    """Mix all bits: the finaliser of splitmix64 (Steele et al., 2014)."""
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB & _MASK
    return value ^ (value >> 31)


def states_of(generators: Sequence[Any]) -> str:
    """Return a text that changes when somebody draws from one of the generators."""
    return comparable([generator_state(each) for each in generators])


def comparable(value: Any, *, tensors: bool = True) -> str:
    """Return a text that is equal for equal values.

    Args:
        tensors: whether to compare the values of tensors, which do not exist during an export.
    """

    def text(leaf: Any) -> Any:
        if isinstance(leaf, np.ndarray):
            return leaf.tobytes()
        if isinstance(leaf, Tensor):
            if is_deferred(leaf) or not tensors:
                return "tensor"
            return octets_of(leaf).tobytes()
        if isinstance(leaf, set | frozenset):
            return sorted(map(repr, leaf))
        kind: Any = type(leaf)
        if kind.__repr__ is not object.__repr__:
            return leaf
        # Objects that are equal to none but themselves count as one.
        return kind.__name__, None if kind.__eq__ is object.__eq__ else comparable(vars(leaf))

    return repr(pytree.tree_map(text, value))


@contextmanager
def reseeded(generators: Sequence[Any]) -> Iterator[None]:
    """Seed a model's own generators from Python's shared one, which has just been seeded.

    Afterwards they are as before: what else draws from them, such as a dataset, sees nothing of it.
    """
    states = [generator_state(each) for each in generators]
    for generator in generators:
        seed = random.getrandbits(32)
        if isinstance(generator, torch.Generator):
            generator.manual_seed(seed)
        elif isinstance(generator, np.random.Generator):
            fresh: Any = type(generator.bit_generator)
            generator.bit_generator.state = fresh(seed).state
        else:
            generator.seed(seed)
    try:
        yield
    finally:
        for generator, state in zip(generators, states, strict=True):
            set_state(generator, state)
