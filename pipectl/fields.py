"""Conversion between JSON and dataclasses or named tuples, checked by type hints.

- ``int`` is a whole number of at least 0 (3.0 is valid), ``float`` a finite number of at least 0.
- ``tuple[X, ...]`` is a list, ``tuple[X, Y]`` a list of two values, ``Mapping[str, X]`` an object.
- A named tuple may also be written as a list.
- Null means absent. Unknown keys are ignored.
- In ``Annotated[X, ...]``, a :class:`Rule` restricts the value; a function replaces the conversion
  of X and raises :class:`FieldError` if the value is wrong.
- The metadata ``{"key": name}`` of a dataclass field sets its name in the file.
- A static method ``complete_fields`` of the class adds fields that a file may omit.

A :class:`DataFile` is a whole file. pydantic does the same, but takes too long to import for
``pipectl status``.
"""

from __future__ import annotations

import math
import sys
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import MISSING, fields, is_dataclass
from enum import Enum
from functools import cache, partial
from itertools import count, repeat
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, TypeVar, Union

from pipectl import files
from pipectl.errors import DataFileError
from pipectl.older_python import Self

T = TypeVar("T")
Convert = Callable[[Any], Any]
VERSION = 1
"""Format version of all files; a file without a version has this one."""
LARGEST = 2**63 - 1
MAX_BYTES = 2**50
"""Maximum size of one object; a sum over thousands of objects fits into 64 bits."""


class FieldError(ValueError):
    """A value is wrong.

    Attributes:
        path: keys and indices that lead to the value, innermost first.
    """

    def __init__(self, message: str, *path: str | int) -> None:
        super().__init__(message)
        self.path = list(path)


class Rule(NamedTuple):
    """A condition on a value; ``words`` complete the sentence "must be ..."."""

    holds: Callable[[Any], bool]
    words: str


class LenientFields:
    """A data class of what a job writes, which a crash may damage: a field that is not of its type
    keeps its default, and from a list of such objects those are left out that cannot be read."""


class DataFile:
    """A dataclass stored as a JSON object of its fields and the format version."""

    hint: ClassVar[str]
    """How to obtain a valid file; shown in errors."""
    max_bytes: ClassVar[int] = files.MAX_BYTES

    def to_json(self) -> dict[str, Any]:
        """Return the documented JSON object."""
        return {"version": VERSION, **write_value(self)}

    def save(self, path: Path) -> None:
        """Replace the file atomically; see :func:`pipectl.files.write_json`."""
        files.write_json(path, self.to_json())

    @classmethod
    def from_json(cls, document: Mapping[str, Any], *, file: str = "file") -> Self:
        """Convert a JSON object, the inverse of :meth:`to_json`; see :meth:`load`."""
        return read_fields(cls, document, file=file, hint=cls.hint)

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read and check the file.

        Raises:
            DataFileError: the file is unreadable, or a field is missing or wrong.
        """
        document = files.read_json(path, hint=cls.hint, limit=cls.max_bytes)
        return cls.from_json(document, file=str(path))


def read_fields(kind: type[T], document: Mapping[str, Any], *, file: str, hint: str) -> T:
    """Convert a JSON object to a dataclass or named tuple.

    Args:
        file: name of the file, for errors.
        hint: how to obtain a valid file, for errors.

    Raises:
        DataFileError: the file has another version, or a field is missing or wrong.
    """
    try:
        if (version := document.get("version", VERSION)) != VERSION:
            raise FieldError(f"is {version!r}; this pipectl reads version {VERSION}", "version")
        value: T = read_value(kind, document)
    except FieldError as error:
        keys = (f"[{key}]" if isinstance(key, int) else f".{key}" for key in reversed(error.path))
        place = "".join(keys).removeprefix(".")
        raise DataFileError(f"{file}: {place}: {error}", hint=hint) from None
    return value


def read_value(annotation: Any, value: Any) -> Any:
    """Convert a JSON value to the type of a annotation.

    Raises:
        FieldError: the value is wrong.
    """
    return _converter(annotation)(value)


@cache
def _converter(annotation: Any) -> Convert:
    """Return the function that converts a JSON value to the type of a annotation."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if annotation in _PLAIN:
        return _PLAIN[annotation]
    if origin is Annotated:
        rules = [each for each in arguments[1:] if isinstance(each, Rule)]
        converters = [each for each in arguments[1:] if not isinstance(each, Rule)]
        convert = converters[0] if converters else _converter(arguments[0])
        return partial(_to_narrowed, convert, rules) if rules else convert
    if origin in (Union, UnionType):
        (present,) = (each for each in arguments if each is not NoneType)
        convert = _converter(present)
        return lambda value: None if value is None else convert(value)
    if origin is tuple and arguments[-1] is ...:
        if isinstance(arguments[0], type) and issubclass(arguments[0], LenientFields):
            return partial(_to_readable_items, partial(_to_instance, arguments[0]))
        return partial(_to_items, repeat(_converter(arguments[0])), None)
    if origin is tuple:
        return partial(_to_items, [_converter(each) for each in arguments], len(arguments))
    if origin is Mapping:
        return partial(_to_mapping, _converter(arguments[1]))
    if origin is Literal:
        return partial(_to_member, {each: each for each in arguments})
    if issubclass(annotation, Enum):
        return partial(_to_member, {member.value: member for member in annotation})
    return partial(_to_instance, annotation)


class _Field(NamedTuple):
    name: str
    key: str
    is_required: bool
    is_explicit: bool
    convert: Convert


@cache
def _fields_of(kind: Any) -> list[_Field]:
    hints = typing.get_type_hints(kind, include_extras=True)
    if not is_dataclass(kind):
        needed = hints.keys() - kind._field_defaults.keys()
        return [_Field(n, n, n in needed, True, _converter(hints[n])) for n in kind._fields]
    result = []
    for each in fields(kind):
        needs = each.default is each.default_factory is MISSING
        key, is_explicit = each.metadata.get("key", each.name), each.metadata.get("explicit", needs)
        result.append(_Field(each.name, key, needs, is_explicit, _converter(hints[each.name])))
    return result


def _to_instance(kind: Any, value: Any) -> Any:
    if isinstance(value, kind):
        return value
    known = _fields_of(kind)
    if isinstance(value, list) and issubclass(kind, tuple):
        return kind(*_to_items([field.convert for field in known], len(known), value))
    if not isinstance(value, Mapping):
        raise _fault(value, "an object")
    if (complete := getattr(kind, "complete_fields", None)) is not None:
        value = complete(value)
    is_lenient, values = issubclass(kind, LenientFields), {}
    for field in known:
        if (item := value.get(field.key)) is not None or field.is_required:
            try:
                values[field.name] = _convert_at(field.key, field.convert, item)
            except FieldError:
                if field.is_required or not is_lenient:
                    raise
    return kind(**values)


def _to_narrowed(convert: Convert, rules: list[Rule], value: Any) -> Any:
    result = convert(value)
    for rule in rules:
        if not rule.holds(result):
            raise _fault(value, rule.words)
    return result


def _to_items(converters: Iterable[Convert], size: int | None, value: Any) -> tuple[Any, ...]:
    """Convert the items of a list; ``size`` is their number, or None for any number."""
    if not isinstance(value, list | tuple) or size not in (None, len(value)):
        raise _fault(value, "a list" if size is None else f"a list of {size} values")
    return tuple(map(_convert_at, count(), converters, value))


def _to_readable_items(convert: Convert, value: Any) -> tuple[Any, ...]:
    items = []
    for item in _to_same((list, tuple), "a list", value):
        with suppress(FieldError):
            items.append(convert(item))
    return tuple(items)


def _to_mapping(convert: Convert, value: Any) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise _fault(value, "an object")
    return {key: _convert_at(key, convert, item) for key, item in value.items()}


def _to_member(members: Mapping[str, Any], value: Any) -> Any:
    if not isinstance(value, str) or value not in members:
        raise _fault(value, " or ".join(members))
    return members[value]


def _to_same(kind: type | tuple[type, ...], words: str, value: Any) -> Any:
    if not isinstance(value, kind):
        raise _fault(value, words)
    return value


def _to_number(value: Any) -> float:
    if type(value) not in (int, float):
        raise _fault(value, "a number")
    if not 0 <= value <= sys.float_info.max:
        raise _fault(value, "a finite number of at least 0")
    return float(value)


def _to_whole(value: Any) -> int:
    if type(value) not in (int, float) or value != value // 1:
        raise _fault(value, "a whole number")
    if not 0 <= value <= LARGEST:
        raise _fault(value, "at least 0" if value < 0 else f"at most {LARGEST}")
    return int(value)


def _to_size(value: Any) -> int:
    """Convert to bytes; a fraction is rounded up."""
    size = _to_number(value)
    if size > MAX_BYTES:
        raise _fault(value, f"at most {MAX_BYTES} bytes")
    return math.ceil(size)


_PLAIN: Mapping[Any, Convert] = {
    Any: lambda value: value,
    str: partial(_to_same, str, "a string"),
    bool: partial(_to_same, bool, "true or false"),
    int: _to_whole,
    float: _to_number,
}
Size = Annotated[int, _to_size]
"""Bytes; files of other tools may contain fractions."""
NamedBytes = tuple[tuple[str, Size], ...]
Positive = Annotated[float, Rule(lambda number: number > 0, "above 0")]
Count = Annotated[int, Rule(lambda number: number >= 1, "at least 1")]


def _convert_at(key: str | int, convert: Convert, value: Any) -> Any:
    try:
        return convert(value)
    except FieldError as error:
        error.path.append(key)
        raise


def write_value(value: Any) -> Any:
    """Return the JSON value that :func:`read_value` converts back.

    A named tuple becomes a list. A dataclass field is omitted if it is None, or if it is empty and
    has a default, unless its metadata contains ``{"explicit": True}``.
    """
    if is_dataclass(value):
        kind: Any = type(value)
        return {
            field.key: write_value(item)
            for field in _fields_of(kind)
            if (item := getattr(value, field.name)) is not None
            if field.is_explicit or item not in ((), {})
        }
    if isinstance(value, Mapping):
        return {str(key): write_value(item) for key, item in value.items()}
    return [write_value(item) for item in value] if isinstance(value, list | tuple) else value


def leaves(document: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the values of a JSON object and of the objects in it, with their dotted keys."""
    for key, value in document.items():
        if isinstance(value, Mapping):
            yield from leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _fault(value: Any, words: str) -> FieldError:
    return FieldError("missing" if value is None else f"must be {words}, not {value!r}"[:200])
