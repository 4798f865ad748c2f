"""Joint work that all ranks leave together if it fails on one of them.

A rank that raises leaves messages that others wait for, so these would wait for ever. It therefore
rings: it sends every rank an empty message. Ranks look for one while they wait, and leave the work
from there. In any case all meet at the end of the work, and only then know that it has succeeded.

What the work has sent and received stays as it is: messages of it may still arrive, into memory
that the error keeps. So no rank may use the communicators of such work again. The ranks can still
save what they hold, over other communicators, and must then end.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn, TypeVar

from mpi4py import MPI

from pipectl.runtime.waiting import barrier, gather_all, interrupted

T = TypeVar("T")
_TAG = 3


class OtherRankError(Exception):
    """The work has failed on another rank, which raises its own error."""


class _RungError(Exception):
    """Ends a wait, and everything around it, if another rank has rung."""


class Alarm:
    """Tells all ranks that work has failed on one.

    Args:
        communicator: of all ranks, used for nothing else.
    """

    def __init__(self, communicator: MPI.Comm) -> None:
        self._communicator = communicator
        self._ringing: list[MPI.Request] = []

    def guard(self, work: Callable[[], T]) -> T:
        """Do work with all other ranks; collective. Every rank raises if one does.

        Raises:
            OtherRankError: the work has failed on other ranks only.
            Exception: whatever it raises on this rank.
        """
        failure: Exception | None = None
        results: list[T] = []
        try:
            with interrupted(self._listen):
                results.append(work())
        except _RungError as error:
            failure = OtherRankError()
            failure.__cause__ = error  # which keeps the memory of messages
        except Exception as error:
            failure = error
            self._ring()
        failed = gather_all(self._communicator, failure is not None)
        if failure is not None:
            raise failure
        if any(failed):
            raise OtherRankError
        return results[0]

    def end(self, error: Exception) -> NoReturn:
        """Raise the error of this rank; without one, wait until those of others have ended the job.

        Args:
            error: of :meth:`guard`.
        """
        if not isinstance(error, OtherRankError):
            raise error
        barrier(self._communicator)
        raise error

    def _ring(self) -> None:
        others = [r for r in range(self._communicator.size) if r != self._communicator.rank]
        self._ringing = [self._communicator.Isend(b"", rank, _TAG) for rank in others]

    def _listen(self) -> None:
        if self._communicator.Iprobe(MPI.ANY_SOURCE, _TAG):
            raise _RungError
