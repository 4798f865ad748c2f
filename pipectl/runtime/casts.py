"""Casts of weights that micro-batches share.

Under autocast, every forward casts the weights again, and autograd keeps the casts until the
backward: micro-batches in flight would each hold a copy of all matrices in half precision. So a
stage's code casts weights itself, at their first use after an update; every further forward, also a
recomputed one, uses the same memory.

A cast has an autograd node of its own in every micro-batch, where autocast would have made one. It
converts the gradient as that one does, so gradients are added in the same precision and order.

Torch's cache of casts would not do. It holds the cast with its node, which would then come last in
every backward, with all gradients in half precision waiting for it; it holds none of frozen
weights, and if the first use is one without gradients, further uses get none.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pipectl.capture.tensors import storage_of
from pipectl.runtime.layout import Layout
from pipectl.torch_api import StorageWeakRef, version_of


class View(NamedTuple):
    """What is cast: a weight, or a view of it.

    Args:
        offset: of its first element in its storage, in elements.
        dtype: to which it is cast.
    """

    layout: Layout
    offset: int
    dtype: torch.dtype


class _Entry(NamedTuple):
    """The casts of what lies in one storage, each with the version of the value that was cast.

    Args:
        storage: keeps the storage's number from being used again.
    """

    storage: StorageWeakRef
    casts: dict[View, tuple[int, Tensor]]


class SharedCasts:
    """The casts of the weights of a stage. An older version of the weights has its own."""

    def __init__(self) -> None:
        self._entries: dict[int, _Entry] = {}
        self._storages: set[StorageWeakRef] = set()

    def __contains__(self, storage: object) -> bool:
        """Whether a storage is that of a cast."""
        return storage in self._storages

    def of(self, value: Tensor, dtype: torch.dtype) -> Tensor:
        """The cast of a weight or a view of one; without a gradient."""
        number, version = storage_of(value), version_of(value)
        entry = self._entries.get(number)
        if entry is None:
            entry = _Entry(StorageWeakRef(value.untyped_storage()), {})  # type: ignore[no-untyped-call]
            self._entries[number] = entry
        view = View(Layout.exactly(value), int(value.storage_offset()), dtype)
        known, cast = entry.casts.get(view, (-1, None))
        if cast is None or known != version:
            cast = value.detach().to(dtype)
            entry.casts[view] = version, cast
            self._storages.add(StorageWeakRef(cast.untyped_storage()))  # type: ignore[no-untyped-call]
        return cast

    def made_of(self, weight: Tensor) -> Mapping[View, Tensor]:
        """The casts of a weight that exist, with offsets from its first element."""
        entry, first = self._entries.get(storage_of(weight)), int(weight.storage_offset())
        if entry is None:
            return {}
        return {
            view._replace(offset=view.offset - first): cast
            for view, (_, cast) in entry.casts.items()
            if first <= view.offset < first + weight.numel()  # others share a vector with it
        }

    def again(self, weight: Tensor, view: View) -> Tensor:
        """The cast of a view of a weight, whose offset counts from the weight's first element."""
        offset = view.offset + int(weight.storage_offset())
        value = weight.detach().as_strided(view.layout.sizes, view.layout.strides, offset)
        return self.of(value, view.dtype)

    def drop(self, weights: Iterable[Tensor] | None = None) -> None:
        """Drop all casts, or those of some weights and of weights that no longer exist."""
        if weights is None:
            self._entries.clear()
            self._storages.clear()
            return
        for weight in weights:
            self._entries.pop(storage_of(weight), None)
        self._entries = {n: e for n, e in self._entries.items() if not _is_gone(e.storage)}
        self._storages = {each for each in self._storages if not _is_gone(each)}


def _is_gone(storage: StorageWeakRef) -> bool:
    return storage.expired()  # type: ignore[no-any-return, no-untyped-call]


class SharedCast:
    """Casts a weight for one operator of a stage."""

    def __init__(self, casts: SharedCasts, dtype: torch.dtype) -> None:
        self._casts, self._dtype = casts, dtype
        self.__name__ = "shared_cast"

    def __call__(self, weight: Tensor) -> Tensor:
        """Return the cast that all share, with an autograd node of its own."""
        return use_cast(weight, self._casts.of(weight, self._dtype))


def use_cast(weight: Tensor, cast: Tensor) -> Tensor:
    """Return the cast of a weight, as an alias with a gradient if the weight has one."""
    if not (weight.requires_grad and torch.is_grad_enabled()):
        return cast
    alias: Tensor = _Cast.apply(weight, cast)  # type: ignore[no-untyped-call]
    return alias


class _Cast(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, cast: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.dtype = weight.dtype
        return cast.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> tuple[Tensor | None, None]:
        """The gradient in the weight's own type, as autocast's own node returns it."""
        return None if gradient is None else gradient.to(ctx.dtype), None
