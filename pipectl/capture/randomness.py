"""Seeds for random operators: a function of (run seed, step, micro-batch, operator) alone.

So a dropout mask is the same in every plan, whatever ran before it on the same rank.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import fx

from pipectl.capture import accelerator
from pipectl.capture.gradients import Applied
from pipectl.capture.opaque import Opaque
from pipectl.capture.schemas import arguments_by_name

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
    accelerator.seed_generator(seed)


def seed_libraries(base: int, key: int) -> None:
    """The same for an operator that runs a user's code, which may use python's and numpy's too."""
    seed = _mix(base ^ key)
    random.seed(seed)
    np.random.seed(seed % 2**32)
    seed_operator(base, key)


Seeder = Callable[[int, int], None]
SEEDERS: tuple[Seeder, ...] = (seed_operator, seed_libraries)


def seeder_of(node: fx.Node, root: fx.GraphModule) -> Seeder | None:
    """What seeds an operator before it runs; None if it cannot draw random numbers."""
    if runs(node, root, Opaque):
        return seed_libraries  # whether it draws may depend on values
    return seed_operator if is_random(node, root) else None


def is_random(node: fx.Node, root: fx.GraphModule) -> bool:
    """Whether an operator draws random numbers, itself or in a subgraph, or may do so.

    Dropout with probability 0 (attention without dropout, say) draws none.
    """
    return any(_draws(inner) for inner in _with_inner(node, root))


def runs(node: fx.Node, root: fx.GraphModule, kind: type) -> bool:
    """Whether an operator, or one of the subgraphs it runs, calls a target of some kind."""
    return any(isinstance(inner.target, kind) for inner in _with_inner(node, root))


def _with_inner(node: fx.Node, root: fx.GraphModule) -> Iterator[fx.Node]:
    """An operator and those of the subgraphs it runs."""
    yield node
    for source in node.all_input_nodes:
        body = root.get_submodule(str(source.target)) if source.op == "get_attr" else None
        if isinstance(body, fx.GraphModule):
            for inner in body.graph.nodes:
                if inner.op == "call_function":
                    yield from _with_inner(inner, body)


def _draws(node: fx.Node) -> bool:
    if isinstance(node.target, Opaque):
        return node.target.outline.draws
    tags: Any = getattr(node.target, "tags", ())
    seeded = torch.Tag.nondeterministic_seeded in tags and not _drops_nothing(node)
    return seeded or isinstance(node.target, Applied)


def _drops_nothing(node: fx.Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    if schema is None:
        return False
    defaults = {argument.name: argument.default_value for argument in schema.arguments}
    given = {**defaults, **arguments_by_name(schema, node.args, node.kwargs)}
    probabilities = [given[name] for name in ("p", "dropout_p", "dropout") if name in given]
    off = any(given.get(name) is False for name in ("train", "training"))
    return off or (bool(probabilities) and all(value == 0 for value in probabilities))


def _mix(value: int) -> int:
    """The finaliser of splitmix64 (Steele et al., 2014): every input bit reaches every output."""
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB & _MASK
    return value ^ (value >> 31)
