"""Parameters that lie in the memory of another parameter or buffer without being it: refused.

Ranks hold, send and update parameters as objects. A view of one, as a parameter of its own, would
follow it on a rank that holds both, and part from it on others.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from pipectl.capture.deferred import is_deferred
from pipectl.capture.names import own_name
from pipectl.errors import CaptureError


def refuse_overlaps(states: Mapping[str, Tensor]) -> None:
    """Raise if a trained parameter shares memory with another state.

    Args:
        states: parameters and buffers by full name, tied ones once.

    Raises:
        CaptureError: naming both.
    """
    placed = ((name, place) for name, tensor in states.items() if (place := _place(tensor)))
    reached: dict[object, list[tuple[str, _Place]]] = {}
    for name, place in sorted(placed, key=lambda item: item[1].start):
        before = reached.setdefault(place.memory, [])
        before[:] = [(other, found) for other, found in before if found.stop > place.start]
        for other, found in before:
            if (_trained(states[name]) or _trained(states[other])) and _meet(found, place):
                raise _error(states, *sorted((name, other), key=list(states).index))
        before.append((name, place))


class _Place(NamedTuple):
    """Where a tensor lies: in which memory, from which byte to which, and how."""

    memory: object
    start: int
    stop: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    item_bytes: int

    @property
    def is_dense(self) -> bool:
        """Whether every byte between the first and the last is its own."""
        used = torch.Size(self.sizes).numel() * self.item_bytes
        return self.stop - self.start == used

    def mark(self, found: Tensor, start: int) -> Tensor:
        """Its bytes in a tensor that stands for memory from a byte on."""
        strides = [stride * self.item_bytes for stride in self.strides]
        offset = self.start - start
        return found.as_strided((*self.sizes, self.item_bytes), (*strides, 1), offset)


def _place(tensor: Tensor) -> _Place | None:
    """None where it lies in no memory that another could share."""
    if is_lazy(tensor) or tensor.is_nested or tensor.layout is not torch.strided:
        return None
    if not tensor.numel():
        return None
    item_bytes, strides = tensor.element_size(), tensor.stride()
    # Elements of an expanded dimension are one.
    sizes = tuple(n if stride else 1 for n, stride in zip(tensor.shape, strides, strict=True))
    if is_deferred(tensor) or tensor.is_meta:
        memory: object = tensor.untyped_storage()._cdata
        start = int(tensor.storage_offset()) * item_bytes
    else:
        memory, start = tensor.device, tensor.data_ptr()
        if not start:  # a wrapper around other tensors
            return None
    last = sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True))
    return _Place(memory, start, start + (last + 1) * item_bytes, sizes, strides, item_bytes)


def _trained(tensor: Tensor) -> bool:
    return isinstance(tensor, nn.Parameter) and tensor.requires_grad


def _meet(one: _Place, other: _Place) -> bool:
    """Whether two places that reach into each other have a byte in common: columns have none."""
    if one.is_dense or (other.is_dense and one.start == other.start):
        return True
    start = min(one.start, other.start)
    found = torch.zeros(max(one.stop, other.stop) - start, dtype=torch.bool)
    one.mark(found, start).fill_(True)
    return bool(other.mark(found, start).any())


def _error(states: Mapping[str, Tensor], first: str, second: str) -> CaptureError:
    both = all(isinstance(states[name], nn.Parameter) for name in (first, second))
    whole = "make both the same nn.Parameter (self.b.weight = self.a.weight), or " if both else ""
    return CaptureError(
        f"model: {own_name(first)} and {own_name(second)} share memory but are not one tensor, so "
        "that ranks would train them apart",
        cure=f"{whole}give each memory of its own (.clone())",
    )
