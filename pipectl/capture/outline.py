"""What a call gives at every batch size, found from calls at a few of them.

Sizes and strides of a result are taken to be linear in the batch size; a result whose sizes follow
from values fits no such rule.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from pipectl.capture.handing import anchored

_PLAIN = (int, float, bool, str, type(None), torch.dtype, torch.device)


class UnpredictableError(Exception):
    """A call has no outline; the text says why, with the called module as its subject."""


@dataclass(frozen=True)
class Linear:
    """A number that is linear in the batch size."""

    factor: int
    rest: int

    def at(self, batch: Any) -> Any:
        """The number for ``batch`` samples; symbolic if ``batch`` is."""
        return self.factor * batch + self.rest if self.factor else self.rest

    @classmethod
    def fit(cls, batches: Sequence[int], numbers: Sequence[int]) -> Linear:
        """The rule that gives ``numbers`` at ``batches``.

        Raises:
            UnpredictableError: there is none.
        """
        pairs = sorted(zip(batches, numbers, strict=True))
        (low, first), (high, last) = pairs[0], pairs[-1]
        factor = (last - first) // (high - low) if high > low else 0
        rule = cls(factor, first - factor * low)
        if any(rule.at(batch) != n for batch, n in zip(batches, numbers, strict=True)):
            raise UnpredictableError(
                "gives a tensor whose size depends on the data, not on the batch size"
            )
        return rule


@dataclass(frozen=True)
class Form:
    """A tensor of a result: of one call with integers, of all calls with linear rules.

    Args:
        origin: index of the argument in whose memory it lies; None for memory of its own.
        memory: number of the memory among those that the result brings; several tensors may
            share one.
        memory_size: its elements.
    """

    dtype: torch.dtype
    requires_grad: bool
    origin: int | None
    memory: int
    sizes: tuple[Any, ...]
    strides: tuple[Any, ...]
    offset: Any
    memory_size: Any

    def at(self, batch: Any) -> Form:
        """The form at one batch size."""
        sizes, strides = (tuple(n.at(batch) for n in some) for some in (self.sizes, self.strides))
        offset, memory_size = self.offset.at(batch), self.memory_size.at(batch)
        return replace(self, sizes=sizes, strides=strides, offset=offset, memory_size=memory_size)

    def blank(self, device: torch.device | None = None) -> Tensor:
        """A tensor of this form without values, in memory of its own."""
        return torch.empty_strided(self.sizes, self.strides, dtype=self.dtype, device=device)


class Unsteady:
    """Stands for a part of a result that no call gives in the structure of another.

    Nothing may be read of it but its type.

    Args:
        kind: that type.
    """

    def __init__(self, kind: type) -> None:
        self._kind = kind

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return self._kind

    def _refuse(self, *_: object) -> Any:
        raise UnpredictableError(
            "reads a part of a result that has another structure from call to call"
        )

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

    def imitate(self, batch: int, arguments: Sequence[Tensor]) -> list[Tensor]:
        """Tensors that share memory and have gradients as those of a real call; values are none.

        Arguments that a call writes are marked as written.
        """
        for index in self.written:
            torch.autograd.graph.increment_version(arguments[index])
        memory: dict[int, Tensor] = {}
        return [_imitation(form.at(batch), arguments, memory) for form in self.forms]


def outline_of(batches: Sequence[int], seen: Sequence[Outline]) -> Outline:
    """The outline that agrees with the calls seen at several batch sizes.

    Raises:
        UnpredictableError: there is none.
    """
    structure, columns = _shared([call.structure for call in seen], [call.leaves for call in seen])
    leaves = tuple(_common(batches, column) for column in columns)
    written = frozenset[int]().union(*(call.written for call in seen))
    return Outline(leaves, structure, written, any(call.draws for call in seen))


def _shared(
    structures: Sequence[Any], calls: Sequence[Sequence[Any]]
) -> tuple[Any, list[tuple[Any, ...]]]:
    """The structure that several results share, and for each of its leaves theirs.

    A part of one type in which they differ, as a list of another length, is one unsteady leaf.

    Raises:
        UnpredictableError: a part is of another type from call to call.
    """
    first = structures[0]
    if all(other == first for other in structures):
        return first, list(zip(*calls, strict=True))
    if any(other.is_leaf() or other.type is not first.type for other in structures):
        raise UnpredictableError("gives a result of another structure from call to call")
    if any((o.context, o.num_children) != (first.context, first.num_children) for o in structures):
        return pytree.treespec_leaf(), [(Unsteady(first.type),) * len(calls)]
    children, columns = [], []
    rest = [iter(leaves) for leaves in calls]
    for parts in zip(*(structure.children() for structure in structures), strict=True):
        taken = [
            list(islice(leaves, part.num_leaves)) for leaves, part in zip(rest, parts, strict=True)
        ]
        child, below = _shared(parts, taken)
        children.append(child)
        columns += below
    return pytree.TreeSpec(first.type, first.context, children), columns


def see(
    leaves: Sequence[Any],
    structure: Any,
    arguments: Sequence[Tensor],
    written: frozenset[int],
    draws: bool,
) -> Outline:
    """The outline of one call, with integers for sizes.

    Raises:
        UnpredictableError: the result holds something that is neither a tensor nor plain.
    """
    memories: dict[int, int] = {}
    for index, argument in reversed(list(enumerate(arguments))):
        memories[argument.untyped_storage()._cdata] = index
    forms = [_form(leaf, memories, len(arguments)) for leaf in leaves]
    if draws:  # another draw may give more than an argument as it is
        trained = any(argument.requires_grad for argument in arguments)
        forms = [_computed(form, written, trained=trained) for form in forms]
    return Outline(tuple(forms), structure, written, draws)


def _computed(form: Any, written: frozenset[int], *, trained: bool) -> Any:
    """The form of a result that may have been computed from the arguments, in memory of its own."""
    if not isinstance(form, Form) or form.origin in written:
        return form
    grad = form.requires_grad or (trained and form.dtype.is_floating_point)
    if form.origin is None:
        return replace(form, requires_grad=grad)
    size = _extent(form)
    memory = -1 - form.memory
    return replace(form, requires_grad=grad, origin=None, memory=memory, offset=0, memory_size=size)


def _form(leaf: Any, memories: dict[int, int], arguments: int) -> Any:
    if not isinstance(leaf, Tensor):
        if not isinstance(leaf, _PLAIN):
            raise UnpredictableError(f"gives a {type(leaf).__name__}, which is not a tensor")
        return leaf
    storage = leaf.untyped_storage()
    memory = memories.setdefault(storage._cdata, arguments + len(memories))
    return Form(
        leaf.dtype,
        leaf.requires_grad,
        memory if memory < arguments else None,
        memory,
        tuple(leaf.shape),
        leaf.stride(),
        int(leaf.storage_offset()),
        storage.nbytes() // leaf.element_size(),
    )


def _common(batches: Sequence[int], column: Sequence[Any]) -> Any:
    """The rule for one leaf of the result."""
    first = column[0]
    if type(first) is Unsteady:
        return first
    if not isinstance(first, Form):
        if any(type(other) is not type(first) or other != first for other in column):
            raise UnpredictableError(f"gives a {type(first).__name__} that changes with the data")
        return first
    if any(not isinstance(o, Form) or len(o.sizes) != len(first.sizes) for o in column):
        raise UnpredictableError(
            "gives a tensor with another number of dimensions from call to call"
        )
    if any(other.dtype != first.dtype for other in column):
        raise UnpredictableError("gives a tensor of another type from call to call")

    def fit(numbers: Sequence[int]) -> Linear:
        return Linear.fit(batches, numbers)

    if any(other.memory != first.memory for other in column):
        # Sometimes an argument itself, sometimes not: taken to be none.
        column = [replace(o, origin=None, memory=-1 - first.memory, offset=0) for o in column]
        column = [replace(other, memory_size=_extent(other)) for other in column]
    first = column[0]
    return replace(
        first,
        requires_grad=any(other.requires_grad for other in column),
        sizes=tuple(map(fit, zip(*(other.sizes for other in column), strict=True))),
        strides=tuple(map(fit, zip(*(other.strides for other in column), strict=True))),
        offset=fit([other.offset for other in column]),
        memory_size=fit([0 if other.origin is not None else other.memory_size for other in column]),
    )


def _extent(form: Form) -> int:
    """Elements of memory that a tensor needs from its first to its last."""
    pairs = zip(form.sizes, form.strides, strict=True)
    return int(1 + sum((size - 1) * stride for size, stride in pairs))


def _imitation(form: Form, arguments: Sequence[Tensor], memory: dict[int, Tensor]) -> Tensor:
    if form.origin is not None:
        base = arguments[form.origin]
    elif form.memory in memory:
        base = memory[form.memory]
    else:
        base = torch.empty(form.memory_size, dtype=form.dtype)
        base = anchored(base) if form.requires_grad and torch.is_grad_enabled() else base
        memory[form.memory] = base
    made = base.as_strided(form.sizes, form.strides, form.offset)
    return made if form.requires_grad else made.detach()
