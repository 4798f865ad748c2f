"""Copying what a checkpoint holds, as far as there is memory for it.

What changes at updates alone need not be copied: it is written from where it is, while the next
step computes its gradients, and only that step's update has to wait until this is done.
"""

from __future__ import annotations

import mmap
from collections.abc import Container, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

_ALIGNMENT = 64


class Held(NamedTuple):
    """Tensors that a checkpoint takes in.

    Args:
        tensors: copies in the memory of the host, but for those that are lent.
        lent: names of the tensors that are the training's own.
    """

    tensors: Mapping[str, Tensor]
    lent: frozenset[str]

    @property
    def copies(self) -> dict[str, Tensor]:
        """Those that are not lent."""
        return {name: t for name, t in self.tensors.items() if name not in self.lent}


def hold(tensors: Mapping[str, Tensor], steady: Container[str], room_bytes: int | None) -> Held:
    """Copy tensors, the small ones first.

    Args:
        steady: those that only updates change, and that are lent where there is no room.
        room_bytes: for copies; None is enough for all.
    """
    lent = frozenset[str]() if room_bytes is None else _lent(tensors, steady, room_bytes)
    copies = _copied({name: tensor for name, tensor in tensors.items() if name not in lent})
    return Held({name: copies.get(name, tensor) for name, tensor in tensors.items()}, lent)


def _lent(tensors: Mapping[str, Tensor], steady: Container[str], room_bytes: int) -> frozenset[str]:
    room = room_bytes - sum(t.nbytes for name, t in tensors.items() if name not in steady)
    found = set()
    for name in sorted(tensors, key=lambda name: (tensors[name].nbytes, name)):
        if name in steady:
            room -= tensors[name].nbytes
            if room < 0:
                found.add(name)
    return frozenset(found)


def _copied(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """They share pages of their own, which the system has back when the last copy is dropped: the
    process keeps what it frees otherwise."""
    sizes = [-(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT for tensor in tensors.values()]
    pages = torch.frombuffer(mmap.mmap(-1, max(sum(sizes), 1)), dtype=torch.uint8)
    found, start = dict[str, Tensor](), 0
    for (name, tensor), size in zip(tensors.items(), sizes, strict=True):
        place = pages[start : start + tensor.nbytes]
        found[name] = place.view(tensor.dtype).view(tensor.shape).copy_(tensor.detach())
        start += size
    return found
