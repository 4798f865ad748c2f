"""A YAML document as plain Python data that knows where it is written.

It consists of :class:`Table`, :class:`Items`, None, texts, and :class:`Plain`: what is written
without quotes and is no text in YAML 1.2. The field that reads it decides whether ``account: 0042``
is a number or a text.
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple, Self

from pipectl.errors import Problem

KeyPath = tuple[str | int, ...]

# Bounded digits: Python refuses to convert a number of more than 4300 digits.
_INTEGER = re.compile(r"[-+]?[0-9]{1,300}")
_OTHER_BASE = re.compile(r"0o[0-7]{1,300}|0x[0-9a-fA-F]{1,300}")
_FLOAT = re.compile(r"[-+]?(\.[0-9]{1,300}|[0-9]{1,300}(\.[0-9]{0,300})?)([eE][-+]?[0-9]{1,9})?")
_SPECIAL = re.compile(r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)")
_WORDS = {
    **dict.fromkeys(("", "~", "null", "Null", "NULL")),
    **dict.fromkeys(("true", "True", "TRUE"), True),
    **dict.fromkeys(("false", "False", "FALSE"), False),
}


class Place(NamedTuple):
    """Where something is written; line and column count from 1, 0 if there is no line."""

    file: str
    line: int = 0
    column: int = 0

    def problem(self, message: str) -> Problem:
        """A fault at this place."""
        return Problem(self.file, self.line, self.column, message)


class Plain(str):
    """A number or truth value as it is written, without quotes: ``12``, ``3e-4``, ``true``."""

    __slots__ = ()


class Table(dict[str, Any]):
    """A mapping with the places of its keys and values."""

    def __init__(self, place: Place) -> None:
        super().__init__()
        self.place = place
        self.key_places: dict[str, Place] = {}
        self.value_places: dict[str, Place] = {}

    def put(self, key: str, value: Any, key_place: Place, value_place: Place) -> None:
        """Set a key to a value that is written at ``value_place``."""
        self[key] = value
        self.key_places[key], self.value_places[key] = key_place, value_place

    def copy(self) -> Self:
        """A copy; the values are the same objects."""
        copy = type(self)(self.place)
        for key, value in self.items():
            copy.put(key, value, self.key_places[key], self.value_places[key])
        return copy


class Items(list[Any]):
    """A list with the places of its items."""

    def __init__(self, place: Place) -> None:
        super().__init__()
        self.place = place
        self.places: list[Place] = []


def parse_scalar(text: str) -> Any:
    """What a plain scalar means: null, true, 12, 0x1f, 3e-4, .inf or a text.

    See https://yaml.org/spec/1.2.2/#1032-tag-resolution.
    """
    if text in _WORDS:
        return _WORDS[text]
    if _INTEGER.fullmatch(text):
        return int(text)
    if _OTHER_BASE.fullmatch(text):
        return int(text, 0)
    if _FLOAT.fullmatch(text):
        return float(text)
    return float(text.replace(".", "")) if _SPECIAL.fullmatch(text) else text


def to_python(value: Any) -> Any:
    """Python values typed as YAML types them, keys too, without places."""
    if isinstance(value, dict):
        return {to_python(key): to_python(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_python(item) for item in value]
    return parse_scalar(value) if isinstance(value, Plain) else value


def merge(lower: Table, upper: Table) -> Table:
    """``upper`` laid over ``lower``: mappings key by key, everything else is replaced."""
    merged = lower.copy()
    merged.place = upper.place
    for key, value in upper.items():
        below = lower.get(key)
        if isinstance(below, Table) and isinstance(value, Table):
            value = merge(below, value)
        merged.put(key, value, upper.key_places[key], upper.value_places[key])
    return merged


def locate(tree: Any, path: KeyPath, *, key: bool = False) -> tuple[Place, Any]:
    """Where ``path`` is written and its value there, or those of the nearest thing around it.

    Args:
        key: whether to give the place of the key instead of the value's.
    """
    place = tree.place
    for step in path:
        if isinstance(tree, Table) and str(step) in tree:
            step = str(step)
            place = (tree.key_places if key else tree.value_places)[step]
            tree = tree[step]
        elif isinstance(tree, Items) and isinstance(step, int) and step < len(tree):
            place, tree = tree.places[step], tree[step]
        else:
            break
    return place, tree


def path_text(path: KeyPath) -> str:
    """``pipeline.warm_up[2]``; what a terminal cannot show is escaped."""
    steps = (f"[{step}]" if isinstance(step, int) else f".{escape(step)}" for step in path)
    return "".join(steps).removeprefix(".")


def escape(text: str) -> str:
    """A key as a message shows it: shortened, and without control characters."""
    short = text if len(text) <= 100 else f"{text[:97]}..."
    return short if short.isprintable() else repr(short)[1:-1]


def show(value: Any) -> str:
    """A value as a message shows it: ``'many'``, ``3.5``, ``a list``; long text is shortened."""
    if isinstance(value, dict):
        return "a mapping"
    if isinstance(value, list):
        return "a list"
    if value is None:
        return "null"
    text = value if len(value) <= 60 else f"{value[:57]}..."
    return str(text) if isinstance(value, Plain) else repr(text)
