"""How a tensor lies in memory, and its shortest contiguous form for a message.

Sums over another layout differ in bits, so a received tensor has the strides of the sent one: a
transposed tensor stays transposed, and an expanded one travels as the single row it repeats.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import prod

import torch
from torch import Tensor

from pipectl.capture import Slot

Tensors = dict[Slot, Tensor | None]
"""Tensors of one message; None if a slot has no gradient."""


@dataclass(frozen=True)
class Layout:
    """Type, sizes and strides of a tensor in a message."""

    dtype: torch.dtype
    sizes: tuple[int, ...]
    strides: tuple[int, ...]

    @classmethod
    def of(cls, tensor: Tensor) -> Layout:
        """The layout of ``tensor``; contiguous if its elements overlap in memory."""
        layout = cls.exactly(tensor)
        return cls.of(tensor.contiguous()) if layout.overlaps else layout

    @classmethod
    def exactly(cls, tensor: Tensor) -> Layout:
        """The layout of a tensor whose elements may overlap in memory."""
        return cls(tensor.dtype, tuple(tensor.shape), tensor.stride())

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{dtype} {list(self.sizes)} with strides {list(self.strides)}"

    @cached_property
    def stored_sizes(self) -> tuple[int, ...]:
        """Sizes with repeated dimensions (stride 0) counted once."""
        pairs = zip(self.sizes, self.strides, strict=True)
        return tuple(1 if stride == 0 and size > 1 else size for size, stride in pairs)

    @cached_property
    def count(self) -> int:
        """Elements in the message."""
        return prod(self.stored_sizes)

    @cached_property
    def is_contiguous(self) -> bool:
        """Whether the strides are those of a new tensor of these sizes."""
        return self.strides == torch.empty(self.sizes, device="meta").stride()

    @cached_property
    def message_sizes(self) -> tuple[int, ...]:
        """Sizes of the contiguous memory of a message: those of the tensor, or of a vector."""
        return self.sizes if self.is_contiguous else (self.count,)

    @property
    def is_dense(self) -> bool:
        """Whether the stored elements fill their memory without gaps or overlap."""
        return self._gap == 0

    @property
    def overlaps(self) -> bool:
        """Whether different elements share memory (a sliding window, say)."""
        return self._gap < 0

    @cached_property
    def _gap(self) -> int:
        """Above 0 if there are gaps between elements, below 0 if elements overlap."""
        if self.count == 0:
            return 0
        expected, gap = 1, 0
        pairs = zip(self.strides, self.stored_sizes, strict=True)
        for stride, size in sorted(pair for pair in pairs if pair[1] != 1):
            if stride < expected:
                return -1
            gap = max(gap, stride - expected)
            expected = stride * size
        return gap

    def flatten(self, tensor: Tensor) -> Tensor:
        """The stored elements as a contiguous vector; a view wherever the layout is dense.

        ``tensor`` may have other strides than this layout; it is then copied into it first.

        Raises:
            ValueError: the layout has one row that repeats, the tensor has rows of its own.
        """
        if tensor.is_conj() or tensor.is_neg():
            tensor = tensor.resolve_conj().resolve_neg()
        if not self.is_dense:
            return self._stored(tensor).contiguous().view(-1)
        if tensor.stride() != self.strides:
            tensor = self._spread(self._stored(tensor))
        return tensor.as_strided((self.count,), (1,))

    def unflatten(self, vector: Tensor) -> Tensor:
        """The tensor whose stored elements are ``vector``; a view wherever the layout is dense."""
        if self.is_dense:
            return vector.as_strided(self.sizes, self.strides)
        return self._spread(vector.view(self.stored_sizes))

    def view(self, memory: Tensor, offset: int) -> Tensor:
        """A tensor in the storage of another one, ``offset`` elements after its first element."""
        empty = torch.empty(0, dtype=self.dtype, device=memory.device)
        first = offset + int(memory.storage_offset()) * memory.itemsize // self.dtype.itemsize
        return empty.set_(memory.untyped_storage(), first, self.sizes, self.strides)

    def _stored(self, tensor: Tensor) -> Tensor:
        """``tensor`` with repeated dimensions cut to their first row."""
        for dim, size in enumerate(self.stored_sizes):
            if size != tensor.shape[dim]:
                if tensor.stride(dim) != 0:
                    raise ValueError(
                        f"dimension {dim} is expanded in the layout, not in the tensor"
                    )
                tensor = tensor.narrow(dim, 0, 1)
        return tensor

    def _spread(self, stored: Tensor) -> Tensor:
        """A copy of the stored elements with this layout's strides."""
        spread = torch.empty_strided(
            self.stored_sizes, self.strides, dtype=self.dtype, device=stored.device
        )
        return spread.copy_(stored).expand(self.sizes)
