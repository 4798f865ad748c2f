"""What batches hold besides tensors, numbers and texts: containers of the user's, and objects.

Dataclasses and mappings of all kinds are containers: what they hold counts. Everything else is an
object, such as a date, a path or an array of numpy. A graph could hold only those of one batch, so
that a model may be given them, but may not look at them. While it is captured, a stand-in that
refuses every look takes their place. Members of an enumeration are compared by identity, which no
stand-in shows: the model is captured with every other member instead.

A model may still follow from whether there is a text, or None in its place, or from the number of
texts in a list. It is captured with others of these, too. If its graph differs, all batches must be
alike in this respect.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from contextlib import contextmanager
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn

from pipectl.capture.factories import module_of
from pipectl.capture.refusals import STAND_IN, Refusal
from pipectl.torch_api import pytree

_KNOWN = (Tensor, int, float, str, type(None), Enum)
"""Leaves that a step gets as they are; see :func:`exportable`."""
_COMPUTED = (Tensor, int, float)
"""Leaves that a graph computes with."""
_PARTS = ("inputs", "targets")
TURNS = 2
"""Of other kinds, see :func:`other_items`."""


def open_containers(value: Any) -> Any:
    """Return a value with all dataclasses and mappings in it as containers of a pytree.

    Their classes are registered with torch. A mapping that its class does not make of a ``dict``
    becomes a ``dict``.
    """
    while True:
        leaves = pytree.tree_leaves(value)
        if all(type(leaf) is Tensor for leaf in leaves):  # most often
            return value
        closed = {type(leaf): leaf for leaf in leaves if _is_container(leaf)}
        if not closed:
            return value
        for kind, leaf in closed.items():
            if not isinstance(leaf, Mapping):
                torch.export.register_dataclass(kind)
            elif _is_made_of_dict(leaf):
                _register_mapping(kind)
            else:
                value = pytree.tree_map_only(kind, dict, value)


def _is_container(leaf: Any) -> bool:
    is_dataclass = dataclasses.is_dataclass(leaf) and not isinstance(leaf, type)
    return is_dataclass or isinstance(leaf, Mapping)


def _is_made_of_dict(mapping: Mapping[Any, Any]) -> bool:
    kind: Any = type(mapping)
    try:
        again = kind(dict(mapping))
        return type(again) is kind and list(again) == list(mapping)
    except Exception:  # it is made of something else
        return False


def _register_mapping(kind: Any) -> None:
    def flatten(mapping: Mapping[Any, Any]) -> tuple[list[Any], tuple[Any, ...]]:
        return list(mapping.values()), tuple(mapping)

    def flatten_with_keys(mapping: Mapping[Any, Any]) -> Any:
        named: list[Any] = [(pytree.MappingKey(key), value) for key, value in mapping.items()]
        return named, tuple(mapping)

    def unflatten(values: Iterable[Any], keys: tuple[Any, ...]) -> Any:
        return kind(dict(zip(keys, values, strict=True)))

    pytree.register_pytree_node(
        kind,
        flatten,
        unflatten,
        serialized_type_name=f"{kind.__module__}.{kind.__qualname__}",
        flatten_with_keys_fn=flatten_with_keys,
    )


class StandIn:
    """An object of a batch, at which nobody may look."""

    def __init__(self, leaf: Any) -> None:
        object.__setattr__(self, "_kind", type(leaf))

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        kind: type = object.__getattribute__(self, "_kind")
        return kind

    def __getattr__(self, _: str) -> Any:
        return _refuse(self)


def _refuse(self: Any, *_: Any, **__: Any) -> Any:
    kind = object.__getattribute__(self, "_kind")
    raise Refusal.OBJECT.error(kind=f" ({module_of(kind)}.{kind.__name__})")


StandIn.__name__ = STAND_IN
_LOOKS = (
    "abs", "add", "and", "bool", "bytes", "call", "complex", "contains", "delitem", "divmod",
    "eq", "float", "floordiv", "format", "ge", "getitem", "gt", "hash", "index", "int", "invert",
    "iter", "le", "len", "lshift", "lt", "matmul", "mod", "mul", "ne", "neg", "next", "or", "pos",
    "pow", "radd", "rand", "rdivmod", "repr", "reversed", "rfloordiv", "rlshift", "rmatmul",
    "rmod", "rmul", "ror", "round", "rpow", "rrshift", "rshift", "rsub", "rtruediv", "rxor",
    "setattr", "setitem", "str", "sub", "truediv", "trunc", "xor", "array", "enter", "exit",
    "fspath",
)  # fmt: skip
for _name in _LOOKS:
    setattr(StandIn, f"__{_name}__", _refuse)


@dataclasses.dataclass(frozen=True)
class Beside:
    """What a captured batch holds beside tensors and numbers.

    Args:
        kinds: of all items, by their places; see :func:`items_of`.
        fixed: places of those on whose kinds the graph depends.
        has_fixed_keys: whether the graph depends on the keys of mappings that have them.
    """

    kinds: Mapping[str, str] = dataclasses.field(default_factory=dict)
    fixed: frozenset[str] = frozenset()
    has_fixed_keys: bool = False

    def difference(self, batch: Any, *, may_have_more: bool) -> str | None:
        """Return what makes another batch one of another graph, in words; None if nothing does.

        Args:
            may_have_more: whether it may have further keys.
        """
        found = {place: kind_of(item) for place, item in items_of(batch).items()}
        for place, kind in self.kinds.items():
            if place not in found and (self.has_fixed_keys or place in self.fixed):
                return f"{place} is missing, which was {kind}"
            if place in self.fixed and found[place] != kind:
                return f"{place} is {found[place]}, not {kind}"
        more = next((place for place in found if place not in self.kinds), None)
        return None if more is None or may_have_more else f"{more} is new"


def items_of(batch: tuple[Any, Any]) -> dict[str, Any]:
    """Return what inputs and targets hold beside tensors and numbers, by place.

    A list or tuple without these is one item.
    """
    return {
        f"{place[0].get(_PARTS)}{pytree.keystr(place[1:])}": leaf
        for place, leaf in pytree.tree_flatten_with_path(batch, is_leaf=_is_item)[0]
        if _is_item(leaf)
    }


def kind_of(item: Any) -> str:
    """Return all that a model can tell of an item without computing with what is in it."""
    if item is None:
        return "None"
    if isinstance(item, list | tuple):
        kinds = [kind_of(each) for each in item]
        alike = f" of {kinds[0]}" if len({*kinds}) == 1 else f": {', '.join(kinds)}" * bool(kinds)
        return f"{len(item)} in a {type(item).__name__}{alike}"
    return "a text" if isinstance(item, str) else f"a {item.__class__.__name__}"


def other_items(batch: tuple[Any, Any], turn: int, places: Container[str]) -> Any:
    """Return the batch with items of other kinds at some places; there are :data:`TURNS`."""

    def change(place: pytree.KeyPath, leaf: Any) -> Any:
        name = f"{place[0].get(_PARTS)}{pytree.keystr(place[1:])}"
        return _other_kind(leaf, turn) if _is_item(leaf) and name in places else leaf

    return pytree.tree_map_with_path(change, batch, is_leaf=_is_item)


def without_keys(batch: Any) -> Any:
    """Return the batch without the keys of dictionaries that have an item or nothing."""
    if isinstance(batch, tuple | list) and not _is_item(batch):
        values = [without_keys(each) for each in batch]
        return type(batch)(*values) if hasattr(batch, "_fields") else type(batch)(values)
    if type(batch) is not dict:
        return batch
    return {key: without_keys(each) for key, each in batch.items() if not _is_item(each)}


def _is_item(value: Any) -> bool:
    if type(value) in (list, tuple):
        return not any(isinstance(leaf, _COMPUTED) for leaf in pytree.tree_leaves(value))
    return not isinstance(value, _COMPUTED) and pytree.tree_is_leaf(value)


def _other_kind(item: Any, turn: int) -> Any:
    if isinstance(item, list | tuple):
        if turn == 1 and item:
            return type(item)()
        return type(item)(_other_kind(each, 1) for each in (*item, item[-1] if item else None))
    if item is None:
        return StandIn(object()) if turn == 0 else "~"
    return None if turn == 0 or not isinstance(item, StandIn) else "~"


def without_objects(batch: Any) -> Any:
    """Return a batch with stand-ins in the place of objects."""
    return pytree.tree_map(lambda leaf: leaf if isinstance(leaf, _KNOWN) else StandIn(leaf), batch)


@contextmanager
def exportable(wrapper: nn.Module, batch: Any) -> Iterator[Any]:
    """Give a batch with None in the place of what torch.export does not take in every release:
    stand-ins and members of enumerations. The step gets them."""
    leaves, structure = pytree.tree_flatten(batch)
    hidden = {place: leaf for place, leaf in enumerate(leaves) if _is_hidden(leaf)}
    if not hidden:
        yield batch
        return

    def put_back(_: nn.Module, args: Any) -> Any:
        found, structure = pytree.tree_flatten(args)
        for place, leaf in hidden.items():
            found[place] = leaf
        return pytree.tree_unflatten(found, structure)

    handle = wrapper.register_forward_pre_hook(put_back)
    try:
        shown = [None if place in hidden else leaf for place, leaf in enumerate(leaves)]
        yield pytree.tree_unflatten(shown, structure)
    finally:
        handle.remove()


def _is_hidden(leaf: Any) -> bool:
    return type(leaf) is StandIn or (is_choice(leaf) and not isinstance(leaf, str))


def is_choice(leaf: Any) -> bool:
    """Return whether a leaf is a text or a member of an enumeration, of which a graph holds one."""
    return isinstance(leaf, str) or (isinstance(leaf, Enum) and not isinstance(leaf, int))


def other_choices(batch: Any) -> Iterator[Any]:
    """Yield the batch with other texts, and with every other member of its enumerations."""
    choices = [leaf for leaf in pytree.tree_leaves(batch) if is_choice(leaf)]
    counts = [len(_members(each)) for each in choices if not isinstance(each, str)]
    turns = max([2 * bool(choices), *counts])
    for turn in range(1, turns):
        yield pytree.tree_map(_other(turn), batch)


def _other(turn: int) -> Callable[[Any], Any]:
    def change(leaf: Any) -> Any:
        if isinstance(leaf, str):
            return f"~{leaf[::-1]}~"
        if not is_choice(leaf):
            return leaf
        members = _members(leaf)
        place = members.index(leaf) if leaf in members else 0
        return members[(place + turn) % len(members)]

    return change


def _members(member: Enum) -> list[Enum]:
    return list(type(member))
