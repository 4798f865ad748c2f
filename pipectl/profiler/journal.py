"""What an interrupted measurement leaves behind, so that the next one goes on from there."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from pipectl.errors import DataFileError, UsageError
from pipectl.files import read_json, write_json

_GRAPH = "graph"


class Journal:
    """Finished measurements by key, in a JSON file that is replaced whole with every note.

    Two processes that measure the same replace each other's notes, of which either is good. If the
    disk becomes full, notes are kept in memory only.

    Args:
        path: its directory exists; None keeps everything in memory.
        header: what decides whether noted measurements are still good; a file with another
            header, or a damaged one, is discarded.

    Attributes:
        resumed: measurements taken over from an earlier process.

    Raises:
        UsageError: the file cannot be written.
    """

    def __init__(self, path: Path | None = None, header: Mapping[str, Any] | None = None) -> None:
        self._path = path
        self._header = json.loads(json.dumps(header))
        self._entries: dict[str, dict[str, Any]] = {}
        self._is_written = path is not None
        if path is not None:
            with suppress(DataFileError):
                document = read_json(path, cure="")
                entries = document.get("entries")
                if document.get("journal") == self._header and isinstance(entries, dict):
                    self._entries = {k: v for k, v in entries.items() if isinstance(v, dict)}
            self._write()
        self.resumed = len(self)

    def __len__(self) -> int:
        """Measurements that are kept."""
        return sum(key != _GRAPH for key in self._entries)

    def find(self, key: str) -> dict[str, Any] | None:
        """What was noted under ``key``, by this process or an earlier one."""
        return self._entries.get(key)

    def note(self, key: str, entry: dict[str, Any]) -> None:
        """Keep a finished measurement; it is in the file when this returns.

        Args:
            entry: survives JSON unchanged.
        """
        self._entries[key] = entry
        try:
            self._write()
        except UsageError:
            self._is_written = False

    def remember(self, key: str, measure: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """What was noted under ``key``; if nothing was, what is measured now, which is kept."""
        entry = self.find(key)
        if entry is None:
            entry = measure()
            self.note(key, entry)
        return entry

    def match(self, fingerprint: str) -> None:
        """Forget everything that was not measured for this graph."""
        graph = {"fingerprint": fingerprint}
        if self.find(_GRAPH) != graph:
            self._entries.clear()
            self.resumed = 0
            self.note(_GRAPH, graph)

    def remove(self) -> None:
        """The measurement is complete: nothing is left to go on with."""
        if self._path is not None:
            self._is_written = False
            self._path.unlink(missing_ok=True)

    def _write(self) -> None:
        if self._path is not None and self._is_written:
            write_json(self._path, {"journal": self._header, "entries": self._entries})
