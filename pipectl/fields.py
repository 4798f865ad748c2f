"""Checked access to the fields of a JSON object, with errors that name file and field."""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from pipectl.errors import DataFileError

T = TypeVar("T")
LARGEST = 2**63 - 1
MOST_BYTES = 2**50
"""Of one thing; sums over thousands still fit into eight bytes."""
_REQUIRED: Any = object()


class Reader:
    """Fields of one JSON object.

    Args:
        document: the object.
        file: its file, for messages.
        path: where in the file it stands, e.g. ``nodes[3]``.
        cure: how to get a good file.
    """

    def __init__(self, document: dict[str, Any], *, file: str, cure: str, path: str = "") -> None:
        self._document = document
        self._file = file
        self._path = path
        self._cure = cure

    def __contains__(self, key: str) -> bool:
        return self._document.get(key) is not None

    def error(self, key: str, message: str) -> DataFileError:
        """An error about ``key``, for the caller to raise."""
        place = f"{self._path}.{key}" if self._path else key
        return DataFileError(f"{self._file}: {place}: {message}", cure=self._cure)

    def value(self, key: str, default: Any = _REQUIRED) -> Any:
        """The raw value; null counts as absent."""
        found = self._document.get(key)
        if found is not None:
            return found
        if default is _REQUIRED:
            raise self.error(key, "missing")
        return default

    def text(self, key: str, default: str = _REQUIRED) -> str:
        """A string."""
        return self._typed(key, str, "a string", default)

    def optional_text(self, key: str) -> str | None:
        """A string, or None where absent."""
        return self.text(key) if key in self else None

    def flag(self, key: str, default: bool = _REQUIRED) -> bool:
        """A boolean."""
        return self._typed(key, bool, "true or false", default)

    def integer(
        self, key: str, default: int = _REQUIRED, *, alias: str | None = None, minimum: int = 0
    ) -> int:
        """A whole number of at least ``minimum``."""
        if alias is not None and key not in self and alias in self:
            key = alias
        number = self.value(key, default)
        if isinstance(number, bool) or not isinstance(number, int | float) or number != number // 1:
            raise self.error(key, f"must be a whole number, not {number!r}")
        if number < minimum:
            raise self.error(key, f"must be at least {minimum}, not {number!r}")
        if number > LARGEST:
            raise self.error(key, f"must be at most {LARGEST}")
        return int(number)

    def optional_integer(self, key: str) -> int | None:
        """A whole number, or None where absent."""
        return self.integer(key) if key in self else None

    def size(self, key: str, default: int = _REQUIRED) -> int:
        """Bytes: a finite number of at least 0; part of a byte counts as one."""
        size_bytes = self.number(key, default)
        if size_bytes > MOST_BYTES:
            raise self.error(key, f"must be at most {MOST_BYTES} bytes")
        return math.ceil(size_bytes)

    def sizes(self, key: str) -> dict[str, int]:
        """An object of bytes by name; empty where absent."""
        nested = self._nested(self.mapping(key), key)
        return {name: nested.size(name) for name in nested._document}

    def mapping(self, key: str) -> dict[str, Any]:
        """An object as it is; empty where absent."""
        return dict(self._typed(key, dict, "an object", {}))

    def number(self, key: str, default: float = _REQUIRED) -> float:
        """A finite number of at least 0."""
        found = self.value(key, default)
        if isinstance(found, bool) or not isinstance(found, int | float):
            raise self.error(key, f"must be a number, not {found!r}")
        if not _is_size(found):
            raise self.error(key, f"must be a finite number of at least 0, not {found!r}"[:200])
        return float(found)

    def optional_number(self, key: str) -> float | None:
        """A finite number of at least 0, or None where absent."""
        return self.number(key) if key in self else None

    def positive(self, key: str, default: float = _REQUIRED) -> float:
        """A finite number above 0."""
        number = self.number(key, default)
        if number == 0:
            raise self.error(key, "must be above 0")
        return number

    def rows(self, key: str, width: int) -> tuple[tuple[float, ...], ...]:
        """A list of lists of ``width`` finite numbers of at least 0; empty where absent."""
        found = self._typed(key, list, "a list", [])
        for row in found:
            if not (isinstance(row, list) and len(row) == width and all(map(_is_size, row))):
                raise self.error(key, f"must be a list of {width} numbers of at least 0 each")
        return tuple(tuple(row) for row in found)

    def section(self, key: str) -> Reader:
        """A nested object."""
        return self._nested(self._typed(key, dict, "an object", _REQUIRED), key)

    def optional(self, key: str, read: Callable[[Reader], T]) -> T | None:
        """What ``read`` makes of a nested object, or None where absent."""
        return read(self.section(key)) if key in self else None

    def items(self, key: str, default: list[Any] = _REQUIRED) -> Iterator[Reader]:
        """The objects of a list."""
        for index, item in enumerate(self._typed(key, list, "a list", default)):
            if not isinstance(item, dict):
                raise self.error(f"{key}[{index}]", "must be an object")
            yield self._nested(item, f"{key}[{index}]")

    def integers(self, key: str, default: list[int] = _REQUIRED) -> tuple[int, ...]:
        """A list of whole numbers."""
        found = self._typed(key, list, "a list", default)
        if not all(map(_is_whole, found)):
            raise self.error(key, "must be a list of whole numbers")
        return tuple(found)

    def numbers(self, key: str) -> tuple[float, ...]:
        """A list of finite numbers of at least 0; empty where absent."""
        found = self._typed(key, list, "a list", [])
        if not all(map(_is_size, found)):
            raise self.error(key, "must be a list of numbers of at least 0")
        return tuple(map(float, found))

    def texts(self, key: str, default: list[str] = _REQUIRED) -> tuple[str, ...]:
        """A list of strings."""
        found = self._typed(key, list, "a list", default)
        if not all(isinstance(item, str) for item in found):
            raise self.error(key, "must be a list of strings")
        return tuple(found)

    def pairs(self, key: str) -> tuple[tuple[str, int], ...]:
        """A list of ``[name, bytes]``; empty where absent."""
        found = self._typed(key, list, "a list", [])
        for item in found:
            shaped = isinstance(item, list) and len(item) == 2
            if not (
                shaped
                and isinstance(item[0], str)
                and _is_whole(item[1])
                and 0 <= item[1] <= MOST_BYTES
            ):
                raise self.error(key, "must be a list of [name, bytes]")
        return tuple((name, size) for name, size in found)

    def timings(self, key: str) -> dict[int, tuple[float, float]]:
        """An object ``{micro-batch size: [forward_s, backward_s]}``; empty where absent."""
        found = self._typed(key, dict, "an object", {})
        for size, pair in found.items():
            shaped = isinstance(pair, list) and len(pair) == 2 and all(map(_is_size, pair))
            if not (shaped and re.fullmatch("0*[1-9][0-9]{0,17}", size)):
                raise self.error(key, "must be {micro-batch size: [forward_s, backward_s]}")
        return {int(size): (float(pair[0]), float(pair[1])) for size, pair in found.items()}

    def check_version(self, known: int) -> None:
        """Refuse a file of another format version; an absent one is 1."""
        version = self.integer("version", default=1)
        if version != known:
            raise self.error("version", f"is {version}; this pipectl reads version {known}")

    def _typed(self, key: str, kind: type[T], what: str, default: Any) -> T:
        found = self.value(key, default)
        if not isinstance(found, kind):
            raise self.error(key, f"must be {what}, not {found!r}"[:200])
        return found

    def _nested(self, document: dict[str, Any], key: str) -> Reader:
        path = f"{self._path}.{key}" if self._path else key
        return Reader(document, file=self._file, cure=self._cure, path=path)


def _is_whole(value: Any) -> bool:
    """Whether a value is a whole number that fits into eight bytes."""
    return isinstance(value, int) and not isinstance(value, bool) and -LARGEST <= value <= LARGEST


def _is_size(value: Any) -> bool:
    """Whether a value is a finite number of at least 0."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return 0 <= value <= sys.float_info.max
