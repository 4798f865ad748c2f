"""Reports of ranks to rank 0 during training, and the files that rank 0 writes from them.

Training can do without these files for a while: their disk may be full, read-only or unavailable.
Rank 0 warns once when writing begins to fail, and once when it works again. Lines are kept until
they can be written; snapshots, such as the heartbeat, are simply written again when they are due.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from os import SEEK_END
from pathlib import Path
from typing import Generic, TypeVar, cast

from mpi4py import MPI

from pipectl.errors import UsageError
from pipectl.files import open_regular
from pipectl.runtime.objects import ArrivingObject, begin_receive

T = TypeVar("T")
MAX_LINES = 100_000
"""Lines kept in memory (about 30 MB); if there are more, the oldest are dropped."""
_TAG = 2


class Reports(Generic[T]):
    """Reports of ranks about steps, which are sent to rank 0. No rank waits for another.

    Args:
        communicator: on which no other messages have this tag.
        ranks: that report; all by default.

    Attributes:
        incomplete: steps that only some ranks have reported, with the reports.
    """

    def __init__(self, communicator: MPI.Comm, ranks: Sequence[int] | None = None) -> None:
        self._communicator = communicator
        self._count = communicator.size if ranks is None else len(ranks)
        self._sending: list[MPI.Request] = []
        self._receiving: list[ArrivingObject] = []
        self.incomplete: dict[int, dict[int, T]] = {}

    @property
    def is_sending(self) -> bool:
        """Whether a report of this rank has not left yet."""
        self._sending = [request for request in self._sending if not request.Test()]
        return bool(self._sending)

    def send(self, step: int, report: T) -> None:
        """Start sending a report."""
        if self._communicator.rank == 0:
            self._accept(0, step, report)
        else:
            sending = self._communicator.isend((step, report), 0, _TAG)
            self._sending = [request for request in self._sending if not request.Test()]
            self._sending.append(sending)

    def collect(self) -> list[tuple[int, dict[int, T]]]:
        """The steps, on rank 0, whose last report has arrived since the last call."""
        while (arriving := begin_receive(self._communicator, _TAG)) is not None:
            self._receiving.append(arriving)
        waiting, self._receiving = self._receiving, []
        for arriving in waiting:
            if arriving.is_there():
                step, report = cast("tuple[int, T]", arriving.value())
                self._accept(arriving.rank, step, report)
            else:
                self._receiving.append(arriving)
        whole = [step for step, each in self.incomplete.items() if len(each) == self._count]
        return [(step, self.incomplete.pop(step)) for step in sorted(whole)]

    def _accept(self, rank: int, step: int, report: T) -> None:
        self.incomplete.setdefault(step, {})[rank] = report


class Attempts:
    """Writes, and warns when that begins to fail and when it works again.

    Args:
        what: is written, such as ``metrics``.
        warn: called with the warnings.
    """

    def __init__(self, what: str, warn: Callable[[str], None]) -> None:
        self._what, self._warn = what, warn
        self._fails = False

    def __call__(self, write: Callable[[], None]) -> bool:
        """Call ``write``; returns whether it succeeded."""
        try:
            write()
        except (OSError, UsageError) as error:
            if not self._fails:
                self._warn(f"{self._what} cannot be written, the job continues: {error}")
            self._fails = True
            return False
        if self._fails:
            self._warn(f"{self._what} can be written again")
        self._fails = False
        return True


class Lines:
    """Lines at the end of a file, in order; one process writes them.

    Args:
        warn: called when they cannot be written, and when they can again.
    """

    def __init__(self, path: Path, warn: Callable[[str], None]) -> None:
        self._path = path
        self._attempt = Attempts(path.name, warn)
        self._waiting: deque[str] = deque(maxlen=MAX_LINES)
        self._may_be_torn = True

    def add(self, lines: Iterable[str]) -> None:
        """Append lines without line ends, after those that are not yet written."""
        self._waiting.extend(lines)
        self._may_be_torn = not self._attempt(self._write)

    def _write(self) -> None:
        """Append all that waits. What a failed attempt has written is removed again, since all of
        it waits for the next one. Readers skip the part of a line that a killed process has left.
        """
        start = "\n" if self._may_be_torn and _ends_within_a_line(self._path) else ""
        text = (start + "".join(f"{line}\n" for line in self._waiting)).encode()
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT
        with os.fdopen(open_regular(self._path, flags), "ab", buffering=0) as stream:
            size_bytes = os.fstat(stream.fileno()).st_size
            try:
                while text:
                    text = text[stream.write(text) :]
            except OSError:
                with suppress(OSError):
                    os.ftruncate(stream.fileno(), size_bytes)
                raise
        self._waiting.clear()


def _ends_within_a_line(path: Path) -> bool:
    """Whether the last line is incomplete, because a process was killed while it wrote."""
    try:
        with path.open("rb") as stream:
            stream.seek(-1, SEEK_END)
            return stream.read() != b"\n"
    except OSError:  # there is none, or it is empty
        return False
