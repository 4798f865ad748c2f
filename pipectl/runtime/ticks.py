"""Letting MPI work between the operators of a stage, forward and backward, without a thread."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx

EVERY = 4
"""Operators between two ticks."""


def insert_ticks(module: fx.GraphModule, advance: Callable[[], None]) -> None:
    """Call ``advance`` behind every few operators of a stage's code, and in their backward.

    Neither sees a tensor, so no bit changes.
    """

    def tick(value: Any) -> None:
        advance()
        if isinstance(value, Tensor) and value.grad_fn is not None and torch.is_grad_enabled():
            value.grad_fn.register_prehook(lambda _: advance())

    operators = [node for node in module.graph.nodes if node.op == "call_function"]
    for node in operators[EVERY - 1 :: EVERY]:
        with module.graph.inserting_after(node):
            module.graph.call_function(tick, (node,))
    module.recompile()
