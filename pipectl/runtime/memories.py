"""Which tensors share memory, and keeping gradients of parameters apart from others.

The gradient of a parameter that is used through a view lies in the memory of another gradient. The
first that a parameter gets becomes its own, and later backwards add to it where it is: to that of
two parameters, if both are used so (torch 2.13 looks only at tensors, not at memory). By then, a
message may still read that memory, too, or the weight half of a backward.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor


def memory_of(tensor: Tensor) -> int:
    """Tells tensors of one memory from others, as long as they are alive."""
    return int(tensor.untyped_storage()._cdata)


def without_gradient(leaves: Iterable[Tensor]) -> list[Tensor]:
    """Those to which the next backward may give other memory than their own."""
    return [leaf for leaf in leaves if leaf.grad is None]


def take_apart(leaves: Sequence[Tensor], others: Iterable[Tensor | None]) -> None:
    """Copy those gradients of leaves that lie in the memory of others, or of each other.

    Args:
        leaves: that had no gradient before the backward.
        others: gradients that are read after it.
    """
    if not leaves:
        return
    memories = {memory_of(other) for other in others if other is not None}
    for leaf in leaves:
        found = leaf.grad
        if found is None or found.layout is not torch.strided:
            continue
        if memory_of(found) in memories:
            leaf.grad = found.clone()
        else:
            memories.add(memory_of(found))
