"""What a run printed, line by line, and which rank each line is of."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from pipectl.access import open_regular
from pipectl.runs.directory import RunDirectory

_LABEL = re.compile(rb"\[(0|[1-9][0-9]{0,8})\] ")
_CHUNK, _LONGEST = 1 << 20, 1 << 22


class Line(NamedTuple):
    """One line.

    Args:
        rank: None for what the job script, its preparation and the launcher print.
        text: with its label, and without its end.
    """

    rank: int | None
    text: str


class Printed:
    """Reads a file that grows, from where it stopped before; what is not there, or no file, is
    empty.

    Only the begin of a line says whose it is: every line of a rank is labelled, whatever it holds.

    Args:
        path: of a log.
    """

    def __init__(self, path: Path) -> None:
        self.seen = 0
        self._path = path
        self._rest = b""

    def whole(self) -> Iterator[Line]:
        """The lines that were finished since."""
        try:
            with os.fdopen(open_regular(self._path), "rb") as file:
                file.seek(self.seen)
                while text := file.read(_CHUNK):
                    self.seen += len(text)
                    *lines, self._rest = (self._rest + text).split(b"\n")
                    if len(self._rest) > _LONGEST:  # a line that never ends is cut
                        lines, self._rest = [*lines, self._rest], b""
                    yield from map(_line, lines)
        except OSError:
            return

    def all(self) -> Iterator[Line]:
        """Those, and the begin of one that is not finished and will not be."""
        yield from self.whole()
        if self._rest:
            yield _line(self._rest)
        self._rest = b""


def late_lines(run: RunDirectory) -> Iterator[Line]:
    """What ranks printed, but launchers that were told to abort did not pass on."""
    for path in run.late_logs():
        yield from Printed(path).all()


def _line(text: bytes) -> Line:
    """Of what a carriage return has overwritten, the last remains, as on a terminal."""
    label = _LABEL.match(text)
    head, body = (b"", text) if label is None else (label[0], text[label.end() :])
    body = body.rstrip(b"\r").rpartition(b"\r")[2]
    rank = None if label is None else int(label[1])
    return Line(rank, (head + body).decode("utf-8", "replace"))
