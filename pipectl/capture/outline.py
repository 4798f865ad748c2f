"""What calls of a submodule give: which tensors, of which sizes, in whose memory.

A stage must know beforehand what it receives and sends. So the calls that are seen at a few batch
sizes are put together to one outline, in which every size is linear in the batch size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from pipectl.capture.refusals import unsteady_part, unsuitable
from pipectl.capture.tensors import storage_of

_PLAIN = (int, float, bool, str, type(None), torch.dtype, torch.device)


class Form(NamedTuple):
    """A tensor of a result.

    Args:
        origin: index of the argument in whose memory it lies; None for memory of its own.
        memory: number of the memory among those of arguments and result; several tensors may
            share one.
        layout: sizes, strides and offset in one row, each as (factor, rest) of the batch size.
    """

    dtype: torch.dtype
    requires_grad: bool
    origin: int | None
    memory: int
    layout: tuple[tuple[int, int], ...]

    def layout_at(self, batch: Any) -> tuple[tuple[Any, ...], tuple[Any, ...], Any]:
        """Sizes, strides and offset for ``batch`` samples; symbolic if ``batch`` is."""
        numbers = [factor * batch + rest if factor else rest for factor, rest in self.layout]
        dims = len(numbers) // 2
        return tuple(numbers[:dims]), tuple(numbers[dims:-1]), numbers[-1]

    def blank(self, batch: Any, device: torch.device | None = None) -> Tensor:
        """A tensor of this form without values, in memory of its own."""
        sizes, strides, _ = self.layout_at(batch)
        return torch.empty_strided(sizes, strides, dtype=self.dtype, device=device)

    def extent(self, batch: int) -> int:
        """Elements of memory that it needs, up to its last."""
        sizes, strides, offset = self.layout_at(batch)
        pairs = zip(sizes, strides, strict=True)
        return max(0, int(offset + 1 + sum((size - 1) * stride for size, stride in pairs)))

    def in_own_memory(self, memory: int) -> Form:
        """The same at the start of memory that no argument has."""
        return self._replace(origin=None, memory=memory, layout=(*self.layout[:-1], (0, 0)))


class Unsteady:
    """Stands for a part of a result that no two calls give in one structure.

    Nothing may be read of it but its type, ``kind``.
    """

    def __init__(self, kind: type) -> None:
        self._kind = kind

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return self._kind

    def _refuse(self, *_: object) -> Any:
        raise unsteady_part()

    __getattr__ = __getitem__ = __iter__ = __len__ = __bool__ = __contains__ = __add__ = _refuse


@dataclass(frozen=True)
class Outline:
    """What a call gives.

    Args:
        leaves: the flat result, with forms for tensors.
        structure: pytree structure of the result.
        written: indices of the tensor arguments whose memory a call wrote.
        draws: whether a call drew random numbers.
    """

    leaves: tuple[Any, ...]
    structure: Any
    written: frozenset[int]
    draws: bool

    @classmethod
    def of_call(
        cls, result: Any, arguments: Sequence[Tensor], written: frozenset[int], draws: bool
    ) -> Outline:
        """The outline of one call.

        Raises:
            RefusedError: the result holds something that is neither a tensor nor plain.
        """
        leaves, structure = pytree.tree_flatten(result)
        memories: dict[int, int] = {}
        for index, argument in enumerate(arguments):
            memories.setdefault(storage_of(argument), index)
        trained = any(argument.requires_grad for argument in arguments)
        outlined: list[Any] = []
        for leaf in leaves:
            if not isinstance(leaf, Tensor):
                if not isinstance(leaf, _PLAIN):
                    raise unsuitable(f"gives a {type(leaf).__name__}, which is not a tensor")
                outlined.append(leaf)
                continue
            number = len(arguments) + len(memories)
            memory = memories.setdefault(storage_of(leaf), number)
            origin = memory if memory < len(arguments) else None
            numbers = (*leaf.shape, *leaf.stride(), int(leaf.storage_offset()))
            layout = tuple((0, number) for number in numbers)
            form = Form(leaf.dtype, leaf.requires_grad, origin, memory, layout)
            if draws and origin not in written:
                # Another draw may give more than an argument as it is.
                form = form if origin is None else form.in_own_memory(-1 - memory)
                if trained and form.dtype.is_floating_point:
                    form = form._replace(requires_grad=True)
            outlined.append(form)
        return cls(tuple(outlined), structure, written, draws)

    @classmethod
    def of_calls(cls, batches: Sequence[int], calls: Sequence[Outline]) -> Outline:
        """The outline that agrees with calls at several batch sizes.

        Raises:
            RefusedError: there is none.
        """
        columns = [call.leaves for call in calls]
        structure, shared = _shared([call.structure for call in calls], columns)
        leaves = tuple(_common(batches, column) for column in shared)
        written = frozenset[int]().union(*(call.written for call in calls))
        return cls(leaves, structure, written, any(call.draws for call in calls))

    @property
    def forms(self) -> tuple[Form, ...]:
        """The forms of the tensors of the result, in order."""
        return tuple(leaf for leaf in self.leaves if isinstance(leaf, Form))

    def leaves_of(self, result: Any) -> list[Any] | None:
        """The flat result of another call; None if its structure is not this one."""
        try:
            leaves: list[Any] = self.structure.flatten_up_to(result)
        except ValueError:
            return None
        return leaves

    def result(self, tensors: Sequence[Any]) -> Any:
        """The result with these tensors in it."""
        waiting = iter(tensors)
        flat = [next(waiting) if isinstance(leaf, Form) else leaf for leaf in self.leaves]
        return self.structure.unflatten(flat)


def _shared(
    structures: Sequence[Any], calls: Sequence[Sequence[Any]]
) -> tuple[Any, list[tuple[Any, ...]]]:
    """The structure that several results share, and for each of its leaves theirs.

    A part of one type in which they differ, as a list of another length, is one unsteady leaf.
    """
    first = structures[0]
    if all(other == first for other in structures):
        return first, list(zip(*calls, strict=True))
    if any(other.is_leaf() or other.type is not first.type for other in structures):
        raise unsuitable("gives a result of another structure from call to call")
    if any((o.context, o.num_children) != (first.context, first.num_children) for o in structures):
        return pytree.treespec_leaf(), [(Unsteady(first.type),) * len(calls)]
    children, columns = [], []
    rest = [iter(leaves) for leaves in calls]
    for parts in zip(*(structure.children() for structure in structures), strict=True):
        below = [list(islice(some, p.num_leaves)) for some, p in zip(rest, parts, strict=True)]
        child, shared = _shared(parts, below)
        children.append(child)
        columns += shared
    return pytree.TreeSpec(first.type, first.context, children), columns


def _common(batches: Sequence[int], column: Sequence[Any]) -> Any:
    """What one leaf of the result has in common over several calls."""
    first = column[0]
    if type(first) is Unsteady:
        return first
    if not isinstance(first, Form):
        if any(type(other) is not type(first) or other != first for other in column):
            raise unsuitable(f"gives a {type(first).__name__} that changes with the data")
        return first
    if any(not isinstance(o, Form) or len(o.layout) != len(first.layout) for o in column):
        raise unsuitable("gives a tensor with another number of dimensions from call to call")
    if any(other.dtype != first.dtype for other in column):
        raise unsuitable("gives a tensor of another type from call to call")
    if any(other.memory != first.memory for other in column):
        # Sometimes an argument itself, sometimes not: taken to be none.
        column = [other.in_own_memory(-1 - first.memory) for other in column]
    layout = []
    for numbers in zip(*([rest for _, rest in form.layout] for form in column), strict=True):
        pairs = sorted(zip(batches, numbers, strict=True))
        (low, low_number), (high, high_number) = pairs[0], pairs[-1]
        factor = (high_number - low_number) // (high - low) if high > low else 0
        rest = low_number - factor * low
        if any(factor * batch + rest != number for batch, number in pairs):
            raise unsuitable("gives a tensor whose size depends on the data, not on the batch size")
        layout.append((factor, rest))
    wants_gradient = any(other.requires_grad for other in column)
    return column[0]._replace(layout=tuple(layout), requires_grad=wants_gradient)
