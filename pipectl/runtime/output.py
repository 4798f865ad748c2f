"""Where the output of a rank goes: to a log of its own, and a few lines to the log of the job.

No process stands between a rank and its log, so none can end it. What libraries in C and child
processes write goes there too. Up to :data:`MAX_FILES` ranks have a file each; of more, those of a
node share one, in which the lines that Python prints bear the rank.
"""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TextIO

from pipectl.files import write_log
from pipectl.runs import RUN_VARIABLE, RunDirectory
from pipectl.runtime.nodes import node_name
from pipectl.units import printable

MAX_FILES = 256
_STREAMS = (1, 2)
_job_log: list[int] = []
"""Where this process's output went before, while it has a log of its own."""


@contextmanager
def own_log(rank: int, ranks: int) -> Iterator[None]:
    """Send the output of this process to the log of a rank, in jobs.

    If that cannot be opened, nothing changes.
    """
    handle = -1
    if RUN_VARIABLE in os.environ:
        run = RunDirectory(Path(os.environ[RUN_VARIABLE]))
        path = run.rank_log(rank) if ranks <= MAX_FILES else run.node_log(node_name())
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK
        with suppress(OSError):
            handle = os.open(path, flags, 0o600)
    if handle < 0:
        yield
        return
    label = b"" if ranks <= MAX_FILES else b"[%d] " % rank
    usual = sys.stdout, sys.stderr
    _flush()
    saved_streams = [os.dup(stream) for stream in _STREAMS]
    for number in _STREAMS:
        os.dup2(handle, number)
    os.close(handle)
    logs = [_LogStream(number, label) for number in _STREAMS]
    buffers = [io.BufferedWriter(log) for log in logs]
    how = "utf-8", "backslashreplace"
    streams = [io.TextIOWrapper(buffer, *how, line_buffering=True) for buffer in buffers]
    sys.stdout, sys.stderr = streams
    _job_log.append(saved_streams[-1])
    try:
        yield
    finally:
        _flush(sys.stdout, sys.stderr, *streams)
        for log in logs:
            log.end_line()
        sys.stdout, sys.stderr = usual
        _job_log.pop()
        for number, before in zip(_STREAMS, saved_streams, strict=True):
            os.dup2(before, number)
            os.close(before)


def job_log() -> int:
    """File descriptor of the job's log."""
    return _job_log[-1] if _job_log else 2


def say(text: str) -> None:
    """Put a line into the job's log, for people."""
    _flush()
    write_log(job_log(), f"{printable(text)}\n")


class _LogStream(io.RawIOBase):
    """A log that never fails: what a full disk does not take is lost.

    Args:
        label: put before every line, which is then written whole.
    """

    def __init__(self, handle: int, label: bytes) -> None:
        super().__init__()
        self._handle, self._label = handle, label
        self._unfinished_line = b""

    def fileno(self) -> int:
        return self._handle

    def writable(self) -> bool:
        return True

    def write(self, data: object) -> int:
        text = bytes(data)  # type: ignore[call-overload]
        size = len(text)
        if self._label:
            *lines, self._unfinished_line = (self._unfinished_line + text).split(b"\n")
            text = b"".join(b"%b%b\n" % (self._label, line) for line in lines)
        with suppress(OSError):
            while text:
                text = text[os.write(self._handle, text) :]
        return size

    def end_line(self) -> None:
        """Write what was held back, since its line had not ended."""
        if self._unfinished_line:
            self.write(b"\n")


def _flush(*streams: TextIO) -> None:
    for stream in streams or (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # closed by user code
            stream.flush()
