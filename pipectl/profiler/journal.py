"""What an interrupted measurement leaves behind, so that the next one goes on from there.

A journal is a text file: a line of JSON that says what is measured, then one line per finished
measurement. Only whole lines count, so that it may end anywhere, and nothing in it is executed.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, Self

from pipectl.access import open_regular
from pipectl.errors import UsageError

_GRAPH = "graph"


class Journal:
    """Finished measurements by key, one writer at a time.

    They are kept in memory only if another process writes the file, or the disk becomes full.

    Args:
        path: its directory exists; None keeps everything in memory.
        header: what decides whether noted measurements are still good; a journal with another
            header is discarded.

    Attributes:
        resumed: measurements taken over from an earlier process.

    Raises:
        UsageError: the file cannot be written.
    """

    def __init__(self, path: Path | None = None, header: Mapping[str, Any] | None = None) -> None:
        self._path = path
        self._header = json.dumps({"journal": header}, sort_keys=True)
        self._entries: dict[str, dict[str, Any]] = {}
        self.resumed = 0
        self._stream: IO[str] | None = None
        self._is_ours = False
        if path is None:
            return
        try:
            self._stream = _locked(path)
            if self._stream is not None:
                self._is_ours = True
                self._read(self._stream)
        except OSError as error:
            self._leave()
            raise UsageError(
                f"{path}: cannot be written: {error.strerror or error}",
                cure="set output.directory to a directory you may write to, or free some space",
            ) from error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __len__(self) -> int:
        """Measurements that are kept."""
        return sum(key != _GRAPH for key in self._entries)

    def find(self, key: str) -> dict[str, Any] | None:
        """What was noted under ``key``, by this process or an earlier one."""
        return self._entries.get(key)

    def note(self, key: str, entry: dict[str, Any]) -> None:
        """Keep a finished measurement; it is on its way to the file when this returns.

        Args:
            entry: survives JSON unchanged.
        """
        self._entries[key] = entry
        try:
            if self._stream is not None:
                _write(self._stream, json.dumps([key, entry]))
        except OSError:
            self._leave()

    def match(self, fingerprint: str) -> None:
        """Forget everything that was not measured for this graph."""
        if self.find(_GRAPH) == {"fingerprint": fingerprint}:
            return
        self._entries.clear()
        self.resumed = 0
        try:
            if self._stream is not None:
                self._begin(self._stream)
        except OSError:
            self._leave()
        self.note(_GRAPH, {"fingerprint": fingerprint})

    def remove(self) -> None:
        """The measurement is complete: nothing is left to go on with."""
        if self._is_ours and self._path is not None:
            self._path.unlink(missing_ok=True)
        self.close()

    def close(self) -> None:
        """Let another process write it."""
        if self._stream is not None:
            self._stream.close()
            self._stream = None

    def _leave(self) -> None:
        """Write no more; the line that did not fit is cut off by who reads the file next."""
        stream, self._stream = self._stream, None
        if stream is not None:
            with suppress(OSError):  # closing tries to write it once more
                stream.close()

    def _read(self, stream: IO[str]) -> None:
        """Take over the whole lines, and cut off what follows them."""
        stream.seek(0)
        *lines, _unfinished = stream.read().split("\n")
        if lines[:1] != [self._header]:
            self._begin(stream)
            return
        size = len(self._header) + 1
        for line in lines[1:]:
            try:
                key, entry = json.loads(line)
            except (ValueError, TypeError, RecursionError):
                break
            if not (line.isascii() and isinstance(key, str) and isinstance(entry, dict)):
                break
            self._entries[key] = entry
            size += len(line) + 1
        self.resumed = len(self)
        stream.truncate(size)
        stream.seek(size)

    def _begin(self, stream: IO[str]) -> None:
        stream.seek(0)
        stream.truncate()
        _write(stream, self._header)


def _write(stream: IO[str], line: str) -> None:
    stream.write(line + "\n")
    stream.flush()


def _locked(path: Path) -> IO[str] | None:
    """The file, open and ours; None if another process has it."""
    handle = open_regular(path, os.O_RDWR | os.O_APPEND | os.O_CREAT)
    stream = os.fdopen(handle, "a+", encoding="ascii", errors="replace", newline="\n")
    try:
        fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        stream.close()
        return None
    except OSError:
        pass  # a file system without locks
    return stream
