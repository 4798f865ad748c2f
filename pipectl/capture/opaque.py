"""A submodule as one operator of a graph, which runs the user's own code.

Such code may do what no graph can hold: branch on values, call numpy, keep things in lists. Only
while a model is exported does an operator of torch stand for it; a stage calls the module itself,
within the stage's autograd graph, with parameters and buffers as arguments like any other.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from pipectl.capture.outline import Form, Outline, Unsteady
from pipectl.capture.python_state import own_generators, reseed
from pipectl.capture.refusals import unsuitable
from pipectl.capture.step import make_known, own_name
from pipectl.capture.tensors import is_deferred, storage_of, storages_in, tensors_in
from pipectl.errors import CaptureError

Place = tuple[nn.Module, str, str]
"""A module, ``_parameters`` or ``_buffers``, and the name of an entry."""
_TENSOR, _NUMBER = object(), object()
"""Stand for tensors and symbolic sizes among the arguments of a call."""


class States:
    """The parameters and buffers of a module and of those in it, tied ones once."""

    def __init__(self, module: nn.Module) -> None:
        self._found = _places(module)
        self.places = tuple(self._found.values())

    def now(self) -> list[Tensor]:
        """What stands in the module at present."""
        return [vars(owner)[kind][name] for (owner, kind, name), *_ in self.places]

    def own_buffers(self, root: nn.Module) -> frozenset[int]:
        """Indices of the buffers that no other part of ``root`` has."""
        everywhere = _places(root)
        return frozenset(
            index
            for index, (key, places) in enumerate(self._found.items())
            if places[0][1] == "_buffers" and len(everywhere[key]) == len(places)
        )

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
        for places, tensor in zip(self.places, tensors, strict=True):
            for owner, kind, name in places:
                vars(owner)[kind][name] = tensor


def _places(module: nn.Module) -> dict[int, list[Place]]:
    """Where each tensor of a module stands."""
    found: dict[int, list[Place]] = {}
    for owner in module.modules():
        for kind in ("_parameters", "_buffers"):
            for name, tensor in vars(owner)[kind].items():
                if tensor is not None:
                    found.setdefault(id(tensor), []).append((owner, kind, name))
    return found


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
                    raise unsuitable(f"is called with a {type(leaf).__name__} that holds tensors")
                self._rest.append(leaf)

    def filled(self, tensors: Sequence[Tensor], numbers: Sequence[Any]) -> Any:
        """The (args, kwargs) with other tensors and numbers."""
        waiting = {_TENSOR: iter(tensors), _NUMBER: iter(numbers)}
        leaves = [
            next(waiting[leaf]) if leaf is _TENSOR or leaf is _NUMBER else leaf
            for leaf in self._rest
        ]
        return pytree.tree_unflatten(leaves, self._structure)


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
        self._tensors = len(states.places) + len(arguments.tensors)
        forms = outline.forms
        memories = [form.memory for form in forms]
        self._unshared = [  # what shares memory with nothing else
            index
            for index, form in enumerate(forms)
            if form.origin is None and memories.count(form.memory) == 1
        ]
        lent = {form.origin for form in forms} | outline.written
        self._entered = frozenset(range(len(states.places), self._tensors)) - lent
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
                for index in range(len(self._states.places), len(tensors)):
                    if not tensors[index].requires_grad:  # the module may ask for its gradient
                        tensors[index] = tensors[index].detach()
            results = self._checked(self._run(tensors, numbers), batch, tensors)
            if anchor is not None:
                forms = self.outline.forms
                wanted = [index for index in self._unshared if forms[index].requires_grad]
                left = leave(anchor, [results[index] for index in wanted])
                for index, tensor in zip(wanted, left, strict=True):
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
        count = len(self._states.places)
        for module, training in self._modes:
            if module.training is not training:
                module.training = training
        reseed(self._generators)
        args, kwargs = self._arguments.filled(tensors[count:], numbers)
        with self._states.replaced(tensors[:count]):
            return self._module(*args, **kwargs)

    def _checked(self, result: Any, batch: int, given: Sequence[Tensor]) -> list[Tensor]:
        """The tensors of a result, in the layouts that were captured."""
        leaves = self.outline.leaves_of(result)
        if leaves is None:
            structure = pytree.tree_structure(result)
            raise self._changed(f"gave {structure}", f"{self.outline.structure}")
        memories = set(storages_in(given))
        found = []
        for leaf, expected in zip(leaves, self.outline.leaves, strict=True):
            if type(expected) is Unsteady:
                continue
            if not isinstance(expected, Form):
                if type(leaf) is not type(expected) or leaf != expected:
                    raise self._changed(f"gave {leaf!r}", repr(expected))
                continue
            sizes, strides, _ = expected.layout_at(batch)
            if not isinstance(leaf, Tensor):
                raise self._changed(f"gave a {type(leaf).__name__}", "a tensor")
            if (leaf.dtype, leaf.shape) != (expected.dtype, sizes):
                raise self._changed(
                    f"gave {list(leaf.shape)} of {leaf.dtype}", f"{list(sizes)} of {expected.dtype}"
                )
            if leaf.requires_grad and not expected.requires_grad:
                raise CaptureError(
                    f"model: {self.path} gave a tensor with a gradient, where its capture found "
                    "one without: whether it computes with its parameters depends on the values "
                    "it gets",
                    cure="let it return a tensor that has a gradient in every case (x + 0 * "
                    "self.f(x), say), or name a larger part of the model under model.opaque",
                )
            borrowed = expected.origin is None and storage_of(leaf) in memories
            if leaf.stride() != strides:
                leaf = expected.blank(batch, leaf.device).copy_(leaf)
            found.append(leaf.clone() if borrowed else leaf)
        return found

    def _changed(self, found: str, expected: str) -> CaptureError:
        return CaptureError(
            f"model: {self.path} {found}, where its capture found {expected}",
            cure="let it return tensors of fixed sizes (padding and a mask, say), or name a larger "
            "part of the model under model.opaque",
        )


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
