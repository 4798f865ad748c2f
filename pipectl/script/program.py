"""What a training script computes between a batch and its loss, as a list that can be run again.

A :class:`Program` is made by :class:`~pipectl.script.recorder.Recorder`. It has two parts, as a
step of a job has: :meth:`Program.forward` takes the inputs of a batch to the results of the
script's modules, :meth:`Program.loss` takes these and the targets to the loss. The modules
themselves are not recorded: they are called, and captured as any model is.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from types import CodeType, FunctionType, ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from pipectl.script.numbers import TracedFloat, TracedInt

Path = tuple[tuple[str, Any], ...]
"""How to reach a value within another one: ``("item", key)`` and ``("attr", name)``."""
BATCH = -1
"""The entry that stands for the batch."""
Place = tuple[str, int]
"""File and line."""


class Ref(NamedTuple):
    """A value within the result of an entry, or within the batch (:data:`BATCH`)."""

    entry: int
    path: Path = ()


class State(NamedTuple):
    """A parameter or buffer of the model, by name."""

    name: str


@dataclasses.dataclass(frozen=True, eq=False)
class Outer:
    """A tensor that the script made before the step."""

    tensor: Tensor


@dataclasses.dataclass(frozen=True, eq=False)
class Holder:
    """An object of a class of the script or a library that holds tensors in attributes.

    Args:
        pattern: an object of this class.
        attributes: those that hold tensors, with :class:`Ref` and so on in their places.
    """

    pattern: Any
    attributes: dict[str, Any]

    def made(self, change: Callable[[Any], Any]) -> Any:
        """Return such an object of changed parts."""
        new = copy.copy(self.pattern)
        for name, value in self.attributes.items():
            object.__setattr__(new, name, rebuilt(value, change, makes=True))
        return new


class _Device:
    """Stands for the device of the batch."""

    def __repr__(self) -> str:
        return "the device"


DEVICE = _Device()


@dataclasses.dataclass
class Entry:
    """One call of the script.

    Args:
        target: a function; or a module, later its path in the model.
        args, kwargs: with :class:`Ref`, :class:`State`, :class:`Outer` and :data:`DEVICE` in them.
        place: the line of the script.
        with_grad: whether autograd recorded it.
        autocast: whether it ran under autocast.
        is_random: whether it drew random numbers.
        writes: entries whose memory it writes in place.
    """

    target: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    place: Place
    with_grad: bool = True
    autocast: bool = False
    is_random: bool = False
    writes: frozenset[int] = frozenset()

    @property
    def is_module(self) -> bool:
        """Whether a module is called."""
        return isinstance(self.target, str | nn.Module)

    @property
    def name(self) -> str:
        """Of the function or module, for messages."""
        if isinstance(self.target, str):
            return self.target or "the model"
        owner = getattr(self.target, "__self__", None)
        if getattr(self.target, "__name__", "") == "__get__":
            return f".{getattr(owner, '__name__', '')}"
        return getattr(self.target, "__name__", type(self.target).__name__)

    @cached_property
    def refs(self) -> tuple[Ref, ...]:
        """All values of other entries that it reads, each once, in the order of its arguments."""
        found = (x for x in parts((self.args, self.kwargs)) if isinstance(x, Ref))
        return tuple(dict.fromkeys(found))

    @cached_property
    def caller(self) -> Callable[..., Any]:
        """Calls a function with arguments, from the line of the script: errors then name it."""
        code = _CALL.replace(co_filename=self.place[0], co_firstlineno=max(self.place[1], 1))
        return FunctionType(code, {}, "call")


_CALL_TEXT = "def call(function, args, kwargs): return function(*args, **kwargs)"
_CALL = next(
    code for code in compile(_CALL_TEXT, "<script>", "exec").co_consts if isinstance(code, CodeType)
)


class Program:
    """The entries that a loss needs.

    Args:
        entries: of a whole step, in order; modules are named by their paths in the model.
        loss: the value that the script calls ``backward()`` on.
    """

    def __init__(self, entries: Sequence[Entry], loss: Ref) -> None:
        self.entries = list(entries)
        self._loss = loss
        self.needed = self._closure([loss.entry], stops=())
        modules = [index for index in self.needed if self.entries[index].is_module]
        self.modules = modules
        self.model_part = self._closure(modules, stops=())
        drawn = [i for i in self.model_part if self.entries[i].is_random or self._is_written(i)]
        self._carried = [*modules, *(index for index in drawn if index not in modules)]
        self.loss_part = self._closure([loss.entry], stops=self._carried)
        used = {ref.entry for index in self.loss_part for ref in self.entries[index].refs}
        used.add(loss.entry)
        self._carried = [i for i in self._carried if i in used or i in modules]

    def batch_leaves(self) -> tuple[list[Path], list[Path]]:
        """Return the tensors of a batch that the model and the loss read, by their paths."""
        found = []
        for part in (self.model_part, self.loss_part):
            refs = [ref for index in part for ref in self.entries[index].refs]
            found.append(list(dict.fromkeys(ref.path for ref in refs if ref.entry == BATCH)))
        if self._loss.entry == BATCH:
            found[1].append(self._loss.path)
        return found[0], found[1]

    def forward(self, model: nn.Module, inputs: Mapping[str, Any]) -> Any:
        """Return what the modules give; of a single one as it is, else a list."""
        values = self._run(self.model_part, {}, inputs, model)
        carried = [values[index] for index in self._carried]
        return carried[0] if len(carried) == 1 else carried

    def loss(
        self, model: nn.Module, factor: int, outputs: Any, targets: Mapping[str, Any]
    ) -> Tensor:
        """Return the loss of the outputs of :meth:`forward`, times a factor."""
        carried = [outputs] if len(self._carried) == 1 else outputs
        values = dict(zip(self._carried, carried, strict=True))
        values = self._run(self.loss_part, values, targets, model)
        loss: Tensor = reach(values[self._loss.entry], self._loss.path)
        return loss if factor == 1 else loss * factor

    @property
    def place(self) -> Place:
        """Where the loss is computed."""
        return self.entries[self._loss.entry].place if self._loss.entry >= 0 else ("", 0)

    def _run(
        self,
        part: Sequence[int],
        values: dict[int, Any],
        batch: Mapping[str, Any],
        model: nn.Module,
    ) -> dict[int, Any]:
        device = next((x.device for x in batch.values() if isinstance(x, Tensor)), None)
        if device is None:
            device = next((x.device for _, x in leaves_of(list(values.values()))), None)

        def value(item: Any) -> Any:
            if isinstance(item, Ref):
                if item.entry == BATCH:
                    return batch[name_of(item.path)]
                return reach(values[item.entry], item.path)
            if isinstance(item, State):
                return attribute(model, item.name)
            if isinstance(item, Outer):
                return item.tensor if device is None else item.tensor.to(device)
            return device if item is DEVICE else item

        for index in part:
            if index in values:
                continue
            entry = self.entries[index]
            args = rebuilt(entry.args, value, makes=True)
            kwargs = rebuilt(entry.kwargs, value, makes=True)
            target = model.get_submodule(entry.target) if entry.is_module else entry.target
            with _no_autocast(device) if not entry.autocast else nullcontext():
                result = entry.caller(target, args, kwargs)
            values[index] = result if entry.with_grad else _detached(result)
        return values

    def _is_written(self, index: int) -> bool:
        return any(index in self.entries[other].writes for other in self.needed)

    def _closure(self, ends: Sequence[int], stops: Collection[int]) -> list[int]:
        """Return the entries that some entries need, themselves included, in order.

        What writes in place to a value that is needed is needed, too, unless the value is already
        there.
        """
        needed, waiting = set[int](), list(ends)
        while waiting:
            index = waiting.pop()
            if index in needed or index < 0 or index in stops:
                continue
            needed.add(index)
            waiting += [ref.entry for ref in self.entries[index].refs]
            waiting += [
                later
                for later, entry in enumerate(self.entries)
                if index in entry.writes and later <= max(ends)
            ]
        return sorted(needed)


def _no_autocast(device: torch.device | None) -> AbstractContextManager[Any]:
    kind = "cpu" if device is None else device.type
    if not torch.is_autocast_enabled(kind):
        return nullcontext()
    return torch.autocast(kind, enabled=False)


def _detached(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach() if value.requires_grad else value
    if isinstance(value, list | tuple | dict):
        return rebuilt(value, lambda x: x.detach() if isinstance(x, Tensor) else x)
    return value


def attribute(model: nn.Module, name: str) -> Any:
    """Return a parameter or buffer of the model."""
    *path, last = name.split(".")
    return getattr(model.get_submodule(".".join(path)), last)


def name_of(path: Path) -> str:
    """Return the name of a tensor of a batch: ``0``, ``input_ids``, ``1.mask``."""
    return ".".join(str(key) for _, key in path) or "batch"


def reach(value: Any, path: Path) -> Any:
    """Return the part of a value that a path leads to."""
    for kind, key in path:
        value = value[key] if kind == "item" else getattr(value, key)
    return value


def leaves_of(
    value: Any, path: Path = (), around: tuple[Any, ...] = ()
) -> Iterator[tuple[Path, Tensor]]:
    """Yield the tensors within lists, tuples, mappings and attributes of objects, with their paths.

    Args:
        around: the objects that hold the value.
    """
    if isinstance(value, Tensor):
        yield path, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from leaves_of(item, (*path, ("item", key)), around)
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from leaves_of(item, (*path, ("item", index)), around)
    elif not any(value is other for other in around) and len(around) < _MAX_DEPTH:
        for name, item in attributes_of(value).items():
            yield from leaves_of(item, (*path, ("attr", name)), (*around, value))


_MAX_DEPTH = 3
"""Of objects within objects in which tensors are looked for."""
_NO_HOLDERS = (type, ModuleType, FunctionType, nn.Module)


def attributes_of(value: Any) -> dict[str, Any]:
    """Return the attributes of an object that may hold tensors of a batch."""
    if isinstance(value, (Tensor, *_NO_HOLDERS)) or not hasattr(value, "__dict__"):
        return {}
    return dict(vars(value))


def as_given(value: Any) -> Any:
    """Return a copy of a batch that stays as it is if the script takes items out of the batch."""

    def copied(item: Any, around: tuple[Any, ...] = ()) -> Any:
        inner = {
            name: rebuilt(held, lambda x: copied(x, (*around, item)))
            for name, held in attributes_of(item).items()
            if next(leaves_of(held, around=(*around, item)), None) is not None
        }
        return Holder(item, inner).made(lambda x: x) if inner else item

    return rebuilt(value, copied)


def parts(value: Any) -> Iterator[Any]:
    """Yield everything within lists, tuples, dicts and slices that is none of these."""
    if isinstance(value, Holder):
        yield from parts(value.attributes)
    elif isinstance(value, Ref | State) or not isinstance(value, list | tuple | Mapping | slice):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from parts(item)
    elif isinstance(value, slice):
        yield from parts((value.start, value.stop, value.step))
    else:
        for item in value:
            yield from parts(item)


def rebuilt(value: Any, change: Callable[[Any], Any], *, makes: bool = False) -> Any:
    """Return the same lists, tuples, mappings and slices of changed parts.

    Args:
        makes: whether to make the objects that :class:`Holder` describes.
    """
    if isinstance(value, Holder):
        if makes:
            return value.made(change)
        return Holder(value.pattern, rebuilt(value.attributes, change))
    if isinstance(value, Ref | State):
        return change(value)
    if isinstance(value, slice):
        own = (value.start, value.stop, value.step)
        return slice(*(rebuilt(x, change, makes=makes) for x in own))
    if isinstance(value, list | tuple):
        items = [rebuilt(item, change, makes=makes) for item in value]
        if hasattr(value, "_fields"):
            return type(value)(*items)
        return tuple(items) if isinstance(value, tuple) else items
    if isinstance(value, Mapping):
        pairs = {key: rebuilt(item, change, makes=makes) for key, item in value.items()}
        return pairs if type(value) is dict else _mapping_like(value, pairs)
    return change(value)


def _mapping_like(value: Mapping[Any, Any], items: dict[Any, Any]) -> Mapping[Any, Any]:
    """Return a mapping of the same class, such as the ModelOutput of transformers."""
    try:
        other: Any = copy.copy(value)
        for key, item in items.items():
            other[key] = item
    except Exception:  # a mapping that takes none
        return items
    return other if other is not value else items


def plain_number(value: Any) -> bool:
    """Whether a value is a number that remembers its entry."""
    return isinstance(value, TracedInt | TracedFloat)
