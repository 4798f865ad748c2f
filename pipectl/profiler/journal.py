"""Finished measurements of an interrupted profile, from which the next one continues."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from pipectl.errors import DataFileError, UsageError
from pipectl.fields import FieldError, read_value, write_value
from pipectl.files import read_json, write_json

T = TypeVar("T")
_GRAPH = "graph"


class Journal:
    """Finished measurements by key, in a JSON file that is replaced as a whole with every entry.

    Two processes that measure the same job replace each other's entries; either is valid. If the
    disk is full, entries are kept in memory only.

    Args:
        path: its directory exists; None keeps everything in memory.
        header: decides whether earlier entries are still valid; a file with another header, or a
            damaged file, is discarded.

    Attributes:
        resumed: number of measurements from an earlier process.

    Raises:
        UsageError: the file cannot be written.
    """

    def __init__(self, path: Path | None = None, header: Mapping[str, Any] | None = None) -> None:
        self._path = path
        self._header = json.loads(json.dumps(header))
        self._entries: dict[str, Any] = {}
        self._is_written = path is not None
        if path is not None:
            with suppress(DataFileError):
                document = read_json(path, hint="")
                entries = document.get("entries")
                if document.get("journal") == self._header and isinstance(entries, dict):
                    self._entries = entries
            self._write()
        self.resumed = len(self)

    def __len__(self) -> int:
        """Return the number of measurements."""
        return sum(key != _GRAPH for key in self._entries)

    def find(self, key: str) -> Any:
        """Return the entry of ``key``, from this process or an earlier one; else None."""
        return self._entries.get(key)

    def note(self, key: str, entry: Any) -> None:
        """Keep a finished measurement; it is in the file when this returns.

        Args:
            entry: survives JSON unchanged.
        """
        self._entries[key] = entry
        try:
            self._write()
        except UsageError:
            self._is_written = False

    def remember(self, key: str, kind: type[T], measure: Callable[[], T]) -> T:
        """Return the measurement of ``key``; if there is none, measure and keep it.

        Args:
            kind: of the measurement, as for :func:`pipectl.fields.read_value`.
        """
        with suppress(FieldError):
            measurement: T = read_value(kind, self.find(key))
            return measurement
        measurement = measure()
        self.note(key, write_value(measurement))
        return measurement

    def match(self, fingerprint: str) -> None:
        """Remove everything that was not measured for this graph."""
        graph = {"fingerprint": fingerprint}
        if self.find(_GRAPH) != graph:
            self._entries.clear()
            self.resumed = 0
            self.note(_GRAPH, graph)

    def remove(self) -> None:
        """Remove the file: the measurement is complete."""
        if self._path is not None:
            self._is_written = False
            self._path.unlink(missing_ok=True)

    def _write(self) -> None:
        if self._path is not None and self._is_written:
            write_json(self._path, {"journal": self._header, "entries": self._entries})
