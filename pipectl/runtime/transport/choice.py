"""The choice how messages move while ranks compute (``launch.progress: auto``).

This is a rule and not a trial, so that a job gets the same help in every run: a trial at the start
of a run would depend on the machine's load at that moment. ``pipectl profile --links`` measures
whether help hides messages on a link; the rule reads this from the run's ``cluster.json``.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import log

from mpi4py import MPI

from pipectl.cluster import Cluster
from pipectl.link import Link
from pipectl.runtime.transport.transfer import WHOLE, Pieces, Progress
from pipectl.runtime.waiting import broadcast, gather_all
from pipectl.units import format_bytes

HELPED = Pieces(2**20, under_way=4)
"""Pieces of a message that moves only within MPI calls: see :mod:`.transfer`."""
STAGED_BYTES = 4 * 2**20
"""Size of a piece of a message that is copied through host memory; each is a copy of its own."""
SMALL_BYTES = 64 * 2**10
"""Smaller messages leave within the call that starts them, over TCP too."""
NEEDED = 0.5
"""Share of a message's time that MPI calls must hide, beyond what is hidden without them."""
_OWN_PROGRESS = (
    "MPIR_CVAR_ASYNC_PROGRESS",
    "MPICH_ASYNC_PROGRESS",
    "I_MPI_ASYNC_PROGRESS",
    "OMPI_MCA_btl_tcp_progress_thread",
)
"""Environment variables by which users make MPI itself advance messages."""


@dataclass(frozen=True)
class Choice:
    """The choice and its reason.

    Args:
        mode: see :mod:`~pipectl.runtime.transport.transfer`.
        why: the reason, in words.
    """

    mode: str
    why: str

    def progress(
        self, *, staged: bool, enter_thread: Callable[[], None] = lambda: None
    ) -> Progress:
        """The chosen help, active from now on.

        Args:
            staged: whether messages are copied through host memory.
            enter_thread: see :class:`Progress`.
        """
        pieces = WHOLE if self.mode == "none" else HELPED
        if staged:
            pieces = replace(pieces, size_bytes=STAGED_BYTES)
        return Progress(self.mode, pieces, enter_thread)


@dataclass(frozen=True)
class Circumstances:
    """A job and its machines.

    Args:
        ranks_per_node: of every node that has ranks.
        message_bytes: size of the largest message.
        cluster: the machines and links for which the plan was made; None if unknown.
    """

    ranks_per_node: Sequence[int]
    message_bytes: int
    cluster: Cluster | None = None


def choose_progress(communicator: MPI.Comm, wanted: str, circumstances: Circumstances) -> Choice:
    """The help to use, the same on all ranks. Collective.

    Args:
        wanted: a mode, ``auto`` for the rule, or ``core`` for a thread on a core of its own, if
            messages are large.
        circumstances: those of rank 0.
    """
    threads = min(gather_all(communicator, MPI.Query_thread())) >= MPI.THREAD_MULTIPLE
    return broadcast(communicator, decide(wanted, circumstances, os.environ, threads=threads))


def decide(
    wanted: str, known: Circumstances, environment: Mapping[str, str], *, threads: bool
) -> Choice:
    """Apply the rule.

    Args:
        environment: variables of rank 0.
        threads: whether MPI allows calls from several threads on all ranks.
    """
    no_threads = "this MPI does not allow calls from several threads"
    if wanted not in ("auto", "core"):
        refused = wanted == "thread" and not threads
        return Choice("none", no_threads) if refused else Choice(wanted, "set in the job")
    if sum(known.ranks_per_node) == 1:
        return Choice("none", "a single rank")
    if known.message_bytes < SMALL_BYTES:
        largest = format_bytes(known.message_bytes)
        return Choice("none", f"the largest message, of {largest}, leaves at once")
    if wanted == "core" and threads:
        return Choice("thread", "launch.progress leaves it a core")
    judged = list(_judged(known, environment))
    needed = [why for needs, why in judged if needs]
    if not needed:
        return Choice("none", "; ".join(why for _, why in judged))
    if threads:
        return Choice("thread", needed[0])
    return Choice("none", f"{needed[0]}; {no_threads}")


def _judged(known: Circumstances, environment: Mapping[str, str]) -> Iterator[tuple[bool, str]]:
    """For every kind of link in the job, whether its messages need help, and why."""
    cluster = known.cluster
    if max(known.ranks_per_node) > 1:
        link = None if cluster is None else cluster.within_node
        copied = "within a node, the receiving processor copies messages itself"
        yield _measured("within a node", link, known.message_bytes) or (False, copied)
    if len(known.ranks_per_node) > 1:
        link = None if cluster is None else cluster.between_nodes
        off = "", "0", "no", "off", "false"
        own = next((n for n in _OWN_PROGRESS if environment.get(n, "").lower() not in off), None)
        why = "between nodes, MPI may move large messages within its calls alone"
        if own is not None:
            why = f"between nodes, MPI moves messages by itself ({own})"
        yield _measured("between nodes", link, known.message_bytes) or (own is None, why)


def _measured(where: str, link: Link | None, message_bytes: int) -> tuple[bool, str] | None:
    """The same, from the measurement of ``profile --links`` nearest to the largest message."""
    rows = () if link is None or link.observed is None else link.observed.overlap
    if not rows:
        return None
    size, plain, polled = min(rows, key=lambda row: abs(log(row[0] / message_bytes)))
    words = f"{where}, {plain:.0%} of a message of {format_bytes(size)} is hidden without help"
    return polled - plain >= NEEDED, f"{words} and {polled:.0%} with it, as measured"
