"""What a forward saved for its backward, as the tensors of a message.

Autograd saves many tensors that share memory: a value and its reshaped self, three views of one
projection. Each memory travels once. Views that together fill a stretch of memory travel as that
stretch, others each on their own; small tensors travel in one vector. What both ranks have anyway,
parameters and constants, stays where it is::

    saved       w   x   x.view   q   k   v   3.0   mean
    message         [x]          [q  k  v]   [3.0, mean]

The *contents* say where each saved tensor is. They follow from the stage's code and are the same
for every micro-batch of one size, so both ranks agree on them once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pipectl.errors import WorkerError
from pipectl.runtime.layout import Layout
from pipectl.runtime.saved_tensors import memory_of

BUNDLED_BYTES = 8 << 10
"""Tensors below this size travel together: a message of their own would cost more than a copy."""
BUNDLE = 0
"""Place of the vector of small tensors in a message."""
_ALIGNMENT = 16


class View(NamedTuple):
    """Where a saved tensor lies.

    Args:
        source: ``state`` for an argument that both ranks have, else ``part``.
        number: of the state or part.
        offset: of its first element, in elements behind that of the state or part.
        sizes: of the tensor; None if it is the whole part.
    """

    source: str
    number: int
    offset: int = 0
    sizes: tuple[int, ...] | None = None
    strides: tuple[int, ...] = ()


class Part(NamedTuple):
    """One memory of a message.

    Args:
        place: of its tensor in the message.
        start: of its first byte, where that tensor is the bundle.
    """

    place: int
    start: int
    layout: Layout


@dataclass(frozen=True)
class Contents:
    """What is where in the messages of one stage and size.

    Args:
        views: of every saved tensor, in the order in which autograd saved them.
    """

    views: tuple[View, ...]
    parts: tuple[Part, ...]

    @property
    def size_bytes(self) -> int:
        """Of a message."""
        return sum(part.layout.size_bytes for part in self.parts)

    def unpack(
        self, message: Sequence[Tensor | None], states: Mapping[int, Tensor]
    ) -> list[Tensor]:
        """The saved tensors of a message.

        Args:
            states: the arguments that both ranks have, by their indices.
        """
        parts = {index: _unpacked(part, message) for index, part in enumerate(self.parts)}
        return [self._tensor(view, states if view.source == "state" else parts)
                for view in self.views]  # fmt: skip

    def to_json(self) -> list[Any]:
        """For the message in which the ranks agree."""
        parts = [(part.place, part.start, part.layout.to_json()) for part in self.parts]
        return [list(map(list, self.views)), parts]

    @classmethod
    def from_json(cls, fields: list[Any]) -> Contents:
        """The inverse of :meth:`to_json`."""
        views, parts = fields
        return cls(
            tuple(
                View(source, index, offset, None if sizes is None else tuple(sizes), tuple(strides))
                for source, index, offset, sizes, strides in views
            ),
            tuple(Part(place, start, Layout.from_json(item)) for place, start, item in parts),
        )

    def _tensor(self, view: View, memories: Mapping[int, Tensor]) -> Tensor:
        memory = memories[view.number]
        if view.sizes is None:
            return memory
        offset = memory.storage_offset() + view.offset
        return memory.detach().as_strided(view.sizes, view.strides, offset)


def pack(
    saved: Sequence[Tensor], states: Mapping[int, Tensor], places: int
) -> tuple[Contents, list[Tensor | None]]:
    """The contents of a message and its tensors, by place.

    Args:
        saved: in the order in which autograd saved them.
        states: the arguments that both ranks have, by their indices.
        places: how many tensors a message may have.

    Raises:
        WorkerError: a tensor is of a kind that no message carries.
    """
    known = {memory_of(state): index for index, state in states.items()}
    packing = _Packing(places)
    memories: dict[int, list[Tensor]] = {}
    for tensor in saved:
        _check(tensor)
        memories.setdefault(memory_of(tensor), []).append(tensor)
    for memory, tensors in memories.items():
        if memory not in known:
            packing.add(tensors)
        else:
            packing.find(tensors, known[memory], states[known[memory]])
    views = tuple(packing.found[_key(tensor)] for tensor in saved)
    return Contents(views, tuple(packing.parts)), [packing.bundle(), *packing.tensors]


def _check(tensor: Tensor) -> None:
    if tensor.layout is not torch.strided or tensor.is_quantized or _is_lazy(tensor):
        raise WorkerError(
            f"a backward needs a tensor of layout {tensor.layout} and type {tensor.dtype}, which "
            "cannot be sent to another rank",
            cure="set pipeline.backward to together",
        )


def _is_lazy(tensor: Tensor) -> bool:
    """Whether its memory holds something else than its values."""
    return tensor.is_conj() or tensor.is_neg()


class _Packing:
    """Puts memories into the parts of a message."""

    def __init__(self, places: int) -> None:
        self._places = places
        self._filled = 0
        self._small: list[Tensor] = []
        self.found: dict[tuple[Any, ...], View] = {}
        self.parts: list[Part] = []
        self.tensors: list[Tensor] = []

    def add(self, tensors: Sequence[Tensor]) -> None:
        """All saved tensors of one memory."""
        different = {_key(tensor): tensor for tensor in tensors}
        stretch = _stretch(list(different.values())) if len(different) > 1 else None
        if stretch is None:
            for key, tensor in different.items():
                self.found[key] = View("part", self._add_part(tensor))
            return
        index = self._add_part(stretch)
        for key, tensor in different.items():
            self.found[key] = _view("part", index, tensor, stretch)

    def find(self, tensors: Sequence[Tensor], index: int, state: Tensor) -> None:
        """Saved tensors in the memory of a state."""
        for tensor in tensors:
            self.found[_key(tensor)] = _view("state", index, tensor, state)

    def bundle(self) -> Tensor | None:
        """All small tensors, if there are any."""
        if not self._small:
            return None
        size = max(self._filled, _ALIGNMENT)
        found = torch.zeros(size, dtype=torch.uint8, device=self._small[0].device)
        small = (part for part in self.parts if part.place == BUNDLE)
        for part, tensor in zip(small, self._small, strict=True):
            flat = part.layout.flatten(tensor).view(torch.uint8)
            found[part.start : part.start + len(flat)].copy_(flat)
        return found

    def _add_part(self, tensor: Tensor) -> int:
        layout = Layout.of(tensor)
        full = len(self.tensors) + 1 == self._places
        if full or layout.size_bytes < BUNDLED_BYTES:
            self.parts.append(Part(BUNDLE, self._filled, layout))
            self._small.append(tensor)
            self._filled += -(-layout.size_bytes // _ALIGNMENT) * _ALIGNMENT
        else:
            self.tensors.append(tensor)
            self.parts.append(Part(len(self.tensors), 0, layout))
        return len(self.parts) - 1


def _key(tensor: Tensor) -> tuple[Any, ...]:
    offset, shape = tensor.storage_offset(), tuple(tensor.shape)
    return memory_of(tensor), tensor.dtype, offset, shape, tensor.stride()


def _view(source: str, index: int, tensor: Tensor, whole: Tensor) -> View:
    offset = int(tensor.storage_offset()) - int(whole.storage_offset())
    return View(source, index, offset, tuple(tensor.shape), tensor.stride())


def _stretch(tensors: Sequence[Tensor]) -> Tensor | None:
    """The memory that several views cover; None if each on its own is less."""
    if len({tensor.dtype for tensor in tensors}) > 1 or any(not t.numel() for t in tensors):
        return None
    first = min(tensor.storage_offset() for tensor in tensors)
    last = max(_end(tensor) for tensor in tensors)
    if last - first > sum(Layout.of(tensor).count for tensor in tensors):
        return None
    return tensors[0].detach().as_strided((last - first,), (1,), first)


def _end(tensor: Tensor) -> int:
    """Behind the last element, in elements of its memory."""
    reach = (
        (size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )
    return int(tensor.storage_offset()) + sum(reach) + 1


def _unpacked(part: Part, message: Sequence[Tensor | None]) -> Tensor:
    tensor = message[part.place]
    assert tensor is not None
    if part.place != BUNDLE:
        return tensor
    stop = part.start + part.layout.size_bytes
    return part.layout.unflatten(tensor[part.start : stop].view(part.layout.dtype))
