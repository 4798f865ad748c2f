"""Files that training can do without for a while: their disk may be full, or read-only, or away.

What is lost by it is told once, and once that it is over. Lines are kept until they can be written;
pictures of the moment, such as the heartbeat, are simply written again when they are due.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable
from os import SEEK_END
from pathlib import Path

from pipectl.errors import UsageError
from pipectl.files import open_regular

MAX_LINES = 100_000
"""Kept in memory (about 30 MB); of more, the oldest are dropped."""


class Attempts:
    """Writes, and tells when that begins to fail and when it ends.

    Args:
        what: is written, such as ``metrics``.
        warn: told so.
    """

    def __init__(self, what: str, warn: Callable[[str], None]) -> None:
        self._what, self._warn = what, warn
        self._fails = False

    def __call__(self, write: Callable[[], None]) -> bool:
        """Whether it could be written."""
        try:
            write()
        except (OSError, UsageError) as error:
            if not self._fails:
                self._warn(f"{self._what} cannot be written, training continues: {error}")
            self._fails = True
            return False
        if self._fails:
            self._warn(f"{self._what} can be written again")
        self._fails = False
        return True


class Lines:
    """Lines at the end of a file, in order.

    Args:
        warn: told when they cannot be written, and when they can again.
    """

    def __init__(self, path: Path, warn: Callable[[str], None]) -> None:
        self._path = path
        self._attempt = Attempts(path.name, warn)
        self._waiting: deque[str] = deque(maxlen=MAX_LINES)
        self._torn = _ends_within_a_line(path)

    def add(self, lines: Iterable[str]) -> None:
        """Append lines, after those that still wait; they have no line ends."""
        self._waiting.extend(lines)
        self._torn = not self._attempt(self._write)

    def _write(self) -> None:
        """An attempt that failed may have left a part of a line, which readers pass over."""
        start = "\n" if self._torn else ""
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT
        with os.fdopen(open_regular(self._path, flags), "a", encoding="utf-8") as stream:
            stream.write(start + "".join(f"{line}\n" for line in self._waiting))
        self._waiting.clear()


def _ends_within_a_line(path: Path) -> bool:
    """As a process leaves it that is killed while it writes."""
    try:
        with path.open("rb") as stream:
            stream.seek(-1, SEEK_END)
            return stream.read() != b"\n"
    except OSError:  # there is none, or it is empty
        return False
