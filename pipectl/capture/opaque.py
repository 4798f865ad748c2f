"""A submodule as one operator of a graph, which runs the user's own code.

Such code may do what no graph can hold: branch on values, call numpy, keep things in lists. Only
while a model is exported does an operator of torch stand for it; a stage calls the module itself,
within the stage's autograd graph, with parameters and buffers as arguments like any other.

A stage must know beforehand what it receives and sends. So the calls that are seen at a few batch
sizes are put together to one outline of the result: which tensors, in whose memory, of which sizes,
each linear in the batch size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from pipectl.capture.randomness import own_generators, reseed
from pipectl.capture.refusals import (
    UNSTEADY,
    cannot_capture,
    other_gradient,
    other_result,
    unsuitable,
)
from pipectl.capture.step import make_known, own_name
from pipectl.capture.tensors import is_deferred, storage_of, storages_in, tensors_in

_TENSOR, _NUMBER = object(), object()
"""Stand for tensors and symbolic sizes among the arguments of a call."""
_PLAIN = (int, float, bool, str, type(None), torch.dtype, torch.device)
"""What a result may hold besides tensors."""


class States:
    """The parameters and buffers of a module and of those in it, tied ones once.

    Attributes:
        names: of each in the module that has it.
    """

    def __init__(self, module: nn.Module) -> None:
        places: dict[int, list[tuple[dict[str, Any], str]]] = {}
        for owner in module.modules():
            for entries in (owner._parameters, owner._buffers):
                for name, tensor in entries.items():
                    if tensor is not None:
                        places.setdefault(id(tensor), []).append((entries, name))
        self._places = list(places.values())
        self.names = [name for (_, name), *_ in self._places]

    def now(self) -> list[Tensor]:
        """What stands in the module at present."""
        return [entries[name] for (entries, name), *_ in self._places]

    @contextmanager
    def replaced(self, tensors: Sequence[Tensor]) -> Iterator[None]:
        """Let other tensors stand in the module; a buffer that is assigned is written instead."""
        before = self.now()
        self._put(tensors)
        try:
            yield
            for tensor, current in zip(tensors, self.now(), strict=True):
                if current is not tensor:
                    with torch.no_grad():
                        tensor.copy_(current)
        finally:
            self._put(before)

    def _put(self, tensors: Sequence[Tensor]) -> None:
        for places, tensor in zip(self._places, tensors, strict=True):
            for entries, name in places:
                entries[name] = tensor


class Arguments:
    """Positional and keyword arguments of a call, flattened.

    Attributes:
        tensors, numbers: tensors and symbolic sizes among them, in order.

    Raises:
        RefusedError: one of them holds tensors that cannot be taken out.
    """

    def __init__(self, args: Any, kwargs: Any) -> None:
        leaves, self._structure = pytree.tree_flatten(make_known((args, kwargs)))
        self.tensors: list[Tensor] = []
        self.numbers: list[Any] = []
        self._rest: list[Any] = []
        for leaf in leaves:
            if isinstance(leaf, Tensor):
                self.tensors.append(leaf)
                self._rest.append(_TENSOR)
            elif isinstance(leaf, torch.SymInt | torch.SymFloat | torch.SymBool):
                self.numbers.append(leaf)
                self._rest.append(_NUMBER)
            else:
                if tensors_in(list(getattr(leaf, "__dict__", {}).values())):
                    raise unsuitable(
                        f"is called with a {type(leaf).__name__} that contains tensors"
                    )
                self._rest.append(leaf)

    def filled(self, tensors: Sequence[Tensor], numbers: Sequence[Any]) -> Any:
        """The (args, kwargs) with other tensors and numbers."""
        waiting = {_TENSOR: iter(tensors), _NUMBER: iter(numbers)}
        leaves = [
            next(waiting[leaf]) if leaf is _TENSOR or leaf is _NUMBER else leaf
            for leaf in self._rest
        ]
        return pytree.tree_unflatten(leaves, self._structure)


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
        raise cannot_capture(*UNSTEADY)

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


class Opaque:
    """One call of a submodule, as an operator: ``opaque(batch, *states, *tensors, *numbers)``.

    Args:
        path: of the module in the step.
        arguments: of the call while the model was exported.
        outline: what the call gives.
    """

    def __init__(
        self, path: str, module: nn.Module, states: States, arguments: Arguments, outline: Outline
    ) -> None:
        self.path = own_name(path)
        self.outline = outline
        self._module = module
        write_buffers_once(module)
        self._states = states
        self._modes = [(inner, inner.training) for inner in module.modules()]
        self._arguments = arguments
        self._tensors = len(states.names) + len(arguments.tensors)
        forms = outline.forms
        memories = [form.memory for form in forms]
        self._unshared = [  # what shares memory with nothing else
            index
            for index, form in enumerate(forms)
            if form.origin is None and memories.count(form.memory) == 1
        ]
        lent = {form.origin for form in forms} | outline.written
        self._entered = frozenset(range(len(states.names), self._tensors)) - lent
        self.__name__ = path.replace(".", "_")

    @cached_property
    def _generators(self) -> list[Any]:
        """Those of its own; while a model is exported, others stand in for some of them."""
        return own_generators(self._module)

    def __repr__(self) -> str:
        return f"{self.path} ({type(self._module).__name__})"

    def __call__(self, batch: int, *given: Any) -> Any:
        """Call the module; gives the tensors of its result, alone or in a tuple.

        Args:
            batch: samples of the micro-batch.
            given: parameters and buffers, then the tensors of the call, then its numbers.

        Raises:
            CaptureError: the result has other sizes than those that were captured.
        """
        tensors, numbers = list(given[: self._tensors]), given[self._tensors :]
        if any(map(is_deferred, tensors)):
            results = self._imitate(batch, tensors)
        else:
            anchor = None
            if torch.is_grad_enabled():
                # Aliases of the inputs that have a gradient and are not changed by that.
                entered = [i for i in sorted(self._entered) if tensors[i].requires_grad]
                aliases, anchor = enter([tensors[index] for index in entered])
                for index, alias in zip(entered, aliases, strict=True):
                    tensors[index] = alias
                for index in range(len(self._states.names), len(tensors)):
                    if not tensors[index].requires_grad:  # the module may ask for its gradient
                        tensors[index] = tensors[index].detach()
            results = self._checked(self._run(tensors, numbers), batch, tensors)
            if anchor is not None:
                forms = self.outline.forms
                indices = [index for index in self._unshared if forms[index].requires_grad]
                left = leave(anchor, [results[index] for index in indices])
                for index, tensor in zip(indices, left, strict=True):
                    results[index] = tensor
        return results[0] if len(results) == 1 else tuple(results)

    def _imitate(self, batch: int, arguments: Sequence[Tensor]) -> list[Tensor]:
        """Tensors that share memory and have gradients as those of a real call; values are none.

        Arguments that a call writes are marked as written.
        """
        forms = self.outline.forms
        for index in self.outline.written:
            torch.autograd.graph.increment_version(arguments[index])
        bases: dict[tuple[int | None, int], Tensor] = {
            (index, index): argument for index, argument in enumerate(arguments)
        }
        results = []
        for form in forms:
            key = form.origin, form.memory
            if key not in bases:
                size = max(other.extent(batch) for other in forms if other.memory == form.memory)
                base = torch.empty(size, dtype=form.dtype)
                grad = form.requires_grad and torch.is_grad_enabled()
                bases[key] = anchored(base) if grad else base
            view = bases[key].as_strided(*form.layout_at(batch))
            results.append(view if form.requires_grad else view.detach())
        return results

    def _run(self, tensors: Sequence[Tensor], numbers: Sequence[Any]) -> Any:
        count = len(self._states.names)
        for module, training in self._modes:
            if module.training is not training:
                module.training = training
        reseed(self._generators)
        args, kwargs = self._arguments.filled(tensors[count:], numbers)
        with self._states.replaced(tensors[:count]):
            return self._module(*args, **kwargs)

    def _checked(self, result: Any, batch: int, arguments: Sequence[Tensor]) -> list[Tensor]:
        """The tensors of a result, in the layouts that were captured."""
        leaves = self.outline.leaves_of(result)
        if leaves is None:
            structure = pytree.tree_structure(result)
            raise other_result(self.path, f"gave {structure}", f"{self.outline.structure}")
        memories = set(storages_in(arguments))
        tensors = []
        for leaf, expected in zip(leaves, self.outline.leaves, strict=True):
            if type(expected) is Unsteady:
                continue
            if not isinstance(expected, Form):
                if type(leaf) is not type(expected) or leaf != expected:
                    raise other_result(self.path, f"gave {leaf!r}", repr(expected))
                continue
            sizes, strides, _ = expected.layout_at(batch)
            if not isinstance(leaf, Tensor):
                raise other_result(self.path, f"gave a {type(leaf).__name__}", "a tensor")
            if (leaf.dtype, leaf.shape) != (expected.dtype, sizes):
                raise other_result(
                    self.path,
                    f"gave {list(leaf.shape)} of {leaf.dtype}",
                    f"{list(sizes)} of {expected.dtype}",
                )
            if leaf.requires_grad and not expected.requires_grad:
                raise other_gradient(self.path)
            borrowed = expected.origin is None and storage_of(leaf) in memories
            if leaf.stride() != strides:
                leaf = expected.blank(batch, leaf.device).copy_(leaf)
            tensors.append(leaf.clone() if borrowed else leaf)
        return tensors


def enter(tensors: Sequence[Tensor]) -> tuple[list[Tensor], Tensor]:
    """Aliases of tensors that require a gradient, and an anchor for :func:`leave`.

    What eager code does may depend on values: an input may have no gradient today, or one in
    another layout. A stage must know beforehand what it receives and sends. So if any result of
    :func:`leave` gets a gradient, each of the tensors gets one, zeros if need be, in the layout of
    the tensor, and only once: the sum over its uses inside.
    """
    if not tensors:
        return [], torch.empty(0, requires_grad=True)
    *aliases, anchor = _Enter.apply(*tensors)  # type: ignore[no-untyped-call]
    return aliases, anchor


def leave(anchor: Tensor, tensors: Sequence[Tensor]) -> list[Tensor]:
    """The tensors, all with gradient, as values of their own that may be written in place."""
    return list(_Leave.apply(anchor, *tensors)) if tensors else []  # type: ignore[no-untyped-call]


def anchored(tensor: Tensor) -> Tensor:
    """A tensor with a gradient that leads nowhere, and that may be written in place."""
    return leave(torch.empty(0, requires_grad=True), [tensor])[0]


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        # Gradients lie as their tensors do, but for tensors whose elements share memory.
        ctx.layouts = [
            (t.shape, torch.empty_like(t, device="meta").stride(), t.dtype, t.device)
            for t in tensors
        ]
        return (*(tensor.view_as(tensor) for tensor in tensors), torch.empty(0))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor, ...]:
        results = []
        for gradient, (sizes, strides, dtype, device) in zip(gradients, ctx.layouts, strict=False):
            if gradient is None or gradient.stride() != strides:
                blank = torch.empty_strided(sizes, strides, dtype=dtype, device=device)
                gradient = blank.zero_() if gradient is None else blank.copy_(gradient)
            results.append(gradient)
        return tuple(results)


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, _: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        return tuple(tensor.detach() for tensor in tensors)

    @staticmethod
    def backward(_: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        return (torch.zeros(0), *gradients)


_lent: WeakKeyDictionary[nn.Module, dict[str, Tensor]] = WeakKeyDictionary()
"""Modules that write their buffers once, with their own buffers while copies stand in for them."""


def write_buffers_once(model: nn.Module) -> None:
    """Let each module of a model write its buffers in forwards alone, not in backwards.

    Plain PyTorch counts a micro-batch twice within ``torch.utils.checkpoint``: the running
    statistics of a BatchNorm move twice, the second time in the order of the backwards, which is
    the schedule's.
    """
    for module in model.modules():
        if module not in _lent and any(each is not None for each in module._buffers.values()):
            _lent[module] = {}
            module.register_forward_pre_hook(_lend_copies)
            # Also where torch ends such a call early, by an exception.
            module.register_forward_hook(_take_back, always_call=True)


def _lend_copies(module: nn.Module, _: Any) -> None:
    if torch._C._current_graph_task_id() != -1:  # what torch's own checkpoint asks, too
        own = {name: each for name, each in module._buffers.items() if each is not None}
        _lent[module] = own
        module._buffers.update({name: each.detach().clone() for name, each in own.items()})


def _take_back(module: nn.Module, *_: Any) -> None:
    module._buffers.update(_lent.get(module, {}))
    _lent[module] = {}
