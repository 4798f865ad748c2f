"""A submodule as one operator of a graph, which runs the user's own code.

Such code may do what no graph can hold: branch on values, call numpy, or keep state in lists. A
stage calls the module itself within the stage's autograd graph, with parameters and buffers as
arguments.

A stage must know in advance what it receives and sends. The calls are therefore observed at a few
batch sizes and combined into an outline of the result: which tensors, in whose memory, and of which
sizes, each a linear function of the batch size.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any
from weakref import WeakSet

import numpy as np
import torch
from torch import Tensor, nn

from pipectl.capture.draws import seeded_draws
from pipectl.capture.leaves import is_choice
from pipectl.capture.model_with_loss import States, own_name, register_dataclasses
from pipectl.capture.python_state import entries_inside, is_same_value, own_generators, put
from pipectl.capture.randomness import reseeded
from pipectl.capture.refusals import Refusal, RefusedError
from pipectl.capture.tensors import is_deferred, storage_of, storages_in, tensors_in
from pipectl.torch_api import buffers_of, count_nodes, functions_since, is_in_backward, pytree

_SIZES = (torch.SymInt, torch.SymFloat, torch.SymBool)
_PLAIN = (int, float, bool, str, type(None), torch.dtype, torch.device)
"""What a result may hold besides tensors."""
_ANY_SIZE = 1 << 40
"""Elements of memory without values, which may be larger than any result."""


class UnsuitableError(Exception):
    """What a submodule does that no operator can do; the submodule is the text's subject."""


class Arguments:
    """Positional and keyword arguments of a call.

    Attributes:
        tensors, sizes: the tensors and symbolic sizes among them, in order.

    Raises:
        UnsuitableError: an argument contains tensors that cannot be taken out.
    """

    def __init__(self, args: Any, kwargs: Any) -> None:
        leaves, self._structure = pytree.tree_flatten(register_dataclasses((args, kwargs)))
        tensors = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        sizes = [i for i, leaf in enumerate(leaves) if isinstance(leaf, _SIZES)]
        self.tensors: list[Tensor] = [leaves[index] for index in tensors]
        self.sizes: list[Any] = [leaves[index] for index in sizes]
        self._places = [*tensors, *sizes]
        self._leaves = [None if i in self._places else leaf for i, leaf in enumerate(leaves)]
        for leaf in self._leaves:
            if any(_has_tensors(entry.value) for entry in entries_inside([leaf]).values()):
                raise UnsuitableError(
                    f"is called with a {type(leaf).__name__} that contains tensors"
                )
        self._inside = entries_inside(self._leaves)

    @property
    def choices(self) -> set[Any]:
        """The texts and members of enumerations among the arguments, which are the same in every
        later call.
        """
        return {leaf for leaf in self._leaves if is_choice(leaf)}

    @property
    def kinds(self) -> str:
        """The structure of the arguments, and the types of those that stay the same."""
        names = [type(leaf).__name__ for leaf in self._leaves]
        return f"{self._structure}{names}"

    def check(self, args: Any, kwargs: Any, values: Sequence[Any]) -> None:
        """Raise if a call has changed what it was called with.

        Args:
            args, kwargs: those that were filled with ``values`` for the call.

        Raises:
            UnsuitableError: nothing outside of the call would see it.
        """
        leaves, structure = pytree.tree_flatten((args, kwargs))
        inside = entries_inside(self._leaves)
        if (
            structure != self._structure
            or not all(map(is_same_value, leaves, self._filled(values)))
            or inside.keys() != self._inside.keys()
            or not all(entry.is_like(self._inside[name]) for name, entry in inside.items())
        ):
            raise UnsuitableError(
                "changes a list, mapping or object that it is called with, where nothing outside "
                "of it sees that (return what is new instead)"
            )

    def filled(self, values: Sequence[Any]) -> Any:
        """Return the (args, kwargs) with other tensors, followed by other sizes.

        Objects among them are as they were for the call, whatever was put into them later.
        """
        for entry in self._inside.values():
            if not isinstance(entry.holder, set):
                put(entry, entry.value)
            if isinstance(entry.content, np.ndarray) and entry.value.flags.writeable:
                entry.value[...] = entry.content
        return pytree.tree_unflatten(self._filled(values), self._structure)

    def _filled(self, values: Sequence[Any]) -> list[Any]:
        leaves = list(self._leaves)
        for place, value in zip(self._places, values, strict=True):
            leaves[place] = value
        return leaves


def _has_tensors(value: Any) -> bool:
    """Return whether a value is or contains tensors, or modules with parameters or buffers."""
    leaves = pytree.tree_leaves(value)
    modules = [leaf for leaf in leaves if isinstance(leaf, nn.Module)]
    return bool(tensors_in(leaves)) or any(
        any(True for _ in (*module.parameters(), *module.buffers())) for module in modules
    )


@dataclass(frozen=True)
class Form:
    """A tensor of a result.

    Args:
        memory: index of the argument whose memory it uses; negative for memory that no argument
            has, and equal for results that share it.
        layout: sizes, strides and offset in one tuple, each as (factor, rest) of that of samples.
    """

    dtype: torch.dtype
    requires_grad: bool
    memory: int
    layout: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, tensor: Tensor, memory: int) -> Form:
        """Return the form of a tensor, in which all sizes are numbers."""
        numbers = (*tensor.shape, *tensor.stride(), int(tensor.storage_offset()))
        layout = tuple((0, number) for number in numbers)
        return cls(tensor.dtype, tensor.requires_grad, memory, layout)

    def layout_at(self, samples: Any = 0) -> tuple[tuple[Any, ...], tuple[Any, ...], Any]:
        """Return sizes, strides and offset for ``samples``; symbolic if they are."""
        numbers = [factor * samples + rest if factor else rest for factor, rest in self.layout]
        dims = len(numbers) // 2
        return tuple(numbers[:dims]), tuple(numbers[dims:-1]), numbers[-1]

    def blank(self, samples: Any = 0, device: torch.device | None = None) -> Tensor:
        """Return a tensor of this form without values, in memory of its own."""
        sizes, strides, _ = self.layout_at(samples)
        return torch.empty_strided(sizes, strides, dtype=self.dtype, device=device)

    def in_own_memory(self, memory: int) -> Form:
        """Return this form at the start of memory that no argument has, in place of a memory."""
        return replace(self, memory=min(memory, ~memory), layout=(*self.layout[:-1], (0, 0)))


class Unsteady:
    """A part of a result whose structure differs between calls.

    Only its type, ``kind``, may be read.
    """

    def __init__(self, kind: type) -> None:
        self._kind = kind

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return self._kind

    def _refuse(self, *_: object) -> Any:
        raise Refusal.UNSTEADY.error()

    __getattr__ = __getitem__ = __iter__ = __len__ = __bool__ = __contains__ = __add__ = _refuse


@dataclass(frozen=True)
class Outline:
    """The result of a call.

    Args:
        tree: the result, with a :class:`Form` in the place of every tensor.
        written: indices of the tensor arguments whose memory a call wrote.
        draws: whether a call drew random numbers.
        changed: indices of the buffers that a call changed.
        functions: whether its backward runs functions of the user, which may run modules again.
    """

    tree: Any
    written: frozenset[int]
    draws: bool
    changed: frozenset[int] = frozenset()
    functions: bool = False

    @classmethod
    def of_call(
        cls, result: Any, arguments: Sequence[Tensor], written: frozenset[int], draws: bool
    ) -> Outline:
        """Return the outline of one call.

        Args:
            arguments: of the call; it had copies of the buffers among them.

        Raises:
            UnsuitableError: the result contains something that is neither a tensor nor a plain
                value.
        """
        memories: dict[int, int] = {}
        for index, argument in enumerate(arguments):
            memories.setdefault(storage_of(argument), index)
        trained = any(argument.requires_grad for argument in arguments)

        def outline(leaf: Any) -> Any:
            if isinstance(leaf, _PLAIN):
                return leaf
            if not isinstance(leaf, Tensor):
                raise UnsuitableError(f"gives a {type(leaf).__name__}, which is not a tensor")
            number = len(arguments) + len(memories)
            form = Form.of(leaf, memories.setdefault(storage_of(leaf), ~number))
            if draws and form.memory not in written:  # another draw may give more than an argument
                form = form if form.memory < 0 else form.in_own_memory(form.memory)
                if trained and form.dtype.is_floating_point:
                    form = replace(form, requires_grad=True)
            return form

        return cls(pytree.tree_map(outline, register_dataclasses(result)), written, draws)

    @classmethod
    def of_calls(cls, batches: Sequence[int], calls: Sequence[Outline]) -> Outline:
        """Return the outline that agrees with calls at several batch sizes.

        Raises:
            UnsuitableError: there is none.
        """
        tree = _combine(batches, [call.tree for call in calls])
        written = frozenset[int]().union(*(call.written for call in calls))
        changed = frozenset[int]().union(*(call.changed for call in calls))
        functions = any(call.functions for call in calls)
        return cls(tree, written, any(call.draws for call in calls), changed, functions)

    @cached_property
    def forms(self) -> tuple[Form, ...]:
        """The forms of the tensors of the result, in order."""
        return tuple(leaf for leaf in pytree.tree_leaves(self.tree) if isinstance(leaf, Form))

    def blanks(self, samples: Any, arguments: Sequence[Tensor]) -> list[Tensor]:
        """Return the tensors of a result without values, with memory and gradients like those of a
        real call.

        Args:
            samples: of the micro-batch; may be symbolic.
            arguments: of the call, without values.
        """
        memories, views = dict(enumerate(arguments)), []
        for form in self.forms:
            if form.memory not in memories:
                memory = torch.empty(_ANY_SIZE, dtype=form.dtype)
                trained = form.requires_grad and torch.is_grad_enabled()
                memories[form.memory] = anchored(memory) if trained else memory
            view = memories[form.memory].as_strided(*form.layout_at(samples))
            views.append(view if form.requires_grad else view.detach())
        return views

    def result(self, tensors: Iterator[Any]) -> Any:
        """Return the result with the next of these tensors in it."""
        return pytree.tree_map_only(Form, lambda _: next(tensors), self.tree)


def _combine(batches: Sequence[int], results: Sequence[Any]) -> Any:
    """Return what the results of several calls have in common, as one tree of forms.

    A part of one type whose structure differs, such as a list of another length, is one unsteady
    leaf.
    """
    flat = [pytree.tree_flatten(each, is_leaf=partial(operator.is_not, each)) for each in results]
    parts, specs = zip(*flat, strict=True)
    first = specs[0]
    if any(spec.type is not first.type for spec in specs):
        raise UnsuitableError("gives a result of another structure from call to call")
    if first.is_leaf():
        return _common(batches, results)
    if any(spec != first for spec in specs):
        return Unsteady(first.type)
    return first.unflatten([_combine(batches, column) for column in zip(*parts, strict=True)])


def _common(batches: Sequence[int], leaves: Sequence[Any]) -> Any:
    """Return what one leaf of the result has in common over several calls."""
    first = leaves[0]
    if not isinstance(first, Form):
        if any(type(other) is not type(first) or other != first for other in leaves):
            raise UnsuitableError(f"gives a {type(first).__name__} that changes with the data")
        return first
    if any(not isinstance(o, Form) or len(o.layout) != len(first.layout) for o in leaves):
        raise UnsuitableError("gives a tensor with another number of dimensions from call to call")
    if any(other.dtype != first.dtype for other in leaves):
        raise UnsuitableError("gives a tensor of another type from call to call")
    if any(other.memory != first.memory for other in leaves):
        # Sometimes an argument itself, sometimes not: taken to be none.
        leaves = [other.in_own_memory(first.memory) for other in leaves]
    layout = []
    for numbers in zip(*([rest for _, rest in form.layout] for form in leaves), strict=True):
        pairs = sorted(zip(batches, numbers, strict=True))
        (low, low_number), (high, high_number) = pairs[0], pairs[-1]
        factor = (high_number - low_number) // (high - low) if high > low else 0
        rest = low_number - factor * low
        if any(factor * samples + rest != number for samples, number in pairs):
            raise UnsuitableError(
                "gives a tensor whose size depends on the data, not on the batch size"
            )
        layout.append((factor, rest))
    wants_gradient = any(other.requires_grad for other in leaves)
    return replace(leaves[0], layout=tuple(layout), requires_grad=wants_gradient)


class Opaque:
    """One call of a submodule as an operator: ``opaque(samples, *states, *tensors, *sizes)``.

    It returns the tensors of the result, then new values of buffers, which it does not write: what
    other operators have read of them stays as their backwards need it.

    Args:
        path: of the module in the wrapper.
        arguments: of the call during the export.
        outline: of the result.
        changed: indices of the buffers whose new values it returns.

    Attributes:
        modes: the modules inside, with whether each is in training mode in every call.
    """

    def __init__(
        self,
        path: str,
        module: nn.Module,
        states: States,
        arguments: Arguments,
        outline: Outline,
        changed: Sequence[int],
    ) -> None:
        self.path, self.outline, self._changed = own_name(path), outline, changed
        self._written = outline.written.difference(states.buffers)
        self.__name__ = path.replace(".", "_")
        self._module, self._states, self._arguments = module, states, arguments
        self.modes = [(inner, inner.training) for inner in module.modules()]
        self._leaves, self._structure = pytree.tree_flatten(outline.tree)
        forms = outline.forms
        memories = [form.memory for form in forms]
        self._unshared = [  # results with gradients that share memory with nothing else
            index
            for index, form in enumerate(forms)
            if form.requires_grad and form.memory < 0 and memories.count(form.memory) == 1
        ]
        first, count = len(states.names), len(arguments.tensors)
        lent = {*memories, *outline.written}
        self._inputs = range(first, first + count)
        self._entered = [index for index in self._inputs if index not in lent]

    @cached_property
    def _generators(self) -> list[Any]:
        """The module's own generators."""
        return own_generators(self._module)

    def kept_buffers(self, args: Sequence[Any], result: Any) -> list[tuple[Tensor, Tensor | None]]:
        """Return the buffers of a call that carry nothing to the next calls.

        Each with its new value if this is the old one: no call changed it while the module was
        observed. Others are statistics of norms.

        Args:
            args, result: of the call.
        """
        states, changed = self._states, self.outline.changed
        results = list(result) if isinstance(result, tuple) else [result]
        new = dict(zip(self._changed, results[len(self.outline.forms) :], strict=True))
        return [
            (args[1 + index], None if index in changed else new.get(index))
            for index in states.buffers
            if index not in changed or index in states.statistics
        ]

    @property
    def choices(self) -> set[Any]:
        """The texts and members of enumerations that the call gets."""
        return self._arguments.choices

    @property
    def kinds(self) -> str:
        """What the call gets beside tensors and sizes, without values."""
        return self._arguments.kinds

    def __repr__(self) -> str:
        return f"{self.path} ({type(self._module).__name__})"

    def __call__(self, samples: int, *arguments: Any) -> Any:
        """Call the module; return a single tensor without a tuple.

        Args:
            samples: of the micro-batch.
            arguments: parameters and buffers, then the tensors of the call, then its sizes.

        Raises:
            CaptureError: the result has other sizes than when it was captured.
        """
        values = list(arguments)
        if any(isinstance(value, Tensor) and is_deferred(value) for value in values):
            torch.autograd.graph.increment_version([values[i] for i in self._written])
            blanks = self.outline.blanks(samples, values)
            return one_or_tuple([*blanks, *(torch.empty_like(values[i]) for i in self._changed)])
        anchor = None
        if torch.is_grad_enabled():
            # Aliases of the inputs that have a gradient and are not changed by that.
            entered = [index for index in self._entered if values[index].requires_grad]
            aliases, anchor = enter([values[index] for index in entered])
            for index, alias in zip(entered, aliases, strict=True):
                values[index] = alias
            for index in self._inputs:
                if not values[index].requires_grad:  # the module may ask for its gradient
                    values[index] = values[index].detach()
        self._switch()
        result, buffers = self._call(values, differentiable=anchor is not None)
        results = self._checked(result, samples, tensors_in([values, buffers]))
        if anchor is not None:
            left = leave(anchor, [results[index] for index in self._unshared])
            for index, tensor in zip(self._unshared, left, strict=True):
                results[index] = tensor
        return one_or_tuple([*results, *(buffers[index] for index in self._changed)])

    def _switch(self) -> None:
        """Put the modules into the modes that they had at the capture."""
        for module, training in self.modes:
            if module.training is not training:
                if module is self._module:  # whose own train() or eval() may set more
                    module.train(True) if training else module.eval()
                module.training = training

    def _call(
        self, values: Sequence[Any], *, differentiable: bool
    ) -> tuple[Any, dict[int, Tensor]]:
        """Call the module; return its result, and new values of buffers by index."""
        count, nodes = len(self._states.names), count_nodes()
        args, kwargs = self._arguments.filled(values[count:])
        with seeded_draws(self._generators) if self.outline.draws else nullcontext():
            result, buffers, *_ = self._states.call_module(values[:count], args, kwargs)
        if differentiable and self.outline.functions:
            functions = functions_since(tensors_in(result), nodes)
            # The shared generators are seeded by then; see `seed_backward`.
            own = partial(reseeded, self._generators) if self._generators else nullcontext
            self._states.lend_to_backwards(functions, values[:count], own)
        return result, buffers

    def _checked(self, result: Any, samples: int, known: Sequence[Tensor]) -> list[Tensor]:
        """Return the tensors of a result, in the layouts that were captured.

        Args:
            known: arguments and buffers of the call. A tensor in their memory is copied, unless it
                was captured in the memory of an argument.
        """
        try:
            leaves = self._structure.flatten_up_to(result)
        except ValueError:
            raise self._other(pytree.tree_structure(result), self._structure) from None
        memories = set(storages_in(known))
        tensors = []
        for leaf, expected in zip(leaves, self._leaves, strict=True):
            if type(expected) is Unsteady:
                continue
            if not isinstance(expected, Form):
                if type(leaf) is not type(expected) or leaf != expected:
                    raise self._other(repr(leaf), repr(expected))
                continue
            sizes, strides, _ = expected.layout_at(samples)
            if not isinstance(leaf, Tensor):
                raise self._other(f"a {type(leaf).__name__}", "a tensor")
            if (leaf.dtype, leaf.shape) != (expected.dtype, sizes):
                form = f"{list(sizes)} of {expected.dtype}"
                raise self._other(f"{list(leaf.shape)} of {leaf.dtype}", form)
            if leaf.requires_grad and not expected.requires_grad:
                raise Refusal.RESULT_GRADIENT.error("", name=self.path)
            borrowed = expected.memory < 0 and storage_of(leaf) in memories
            if leaf.stride() != strides:
                leaf = expected.blank(samples, leaf.device).copy_(leaf)
            tensors.append(leaf.clone() if borrowed else leaf)
        return tensors

    def _other(self, result: Any, expected: Any) -> RefusedError:
        return Refusal.RESULT.error("", name=self.path, result=result, expected=expected)


def one_or_tuple(tensors: Sequence[Tensor]) -> Any:
    """Return the only tensor, or all of them, as operators give their results."""
    return tensors[0] if len(tensors) == 1 else tuple(tensors)


def enter(tensors: Sequence[Tensor]) -> tuple[list[Tensor], Tensor]:
    """Return aliases of tensors that require a gradient, and an anchor for :func:`leave`.

    What eager code does may depend on values: an input may have no gradient today, or a gradient in
    another layout. A stage must know in advance what it receives and sends. If any result of
    :func:`leave` gets a gradient, each of the tensors therefore gets one: the sum over its uses,
    zeros if there is none, in the layout of the tensor.
    """
    if not tensors:
        return [], torch.empty(0, requires_grad=True)
    *aliases, anchor = _Enter.apply(*tensors)  # type: ignore[no-untyped-call]
    return aliases, anchor


def leave(anchor: Tensor, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return the tensors, all with gradient, as values that may be written in place."""
    return list(_Leave.apply(anchor, *tensors)) if tensors else []  # type: ignore[no-untyped-call]


def anchored(tensor: Tensor) -> Tensor:
    """Return a tensor with a gradient that goes nowhere, and that may be written in place."""
    return leave(torch.empty(0, requires_grad=True), [tensor])[0]


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *tensors: Tensor) -> tuple[Tensor, ...]:
        # Gradients lie as their tensors do, but for tensors whose elements share memory.
        ctx.layouts = [torch.empty_like(tensor, device="meta") for tensor in tensors]
        return (*(tensor.view_as(tensor) for tensor in tensors), torch.empty(0))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, ...]:
        # Sparse ones become dense; zeros where there was none.
        dense = (g if g.layout is torch.strided else g.to_dense() for g in gradients)
        return tuple(
            gradient
            if gradient.stride() == layout.stride()
            else torch.empty_like(layout, device=gradient.device).copy_(gradient)
            for gradient, layout in zip(dense, ctx.layouts, strict=False)
        )


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, _: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        return tuple(tensor.detach() for tensor in tensors)

    @staticmethod
    def backward(_: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        return (torch.zeros(0), *gradients)


_written_once: WeakSet[nn.Module] = WeakSet()


def write_buffers_once(model: nn.Module) -> None:
    """Let the modules of a model write their buffers in forwards, but not in backwards.

    Plain PyTorch counts a micro-batch twice within ``torch.utils.checkpoint``: the running
    statistics of a BatchNorm move twice, and the second time in the order of the backwards, which
    depends on the schedule.
    """
    for module in model.modules():
        if module in _written_once or all(each is None for each in buffers_of(module).values()):
            continue
        _written_once.add(module)
        own: dict[str, Tensor] = {}  # while copies stand in the module

        def lend(module: nn.Module, _: Any, own: dict[str, Tensor] = own) -> None:
            if is_in_backward():
                buffers = buffers_of(module)
                own.update({name: each for name, each in buffers.items() if each is not None})
                buffers.update({name: each.detach().clone() for name, each in own.items()})

        def take_back(module: nn.Module, *_: Any, own: dict[str, Tensor] = own) -> None:
            buffers_of(module).update(own)
            own.clear()

        module.register_forward_pre_hook(lend)
        # Also where torch ends such a call early, by an exception.
        module.register_forward_hook(take_back, always_call=True)
