"""The logs of a run, which are read while it writes them."""

from __future__ import annotations

import os
import re
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from pipectl.errors import PipectlError, UsageError
from pipectl.files import open_regular
from pipectl.runs.directory import RunDirectory
from pipectl.runs.readers import read_errors
from pipectl.runs.record import Record

_LABEL = re.compile(rb"\[(0|[1-9][0-9]{0,8})\] ")
_OF_RANK = re.compile(r"rank-([0-9]{1,9})\.log")
_CHUNK = 1 << 20
_MAX_LINE = 1 << 16
"""Maximum bytes of a line of a log; longer lines are split."""
_WINDOW, _WIDER = 1 << 16, 4
"""Bytes that are read first to find the last lines, and factor by which the next try reads more."""


class Line(NamedTuple):
    """One line of a log.

    Args:
        rank: None for output of the job script, the preparation and the launcher.
        text: the line after its rank, without a line end.
    """

    rank: int | None
    text: str


class Log:
    """A growing log, which is read from where the last reading ended.

    In the log of a node, each line begins with its rank.
    """

    def __init__(self, path: Path) -> None:
        self.offset = 0
        self._path = path
        self._rest = b""
        name = _OF_RANK.fullmatch(path.name)
        self._rank = None if name is None else int(name[1])
        self._is_labelled = path.name.startswith("node-")

    def read_lines(self, *, to_the_end: bool = False) -> Iterator[Line]:
        """Yield the complete lines since the last call.

        Args:
            to_the_end: whether to yield an incomplete last line too.
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

    def read_last_lines(
        self, count: int, wanted: Callable[[Line], bool], *, to_the_end: bool = False
    ) -> list[Line]:
        """Return the last lines of the whole log that are ``wanted``, and go on after them.

        A log may have gigabytes: more and more of its end is read until that has enough lines.

        Args:
            count: maximum number of lines.
            to_the_end: see :meth:`read_lines`.
        """
        window = _WINDOW
        while True:
            start = self._start_of_last(window)
            if start is not None:
                self.offset, self._rest = start, b""
                new_lines = self.read_lines(to_the_end=to_the_end)
                lines = deque(filter(wanted, new_lines), count)
                if start == 0 or len(lines) == count:
                    return list(lines)
            window *= _WIDER

    def _start_of_last(self, window: int) -> int | None:
        """Return where the first line begins in the last bytes; None if they are within one line.

        In a line that has to be split (a progress bar that never ends it, say), it is any place.
        """
        try:
            file = os.fdopen(open_regular(self._path), "rb")
        except OSError:
            return 0
        with file:
            start = os.fstat(file.fileno()).st_size - window
            if start <= 0:
                return 0
            file.seek(start - 1)
            place = file.read(min(window, _CHUNK)).find(b"\n")
        if place < 0 and window <= _MAX_LINE:
            return None
        return start + max(0, place)

    def _line(self, text: bytes) -> Line:
        """Return a line without text that a carriage return overwrites on a terminal."""
        rank, head = self._rank, b"" if self._rank is None else b"[%d] " % self._rank
        if self._is_labelled and (label := _LABEL.match(text)) is not None:
            rank, head, text = int(label[1]), label[0], text[label.end() :]
        body = text.rstrip(b"\r").rpartition(b"\r")[2]
        return Line(rank, (head + body).decode("utf-8", "replace"))


class Logs:
    """All logs of a run: the ranks' first, then the job's, which ends with the failure."""

    def __init__(self, run: RunDirectory) -> None:
        self._run = run
        self._logs: dict[Path, Log] = {}

    @property
    def bytes_read(self) -> int:
        """Bytes read from all logs."""
        return sum(log.offset for log in self._logs.values())

    @property
    def is_empty(self) -> bool:
        """Whether nothing was printed since the last reading."""
        return next(self.read_lines(to_the_end=True), None) is None

    def read_lines(self, *, to_the_end: bool = False) -> Iterator[Line]:
        """Yield the new lines of each log; see :meth:`Log.read_lines`."""
        for log in self._all():
            yield from log.read_lines(to_the_end=to_the_end)

    def read_last_lines(
        self, count: int, wanted: Callable[[Line], bool], *, to_the_end: bool = False
    ) -> list[Line]:
        """Return the last lines of all logs; see :meth:`Log.read_last_lines`."""
        lines: list[Line] = []
        for log in reversed(self._all()):  # also those of which nothing is shown: they go on later
            missing = count - len(lines)
            lines = log.read_last_lines(missing, wanted, to_the_end=to_the_end) + lines
        return lines

    def _all(self) -> list[Log]:
        paths = (*self._run.rank_logs(), self._run.job_log)
        return [self._logs.setdefault(path, Log(path)) for path in paths]


def last_lines(
    run: RunDirectory, logs: Logs, ranks: Collection[int] = (), tail: int | None = None
) -> list[Line]:
    """Return what is left of the logs of a run to read, and how the ``ranks`` have failed.

    Args:
        logs: of the run; what was read of them is left out, unless ``tail`` asks for it.
        ranks: whose lines are returned; empty for all lines.
        tail: maximum number of lines, which are the last ones; None for all.

    Raises:
        UsageError: the run has no such rank, or ``tail`` is negative.
    """
    check_ranks(run, ranks)
    if tail is not None and tail < 0:
        raise UsageError(f"tail: {tail} is negative", hint="give a number of lines, or none")

    def is_wanted(line: Line) -> bool:
        return not ranks or line.rank in ranks

    errors = [  # they are in the job's log, not in a rank's
        Line(error.rank, text)
        for error in (read_errors(run.start) if ranks else ())
        for text in error.text.splitlines()
    ]
    if tail is None:
        return list(filter(is_wanted, [*logs.read_lines(to_the_end=True), *errors]))
    lines = logs.read_last_lines(tail, is_wanted, to_the_end=True)
    return list(deque([*lines, *filter(is_wanted, errors)], tail))


def check_ranks(run: RunDirectory, ranks: Iterable[int]) -> None:
    """Refuse ranks that the run does not have, if their number is known."""
    try:
        count = Record.load(run.record).ranks
    except PipectlError:
        return
    for rank in ranks:
        if not 0 <= rank < count:
            raise UsageError(
                f"rank {rank}: {run.name} has the ranks 0 to {count - 1}",
                hint="leave it out to see all",
            )
