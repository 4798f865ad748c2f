"""What a forward saved for its backward, as the tensors of a message.

Autograd saves many tensors that share memory: a value and its reshaped self, three views of one
projection. Each memory travels once, as bytes, from the first to the last that a saved tensor
covers; small ones travel in one vector. What both ranks have anyway, parameters and constants,
stays where it is::

    saved       w   x   x.view   q   k   v   3.0   mean
    message         [x]          [q  k  v]   [3.0  mean]

The *contents* say where each saved tensor is. They follow from the stage's code and are the same
for every micro-batch of one size, so both ranks agree on them once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from pipectl.errors import WorkerError
from pipectl.runtime.saved_tensors import Block, Handle, bytes_of, memory_of, unpack

BUNDLED_BYTES = 8 << 10
"""Memories below this size travel together: a message of their own would cost more than a copy."""
_ALIGNMENT = 16


class View(NamedTuple):
    """Where a saved tensor lies.

    Args:
        number: of its memory; below 0, of the state ``~number``, which both ranks have.
        offset: of its first element, in elements after that of the memory or state.
    """

    number: int
    dtype: torch.dtype
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int


class Contents(NamedTuple):
    """What is where in the messages of one stage and size.

    Args:
        views: of every saved tensor, in the order in which autograd saved them.
        sizes: bytes of every memory.
    """

    views: tuple[View, ...]
    sizes: tuple[int, ...]

    def unpack(
        self, message: Sequence[Tensor | None], states: Mapping[int, Tensor]
    ) -> list[Tensor]:
        """The saved tensors of a message.

        Args:
            states: the arguments that both ranks have, by their indices.
        """
        bundle, *large = message
        alone = dict(zip(_large(self.sizes, len(message)), large, strict=False))
        blocks, start = [], 0
        for number, size in enumerate(self.sizes):
            memory = alone.get(number)
            if memory is None:
                assert bundle is not None
                memory = bundle[start : start + size].clone()
                start += size
            blocks.append(Block(memory))
        tensors = []
        for number, dtype, sizes, strides, offset in self.views:
            if number < 0:
                state = states[~number].detach()
                tensors.append(state.as_strided(sizes, strides, state.storage_offset() + offset))
            else:
                tensors.append(unpack(Handle(blocks[number], dtype, sizes, strides, offset)))
        return tensors


def pack(
    saved: Sequence[Tensor], states: Mapping[int, Tensor], places: int
) -> tuple[Contents, list[Tensor | None]]:
    """The contents of a message and its tensors, by place; the first has the small memories.

    Args:
        saved: in the order in which autograd saved them.
        states: the arguments that both ranks have, by their indices.
        places: how many tensors a message may have.

    Raises:
        WorkerError: a tensor is of a kind that no message carries.
    """
    known = {memory_of(state): index for index, state in states.items()}
    spans: dict[int, tuple[int, int]] = {}
    memories: dict[int, Tensor] = {}
    for tensor in saved:
        is_lazy = tensor.is_conj() or tensor.is_neg()  # its memory holds something else
        if tensor.layout is not torch.strided or tensor.is_quantized or is_lazy:
            raise WorkerError(
                f"a backward needs a tensor of layout {tensor.layout} and type {tensor.dtype}, "
                "which cannot be sent to another rank",
                cure="set pipeline.backward to together",
            )
        memory = memory_of(tensor)
        if memory not in known:
            start, stop = _span(tensor)
            first, last = spans.get(memory, (start, stop))
            spans[memory] = min(first, start), max(last, stop)
            memories.setdefault(memory, bytes_of(tensor.untyped_storage()))
    vectors = [memories[memory][slice(*span)] for memory, span in spans.items()]
    numbers = {memory: number for number, memory in enumerate(spans)}
    views = []
    for tensor in saved:
        memory, offset = memory_of(tensor), int(tensor.storage_offset())
        if memory in known:
            number, base = ~known[memory], int(states[known[memory]].storage_offset())
        else:
            number, base = numbers[memory], spans[memory][0] // tensor.itemsize
        form = tensor.dtype, tuple(tensor.shape), tensor.stride()
        views.append(View(number, *form, offset - base))
    contents = Contents(tuple(views), tuple(vector.numel() for vector in vectors))
    large = _large(contents.sizes, places)
    small = [vector for number, vector in enumerate(vectors) if number not in large]
    return contents, [torch.cat(small) if small else None, *(vectors[number] for number in large)]


def _large(sizes: Sequence[int], places: int) -> list[int]:
    return [number for number, size in enumerate(sizes) if size >= BUNDLED_BYTES][: places - 1]


def _span(tensor: Tensor) -> tuple[int, int]:
    """The bytes of its memory from its first to after its last element; aligned for all types."""
    start = int(tensor.storage_offset()) * tensor.itemsize
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    reach = sum((size - 1) * stride for size, stride in pairs) + 1 if tensor.numel() else 0
    return start - start % _ALIGNMENT, start + reach * tensor.itemsize
