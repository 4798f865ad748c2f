"""Tensors in nested values, and their storages."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pipectl.torch_api import FakeTensor, identity_of, pytree


def is_deferred(tensor: Tensor) -> bool:
    """Return whether a tensor has no values yet."""
    return isinstance(tensor, FakeTensor)


def fill_sample(tensor: Tensor) -> Tensor:
    """Fill a tensor with random values, with index 0, or with True if it is a mask."""
    return (
        tensor.normal_() if tensor.is_floating_point() else tensor.fill_(tensor.dtype is torch.bool)
    )


def octets_of(tensor: Tensor) -> Any:
    """Return the bytes of a tensor as a numpy array in host memory, without a copy if possible."""
    return tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()


def is_same(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors of one shape and type have the same bits."""
    return bool((octets_of(one) == octets_of(other)).all())


def is_equal(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors have the same type, sizes, strides and bits."""
    forms = [(each.dtype, each.shape, each.stride()) for each in (one, other)]
    return forms[0] == forms[1] and is_same(one, other)


def tensors_in(value: Any) -> list[Tensor]:
    """Return all tensors in a tree, in order."""
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]


def storage_of(tensor: Tensor) -> int:
    """Return an identity of a tensor's storage, valid while the tensor exists."""
    return identity_of(tensor.untyped_storage())


def storages_in(value: Any) -> list[int]:
    """Return the storages of all tensors in a tree, in order."""
    return [storage_of(tensor) for tensor in tensors_in(value)]
