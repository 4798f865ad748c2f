"""Tensors in nested values, and the memory they lie in."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree


def is_deferred(tensor: Tensor) -> bool:
    """Whether a tensor has no values yet."""
    return isinstance(tensor, FakeTensor)


def fill_sample(tensor: Tensor) -> Tensor:
    """Fill a tensor with random values, or valid indices, or a mask that hides nothing."""
    return (
        tensor.normal_() if tensor.is_floating_point() else tensor.fill_(tensor.dtype is torch.bool)
    )


def octets_of(tensor: Tensor) -> Any:
    """The bytes of a tensor, as numpy's array in the host's memory; not copied if possible."""
    return tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()


def tensors_in(value: Any) -> list[Tensor]:
    """All tensors in a tree, in order."""
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]


def storage_of(tensor: Tensor) -> int:
    """Identity of the storage of a tensor, for as long as somebody holds it."""
    identity: int = tensor.untyped_storage()._cdata
    return identity


def storages_in(value: Any) -> list[int]:
    """The same of every tensor in a tree, in order."""
    return [storage_of(tensor) for tensor in tensors_in(value)]
