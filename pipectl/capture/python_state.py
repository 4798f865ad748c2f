"""State that a model keeps between steps outside of parameters and buffers.

It is in Python objects: attributes of modules, and whatever they refer to. It is not in the state
dict, and no graph follows it.

A graph would freeze this state: it contains the values of plain attributes at the time of the
capture, and torch drops assignments. This does no harm if nothing reads the attribute again, or if
every step assigns the same (such as a table that is computed when it is first needed).
"""

from __future__ import annotations

import itertools
import random
import re
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager, suppress
from functools import cache, partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, fx, nn

from pipectl.capture.model_with_loss import own_name, own_path
from pipectl.capture.origins import CONVERSIONS, Origins, kind_of
from pipectl.capture.outer_state import CachedFunction, clear_traced, outer_holders
from pipectl.capture.randomness import (
    GENERATORS,
    SHARED_GENERATORS,
    comparable,
)
from pipectl.capture.refusals import Refusal, RefusedError
from pipectl.capture.tensors import is_deferred, tensors_in
from pipectl.objects import (
    CONTAINERS,
    MAX_ARRAY_BYTES,
    SHARED,
    Holder,
    is_restorable,
    items_in,
    restore_of,
)
from pipectl.torch_api import get_proxy_mode, get_proxy_slot, make_subclass, pytree, version_of

_VALUES = (int, float, complex, np.number, np.bool_, str)
_FIXED = (*_VALUES, bytes, range, slice, torch.device)
"""Of which two that are equal may take each other's place."""
MANY_STEPS = 2520
"""After which a count is a multiple of all up to ten, but no loop over it is too long to trace."""
_ABSENT = object()
_LEFT = "pipectl_left"
_OF_TORCH = re.compile(r"\._(buffers|parameters|modules|\w*hooks\w*)\b|(^|\.)training$")
"""In the names of attributes that every module of torch has."""
_UNWATCHED = re.compile(r"\._(parameters|\w*hooks\w*)\b|\._modules$|(^|\.)training$")
_OF_STATES = re.compile(r"(^|\.)_(?:buffers|parameters)\['(.+)'\]$")
"""Ends the name of a parameter or buffer."""


UNSET = (
    "give it a value in the factory (such as torch.zeros(6)); a second buffer may tell whether it "
    "was set, to choose with torch.where"
)
"""What to do about a buffer that has no value before the first forward."""


class Entry(NamedTuple):
    """An attribute of an object, or an entry of a mapping, list or deque.

    Args:
        value: :data:`_ABSENT` if a step has removed it.
        holder: the attributes, mapping, list or deque that contains it.
        key: its name, key or index there.
        content: what tells whether the value itself has changed: a copy of an array, how far an
            iterator is; None for anything else.
        old: the value before the step, of an entry that the step has changed.
    """

    value: Any
    holder: Any
    key: Any
    content: Any = None
    old: Any = None

    @property
    def plain(self) -> Any:
        """A number, a text, an array, or a tuple of numbers and texts; None for anything else."""
        if isinstance(self.value, np.ndarray):
            return self.content
        parts = self.value if isinstance(self.value, tuple) else (self.value,)
        return self.value if parts and all(isinstance(p, _VALUES) for p in parts) else None

    def is_as(self, other: Entry | None) -> bool:
        """Return whether another entry has this very value, with the same content."""
        return (
            other is not None
            and self.value is other.value
            and _is_equal(self.content, other.content)
        )

    def is_like(self, other: Entry | None) -> bool:
        """Return whether another entry has this value or one that is equal to it for good."""
        return other is not None and (
            (is_same_value(self.value, other.value) and _is_equal(self.content, other.content))
            or (isinstance(self.content, np.ndarray) and _is_equal(self.content, other.content))
        )

    def after(self, steps: int) -> Entry | None:
        """Return the entry after more such steps; None if that is not known."""
        old, new = self.old, self.plain
        if isinstance(new, tuple) and isinstance(old, tuple) and len(new) == len(old):
            value: Any = tuple(_after(*pair, steps) for pair in zip(old, new, strict=True))
        else:
            value = _after(old, new, steps)
        return None if value is None else self._replace(value=value, content=_content(value))


def _after(old: Any, new: Any, steps: int) -> Any:
    """Return a number that has changed alike in so many steps; None for texts and the like."""
    numbers = isinstance(old, int | float | np.number) and isinstance(new, int | float | np.number)
    if not numbers and not (
        isinstance(old, np.ndarray)
        and isinstance(new, np.ndarray)
        and old.shape == new.shape
        and {old.dtype.kind, new.dtype.kind} <= set("iuf")
    ):
        return new if _is_equal(old, new) else None
    with np.errstate(all="ignore"):
        return old + steps * (new - old)


def is_same_value(one: Any, other: Any) -> bool:
    """Return whether two values are one, or cannot change and are equal, such as two sizes."""
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    if isinstance(one, tuple):
        return len(one) == len(other) and all(map(is_same_value, one, other))
    return isinstance(one, _FIXED) and bool(one == other)


def _is_equal(one: Any, other: Any) -> bool:
    if isinstance(one, np.ndarray) and isinstance(other, np.ndarray):
        same_kind = (one.shape, one.dtype) == (other.shape, other.dtype)
        return same_kind and one.tobytes() == other.tobytes()
    return type(one) is type(other) and bool(one == other)


def _content(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        is_compared = value.dtype.kind in "biufc" and value.nbytes <= MAX_ARRAY_BYTES
        return value.copy() if is_compared else None
    if isinstance(value, itertools.count):
        return repr(value)
    return object() if isinstance(value, Iterator) else None  # it may have advanced


@contextmanager
def preserve_state(model: nn.Module, tensors: Iterable[Tensor]) -> Iterator[None]:
    """Restore the tensors, the Python state of the modules, and the generators afterwards."""
    own = [item.value for item in items_of(model)]
    holders = outer_holders(model)
    generators = [each.value for each in holders if isinstance(each.value, GENERATORS)]
    values = [*SHARED_GENERATORS, *own, *generators, *filter(is_restorable, tensors)]
    restores = [restore_of(value) for value in values]
    outer = entries_of(holders)
    try:
        yield
    finally:
        _restore_outer(model, outer)
        for restore in restores:
            with suppress(RuntimeError, TypeError, ValueError):  # it takes no values
                restore()


def entries_of(holders: Iterable[Holder]) -> dict[str, Entry]:
    """Return all entries by name, such as ``blocks.3.calls`` or ``meter.counts['steps']``.

    An object has the attributes of its class, too, until it gets its own.
    """
    return {
        holder.name_of(key): entry_of(holder, key, value)
        for holder in holders
        for key, value in pairs_of(holder)
    }


def pairs_of(holder: Holder) -> Iterable[tuple[Any, Any]]:
    """Return the key and the value of all entries of a holder."""
    value = holder.value
    if isinstance(value, MutableMapping):
        defaults = {} if holder.owner is None else _numbers_of(holder.owner)
        return ({**defaults, **value} if defaults else value).items()
    return enumerate(value) if isinstance(value, list | deque) else ()


def entry_of(holder: Holder, key: Any, value: Any) -> Entry:
    """Return an entry of a holder as it is now."""
    return Entry(value, holder.value, key, _content(value))


@cache
def _numbers_of(owner: type) -> dict[str, int | float]:
    """Return the attributes of a class that are numbers; not those that torch's have."""
    users = [each for each in owner.__mro__ if each.__module__.partition(".")[0] not in SHARED]
    every = [pair for each in reversed(users) for pair in vars(each).items()]
    return {name: value for name, value in every if isinstance(value, int | float)}


def _restore_outer(model: nn.Module, before: Mapping[str, Entry]) -> None:
    """Restore numbers and tensors outside of a model; what else it has made there may stay, but
    for tensors of a trace.
    """
    holders = outer_holders(model)
    for each in holders:
        if isinstance(each.value, CachedFunction):
            clear_traced(each.value)
    for name, entry in reversed(entries_of(holders).items()):
        value, holder, key = entry[:3]
        old = before.get(name)
        if entry.is_as(old):
            continue
        is_data = entry.plain is not None or isinstance(value, _StandIn)
        if is_data or any(True for _ in tensors_in(value)):
            with suppress(AttributeError, TypeError, KeyError, IndexError):  # it is not to be set
                if old is None:
                    del holder[key]
                    continue
                holder[key] = old.value
        if old is not None and isinstance(old.content, np.ndarray):
            with suppress(ValueError):  # it is read-only
                old.value[...] = old.content


def own_generators(root: nn.Module) -> list[Any]:
    """Return the generators that modules and their code can reach, but for torch's shared one and
    those of ``random`` and ``numpy.random``.

    ``random.SystemRandom`` has neither a seed nor a state and is left out.
    """
    every = [each.value for each in (*items_of(root), *outer_holders(root))]
    found = {id(each): each for each in every if isinstance(each, GENERATORS)}
    for shared in SHARED_GENERATORS:
        found.pop(id(shared), None)
    return [each for each in found.values() if not isinstance(each, random.SystemRandom)]


def items_of(model: nn.Module) -> Iterator[Holder]:
    """Yield everything in a model that may change, once: containers, generators, arrays, and the
    attributes of objects.
    """
    known = {id(value) for value in (*model.parameters(), *model.buffers(), *model.modules())}
    return items_in([Holder(vars(m), path, type(m)) for path, m in model.named_modules()], known)


def entries_inside(values: list[Any]) -> dict[str, Entry]:
    """Return values, and the entries of whatever they refer to, but for what is in modules."""
    items = [*items_in([Holder(values, "", None)], set(), modules=False)]
    sets = [item for item in items if type(item.value) is set]
    members = {item.name: Entry((*map(id, item.value),), item.value, None) for item in sets}
    return entries_of(items) | members


def plain_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return the tensors and numpy arrays in attributes of a model that are neither parameters nor
    buffers, by name.
    """
    found: dict[str, Tensor] = {}
    for value, name, _ in items_of(model):
        if isinstance(value, Tensor):
            found[name.lstrip(".")] = value.detach()
        elif isinstance(value, np.ndarray):
            with suppress(TypeError):  # torch has no such type
                found[name.lstrip(".")] = torch.as_tensor(value.copy())
    return found


class _Blank(NamedTuple):
    """A tensor of a table.

    Args:
        name: of the entry, or of the buffer.
        place: among the tensors of the entry.
    """

    name: str
    place: int
    dtype: torch.dtype
    sizes: tuple[int, ...]
    strides: tuple[int, ...]

    def made(self) -> Tensor:
        tensor = torch.empty_strided(self.sizes, self.strides, dtype=self.dtype).zero_()
        setattr(tensor, _LEFT, (self.name, self.place))
        return tensor


class Table:
    """Tensors that a step leaves, and that every step would compute alike."""

    def __init__(self, leaves: list[Any], structure: Any) -> None:
        self._leaves, self._structure = leaves, structure

    @classmethod
    def left(cls, name: str, value: Any) -> Table | None:
        """Return the tensors that are left as the value of an entry; None if there are none, or if
        their sizes follow from the batch, or if they are those of before in another form.

        The nodes that compute them are marked; see :func:`mark_of`.
        """
        mode: Any = get_proxy_mode()
        leaves, structure = pytree.tree_flatten(value)
        if mode is None or not tensors_in(leaves):
            return None
        for place, leaf in enumerate(leaves):
            if not isinstance(leaf, Tensor):
                continue
            slot: Any = get_proxy_slot(leaf, mode.tracer, None)
            if slot is None:
                if is_deferred(leaf):
                    return None
                continue  # its values are known
            sizes = (*leaf.shape, *leaf.stride())
            is_made = _unconverted(slot.proxy.node).op == "call_function"
            if not is_made or not all(type(size) is int for size in sizes):
                return None
            mark = slot.proxy.node.meta.setdefault(_LEFT, (name_of_state(name), place))
            leaves[place] = _Blank(mark[0], mark[1], leaf.dtype, (*leaf.shape,), leaf.stride())
        return cls(leaves, structure)

    def made(self) -> Any:
        """Return the value with tensors that stand for those; see :func:`left_in`."""
        made = [each.made() if isinstance(each, _Blank) else each for each in self._leaves]
        return pytree.tree_unflatten(made, self._structure)


def mark_of(node: fx.Node) -> tuple[str, int] | None:
    """Return the name of the table that a node computes, and which of its tensors."""
    mark: tuple[str, int] | None = node.meta.get(_LEFT)
    return mark


def left_in(tensor: Any) -> tuple[str, int] | None:
    """Return the same for a tensor that stands for one of a table."""
    mark: tuple[str, int] | None = getattr(tensor, _LEFT, None)
    return mark


Refuse = Callable[[], RefusedError]


class _TensorStandIn(Tensor):
    """Stands for a tensor: any use of it is refused."""

    refuse: Refuse

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        leaves = pytree.tree_leaves((args, kwargs))
        first = next(leaf for leaf in leaves if isinstance(leaf, cls))
        raise vars(first)["refuse"]()


class _StandIn:
    """Stands for anything else: who computes with tensors by it, or decides, is refused.

    Numbers may be added to it, as those do that only count.
    """

    def __init__(self, refuse: Refuse) -> None:
        self._refuse = refuse

    def _read(self, *_: object) -> Any:
        raise self._refuse()

    def _count(self, other: object = None) -> Any:
        return self._read() if isinstance(other, Tensor) else self

    __bool__ = __len__ = __iter__ = __getitem__ = __contains__ = __call__ = _read
    __float__ = __int__ = __index__ = __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = _read
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = _count
    __rtruediv__ = __floordiv__ = __mod__ = __pow__ = __rpow__ = __neg__ = __abs__ = _count
    __hash__ = object.__hash__

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self._read()

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        leaves = pytree.tree_leaves((args, kwargs))
        next(leaf for leaf in leaves if type(leaf) is cls)._read()


def stand_in(value: Any, refuse: Refuse) -> Any:
    """Return what stands for a value: who uses it gets an error. Tensors in tuples are replaced."""
    tensor = make_subclass(_TensorStandIn, torch.empty(0))
    tensor.refuse = refuse
    replaced = pytree.tree_map_only(Tensor, lambda _: tensor, value)
    return replaced if tensors_in(replaced) else _StandIn(refuse)


def is_tensor(value: Any) -> bool:
    """Return whether a value is a tensor, and no stand-in for one."""
    return isinstance(value, Tensor) and not isinstance(value, _TensorStandIn)


def _carried(name: str, value: Any) -> Any:
    """Return the value of an entry at the beginning of a step, with stand-ins for tensors."""
    if not tensors_in(value):
        return value
    refuse = partial(carried, name, value)
    # No tensor among the buffers, or it would be one of the states.
    return _StandIn(refuse) if _OF_STATES.search(name) else stand_in(value, refuse)


def name_of_state(name: str) -> str:
    """Return the name of a parameter or buffer for that of its entry; any other name as it is."""
    return _OF_STATES.sub(r"\1\2", name)


def carried(name: str, value: Any, place: str | None = None) -> RefusedError:
    """Return the refusal of what one step keeps for the next.

    Args:
        name: of its entry.
        place: the line that uses it, by default the one that is running.
    """
    error = Refusal.CARRIED.error(place, name=own_name(name_of_state(name)))
    if is_of_states(name):
        error.hint = UNSET
    elif isinstance(value, bool):
        error.hint = "make the flag a buffer with register_buffer(), and choose with torch.where"
    return error


@contextmanager
def watch_changes(wrapper: nn.Module, begin: Mapping[str, Entry]) -> Iterator[dict[str, Entry]]:
    """Find what a step changes in Python objects while it is exported; restore it afterwards.

    The result has, by name, what the next step begins with: numbers, texts and arrays that have
    changed, iterators, and tensors that follow from the batch or from old values; a step that uses
    such a tensor is refused.

    Args:
        begin: what this step begins with.

    Raises:
        RefusedError: from the export, if the extra state of a module has changed.
    """
    changes, batch, trained = dict[str, Entry](), set[fx.Node](), set[fx.Node]()
    states = dict[str, list[fx.Node]]()  # which the graph follows

    def start(_: object, given: object) -> None:
        batch.update(_nodes(given))
        states.update(_nodes_of_states(wrapper))
        trained.update(_nodes([each for each in wrapper.parameters() if each.requires_grad]))
        for name, entry in begin.items():
            is_table = isinstance(entry.value, Table)
            if is_of_states(name) and not is_table:  # the export would replace it before
                put(entry, _carried(name, entry.value))

    def compare(*_: object) -> None:
        refuse_extra_states(wrapper, extra, tensors=False)
        now = _every_entry(wrapper)
        mode: Any = get_proxy_mode()
        origins = Origins(mode.tracer.graph if mode is not None else fx.Graph())
        roots = {node for nodes in states.values() for node in nodes if origins.writes.get(node)}
        roots |= batch | trained
        changed = {n: e for n, e in now.items() if not e.is_as(before.get(n))}
        # Those that only the export has changed:
        for name in [n for n, e in changed.items() if states.get(n) == _nodes(e.value)]:
            del changed[name]
        following = {
            name
            for name, entry in changed.items()
            if _follows(
                entry.value,
                origins,
                roots.union(states.get(name, ())),
                before[name].value if name in before else None,
            )
        }
        changes.update(_changes(before, changed, following, states))
        for name in before.keys() - now.keys() - outer:
            if before[name].plain is not None:
                changes[name] = before[name]._replace(value=_ABSENT, content=None)

    with preserve_state(wrapper, ()):
        outer = entries_of(outer_holders(wrapper)).keys()
        _begin_with(begin, outer)
        before, extra = _every_entry(wrapper), extra_states(wrapper, tensors=False)
        hooks = [
            wrapper.register_forward_pre_hook(start),
            wrapper.register_forward_hook(compare),
        ]
        try:
            yield changes
        finally:
            for hook in hooks:
                hook.remove()


def _nodes_of_states(wrapper: nn.Module) -> dict[str, list[fx.Node]]:
    """Return the nodes of the parameters and buffers that have values, by the names of entries."""
    return {
        name: _nodes(entry.value)
        for name, entry in entries_of(items_of(wrapper)).items()
        if isinstance(entry.value, Tensor) and _OF_STATES.search(name)
    }


def _changes(
    before: Mapping[str, Entry],
    changed: Mapping[str, Entry],
    following: Collection[str],
    states: Collection[str],
) -> Iterator[tuple[str, Entry]]:
    """Yield what the next step begins with, of what a step has changed.

    Args:
        following: names of those whose tensors may be others in the next step.
        states: names of the parameters and buffers that had values before the step.
    """
    for name, entry in changed.items():
        old = before[name].plain if name in before else None
        if entry.plain is not None or (entry.value is None and old is not None):
            if not _is_equal(entry.plain, old):
                yield name, entry._replace(old=old)
        elif name in states:
            continue
        # An iterator goes on where this step has left it.
        elif isinstance(entry.value, Iterator) or name in following:
            yield name, entry
        elif (table := Table.left(name, entry.value)) is not None:
            yield name, entry._replace(value=table)


def _begin_with(begin: Mapping[str, Entry], outer: Collection[str]) -> None:
    """Let a step begin with the values of entries, but for parameters and buffers.

    Args:
        outer: names of the entries outside of the model.
    """
    for name, entry in begin.items():
        value = entry.value
        if isinstance(value, Table):
            put(entry, value.made())
            continue
        if value is _ABSENT or is_of_states(name):
            continue
        if isinstance(value, np.ndarray):
            value = value if entry.content is None else entry.content.copy()
        else:
            value = _other(value) if name in outer else _carried(name, value)
        put(entry, value)
    for entry in sorted((e for e in begin.values() if e.value is _ABSENT), key=_place)[::-1]:
        with suppress(KeyError, IndexError):
            del entry.holder[entry.key]


def put(entry: Entry, value: Any) -> None:
    """Put a value where an entry is."""
    _, holder, key, *_ = entry
    if not isinstance(holder, list | deque) or key < len(holder):
        holder[key] = value
    elif key == len(holder):
        holder.append(value)


def _place(entry: Entry) -> int:
    return entry.key if isinstance(entry.key, int) else 0


def _every_entry(wrapper: nn.Module) -> dict[str, Entry]:
    """Return all entries of a model, and those outside of it that its code can reach, by name."""
    return entries_of(items_of(wrapper)) | entries_of(outer_holders(wrapper))


def is_of_torch(name: str) -> bool:
    """Return whether an entry is of what every module of torch has: parameters, hooks, its mode."""
    return _OF_TORCH.search(name) is not None


def is_watched(name: str) -> bool:
    """Return whether something has entries that forwards may set: attributes, or buffers."""
    return _UNWATCHED.search(name) is None


def is_of_states(name: str) -> bool:
    """Return whether an entry is a parameter or buffer."""
    return _OF_STATES.search(name) is not None


def state_values(wrapper: nn.Module) -> dict[str, object]:
    """Return what tells whether an entry has changed, by name, and how many a container has.

    Parameters, buffers and hooks are left out.
    """
    values: dict[str, object] = {}
    for name, entry in _every_entry(wrapper).items():
        value = entry.value
        if is_of_torch(name):
            continue
        is_number = isinstance(value, int | float | str | None)
        size = version_of(value) if is_tensor(value) else 0
        if type(value) in CONTAINERS:
            size = len(value)
        if isinstance(value, np.ndarray) and entry.content is not None:
            size = hash(entry.content.tobytes())
        values[own_name(name)] = value if is_number else (id(value), size)
    return values


def changed_state(before: Mapping[str, object], after: Mapping[str, object]) -> list[str]:
    """Return the names of what has changed between two calls of :func:`state_values`."""
    added = (name for name in after.keys() - before.keys() if not name.endswith("]"))
    return sorted([*added, *(n for n, value in before.items() if after.get(n, value) != value)])


def _other(value: Any) -> Any:
    """Return a value that a step might have left outside of a model: tensors have other values.

    Code that only prints or gathers them may use them in any way.
    """

    def other(tensor: Tensor) -> Tensor:
        sizes: list[Any] = [getattr(size, "node", size) for size in tensor.shape]
        sizes = [getattr(size, "hint", size) for size in sizes]
        return torch.full(sizes, 0.37).to(tensor.dtype)

    return pytree.tree_map_only(Tensor, other, value)


def _follows(value: Any, origins: Origins, roots: Collection[fx.Node], old: Any) -> bool:
    """Return whether tensors follow from some nodes or, except by a conversion, from old ones."""
    mode: Any = get_proxy_mode()
    known = {id(leaf) for leaf in pytree.tree_leaves(old)}

    def is_root(node: fx.Node) -> bool:
        is_constant = node.op == "get_attr"  # what was there before the trace
        return node in roots or (
            is_constant and id(getattr(mode.tracer.root, str(node.target), _ABSENT)) in known
        )

    nodes = [node for node in map(_unconverted, _nodes(value)) if node.op != "get_attr"]
    return origins.follow(nodes, is_root)


def _unconverted(node: fx.Node) -> fx.Node:
    while kind_of(node) in CONVERSIONS:
        node = node.all_input_nodes[0]
    return node


def _nodes(value: Any) -> list[fx.Node]:
    """Return the nodes of tensors in the graph that is being traced."""
    mode = get_proxy_mode()
    if mode is None:
        return []
    slots: list[Any] = [get_proxy_slot(leaf, mode.tracer, None) for leaf in tensors_in(value)]
    return [slot.proxy.node for slot in slots if slot is not None]


def extra_states(model: nn.Module, *, tensors: bool = True) -> dict[str, str]:
    """Return each module's addition to the state dict (``get_extra_state``) as text, by path."""
    plain = nn.Module.get_extra_state
    return {
        path: comparable(module.get_extra_state(), tensors=tensors)
        for path, module in model.named_modules()
        if type(module).get_extra_state is not plain
    }


def refuse_extra_states(
    model: nn.Module, before: Mapping[str, str], *, tensors: bool = True
) -> None:
    """Raise if the extra state of a module has changed in a forward.

    A state that does not change comes from the factory on every rank.

    Raises:
        RefusedError: no checkpoint would contain it.
    """
    if not before:
        return
    now, again = (extra_states(model, tensors=tensors) for _ in range(2))
    for path, old in before.items():
        if old != now[path] == again[path]:  # some texts name objects that each call makes anew
            name = own_path(path) or type(model.get_submodule(path)).__name__
            raise Refusal.EXTRA_STATE.error("", name=name)
