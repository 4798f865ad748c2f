"""Which help messages need to move while ranks compute: tried out when the ranks start.

Neighbours exchange a message while both compute a fixed amount of work, once for every kind of
help. What counts is the time until both the work and the message are done, so a helper that takes
the core away from the work gains nothing. The message is as large as those of the job: buffers of
the operating system take in a small one, which then needs no help, and not a large one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any

import numpy as np
import torch
from mpi4py import MPI
from torch import Tensor

from pipectl.runtime.transport.progress import MODES, Progress
from pipectl.runtime.transport.transfer import WHOLE, Pieces, Transfer, memory
from pipectl.runtime.waiting import barrier, wait

HELPED = Pieces(2**20, under_way=4)
"""Pieces of a message that moves only within calls: see :mod:`.transfer`."""
STAGED = Pieces(4 * 2**20)
"""Pieces of a message that is copied through host memory."""
NEEDED = 0.5
"""Share of a message's time that help must hide to be worth its cost; less may be noise."""
_LEAST = 0.3

_AS_GOOD = 0.4
"""A thread is preferred where it hides this much, and this part of what polling hides."""

_NO_THREADS = "this MPI does not allow calls from several threads"
_FIRST_BYTES, _FEWEST_BYTES, _MOST_BYTES = 2**20, 2**18, 2**23
_LONGEST_S = 0.15
"""Time of a message; on slower links it is smaller."""
_WORK = 1.5
"""Time of the work, in times of the message."""
_FEWEST, _MOST = 3, 25
_MODE_S = 0.15
"""Time for the repeats of one mode, if the fewest do not take longer."""
_ORDER = 96  # a product of matrices of this order is an operator of some ten microseconds


@dataclass(frozen=True)
class Choice:
    """What was chosen, and why.

    Args:
        mode: see :mod:`~pipectl.runtime.transport.progress`.
        why: in words.
        gained: of every kind of help, the part of a message's time that it hid, at the link that
            gained most; empty where nothing was tried.
    """

    mode: str
    why: str
    gained: tuple[tuple[str, float], ...] = ()

    def to_json(self) -> dict[str, Any]:
        """For the heartbeat."""
        return {"progress": self.mode, "why": self.why, "gained": dict(self.gained)}

    def progress(self, *, staged: bool) -> Progress:
        """The chosen help, at work from now on."""
        whole = STAGED if staged else WHOLE
        return Progress(self.mode, whole if self.mode == "none" else HELPED)


def choose_progress(
    communicator: MPI.Comm, wanted: str = "auto", message_bytes: int = _MOST_BYTES
) -> Choice:
    """The help to use, the same on all ranks. Collective; takes some seconds on slow links.

    Args:
        communicator: of its own.
        wanted: a mode, or ``auto`` to try out.
        message_bytes: of the largest message there will be; the same on all ranks.
    """
    # One rank whose MPI was started for a single thread decides for all: they must choose alike.
    threads = communicator.allreduce(MPI.Query_thread(), op=MPI.MIN) >= MPI.THREAD_MULTIPLE
    if wanted == "thread" and not threads:
        return Choice("poll", _NO_THREADS)
    if wanted != "auto":
        return Choice(wanted, "set in the job")
    if communicator.size == 1:
        return Choice("none", "a single rank")
    modes = [mode for mode in MODES if mode != "thread" or threads]
    mine = _trial(communicator, modes, message_bytes)
    gained = {mode: communicator.allreduce(mine[mode], op=MPI.MAX) for mode in modes[1:]}
    choice = decide(gained)
    return choice if threads else replace(choice, why=f"{_NO_THREADS}; {choice.why}")


def decide(gained: dict[str, float]) -> Choice:
    """The choice that follows from what every kind of help gained.

    A thread also helps in the midst of long operators, of which the trial has none.
    """
    rows = tuple(gained.items())
    words = ", ".join(f"{mode} hides {share:.0%} more of a message" for mode, share in rows)
    best = max(gained.values(), default=0.0)
    if best < NEEDED:
        return Choice("none", f"help hides too little: {words}", rows)
    thread = gained.get("thread", 0.0)
    mode = "thread" if thread >= max(_LEAST, _AS_GOOD * best) else "poll"
    return Choice(mode, words, rows)


def _trial(communicator: MPI.Comm, modes: Sequence[str], message_bytes: int) -> dict[str, float]:
    """What every mode gains at this rank, at the better of its two neighbours."""
    found = dict.fromkeys(modes, 0.0)
    for first in (0, 1):  # pairs (0, 1), (2, 3) ..., then (1, 2), (3, 4) ...
        barrier(communicator)
        rank = communicator.rank
        other = rank + 1 if (rank - first) % 2 == 0 else rank - 1
        if rank >= first and 0 <= other < communicator.size and other >= first:
            gained = _gains(_Pair(communicator, other), modes, message_bytes)
            found = {mode: max(found[mode], gained[mode]) for mode in modes}
    barrier(communicator)
    return found


class _Pair:
    """This rank and the one it exchanges messages with."""

    def __init__(self, communicator: MPI.Comm, other: int) -> None:
        self._communicator = communicator
        self._other = other

    def larger(self, value: float) -> float:
        """The larger one of both ranks' values, on both."""
        mine, theirs = np.array([value]), np.empty(1)
        wait(
            [
                self._communicator.Irecv(theirs, self._other, 1),
                self._communicator.Isend(mine, self._other, 1),
            ]
        )
        return max(value, float(theirs[0]))

    def exchange_s(self, mode: str, buffers: Sequence[Tensor], products: int) -> float:
        """Time in which both ranks compute and exchange a message, in seconds."""
        with Progress(mode, WHOLE if mode == "none" else HELPED) as progress:
            self.larger(0.0)
            start = perf_counter()
            transfers = [
                progress.begin(lambda: self._receive(buffers[0], progress.pieces)),
                progress.begin(lambda: self._send(buffers[1], progress.pieces)),
            ]
            _multiply(products, progress if mode == "poll" else None)
            progress.wait(transfers)
            return self.larger(perf_counter() - start)

    def _send(self, buffer: Tensor, pieces: Pieces) -> Transfer:
        return Transfer.send(
            lambda at, size: self._communicator.Isend(memory(buffer, at, size), self._other, 2),
            buffer.nbytes,
            pieces,
        )

    def _receive(self, buffer: Tensor, pieces: Pieces) -> Transfer:
        return Transfer.receive(
            lambda at, size: self._communicator.Irecv(memory(buffer, at, size), self._other, 2),
            buffer.nbytes,
            pieces,
        )


def _gains(pair: _Pair, modes: Sequence[str], message_bytes: int) -> dict[str, float]:
    """Of every mode, the time it saves, in times of the message; of the least disturbed trials."""
    in_time = _FIRST_BYTES * _LONGEST_S / _alone_s(pair, _FIRST_BYTES)
    wanted = min(_MOST_BYTES, max(_FIRST_BYTES, message_bytes))
    size = int(max(_FEWEST_BYTES, min(wanted, in_time)))
    alone_s = _alone_s(pair, size)
    products = int(pair.larger(_WORK * alone_s / _product_s())) + 1
    buffers = _buffers(size)
    times: dict[str, list[float]] = {mode: [] for mode in modes}
    for _ in range(int(min(_MOST, max(_FEWEST, _MODE_S / (alone_s * (1 + _WORK)))))):
        for mode in modes:
            times[mode].append(pair.exchange_s(mode, buffers, products))
    return {mode: (min(times["none"]) - min(times[mode])) / alone_s for mode in modes}


def _alone_s(pair: _Pair, size: int) -> float:
    """Time of the exchange without any work."""
    buffers = _buffers(size)
    return min(pair.exchange_s("none", buffers, 0) for _ in range(2))


def _buffers(size: int) -> list[Tensor]:
    return [torch.ones(size, dtype=torch.uint8) for _ in range(2)]


def _product_s() -> float:
    _multiply(20, None)
    start = perf_counter()
    _multiply(50, None)
    return (perf_counter() - start) / 50


def _multiply(products: int, progress: Progress | None) -> None:
    matrix = np.ones((_ORDER, _ORDER), dtype=np.float32)
    product = np.empty_like(matrix)
    for _ in range(products):
        np.matmul(matrix, matrix, out=product)
        if progress is not None:
            progress.tick()
