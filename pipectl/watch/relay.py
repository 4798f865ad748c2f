"""The process through which a rank's output goes: ``python -m pipectl.watch.relay LABEL FILE``.

Launchers pass on whatever pieces of text they happen to read, so that lines of several ranks end up
within each other, and those that put the rank in front of lines put it in front of pieces. Here
whole lines get the label, and few enough bytes are written at once to stay together in a pipe. This
process outlives its rank by as long as it takes to pass on what that wrote last.
"""

from __future__ import annotations

import fcntl
import os
import select
import stat
import struct
import sys
import termios
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from pipectl.watch.signals import outlive_signals

_TOGETHER = 4096
"""Bytes that a pipe of Linux takes as one, and that Open MPI reads at once."""
_PIECE = 4000
"""Bytes of a line; longer ones are broken."""
_PATIENCE_S = 1.0
"""After which the begin of a line is passed on without its end."""
_TAKEN_S, _PAUSE_S = 0.2, 0.001


def label_of(name: str) -> bytes:
    """What stands before every line."""
    return f"[{name}] ".encode()


def lines_of(text: bytes) -> tuple[list[bytes], bytes]:
    """Whole lines without their ends, long ones broken, and the begin of the next."""
    *whole, rest = text.split(b"\n")
    lines = [piece for line in whole for piece in (list(_pieces(line)) or [b""])]
    *full, rest = list(_pieces(rest)) or [b""]
    return [*lines, *full], rest


def batches(lines: list[bytes], label: bytes) -> Iterator[bytes]:
    """Labelled lines, as many together as stay together."""
    batch = b""
    for line in lines:
        labelled = label + line.removesuffix(b"\r") + b"\n"
        if len(batch) + len(labelled) > _TOGETHER:
            yield batch
            batch = b""
        batch += labelled
    if batch:
        yield batch


def relay(source: int, sink: Sink, label: bytes) -> None:
    """Pass on everything, until nobody can write any more.

    Args:
        source: file descriptor.
    """
    rest, until = b"", 0.0
    while True:
        ready, _, _ = select.select([source], [], [], _left(until) if rest else None)
        text = os.read(source, 1 << 16) if ready else b""
        begun = bool(rest)
        lines, rest = lines_of(rest + text)
        if lines or not begun:
            until = time.monotonic() + _PATIENCE_S
        if rest and (not text or not _left(until)):
            lines, rest = [*lines, rest], b""
        for batch in batches(lines, label):
            sink.write(batch)
        if ready and not text:
            return


class Sink:
    """Where labelled lines go: to the launcher, or to a file once that is gone.

    Launchers that are told to abort end at once, and take what they have not read with them.

    Args:
        pipe: file descriptor; of anything else than a pipe, all is taken at once.
        late: what the launcher did not take; made when needed.
    """

    def __init__(self, pipe: int, late: Path) -> None:
        self._pipe, self._late = pipe, late
        self._buffers = stat.S_ISFIFO(os.fstat(pipe).st_mode)
        self._gone = False

    def write(self, batch: bytes) -> None:
        """Write it, and wait a little until it is taken."""
        if not self._gone:
            self._gone = not self._taken(batch)
        if self._gone:
            with suppress(OSError), self._late.open("ab") as file:
                file.write(batch)

    def _taken(self, batch: bytes) -> bool:
        """Whether somebody has it, or will probably read it."""
        try:
            while batch:
                select.select([], [self._pipe], [])
                batch = batch[os.write(self._pipe, batch) :]
        except OSError:
            return False
        if not self._buffers:
            return True
        until = time.monotonic() + _TAKEN_S
        while (left := _waiting(self._pipe)) and _left(until) and not _abandoned(self._pipe):
            time.sleep(_PAUSE_S)
        return not (left and _abandoned(self._pipe))


def _pieces(line: bytes) -> Iterator[bytes]:
    """A line cut into pieces, but no letter of UTF-8."""
    while len(line) > _PIECE:
        cut = next((at for at in range(_PIECE, _PIECE - 4, -1) if line[at] & 0xC0 != 0x80), _PIECE)
        yield line[:cut]
        line = line[cut:]
    if line:
        yield line


def _left(until: float) -> float:
    return max(0.0, until - time.monotonic())


def _waiting(sink: int) -> int:
    """Bytes in a pipe that its reader has not taken."""
    answer = fcntl.ioctl(sink, termios.FIONREAD, b"\0" * 4)
    return int(struct.unpack("i", answer)[0])


def _abandoned(pipe: int) -> bool:
    """Whether nobody can read from it any more."""
    poll = select.poll()
    poll.register(pipe, 0)
    return bool(poll.poll(0))


def main() -> None:
    """Relay the standard input."""
    outlive_signals()
    _, name, late = sys.argv
    relay(0, Sink(1, Path(late)), label_of(name))


if __name__ == "__main__":
    main()
