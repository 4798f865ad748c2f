"""Seeds for random operators: a function of (run seed, step, micro-batch, operator) alone.

So a dropout mask is the same in every plan, whatever ran before it on the same rank.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable

import numpy as np
import torch

from pipectl.capture.regions import accelerator, accelerator_in_use

_MASK = (1 << 64) - 1


def seed_of(*parts: int | str) -> int:
    """A 64-bit seed from the parts, well mixed."""
    text = "\0".join(str(part) for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def seed_operator(base: int, key: int) -> None:
    """Seed the generators a random operator draws from, just before it runs.

    ``torch.manual_seed`` would do the same, 80 times slower.

    Args:
        base: seed of (run, step, micro-batch).
        key: seed of the operator.
    """
    seed = _mix(base ^ key)
    torch.default_generator.manual_seed(seed)
    seed_accelerator(seed)


def seed_libraries(base: int, key: int) -> None:
    """The same for an operator that runs a user's code, which may use python's and numpy's too."""
    seed = _mix(base ^ key)
    random.seed(seed)
    np.random.seed(seed % 2**32)
    seed_operator(base, key)


Seeder = Callable[[int, int], None]
SEEDERS: tuple[Seeder, ...] = (seed_operator, seed_libraries)


def _mix(value: int) -> int:
    """The finaliser of splitmix64 (Steele et al., 2014): every input bit reaches every output."""
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB & _MASK
    return value ^ (value >> 31)


def seed_accelerator(seed: int) -> None:
    """Seed the generator of the current accelerator, if one is in use."""
    if accelerator_in_use() is None:
        return
    _, module = accelerator()
    generators = getattr(module, "default_generators", None)
    if generators:  # of the current one alone, and much faster
        generators[module.current_device()].manual_seed(seed)
    else:
        module.manual_seed(seed)


def seed_everything(seed: int) -> None:
    """Seed python, numpy and torch, so that a factory makes the same object on every rank."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
