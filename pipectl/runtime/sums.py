"""Sums of the gradients of one stage over the micro-batches of a step, in the order of a tree.

Autograd adds each gradient to the one before it, so the bits of the sum depend on which
micro-batches a rank computes. In a reproducible training, every backward leaves the gradients of
its micro-batch alone, and they are added as :mod:`pipectl.schedule.sum_tree` says.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import torch
from torch import Tensor

from pipectl.schedule.sum_tree import Node, insert, is_within, total


class GradientSums:
    """The sums of the leaves of one stage.

    Args:
        leaves: tensors that get gradients.

    Attributes:
        micro_batch: whose backward runs, or has run last.
    """

    def __init__(self, leaves: Iterable[Tensor]) -> None:
        self._leaves = list(leaves)
        self._parts: defaultdict[int, dict[Node, Tensor]] = defaultdict(dict)
        self.micro_batch = -1

    def add(self, leaves: Iterable[Tensor]) -> None:
        """Take over the gradients that the micro-batch has given to some leaves."""
        for leaf in leaves:
            if leaf.grad is not None:
                insert(self._parts[id(leaf)], self.micro_batch, leaf.grad, Tensor.add_)
                leaf.grad = None

    def take(self, leaf: Tensor, root: Node) -> Tensor | None:
        """Return and drop the sum of a node; None if no micro-batch has given a gradient."""
        parts = self._parts[id(leaf)]
        if root in parts:
            return parts.pop(root)
        within = {node: parts.pop(node) for node in list(parts) if is_within(node, root)}
        return total(within, torch.add) if within else None

    def finish(self) -> None:
        """Give each leaf the sum over all micro-batches, unless it was taken."""
        for leaf in self._leaves:
            parts = self._parts[id(leaf)]
            if parts:
                gradient = total(parts, torch.add)
                if gradient.stride() != leaf.stride():  # norms depend on the layout
                    gradient = torch.empty_like(leaf).copy_(gradient)
                leaf.grad = gradient
                parts.clear()

    def forget(self) -> None:
        """Drop all sums."""
        self._parts.clear()
