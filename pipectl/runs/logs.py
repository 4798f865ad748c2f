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
_OF_RANK = re.compile(r"rank-([0-9]{1,9})\.log")
_CHUNK = 1 << 20
_MAX_LINE = 1 << 16
"""Bytes of a line; a longer one is broken."""


class Line(NamedTuple):
    """One line.

    Args:
        rank: None for what the job script, its preparation and the launcher print.
        text: with the rank before it, and without its end.
    """

    rank: int | None
    text: str


class Log:
    """Reads a log that grows, from where it stopped before; what is no file is empty.

    Args:
        path: of a log. The name says whose a rank's is; in the log of a node every line does.
    """

    def __init__(self, path: Path) -> None:
        self.offset = 0
        self._path = path
        self._rest = b""
        name = _OF_RANK.fullmatch(path.name)
        self._rank = None if name is None else int(name[1])
        self._is_labelled = path.name.startswith("node-")

    def read_lines(self, *, to_the_end: bool = False) -> Iterator[Line]:
        """The lines that were finished since.

        Args:
            to_the_end: also the start of one that is not finished and will not be.
        """
        try:
            file = os.fdopen(open_regular(self._path), "rb")
        except OSError:
            return
        with file:
            if os.fstat(file.fileno()).st_size < self.offset:  # it was cut
                self.offset, self._rest = 0, b""
            file.seek(self.offset)
            while text := file.read(_CHUNK):
                self.offset += len(text)
                *lines, self._rest = (self._rest + text).split(b"\n")
                yield from map(self._line, lines)
                while len(self._rest) > _MAX_LINE:
                    yield self._line(self._rest[:_MAX_LINE])
                    self._rest = self._rest[_MAX_LINE:]
        if to_the_end and self._rest:
            yield self._line(self._rest)
            self._rest = b""

    def _line(self, text: bytes) -> Line:
        """The line without what a carriage return has overwritten, as on a terminal."""
        rank, head = self._rank, b"" if self._rank is None else b"[%d] " % self._rank
        if self._is_labelled and (label := _LABEL.match(text)) is not None:
            rank, head, text = int(label[1]), label[0], text[label.end() :]
        body = text.rstrip(b"\r").rpartition(b"\r")[2]
        return Line(rank, (head + body).decode("utf-8", "replace"))


class Logs:
    """All logs of a run: those of ranks first, then the job's, which ends with why it failed."""

    def __init__(self, run: RunDirectory) -> None:
        self._run = run
        self._logs: dict[Path, Log] = {}

    @property
    def bytes_read(self) -> int:
        """Over all logs, so far."""
        return sum(log.offset for log in self._logs.values())

    def read_lines(self, *, to_the_end: bool = False) -> Iterator[Line]:
        """See :meth:`Log.read_lines`, for each log."""
        for path in (*self._run.rank_logs(), self._run.job_log):
            log = self._logs.setdefault(path, Log(path))
            yield from log.read_lines(to_the_end=to_the_end)
