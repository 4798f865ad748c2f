"""A YAML document as a tree in which every value and key knows its place in its file."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pipectl.errors import Problem

_NULL = re.compile(r"|~|null|Null|NULL")
_TRUE = re.compile(r"true|True|TRUE")
_FALSE = re.compile(r"false|False|FALSE")
# Bounded digits: Python refuses to convert a number of more than 4300 digits.
_INTEGER = re.compile(r"[-+]?[0-9]{1,300}")
_OCTAL = re.compile(r"0o[0-7]{1,300}")
_HEXADECIMAL = re.compile(r"0x[0-9a-fA-F]{1,300}")
_FLOAT = re.compile(r"[-+]?(\.[0-9]{1,300}|[0-9]{1,300}(\.[0-9]{0,300})?)([eE][-+]?[0-9]{1,9})?")
_INFINITE = re.compile(r"([-+]?)\.(inf|Inf|INF)")
_NAN = re.compile(r"\.(nan|NaN|NAN)")


@dataclass(frozen=True, order=True)
class Place:
    """Where something is written; line and column count from 1, 0 where there is no line."""

    file: str
    line: int = 0
    column: int = 0

    def problem(self, message: str) -> Problem:
        """A fault that is found here."""
        return Problem(self.file, self.line, self.column, message)


@dataclass(frozen=True)
class Scalar:
    """A leaf: its text, and whether it was written plainly (without quotes)."""

    text: str
    plain: bool
    place: Place = Place("")

    @classmethod
    def of(cls, value: bool | int | float | str) -> Scalar:
        """The scalar that a Python value would be written as."""
        if isinstance(value, bool):
            return cls("true" if value else "false", plain=True)
        return cls(str(value), plain=not isinstance(value, str))

    @property
    def value(self) -> Any:
        """Its value by the core schema of YAML 1.2: null, true, 12, 0x1f, 3e-4, .inf or text."""
        return _core_value(self.text) if self.plain else self.text

    def __str__(self) -> str:
        """How a message shows it: numbers bare, text in quotes, long text shortened."""
        text = self.text if len(self.text) <= 60 else f"{self.text[:57]}..."
        if self.value is None:
            return "null"
        return repr(text) if isinstance(self.value, str) else text


@dataclass(frozen=True)
class Items:
    """A list."""

    items: tuple[Tree, ...]
    place: Place


@dataclass(frozen=True)
class Entry:
    """A key of a mapping with its value."""

    key: Scalar
    value: Tree


@dataclass(frozen=True)
class Table:
    """A mapping, by the text of its keys."""

    entries: Mapping[str, Entry] = field(default_factory=dict)
    place: Place = Place("")


Tree = Scalar | Items | Table
Path = tuple[str | int, ...]


def is_null(tree: Any) -> bool:
    """Whether nothing (or ``null``, ``~``) is written."""
    return isinstance(tree, Scalar) and tree.value is None


def to_values(tree: Tree) -> Any:
    """Plain Python values, typed as YAML 1.2 types them; keys of mappings too."""
    if isinstance(tree, Scalar):
        return tree.value
    if isinstance(tree, Items):
        return [to_values(item) for item in tree.items]
    return {entry.key.value: to_values(entry.value) for entry in tree.entries.values()}


def plain(data: Any) -> Any:
    """Plain Python values of what :func:`to_data` gives."""
    if isinstance(data, dict):
        return {key: plain(item) for key, item in data.items()}
    if isinstance(data, list | tuple):
        return [plain(item) for item in data]
    return data.value if isinstance(data, Scalar) else data


def to_data(tree: Tree) -> Any:
    """Dictionaries and lists with :class:`Scalar` leaves, whose type the reading field decides.

    ``kwargs`` belong to no field: they become plain values.
    """
    if isinstance(tree, Scalar):
        return tree
    if isinstance(tree, Items):
        return [to_data(item) for item in tree.items]
    return {key: _entry_data(key, entry.value) for key, entry in tree.entries.items()}


def locate(tree: Tree, path: Path, *, key: bool = False) -> Place:
    """Where ``path`` is written, or else the nearest thing around it.

    Args:
        key: the place of the key rather than of its value.
    """
    place = tree.place
    for step in path:
        if isinstance(tree, Table) and (entry := tree.entries.get(str(step))):
            tree = entry.value
            place = entry.key.place if key else tree.place
        elif isinstance(tree, Items) and isinstance(step, int) and step < len(tree.items):
            tree = tree.items[step]
            place = tree.place
        else:
            return place
    return place


def path_text(path: Path) -> str:
    """``pipeline.warm_up[2]``; what a terminal cannot show is escaped."""
    text = ""
    for step in path:
        text += f"[{step}]" if isinstance(step, int) else f".{printable(step)}"
    return text.removeprefix(".")


def printable(text: str) -> str:
    """A key as a message shows it: shortened, and without control characters."""
    short = text if len(text) <= 100 else f"{text[:97]}..."
    return short if short.isprintable() else repr(short)[1:-1]


def _entry_data(key: str, value: Tree) -> Any:
    if key == "kwargs" and isinstance(value, Table):
        return {name: to_values(entry.value) for name, entry in value.entries.items()}
    return to_data(value)


def _core_value(text: str) -> Any:
    """https://yaml.org/spec/1.2.2/#1032-tag-resolution."""
    if _NULL.fullmatch(text):
        return None
    if _TRUE.fullmatch(text) or _FALSE.fullmatch(text):
        return text[0] in "tT"
    if _INTEGER.fullmatch(text):
        return int(text)
    if _OCTAL.fullmatch(text) or _HEXADECIMAL.fullmatch(text):
        return int(text, 0)
    if _FLOAT.fullmatch(text) or _NAN.fullmatch(text):
        return float(text.replace(".nan", "nan").replace(".NaN", "nan").replace(".NAN", "nan"))
    if sign := _INFINITE.fullmatch(text):
        return float(f"{sign[1]}inf")
    return text
