"""How batches reach a rank: it reads the data itself, or takes what one rank has read for all.

A dataset that draws by a generator of its own, or numbers classes in the order of a set, gives
every process other samples. Inputs and targets that two ranks read would not belong together.

**Everywhere**: every rank reads what it needs. If several ranks read a sample, each sends a
checksum of it to the rank that computes its loss, which compares them before that forward. No
gradient of samples that differ exists anywhere, so no weight changes. No rank waits for it: the
checksums leave before the activations that the loss is computed from. It is the same if steps
overlap, and in evaluations.

**Once**: one rank, the *reader*, reads all micro-batches and sends the other ranks their parts. It
is the first of the lowest stage that reads the data. If it computes every micro-batch, it sends the
parts of each before its own forward, which all others that read depend on. Otherwise, or if the
weights in the loss follow from all targets of a step, it sends those of a step before anything else
in that step. So no rank waits for a part that comes after something that waits for this rank, and
no more than a step is read ahead. In evaluations it is one micro-batch ahead.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, combinations, islice
from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI
from torch import Tensor

from pipectl.capture import CapturedGraph, CapturedJob
from pipectl.capture.data import Loader, Pieces, Samples
from pipectl.capture.digests import Digests, digests_of
from pipectl.capture.slices import Span
from pipectl.errors import WorkerError
from pipectl.profile import Profile
from pipectl.profile_parts import Readings
from pipectl.runtime.parcels import Parcel, Post
from pipectl.runtime.stage import Stage
from pipectl.runtime.step import Batch, narrowed
from pipectl.runtime.waiting import gather_all, wait
from pipectl.torch_api import pytree

_TARGETS: pytree.SequenceKey[Any] = pytree.SequenceKey(1)
_TAGS = 2**15
"""Tags that every MPI has."""
Compare = Callable[[int], None]
"""Compares the readings of a micro-batch, before its loss is computed."""
Parts = Mapping[int, Mapping[int, Span]]
"""By rank and micro-batch: samples of it."""


class Peer(NamedTuple):
    """Another rank that reads some samples of a micro-batch, or computes their loss."""

    rank: int
    span: Span


@dataclass(frozen=True, eq=False)
class Demand:
    """What all ranks need of the data in one run of a step.

    Args:
        rank: this rank.
        sizes: every micro-batch as a whole.
        needs: what each rank reads.
        losses: whose loss each rank computes.
        late: ranks that only begin the backward of losses, and read what weighs them later than
            these are computed; each compares its own reading.
    """

    rank: int
    sizes: Sequence[Span]
    needs: Parts
    losses: Parts
    late: frozenset[int] = frozenset()

    @cached_property
    def own(self) -> Mapping[int, Span]:
        """What this rank needs."""
        return self.needs.get(self.rank, {})

    @cached_property
    def senders(self) -> Mapping[int, Sequence[Peer]]:
        """By micro-batch whose loss this rank computes, the others that read parts of it.

        Left out if only one rank reads it.
        """
        found = {}
        for number, span in self.losses.get(self.rank, {}).items():
            readers = self._readers(number, span, self.rank)
            if len(readers) > 1:
                found[number] = [peer for peer in readers if peer.rank != self.rank]
        return found

    @cached_property
    def receivers(self) -> Mapping[int, Sequence[Peer]]:
        """By micro-batch that this rank reads, the others that compute the loss of parts of it."""
        found: dict[int, list[Peer]] = {}
        for rank, losses in self.losses.items():
            for number in () if rank == self.rank else self.own.keys() & losses.keys():
                readers = self._readers(number, losses[number], rank)
                mine = next((peer.span for peer in readers if peer.rank == self.rank), None)
                if mine is not None and len(readers) > 1:
                    found.setdefault(number, []).append(Peer(rank, mine))
        return found

    def _readers(self, number: int, span: Span, judge: int) -> list[Peer]:
        """Who reads some of the samples of a micro-batch that a rank compares, and which."""
        readers = [
            (rank, each[number])
            for rank, each in self.needs.items()
            if number in each and (rank == judge or rank not in self.late)
        ]
        parts = (Peer(rank, _common(span, part)) for rank, part in readers)
        return [peer for peer in parts if peer.span.size > 0]


class ReadingComparison:
    """Compares what several ranks have read, in one run of a step.

    Args:
        name: of a sample, by micro-batch and row.
        pending: sends under way are added to it.
    """

    def __init__(
        self,
        communicator: MPI.Comm,
        demand: Demand,
        name: Callable[[int, int], str],
        pending: list[tuple[MPI.Request, Digests]],
    ) -> None:
        self._communicator, self._demand, self._name = communicator, demand, name
        self._pending = pending
        self._open = set(demand.senders)
        self._own: dict[int, Digests] = {}

    def read(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """What this rank loads; it sends the checksums of each as soon as it is read."""
        demand = self._demand
        for (number, load), batch in zip(demand.own.items(), batches, strict=False):
            receivers = demand.receivers.get(number, ())
            if receivers or number in self._open:
                digests = digests_of(batch, load.size)
                if number in self._open:
                    self._own[number] = digests
                for rank, span in receivers:
                    part = digests[span.start - load.start : span.stop - load.start].copy()
                    request = self._communicator.Isend(part, rank, number % _TAGS)
                    self._pending.append((request, part))
            yield batch

    def compare(self, number: int) -> None:
        """Compare all readings of a micro-batch; nothing if one rank reads it, or the second time.

        Raises:
            WorkerError: a sample differs.
        """
        if number not in self._open:
            return
        self._open.remove(number)
        readings = list[tuple[Peer, Digests]]()
        requests = []
        for peer in self._demand.senders[number]:
            digests = np.empty(peer.span.size, dtype=np.uint32)
            requests.append(self._communicator.Irecv(digests, peer.rank, number % _TAGS))
            readings.append((peer, digests))
        wait(requests)
        if (own := self._own.pop(number, None)) is not None:
            me = Peer(self._demand.rank, self._demand.own[number])
            readings.append((me, own))
        for (one, first), (other, second) in combinations(readings, 2):
            span = _common(one.span, other.span)
            parts = (
                digests[span.start - peer.span.start : span.stop - peer.span.start]
                for peer, digests in ((one, first), (other, second))
            )
            differing = np.flatnonzero(np.not_equal(*parts))
            if len(differing):
                ranks = sorted((one.rank, other.rank))
                raise WorkerError(
                    f"{self._name(number, span.start + int(differing[0]))} is not the same on "
                    f"ranks {ranks[0]} and {ranks[1]}, which both read it; no weight was changed "
                    "by it",
                    hint="let samples depend only on their index and on the generators of random, "
                    "numpy and torch, which are seeded before each (no generator of their own, no "
                    "order of a set, no time or process number); or data.read: once, which lets "
                    "one rank read for all",
                )


class Feed:
    """The training or held-out data of one rank.

    Args:
        communicator: used for nothing else.
        loader: of the data.
        micro_batch_size: of the data.
        source: names the data, for errors.
        reader: the rank that reads for all; None if each rank reads what it needs.
        wanted: the places of the tensors that this rank computes with.
    """

    def __init__(
        self,
        communicator: MPI.Comm,
        loader: Loader,
        micro_batch_size: int,
        source: str,
        reader: int | None,
        wanted: frozenset[str],
    ) -> None:
        self._communicator, self._loader, self._source = communicator, loader, source
        self._micro_batch_size, self._reader = micro_batch_size, reader
        self._is_reader = reader in (None, communicator.rank)
        self._loaded: Iterator[Batch] = iter(())
        self._wanted = gather_all(communicator, wanted)
        self._post = Post(communicator)
        self._pending: list[tuple[MPI.Request, Digests]] = []

    def open(
        self, batches: Iterable[Samples], skipped: int = 0, pieces_of: Pieces | None = None
    ) -> None:
        """Open the data; see :meth:`pipectl.capture.data.Loader.pieces`.

        Args:
            pieces_of: what this rank needs of a batch; None for whole micro-batches.
        """
        if not self._is_reader:
            return
        if pieces_of is None or self._reader is not None:
            size = self._micro_batch_size
            self._loaded = self._loader.micro_batches(batches, size, skipped)
        else:
            self._loaded = self._loader.pieces(batches, pieces_of, skipped)

    def take(
        self, demand: Demand, batches: Sequence[Samples], together: int = 1, ahead: int = 0
    ) -> tuple[Iterator[Batch], Compare]:
        """What this rank loads of the next batches.

        Args:
            together: micro-batches that a reader for all sends before it goes on.
            ahead: micro-batches that it sends besides.

        Returns:
            What it loads, and what compares the readings of a micro-batch.
        """
        if self._reader is None:
            self._pending = [each for each in self._pending if not each[0].Test()]

            def name(number: int, row: int) -> str:
                return self._name(batches, sum(span.whole for span in demand.sizes[:number]) + row)

            comparison = ReadingComparison(self._communicator, demand, name, self._pending)
            return comparison.read(islice(self._loaded, len(demand.own))), comparison.compare
        if not self._is_reader:
            return (self._post.receive(self._reader) for _ in demand.own), lambda _: None
        loaded = self._distribute(demand, together, ahead)
        if together > 1 or ahead:  # at once: others may need them before this rank does
            loaded = chain(list(islice(loaded, 1)), loaded)
        return loaded, lambda _: None

    def finish(self) -> None:
        """Return when all that was sent has been received."""
        self._post.finish()
        wait([request for request, _ in self._pending])
        self._pending.clear()

    def _distribute(self, demand: Demand, together: int, ahead: int) -> Iterator[Batch]:
        """What this rank loads; the others get theirs."""
        own, sizes, sent = deque[Batch](), demand.sizes, 0
        for number in range(len(sizes)):
            until = (number // together + 1) * together + ahead
            while sent < min(until, len(sizes)):
                batch = next(self._loaded)
                for rank, loads in demand.needs.items():
                    if sent not in loads:
                        continue
                    part = narrowed(batch, loads[sent], sizes[sent])
                    if rank == demand.rank:
                        own.append(part)
                    else:
                        part = _without_values(part, self._wanted[rank])
                        self._post.send(Parcel(part, self._source), rank)
                sent += 1
            if number in demand.own:
                yield own.popleft()

    def _name(self, batches: Sequence[Samples], position: int) -> str:
        for batch in batches:
            if position < batch.size:
                break
            position -= batch.size
        place = batch.positions.start + position
        if self._loader.samples is None:
            return f"{self._source}: sample {place} of a batch"
        index = self._loader.order(batch.epoch)[place]
        return f"{self._source}: sample {index} (epoch {batch.epoch + 1})"


def wants(
    graph: CapturedGraph, stages: Iterable[Stage], *, training: bool, targets: bool
) -> frozenset[str]:
    """The places of tensors of a batch that some stages compute with.

    Args:
        targets: whether all targets are used besides.
    """
    names = {name for stage in stages for name in stage.reads(training=training)}
    return frozenset(
        pytree.keystr(place)
        for name, place in graph.places.items()
        if name in names or (targets and place[0] == _TARGETS)
    )


def _without_values(batch: Batch, wanted: Container[str]) -> Any:
    """The batch with zeros, which need no room, for tensors that nobody computes with."""

    def change(place: pytree.KeyPath, leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or pytree.keystr(place) in wanted:
            return leaf
        return leaf.new_zeros(()).expand(leaf.shape)

    return pytree.tree_map_with_path(change, batch)


def reads_once(job: CapturedJob, profile: Profile) -> bool:
    """Whether one rank reads the data for all."""
    read = job.spec.data.read
    differ = profile.readings not in (None, Readings.SAME)
    return read == "once" or (read == "auto" and (job.loader.samples is None or differ))


def _common(one: Span, other: Span) -> Span:
    start = max(one.start, other.start)
    return one._replace(start=start, stop=max(start, min(one.stop, other.stop)))
