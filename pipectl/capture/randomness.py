"""Seeds for random operators: a function of (run seed, step, micro-batch, operator) alone.

So a dropout mask is the same in every plan, whatever ran before it on the same rank.
"""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from torch import fx

from pipectl.capture.gradients import Applied

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
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.default_generators[torch.cuda.current_device()].manual_seed(seed)


def is_random(node: fx.Node, root: fx.GraphModule) -> bool:
    """Whether an operator draws random numbers, itself or in a subgraph, or may do so.

    Dropout with probability 0 (attention without dropout, say) draws none.
    """
    if isinstance(node.target, Applied):
        return True
    tags: Any = getattr(node.target, "tags", ())
    if torch.Tag.nondeterministic_seeded in tags:
        return not _drops_nothing(node)
    called = (source for source in node.all_input_nodes if source.op == "get_attr")
    bodies = (root.get_submodule(str(source.target)) for source in called)
    return any(
        is_random(inner, body)
        for body in bodies
        if isinstance(body, fx.GraphModule)
        for inner in body.graph.nodes
        if inner.op == "call_function"
    )


def _drops_nothing(node: fx.Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    if schema is None:
        return False
    arguments = zip((argument.name for argument in schema.arguments), node.args, strict=False)
    given = {argument.name: argument.default_value for argument in schema.arguments}
    given.update({**dict(arguments), **node.kwargs})
    probabilities = [given[name] for name in ("p", "dropout_p", "dropout") if name in given]
    off = any(given.get(name) is False for name in ("train", "training"))
    return off or (bool(probabilities) and all(value == 0 for value in probabilities))


def _mix(value: int) -> int:
    """The finaliser of splitmix64 (Steele et al., 2014): every input bit reaches every output."""
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB & _MASK
    return value ^ (value >> 31)
