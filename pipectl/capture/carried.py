"""What a model keeps from one step to the next, other than in buffers.

A graph would freeze it: it has what plain attributes held when it was captured, and torch drops
what is assigned. That does no harm where nothing reads it again (a map to look at), or where every
step would assign the same (a table that is made when it is first needed).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode, get_proxy_slot
from torch.utils import _pytree as pytree

from pipectl.capture.python_state import numbers_in
from pipectl.capture.refusals import CarriedError
from pipectl.capture.step import own_path

_CONVERSIONS = {"to", "_to_copy", "type_as", "contiguous", "clone", "detach", "alias"}
"""Operators that leave values as they are."""
_ABSENT = object()


class Attribute(NamedTuple):
    """A plain attribute of a module; ``path`` is the module's in the step."""

    module: nn.Module
    path: str
    name: str


class Assignments:
    """While a step is exported: finds what every step would assign anew to plain attributes.

    Attributes:
        tensors: attributes that got tensors which follow from the batch, or from what was there.
        numbers: numbers that are others now, by name, with what they were and what they are.
    """

    def __init__(self, step: nn.Module) -> None:
        self.tensors: list[Attribute] = []
        self.numbers: dict[str, tuple[Any, Any]] = {}
        self._modules: dict[str, nn.Module] = dict(step.named_modules())
        self._before = {path: dict(vars(module)) for path, module in self._modules.items()}
        self._buffers = {path: dict(module._buffers) for path, module in self._modules.items()}
        self._numbers = numbers_in(step)
        self._extra = extra_states(step)
        self._batch: set[fx.Node] = set()
        self._hooks = [
            step.register_forward_pre_hook(lambda _, batch: self._batch.update(_nodes(batch))),
            step.register_forward_hook(lambda *_: self._compare()),
        ]

    def __enter__(self) -> Assignments:
        return self

    def __exit__(self, *_: object) -> None:
        """Drop new attributes with tensors of the export, which torch leaves.

        Others may say what a forward has done for good (put hooks on modules, say).
        """
        for hook in self._hooks:
            hook.remove()
        for path, module in self._modules.items():
            for name in vars(module).keys() - self._before[path].keys():
                if _tensors(vars(module)[name]):
                    del vars(module)[name]
        for name in self.numbers:
            self._numbers[name].set(self._numbers[name].value)

    def _compare(self) -> None:
        refuse_extra_states(self._modules[""], self._extra)
        caching: set[str] = set()  # modules that assigned tensors: numbers may say of what they are
        for path, module in self._modules.items():
            before = {**self._before[path], **self._buffers[path]}
            for name, value in (*vars(module).items(), *module._buffers.items()):
                old = before.get(name)
                if value is old:
                    continue
                if isinstance(value, Tensor):
                    caching.add(path)
                if name in vars(module) and self._changes(old, value):
                    self.tensors.append(Attribute(module, path, name))
        for name, number in numbers_in(self._modules[""]).items():
            known = self._numbers.get(name)
            if known is None or number.path in caching:
                continue
            if type(number.value) is type(known.value) and number.value != known.value:
                self.numbers[name] = known.value, number.value

    def _changes(self, old: Any, new: Any) -> bool:
        """Whether tensors follow from the batch or, other than by a conversion, from old ones."""
        known = {id(leaf) for leaf in pytree.tree_leaves(old)}

        def is_source(node: fx.Node) -> bool:
            return node in self._batch or id(_constant(node)) in known

        nodes = map(_unconverted, _nodes(new))
        return any(node.op != "get_attr" and _follows(node, is_source) for node in nodes)


def _nodes(value: Any) -> list[fx.Node]:
    """The nodes of tensors in the graph that is being traced."""
    mode = get_proxy_mode()
    if mode is None:
        return []
    slots: list[Any] = [get_proxy_slot(leaf, mode.tracer, None) for leaf in _tensors(value)]
    return [slot.proxy.node for slot in slots if slot is not None]


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]


def _follows(node: fx.Node, is_source: Callable[[fx.Node], bool]) -> bool:
    """Whether the values of a node follow from those of a source."""
    waiting, seen = [node], {node}
    while waiting:
        node = waiting.pop()
        if is_source(node):
            return True
        fresh = [source for source in _sources(node) if source not in seen]
        seen.update(fresh)
        waiting += fresh
    return False


def _sources(node: fx.Node) -> list[fx.Node]:
    """The nodes on whose values, not only sizes and types, those of a node depend."""
    kind = _kind(node)
    if kind.startswith(("sym_", "new_")) or kind.endswith("_like"):
        return []
    return node.all_input_nodes[:1] if kind in _CONVERSIONS else node.all_input_nodes


def _unconverted(node: fx.Node) -> fx.Node:
    while _kind(node) in _CONVERSIONS:
        node = node.all_input_nodes[0]
    return node


def _kind(node: fx.Node) -> str:
    return str(getattr(node.target, "_opname", ""))


def _constant(node: fx.Node) -> Any:
    """The tensor that a node stands for, if it was there before the trace."""
    mode = get_proxy_mode()
    if mode is None or node.op != "get_attr":
        return _ABSENT
    tracer: Any = mode.tracer
    return getattr(tracer.root, str(node.target), _ABSENT)


@contextmanager
def later(step: nn.Module, numbers: Mapping[str, Any]) -> Iterator[None]:
    """While a step is exported once more: with other numbers, by name, as later steps have them."""
    known = numbers_in(step)
    for name, value in numbers.items():
        known[name].set(value)
    try:
        yield
    finally:
        for name in numbers:
            known[name].set(known[name].value)


def extra_states(model: nn.Module) -> dict[str, Any]:
    """What modules add to a state dict (``get_extra_state``), by their paths."""
    plain = nn.Module.get_extra_state
    return {
        path: pytree.tree_map(_kept_value, module.get_extra_state())
        for path, module in model.named_modules()
        if type(module).get_extra_state is not plain
    }


def refuse_extra_states(model: nn.Module, before: Mapping[str, Any]) -> None:
    """Raise if the extra state of a module is another one after a forward.

    One that stays the same comes from the factory on every rank.

    Raises:
        CarriedError: no checkpoint would hold it.
    """
    if not before:
        return
    now, again = extra_states(model), extra_states(model)
    for path, old in before.items():
        # Objects that are made anew for each call may never equal others.
        if not _are_same(old, now[path]) and _are_same(now[path], again[path]):
            kind = type(model.get_submodule(path)).__name__
            raise CarriedError(
                f"model: {own_path(path) or kind} changes its extra state "
                "(get_extra_state) in its forward, which no checkpoint would hold",
                cure="keep what changes in a buffer, with register_buffer()",
            )


def _kept_value(value: Any) -> Any:
    """A value that stays as it is."""
    if isinstance(value, Tensor):
        return value.clone()
    return value.copy() if isinstance(value, np.ndarray) else value


def _are_same(old: Any, new: Any) -> bool:
    if pytree.tree_structure(old) != pytree.tree_structure(new):
        return False
    pairs = zip(pytree.tree_leaves(old), pytree.tree_leaves(new), strict=True)
    return all(_is_same(*pair) for pair in pairs)


def _is_same(old: Any, new: Any) -> bool:
    if isinstance(old, Tensor) and isinstance(new, Tensor):
        return isinstance(new, FakeTensor) or torch.equal(old, new)
    if isinstance(old, np.ndarray) and isinstance(new, np.ndarray):
        return np.array_equal(old, new)
    try:
        return old is new or bool(old == new)
    except Exception:  # of the model's own __eq__
        return False
