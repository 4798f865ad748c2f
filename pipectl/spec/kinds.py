"""What a field may hold: how it is read, written, named in messages and put in the JSON Schema.

A field of a spec model is annotated with one :class:`Kind`; validation, the JSON Schema and the
reference are all made from it. Pydantic adds the structure: which fields, which are required.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pydantic import GetCoreSchemaHandler
from pydantic_core import CoreSchema, core_schema

from pipectl.spec.tree import Scalar
from pipectl.units import format_clock, parse_bytes, parse_duration, parse_walltime

_LARGEST = 2**63 - 1
_LONGEST_QUANTITY = 40


def _same(value: Any) -> Any:
    return value


@dataclass(frozen=True, eq=False)
class Kind:
    """One kind of scalar.

    Args:
        words: completes "must be ...".
        schema: its JSON Schema.
        read: the value of a scalar; raises ValueError with what is wrong.
        write: the value as plain YAML data, which ``read`` understands.
        absent: how None is written.
        lists: whether a list may stand in its place, which the field's own type then reads.
    """

    words: str
    schema: dict[str, Any]
    read: Callable[[Scalar], Any]
    write: Callable[[Any], Any] = _same
    absent: str | None = None
    lists: bool = False

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        serializer = core_schema.plain_serializer_function_ser_schema(self.dump)
        return core_schema.no_info_before_validator_function(
            self.validate, handler(source), serialization=serializer
        )

    def __get_pydantic_json_schema__(self, _schema: Any, _handler: Any) -> dict[str, Any]:
        return dict(self.schema)

    def validate(self, value: Any) -> Any:
        """Read a scalar of the document, or a Python value given in its place.

        Raises:
            ValueError: it is not of this kind.
        """
        if value is None or (self.lists and isinstance(value, list | tuple)):
            return value
        if isinstance(value, bool | int | float | str):
            value = Scalar.of(value)
        if not isinstance(value, Scalar):
            raise self.mistake(value)
        return self.read(value)

    def dump(self, value: Any) -> Any:
        """The value as plain YAML data."""
        return self.absent if value is None else self.write(value)

    def mistake(self, found: Any) -> ValueError:
        """What to raise for ``found``."""
        return ValueError(f"must be {self.words}, not {describe(found)}")


def describe(found: Any) -> str:
    """What was found, for a message: ``'many'``, ``3.5``, ``a list``."""
    if isinstance(found, dict):
        return "a mapping"
    if isinstance(found, list | tuple):
        return "a list"
    return str(found) if isinstance(found, Scalar) else repr(found)


def whole(minimum: int, maximum: int = _LARGEST) -> Kind:
    """A whole number; ``1e3`` is one, a quoted one is not."""
    bounds = f"at least {minimum}" if maximum == _LARGEST else f"{minimum} to {maximum}"

    def read(scalar: Scalar) -> int:
        value = scalar.value
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int):
            raise kind.mistake(_unquoted(scalar))
        if not minimum <= value <= maximum:
            raise ValueError(f"must be {_range(value, minimum, maximum)}, not {scalar}")
        return value

    schema = {"type": "integer", "minimum": minimum}
    if maximum != _LARGEST:
        schema["maximum"] = maximum
    kind = Kind(f"a whole number of {bounds}".replace("of 0", "from 0"), schema, read)
    return kind


def positive_number() -> Kind:
    """A finite number above 0."""

    def read(scalar: Scalar) -> float:
        value = scalar.value
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise kind.mistake(_unquoted(scalar))
        if not 0 < value < math.inf:
            raise kind.mistake(scalar)
        return float(value)

    kind = Kind("a number above 0", {"type": "number", "exclusiveMinimum": 0}, read)
    return kind


def flag() -> Kind:
    """``true`` or ``false``; ``yes`` and ``on`` are text in YAML 1.2."""

    def read(scalar: Scalar) -> bool:
        if isinstance(scalar.value, bool):
            return scalar.value
        raise kind.mistake(_unquoted(scalar))

    kind = Kind("true or false", {"type": "boolean"}, read)
    return kind


def text(
    words: str = "text", check: Callable[[str], str | None] | None = None, **schema: Any
) -> Kind:
    """One line of text; a plain number or true counts as its text.

    Args:
        words: what it names.
        check: says what is wrong with a text, or None.
        schema: further keys of the JSON Schema.
    """

    def read(scalar: Scalar) -> str:
        if scalar.value is None:
            raise kind.mistake(scalar)
        if "\n" in scalar.text:
            raise ValueError("must be one line; it contains a line break")
        if not scalar.text.strip():
            raise ValueError(f"must be {words}; it is empty")
        if check is not None and (fault := check(scalar.text)):
            raise ValueError(fault)
        return scalar.text

    kind = Kind(words, {"type": ["string", "number", "boolean"], **schema}, read)
    return kind


def any_text() -> Kind:
    """Text of any length, also empty or of several lines."""

    def read(scalar: Scalar) -> str:
        if scalar.value is None:
            raise kind.mistake(scalar)
        return scalar.text

    kind = Kind("text", {"type": ["string", "number", "boolean"]}, read)
    return kind


def choice(*names: str, later: tuple[str, ...] = ()) -> Kind:
    """One of ``names``; those in ``later`` are refused by their name as not supported yet."""
    listed = " or ".join(filter(None, (", ".join(names[:-1]), names[-1])))

    def read(scalar: Scalar) -> str:
        if scalar.text in names:
            return scalar.text
        if scalar.text in later:
            raise ValueError(f"{scalar.text!r} is not supported yet; choose {listed}")
        raise kind.mistake(scalar)

    kind = Kind(listed, {"enum": list(names)}, read)
    return kind


def size() -> Kind:
    """Bytes, as a number or with a unit."""
    return _quantity("a size such as 4GiB", parse_bytes, "1 byte", _same)


def duration() -> Kind:
    """Seconds, as a clock or with units; a bare number is seconds."""
    return _quantity("a duration such as 01:30:00 or 90m", parse_duration, "1 s", format_clock)


def walltime() -> Kind:
    """Seconds likewise; a bare number is minutes, as for Slurm."""
    return _quantity("a time such as 01:30:00, 90m or 90", parse_walltime, "1 s", format_clock)


def auto(kind: Kind) -> Kind:
    """``auto``, read as None, or a value of ``kind``; a choice lists ``auto`` itself."""
    if "enum" in kind.schema:
        words, schema = kind.words, kind.schema
    else:
        words, schema = f"auto or {kind.words}", {"anyOf": [{"const": "auto"}, kind.schema]}

    def read(scalar: Scalar) -> Any:
        if scalar.text == "auto":
            return None
        try:
            return kind.read(scalar)
        except ValueError as error:
            message = str(error).replace(f"must be {kind.words}", f"must be {words}")
            raise ValueError(message) from None

    return Kind(words, schema, read, kind.write, absent="auto")


def auto_list(words: str) -> Kind:
    """``auto``, read as None, or a list, which the field's own type reads."""

    def read(scalar: Scalar) -> None:
        if scalar.text != "auto":
            raise kind.mistake(scalar)

    items = {"type": "array", "items": whole(1).schema}
    schema: dict[str, Any] = {"anyOf": [{"const": "auto"}, items]}
    kind = Kind(f"auto or {words}", schema, read, list, absent="auto", lists=True)
    return kind


def _quantity(
    words: str, parse: Callable[[str], int], least: str, write: Callable[[int], Any]
) -> Kind:
    def read(scalar: Scalar) -> int:
        if scalar.value is None or len(scalar.text) > _LONGEST_QUANTITY:
            raise kind.mistake(scalar)
        value = parse(scalar.text)
        if not 1 <= value <= _LARGEST:
            raise ValueError(f"must be at least {least} and below 2^63, not {scalar}")
        return value

    kind = Kind(words, {"type": ["string", "number"]}, read, write)
    return kind


def _range(value: int, minimum: int, maximum: int) -> str:
    return f"at least {minimum}" if value < minimum else f"at most {maximum}"


def _unquoted(scalar: Scalar) -> Any:
    """The scalar, or a hint where only its quotes are wrong."""
    bare = Scalar(scalar.text, plain=True, place=scalar.place)
    if scalar.plain or isinstance(bare.value, str | None):
        return scalar
    return _Quoted(scalar.text)


class _Quoted(str):
    """A text that would be right without its quotes."""

    __slots__ = ()

    def __repr__(self) -> str:
        return f"the text {str.__repr__(self)[:60]}; remove the quotes"
