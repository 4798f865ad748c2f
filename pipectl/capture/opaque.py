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

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree

from pipectl.capture.drawing import own_generators, reseed
from pipectl.capture.handing import enter, leave
from pipectl.capture.names import own_name
from pipectl.capture.outline import Form, Outline, UnpredictableError, Unsteady
from pipectl.capture.recomputed import write_buffers_once
from pipectl.capture.step import make_known
from pipectl.errors import CaptureError

Place = tuple[nn.Module, str, str]
"""A module, ``_parameters`` or ``_buffers``, and the name of an entry."""


class States:
    """The parameters and buffers of a module and of those in it, tied ones once."""

    def __init__(self, module: nn.Module) -> None:
        self._found = _places(module)
        self.places = tuple(self._found.values())

    def now(self) -> list[Tensor]:
        """What stands in the module at present."""
        return [vars(owner)[kind][name] for (owner, kind, name), *_ in self.places]

    def buffers_apart(self, root: nn.Module) -> frozenset[int]:
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
    """Positional and keyword arguments of a call, taken apart.

    Attributes:
        tensors, numbers: tensors and symbolic sizes among them, in order.

    Raises:
        UnpredictableError: one of them holds tensors that cannot be taken out.
    """

    def __init__(self, args: Any, kwargs: Any) -> None:
        leaves, self._structure = pytree.tree_flatten(make_known((args, kwargs)))
        self.tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        self.numbers = [leaf for leaf in leaves if isinstance(leaf, _SYMBOLIC)]
        self._rest = [_rest(leaf) for leaf in leaves]

    def filled(self, tensors: Sequence[Tensor], numbers: Sequence[Any]) -> Any:
        """The (args, kwargs) with other tensors and numbers."""
        waiting = {_TENSOR: iter(tensors), _NUMBER: iter(numbers)}
        leaves = [
            next(waiting[leaf]) if leaf is _TENSOR or leaf is _NUMBER else leaf
            for leaf in self._rest
        ]
        return pytree.tree_unflatten(leaves, self._structure)


_SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)
_TENSOR, _NUMBER = object(), object()


def _rest(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return _TENSOR
    if isinstance(leaf, _SYMBOLIC):
        return _NUMBER
    found = (t for t in _held(leaf) if isinstance(t, Tensor))
    if next(found, None) is not None:
        raise UnpredictableError(f"is called with a {type(leaf).__name__} that holds tensors")
    return leaf


def _held(leaf: Any) -> Any:
    return pytree.tree_leaves(list(getattr(leaf, "__dict__", {}).values()))


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
        self._apart = [index for index, form in enumerate(forms) if _is_apart(form, forms)]
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
        if any(isinstance(tensor, FakeTensor) for tensor in tensors):
            return _alone(self.outline.imitate(batch, tensors))
        anchor = self._enter(tensors) if torch.is_grad_enabled() else None
        result = self._run(tensors, numbers)
        found = self._checked(result, batch, tensors)
        return _alone(found if anchor is None else self._leave(anchor, found))

    def _enter(self, tensors: list[Tensor]) -> Tensor:
        """Replace those of the inputs that have a gradient and are not changed by their aliases."""
        wanted = [index for index in sorted(self._entered) if tensors[index].requires_grad]
        aliases, anchor = enter([tensors[index] for index in wanted])
        for index, alias in zip(wanted, aliases, strict=True):
            tensors[index] = alias
        for index in range(len(self._states.places), len(tensors)):
            if not tensors[index].requires_grad:  # the module may ask for its gradient
                tensors[index] = tensors[index].detach()
        return anchor

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
        memories = {tensor.untyped_storage()._cdata for tensor in given}
        found = []
        for leaf, expected in zip(leaves, self.outline.leaves, strict=True):
            if type(expected) is Unsteady:
                continue
            if not isinstance(expected, Form):
                if type(leaf) is not type(expected) or leaf != expected:
                    raise self._changed(f"gave {leaf!r}", repr(expected))
                continue
            form = expected.at(batch)
            self._check(leaf, form)
            borrowed = form.origin is None and leaf.untyped_storage()._cdata in memories
            if leaf.stride() != form.strides:
                leaf = form.blank(leaf.device).copy_(leaf)
            found.append(leaf.clone() if borrowed else leaf)
        return found

    def _check(self, leaf: Any, form: Form) -> None:
        if not isinstance(leaf, Tensor):
            raise self._changed(f"gave a {type(leaf).__name__}", "a tensor")
        if (leaf.dtype, tuple(leaf.shape)) != (form.dtype, form.sizes):
            raise self._changed(
                f"gave {list(leaf.shape)} of {leaf.dtype}", f"{list(form.sizes)} of {form.dtype}"
            )
        if leaf.requires_grad and not form.requires_grad:
            raise CaptureError(
                f"model: {self.path} gave a tensor with a gradient, where its capture found one "
                "without: whether it computes with its parameters depends on the values it gets",
                cure="let it return a tensor that has a gradient in every case (x + 0 * self.f(x), "
                "say), or name a larger part of the model under model.opaque",
            )

    def _leave(self, anchor: Tensor, found: list[Tensor]) -> list[Tensor]:
        forms = self.outline.forms
        wanted = [index for index in self._apart if forms[index].requires_grad]
        left = leave(anchor, [found[index] for index in wanted])
        for index, tensor in zip(wanted, left, strict=True):
            found[index] = tensor
        return found

    def _changed(self, found: str, expected: str) -> CaptureError:
        return CaptureError(
            f"model: {self.path} {found}, where its capture found {expected}",
            cure="let it return tensors of fixed sizes (padding and a mask, say), or name a larger "
            "part of the model under model.opaque",
        )


def _is_apart(form: Form, forms: Sequence[Form]) -> bool:
    """Whether a tensor of a result shares memory with nothing else."""
    return form.origin is None and sum(form.memory == other.memory for other in forms) == 1


def _alone(tensors: Sequence[Tensor]) -> Any:
    return tensors[0] if len(tensors) == 1 else tuple(tensors)
