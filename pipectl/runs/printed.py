"""What a run printed, line by line, and which rank each line is of."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, NamedTuple

from pipectl.access import open_regular
from pipectl.runs.directory import RunDirectory

_LABEL = re.compile(rb"\[(0|[1-9][0-9]{0,8})\] ")
_OF_RANK = re.compile(r"rank-([0-9]{1,9})\.log")
_CHUNK = 1 << 20
_MAX_LINE = 1 << 16
"""Bytes of a line; what is longer is broken."""


class Line(NamedTuple):
    """One line.

    Args:
        rank: None for what the job script, its preparation and the launcher print.
        text: with the rank before it, and without its end.
    """

    rank: int | None
    text: str


class Printed:
    """Reads a log that grows, from where it stopped before; what is no file is empty.

    Args:
        path: of a log. The name says whose a rank's is; in the log of a node every line does.
    """

    def __init__(self, path: Path) -> None:
        self.seen = 0
        self._path = path
        self._rest = b""
        name = _OF_RANK.fullmatch(path.name)
        self._rank = None if name is None else int(name[1])
        self._is_labelled = path.name.startswith("node-")

    def whole(self) -> Iterator[Line]:
        """The lines that were finished since."""
        file = self._open()
        if file is None:
            return
        with file:
            if os.fstat(file.fileno()).st_size < self.seen:  # it was cut
                self.seen, self._rest = 0, b""
            file.seek(self.seen)
            while text := file.read(_CHUNK):
                self.seen += len(text)
                *lines, self._rest = (self._rest + text).split(b"\n")
                yield from map(self._line, lines)
                while len(self._rest) > _MAX_LINE:
                    yield self._line(self._rest[:_MAX_LINE])
                    self._rest = self._rest[_MAX_LINE:]

    def all(self) -> Iterator[Line]:
        """Those, and the begin of one that is not finished and will not be."""
        yield from self.whole()
        if self._rest:
            yield self._line(self._rest)
        self._rest = b""

    def _open(self) -> BinaryIO | None:
        try:
            return os.fdopen(open_regular(self._path), "rb")
        except OSError:
            return None

    def _line(self, text: bytes) -> Line:
        """Of what a carriage return has overwritten, the last remains, as on a terminal."""
        rank, head = self._rank, b"" if self._rank is None else b"[%d] " % self._rank
        if self._is_labelled and (label := _LABEL.match(text)) is not None:
            rank, head, text = int(label[1]), label[0], text[label.end() :]
        body = text.rstrip(b"\r").rpartition(b"\r")[2]
        return Line(rank, (head + body).decode("utf-8", "replace"))


class Logs:
    """All logs of a run: those of ranks first, then the job's, which ends with why it failed."""

    def __init__(self, run: RunDirectory) -> None:
        self._run = run
        self._printed: dict[Path, Printed] = {}

    @property
    def seen(self) -> int:
        """Bytes read so far."""
        return sum(printed.seen for printed in self._printed.values())

    def whole(self) -> Iterator[Line]:
        """The lines that were finished since."""
        for printed in self._logs():
            yield from printed.whole()

    def all(self) -> Iterator[Line]:
        """Those, and those that are not finished and will not be."""
        for printed in self._logs():
            yield from printed.all()

    def _logs(self) -> Iterator[Printed]:
        for path in (*self._run.rank_logs(), self._run.job_log):
            yield self._printed.setdefault(path, Printed(path))
