"""Which tensors share memory, and keeping gradients of parameters apart from others.

The gradient of a parameter that is used through a view lies in the memory of another gradient. The
first that a parameter gets becomes its own, and later backwards add to it where it is: to that of
two parameters, if both are used so (torch 2.13 looks only at tensors, not at memory). By then, a
message may still read that memory, too, or the weight half of a backward.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


def memory_of(tensor: Tensor) -> int:
    """Tells tensors of one memory from others, as long as they are alive."""
    return int(tensor.untyped_storage()._cdata)


@contextmanager
def kept_apart(leaves: Iterable[Tensor], others: Iterable[Tensor | None] = ()) -> Iterator[None]:
    """For one backward: give leaves their first gradients in memory of nothing else.

    Args:
        leaves: that it can give gradients.
        others: gradients that are read after it; looked at when it is done.
    """
    fresh = [leaf for leaf in leaves if leaf.grad is None]
    yield
    if not fresh:
        return
    memories = {memory_of(other) for other in others if other is not None}
    for leaf in fresh:
        found = leaf.grad
        if found is None or found.layout is not torch.strided:
            continue
        if memory_of(found) in memories:
            leaf.grad = found.clone()
        else:
            memories.add(memory_of(found))
