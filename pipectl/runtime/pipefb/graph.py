"""The autograd graph of a stage without its values: what a backward on another rank runs through.

The stage's code runs once for every size, on what the forward's rank called it with first. Where
autograd saves a tensor, it saves the tensor's number instead, and finds in the backward of a
micro-batch what the forward's rank sent under that number. Parameters are the real ones, so
gradients accumulate in them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node, saved_tensors_hooks
from torch.utils import _pytree as pytree

from pipectl.capture import Slot
from pipectl.capture.stage import Receive
from pipectl.errors import MismatchError
from pipectl.runtime.saved_tensors import kept_apart
from pipectl.runtime.stage import Segment, Start

_PLAIN = (int, float, str, type(None), torch.dtype, torch.device)
"""What an autograd function may keep as attributes: it is the same on both ranks."""


class Graph:
    """A stage's autograd graph at one size.

    Args:
        start: what a forward of the whole stage, its only segment, started from.

    Attributes:
        saved: type and sizes of every tensor that autograd would have saved, in order.
        structure: names of all nodes, in an order that follows from the graph.

    Raises:
        MismatchError: an autograd function keeps values where nobody finds them.
    """

    def __init__(self, stage: int, segment: Segment, start: Start) -> None:
        self._leaves = segment.leaves
        self._values: list[Tensor | None] = []
        self.saved: list[tuple[torch.dtype, tuple[int, ...]]] = []
        with saved_tensors_hooks(self._pack, self._unpack):
            self._live, _ = segment.run(start, again=True)
        nodes = nodes_behind(self._live.roots.values())
        self.structure = [node.name() for node in nodes]
        _check_functions(stage, nodes)
        self._is_read_once = all(_is_read_once(node) for node in nodes)

    def backward(
        self, values: list[Tensor], gradients: Mapping[Slot, Tensor | None], weight: float,
        scale: float,
    ) -> dict[Slot, Tensor | None]:  # fmt: skip
        """Run the backward of a micro-batch; parameter gradients accumulate.

        Args:
            values: of the saved tensors, in order; the list is emptied.
            gradients, weight, scale: see :meth:`pipectl.runtime.stage.Stage.backward`.

        Returns:
            Gradients of the received values.
        """
        roots, seeds = self._live.seeded(gradients, scale, weight)
        self._values = [*values]
        values.clear()
        caught = self._live.caught
        if roots:
            with kept_apart(self._leaves, chain(seeds, caught.values())):
                torch.autograd.backward(roots, seeds, retain_graph=True)
        self._values = []
        returned = dict(caught)
        caught.clear()
        return returned

    def _pack(self, tensor: Tensor) -> int:
        self.saved.append((tensor.dtype, tuple(tensor.shape)))
        return len(self.saved) - 1

    def _unpack(self, number: int) -> Tensor:
        value = self._values[number]
        assert value is not None
        if self._is_read_once:
            self._values[number] = None  # its memory is free when this node is done
        return value


def nodes_behind(edges: Iterable[GradientEdge]) -> list[Node]:
    """All nodes of an autograd graph, each once, in an order that follows from its edges."""
    nodes: dict[Node, None] = {}
    waiting = [edge.node for edge in edges]
    while waiting:
        node = waiting.pop()
        if node not in nodes:
            nodes[node] = None
            waiting += [after for after, _ in node.next_functions if after is not None]
    return list(nodes)


def _is_read_once(node: Node) -> bool:
    """Whether it asks for each saved tensor once: true of all but the user's own functions."""
    function = getattr(node, "_forward_cls", None)
    return function is None or function.__module__ == Receive.__module__


def _check_functions(stage: int, nodes: Sequence[Node]) -> None:
    """Refuse autograd functions that keep values in attributes, where nobody finds them."""
    for node in nodes:
        kept: dict[str, Any] = getattr(node, "__dict__", {})
        if not all(isinstance(leaf, _PLAIN) for leaf in pytree.tree_leaves(kept)):
            raise MismatchError(
                f"plan.json: stages[{stage}] has its backward on another rank, but "
                f"{node.name()} keeps more than numbers as attributes",
                cure="keep tensors with ctx.save_for_backward(), or set pipeline.backward to "
                "together",
            )
