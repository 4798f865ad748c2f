"""Batches: the samples of each step, loaded the same way on every rank.

The order of the samples depends on the run seed only, and Python, numpy and torch are seeded before
each sample, so a rank that loads the inputs and a rank that loads the targets see the same
augmentation. What a ``collate_fn`` draws depends on the last sample of its micro-batch, or, with
iterable data, on the position of the micro-batch in the run.
"""

from __future__ import annotations

import os
import random
import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager
from copy import copy
from functools import cached_property
from itertools import chain, count, islice
from multiprocessing.util import get_temp_dir
from tempfile import gettempdir
from typing import Any, ClassVar, NamedTuple
from weakref import WeakValueDictionary

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate, get_worker_info

from pipectl.capture.batch import split_sample
from pipectl.capture.buckets import Buckets, length_of_sample
from pipectl.capture.factories import call
from pipectl.capture.randomness import seed_of
from pipectl.errors import CaptureError, InvalidInputError, WorkerError
from pipectl.faults import user_line_in
from pipectl.objects import Kept, restoring
from pipectl.torch_api import read_sample

Sample = tuple[int, int]
"""(epoch, index) of a sample."""


_IN_PROCESS = re.compile(r"Caught \S+ in DataLoader worker process \d+\.\n")
_AFTER_FRAMES = re.compile(r"\n[ \t].*\n(?=\S)")
_PROCESS_ENDED = "DataLoader worker (pid"
"""How torch's errors of loading processes begin, and the end of the tracebacks in them."""
_MAX_DIRECTORY = 107 - len("/listener-12345678")
"""Bytes of the path of a directory with sockets of processes, see unix(7)."""
_ITERATORS = ("builtins", "itertools")
"""Modules of what goes through something once: generators, map, zip and the like."""


def micro_batches_of(samples: int, micro_batch_size: int) -> list[range]:
    """Return the positions of each micro-batch in a batch: all full except the last."""
    positions = range(samples)
    return [positions[i : i + micro_batch_size] for i in range(0, samples, micro_batch_size)]


def split_batch(samples: int, micro_batch_size: int) -> list[int]:
    """Return the sizes of the micro-batches of a batch."""
    return [len(positions) for positions in micro_batches_of(samples, micro_batch_size)]


class Samples(NamedTuple):
    """The samples of one batch.

    Args:
        epoch: of the samples.
        positions: in the order of the epoch.
        length: padded length of their sequences; 0 without buckets.
        tokens: the sum of the lengths of their sequences; 0 without buckets.
    """

    epoch: int
    positions: range
    length: int = 0
    tokens: int = 0

    @property
    def size(self) -> int:
        """Number of samples."""
        return len(self.positions)


InTurn = tuple[int, int, bool, bool]
"""Processes that each read an iterable dataset and make batches, which are taken from one process
after the other; the samples of a batch; whether incomplete batches are left out; and whether these
processes read all epochs, instead of new ones in each."""
Pieces = Callable[[Samples], Sequence[range]]
"""From a batch to the positions in it that are loaded, piece by piece."""


class Loader:
    """Draws the batches of one dataset, and loads the micro-batches that a rank needs.

    Args:
        dataset: map-style (``__len__``, and ``__getitem__`` or ``__getitems__``) or iterable; may
            have its own ``collate_fn``, the ``lengths`` of its samples, and a ``set_epoch`` that is
            called with the number of an epoch, from 0, before its samples are read.
        seed: of the run.
        batch_size: samples per batch; None for all of the dataset, or of a bucket.
        drop_last: whether an incomplete last batch of an epoch is left out.
        workers: number of loader processes; 0 loads in this process. One of them reads all epochs
            of an iterable dataset: several would each read all of it, or samples in another order,
            and new ones in each epoch would not know of the epochs before.
        shuffle: whether each epoch has an order of its own.
        buckets: padded lengths of sequences, ascending; empty without padding.
        pad: the padding values of fields, by name.
        section: of the spec that names the dataset.
        order: returns the indices of the samples of an epoch, which may repeat some and leave some
            out; by default each sample comes once.
        in_turn: how a ``DataLoader`` of torch reads an iterable dataset, if it is to be read so.
    """

    def __init__(
        self,
        dataset: Any,
        *,
        seed: int,
        batch_size: int | None = None,
        drop_last: bool = False,
        workers: int = 0,
        shuffle: bool = True,
        buckets: Sequence[int] = (),
        pad: Mapping[str, float] | None = None,
        section: str = "data",
        order: Callable[[int], Sequence[int]] | None = None,
        in_turn: InTurn | None = None,
    ) -> None:
        self._dataset = dataset
        self._seed = seed
        self._batch_size, self._drop_last = batch_size, drop_last
        self._workers = workers
        self._shuffle = shuffle
        self._order, self._in_turn = order, in_turn
        self._lengths, self._pad, self._section = buckets, dict(pad or {}), section
        self._iterable = isinstance(dataset, IterableDataset) or not _has_items(dataset)
        self._unread = Kept(dataset) if self._iterable else Kept()
        self._told = _Told.of(dataset)
        self.collate: Callable[[list[Any]], Any] = (
            getattr(dataset, "collate_fn", None) or default_collate
        )
        # The dataset's own may look at all samples of a micro-batch, and draw numbers for it.
        self.takes_whole = self.collate is not default_collate

    @cached_property
    def samples(self) -> int | None:
        """Size of the dataset, which may grow as it keeps what it reads; None if it is iterable.

        Raises:
            CaptureError: a map-style dataset has no length, or is empty.
        """
        if self._iterable:
            return None
        if not isinstance(self._dataset, Sized):
            raise CaptureError(
                f"{self._section}: has __getitem__ but no __len__",
                hint="add __len__ to the dataset",
            )
        if not len(self._dataset):
            raise self._empty()
        return len(self._dataset) if self._order is None else len(self._order(0))

    @cached_property
    def buckets(self) -> Buckets | None:
        """The samples by length; None without buckets.

        Raises:
            CaptureError: a sample is longer than all buckets, the lengths are not known, or they
                differ between epochs.
        """
        if not self._lengths:
            return None
        dataset: Any = self._dataset
        if self.samples is None:
            raise CaptureError(
                f"{self._section}: is iterable, so that data.buckets cannot sort its samples by "
                "length",
                hint="use a dataset with __len__ and __getitem__, or leave data.buckets out",
            )
        samples = len(dataset)  # an order, such as a script's sampler, may leave some out
        lengths = getattr(dataset, "lengths", None)
        if lengths is None or callable(lengths):
            seeded, names = _Seeded(dataset, self._seed, self._told), (self._pad, self._section)
            lengths = [
                length_of_sample(self._sample(seeded, index), *names) for index in range(samples)
            ]
        elif len(lengths) != samples:
            raise CaptureError(
                f"{self._section}: has {samples} samples, but its attribute lengths has "
                f"{len(lengths)} entries",
                hint="let it have the length of every sample",
            )
        epochs = () if self._order is None else (self._order(0), self._order(1))
        return Buckets(self._lengths, self._pad, lengths, self._section, epochs)

    @property
    def lengths(self) -> tuple[int, ...]:
        """The padded lengths of its sequences, ascending; (0,) without buckets."""
        return (0,) if self.buckets is None else self.buckets.used_lengths

    @property
    def counts(self) -> tuple[int, ...]:
        """The samples of an epoch, those of each length alone; none if the data are iterable."""
        if self.samples is None:
            return ()
        return (self.samples,) if self.buckets is None else self.buckets.counts

    def batches(self) -> Iterator[Samples]:
        """Yield the batches of a run without end, epoch after epoch."""
        return (batch for epoch in count() for batch in self.epoch(epoch))

    def epoch(self, epoch: int) -> list[Samples]:
        """Return the batches of one epoch; every epoch has the same number of each size and length.

        Batches of iterable data are always full.
        """
        samples, buckets = self.samples, self.buckets
        if samples is None:
            return [Samples(epoch, range(self._batch_size or 1))]
        size = self._batch_size or samples
        if buckets is None:
            stop = samples - samples % size if self._drop_last else samples
            starts = range(0, stop, size)
            return [Samples(epoch, range(first, min(first + size, stop))) for first in starts]
        batches, start = list[Samples](), 0
        for indices in buckets.arrange(self._drawn(epoch), size):
            positions = range(start, start + len(indices))
            start = positions.stop
            if len(indices) == size or not self._drop_last:
                length, tokens = buckets.length_of(indices), buckets.tokens_of(indices)
                batches.append(Samples(epoch, positions, length, tokens))
        return batches

    def shapes(self, size: int | None) -> list[tuple[int, int]]:
        """Return samples and length of the different micro-batches of an epoch, the largest first.

        Args:
            size: samples of a full one; None for whole batches.
        """
        batches = self.epoch(0)
        shapes = {(n, b.length) for b in batches for n in split_batch(b.size, size or b.size)}
        return sorted(shapes, reverse=True)

    def order(self, epoch: int) -> Sequence[int]:
        """Return the index of the sample at every position of an epoch."""
        order = self._drawn(epoch)
        if self.buckets is None:
            return order
        arranged = self.buckets.arrange(order, self._batch_size or len(order))
        return [index for batch in arranged for index in batch.tolist()]

    def with_batch_size(self, batch_size: int, *, drop_last: bool) -> Loader:
        """Return a loader of the same samples with another batch size."""
        other = copy(self)
        other._batch_size, other._drop_last = batch_size, drop_last
        return other

    def example(self, size: int, first: int = 0, length: int = 0) -> tuple[Any, Any]:
        """Return ``size`` collated samples as (inputs, targets), repeated if there are too few.

        Args:
            first: number of the first sample in a map-style dataset, or in its bucket.
            length: padded length of sequences; 0 stands for the largest.
        """
        length, samples = length or self.lengths[-1], self.samples
        indices: Sequence[int] = range(samples or 0) if self._order is None else self._order(0)
        if self.buckets is not None:
            indices = self.buckets.fitting(length)

        def load() -> list[Any]:
            if samples is None:
                with self._as_unread():
                    return list(islice(self._passes(), size))
            seeded, count = self._seeded(), len(indices)
            picks = (indices[(first + i) % count] for i in range(min(size, count)))
            return [self._sample(seeded, index) for index in picks]

        loaded = call(load, self._section)
        if not loaded:
            raise self._empty()
        batch = self._collate([loaded[i % len(loaded)] for i in range(size)], length)
        if self.buckets is not None:
            self.buckets.check_fields(batch)
        return split_sample(batch)

    def sample(self, index: int) -> Any:
        """Return a sample of a map-style dataset as a batch of its own, without padding."""
        return self.collate([self._sample(_Seeded(self._dataset, self._seed, self._told), index)])

    def stream(self) -> Iterator[Any]:
        """Yield the samples of the first epoch of an iterable dataset, each as :meth:`sample`."""
        with self._as_unread():
            for sample in self._passes():
                yield self.collate([sample])

    def read(self, batch: Samples) -> tuple[Any, Any]:
        """Return a batch as (inputs, targets), loaded in this process."""
        here = copy(self)
        here._workers = 0
        with self._as_unread():
            return next(here.micro_batches([batch], batch.size))

    def micro_batches(
        self, batches: Iterable[Samples], micro_batch_size: int, skipped: int = 0
    ) -> Iterator[tuple[Any, Any]]:
        """Yield (inputs, targets) of every micro-batch of ``batches``; see :meth:`pieces`."""
        return self.pieces(
            batches, lambda batch: micro_batches_of(batch.size, micro_batch_size), skipped
        )

    def pieces(
        self, batches: Iterable[Samples], pieces_of: Pieces, skipped: int = 0
    ) -> Iterator[tuple[Any, Any]]:
        """Yield (inputs, targets) of parts of ``batches``, in order; other samples are not loaded.

        Other samples of an iterable dataset are read and dropped: those of the batches before in
        this call, which takes as long as it took to read them.

        Args:
            pieces_of: positions within a batch that are loaded together, ascending.
            skipped: number of batches at the beginning that were used before.
        """
        if self._iterable:
            samples, numbered = self._endless(), enumerate(batches)
            _skip(samples, sum(batch.size for _, batch in islice(numbered, skipped)))
            collated: Iterable[Any] = self._stream(samples, numbered, pieces_of)
        else:
            collated = DataLoader(
                self._seeded(),
                batch_sampler=self._samples(islice(batches, skipped, None), pieces_of),
                collate_fn=self._collate,
                num_workers=self._workers,
            )
        return (split_sample(batch) for batch in _loaded(collated))

    @contextmanager
    def _as_unread(self) -> Iterator[None]:
        """Let an iterable dataset be as it was before the block, which reads some of it: it may
        count how often it is read.
        """
        before = Kept(self._dataset) if self._iterable else Kept()
        with restoring(before.restore):
            yield

    def _empty(self) -> CaptureError:
        hint = f"check the arguments of {self._section}:"
        return CaptureError(f"{self._section}: the dataset is empty", hint=hint)

    def _drawn(self, epoch: int) -> Sequence[int]:
        """Return all samples, in the order in which an epoch draws them."""
        if self._order is not None:
            return self._order(epoch)
        samples = self.samples or 0
        if not self._shuffle:
            return list(range(samples))
        generator = torch.Generator().manual_seed(seed_of(self._seed, "epoch", epoch) >> 1)
        return torch.randperm(samples, generator=generator).tolist()

    def _seeded(self) -> _Seeded:
        return _Seeded(self._dataset, self._seed, self._told, numbered=self.buckets is not None)

    def _sample(self, seeded: _Seeded, index: int) -> Any:
        """Return a sample of the first epoch; an error names its index."""
        return call(seeded.__getitem__, f"{self._section}: sample {index}", (0, index))

    def _samples(self, batches: Iterable[Samples], pieces_of: Pieces) -> Iterator[list[Sample]]:
        """Yield the samples of every piece."""
        current_epoch = -1
        order: Sequence[int] = ()
        for batch in batches:
            epoch, start = batch.epoch, batch.positions.start
            if epoch != current_epoch:
                current_epoch, order = epoch, self.order(epoch)
            for piece in pieces_of(batch):
                yield [(epoch, order[start + position]) for position in piece]

    def _stream(
        self, samples: Iterator[Any], batches: Iterable[tuple[int, Samples]], pieces_of: Pieces
    ) -> Iterator[Any]:
        for number, batch in batches:
            position = 0
            for piece in pieces_of(batch):
                _skip(samples, piece.start - position)
                piece_samples = list(islice(samples, len(piece)))
                # Where samples come from processes, the generators are as computations left them.
                _seed(seed_of(self._seed, "piece", number, piece.start))
                yield self._collate(piece_samples)
                position = piece.stop
            _skip(samples, batch.size - position)

    def _endless(self) -> Iterator[Any]:
        processes, size, drop_last, stays = self._in_turn or (0, 1, False, True)
        is_told_here = processes > 0  # as the script does
        if not processes:  # the same samples, wherever they are read
            processes, stays = min(self._workers, 1), True
        self._unread.restore()
        samples = self._passes(tells=not is_told_here)
        batches: DataLoader[Any] = DataLoader(
            samples,
            size,
            collate_fn=_as_it_is,
            num_workers=processes,
            drop_last=drop_last,
            persistent_workers=stays and processes > 0,
        )
        for epoch in count():
            samples.epoch, empty = epoch, True
            if is_told_here:
                self._told.again(epoch)
            for sample in chain.from_iterable(_loaded(batches)):
                empty = False
                yield sample
            if empty:
                raise CaptureError(
                    f"data: epoch {epoch + 1} of the dataset has no samples",
                    hint="__iter__ must start from the beginning each time; a generator can be "
                    "read only once",
                )

    def _passes(self, *, tells: bool = True) -> _SeededStream:
        return _SeededStream(self._dataset, self._seed, self._told if tells else _Told(None))

    def _collate(self, samples: list[Any], length: int = 0) -> Any:
        try:
            if self.buckets is None:
                return self.collate(samples)
            return self.buckets.join(samples, self.collate, length)
        except CaptureError:
            raise
        except Exception as error:
            raise CaptureError(
                f"data: samples cannot be collated into a batch: {type(error).__name__}: {error}",
                hint="return a tensor in place of None, such as torch.zeros(()) as a target"
                if "NoneType" in str(error)
                else "make samples of equal shape, name lengths to pad them to under data.buckets, "
                "or give the dataset a collate_fn",
            ) from error


def _as_it_is(samples: list[Any]) -> list[Any]:
    """Leave samples for ``collate_fn``; ``DataLoader`` would convert it to tensors."""
    return samples


def _skip(samples: Iterator[Any], count: int) -> None:
    deque(islice(samples, count), maxlen=0)


def seed_sample(seed: int, epoch: int, index: int) -> None:
    """Seed Python, numpy and torch for one sample."""
    _seed(seed_of(seed, "sample", epoch, index))


def _loaded(batches: Iterable[Any]) -> Iterator[Any]:
    """What a loader gives. torch raises errors of its processes with a traceback as the message.

    Raises:
        WorkerError: the user's code raised in a loading process, or the process ended.
        CaptureError: samples cannot be collated there.
        InvalidInputError: loading processes cannot send anything.
    """
    if getattr(batches, "num_workers", 0):
        _refuse_long_directory()
    try:
        yield from batches
    except Exception as error:
        text = str(error).rstrip()
        if text.startswith(_PROCESS_ENDED):
            hint = "it was killed, perhaps for lack of memory; fewer data.workers need less"
            raise WorkerError(f"data: {text.partition('. ')[0]}", hint=hint) from error
        if not _IN_PROCESS.match(text):
            raise
        what = _AFTER_FRAMES.split(text)[-1]  # the class, the message, and perhaps a hint
        if isinstance(error, CaptureError):
            message, _, hint = what.partition(": ")[2].partition("\n")
            raise CaptureError(message, hint=hint.strip() or None) from error
        raise WorkerError(
            f"data: a loading process raised {what}{user_line_in(text)}",
            hint="data.workers: 0 loads in the rank itself, to see more",
        ) from error


def _refuse_long_directory() -> None:
    """Refuse a directory in which processes cannot have sockets: they would wait for ever."""
    if len(os.fsencode(get_temp_dir())) > _MAX_DIRECTORY:
        most = _MAX_DIRECTORY - len("/pymp-12345678")
        raise InvalidInputError(
            f"data.workers: processes have sockets in TMPDIR, whose path may have {most} bytes at "
            f"most: {gettempdir()}",
            hint="set a shorter one: environment.variables: {TMPDIR: /tmp}",
        )


def _seed(value: int) -> None:
    random.seed(value)
    np.random.seed(value & 0xFFFFFFFF)
    torch.default_generator.manual_seed(value)


class _Told:
    """Tells a dataset the number of the epoch that is read, if it wants to know.

    All loaders of a dataset share one: each tells it again what another has told otherwise.

    Args:
        dataset: that may have ``set_epoch``.
    """

    _known: ClassVar[WeakValueDictionary[int, _Told]] = WeakValueDictionary()

    @classmethod
    def of(cls, dataset: Any) -> _Told:
        """The one of a dataset."""
        told = cls._known.get(id(dataset))
        if told is None or told._dataset is not dataset:
            told = cls._known[id(dataset)] = cls(dataset)
        return told

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset
        self._set_epoch: Callable[[int], Any] | None = getattr(dataset, "set_epoch", None)
        self._epoch = -1

    def __call__(self, epoch: int) -> None:
        if epoch != self._epoch:
            self.again(epoch)

    def again(self, epoch: int) -> None:
        """Tell it, even if it has been told this one last."""
        self._epoch = epoch
        if self._set_epoch is not None:
            self._set_epoch(epoch)


class _Seeded(Dataset[Any]):
    """A map-style dataset whose samples depend on (seed, epoch, index) only.

    Args:
        numbered: whether each sample comes with its index.
    """

    def __init__(self, dataset: Any, seed: int, told: _Told, *, numbered: bool = False) -> None:
        self._dataset = dataset
        self._seed = seed
        self._told = told
        self._numbered = numbered

    def __getitem__(self, sample: Sample) -> Any:
        epoch, index = sample
        self._told(epoch)
        seed_sample(self._seed, epoch, index)
        value = read_sample(self._dataset, index)
        return (index, value) if self._numbered else value


def _has_items(dataset: Any) -> bool:
    return hasattr(dataset, "__getitem__") or hasattr(dataset, "__getitems__")


class _SeededStream(IterableDataset[Any]):
    """An iterable dataset, with the generators seeded before each sample.

    Otherwise its random numbers would depend on what the rank has computed in between.

    Attributes:
        epoch: that is read next. A process that reads several counts them itself.
    """

    def __init__(self, dataset: Iterable[Any], seed: int, told: _Told) -> None:
        self._dataset = dataset
        self._seed = seed
        self._told = told
        self.epoch = 0

    def __iter__(self) -> Iterator[Any]:
        worker = get_worker_info()
        first, stride = (worker.id, worker.num_workers) if worker else (0, 1)
        epoch, self.epoch = self.epoch, self.epoch + 1
        self._told.again(epoch)
        seed_sample(self._seed, epoch, first)
        samples = iter(self._dataset)
        for index in count(first, stride):
            seed_sample(self._seed, epoch, index)
            try:
                sample = next(samples)
            except StopIteration:
                return
            yield sample


def check_dataset(dataset: Any, key: str, factory: str) -> None:
    """Raise for objects that are often mistaken for a dataset.

    Args:
        key: of the section of the spec that names the factory.

    Raises:
        CaptureError: saying what was returned and what was expected.
    """
    tensors = dataset if isinstance(dataset, tuple | list) else [dataset]
    if isinstance(dataset, DataLoader):
        hint = (
            "return the dataset itself: batches are made by training.batch_size and "
            "pipeline.micro_batches, shuffled by data.shuffle, loaded by data.workers processes; "
            "a collate_fn is an attribute of the dataset"
        )
    elif tensors and all(isinstance(item, Tensor) for item in tensors):
        hint = "return torch.utils.data.TensorDataset(inputs, targets)"
    elif tensors and all(isinstance(item, np.ndarray) for item in tensors):
        arrays = "torch.from_numpy(inputs), torch.from_numpy(targets)"
        hint = f"return torch.utils.data.TensorDataset({arrays})"
    elif isinstance(dataset, Mapping) and 0 not in dataset:
        hint = f"return one dataset, such as that of {next(iter(dataset), 'train')!r}; for several "
        hint += "tensors, torch.utils.data.TensorDataset(inputs, targets)"
    elif isinstance(dataset, Iterator) and type(dataset).__module__ in _ITERATORS:
        hint = "it can be read only once, and every rank, epoch and profile reads from the "
        hint += "beginning: return a list, or an object whose __iter__ starts anew each time"
    elif not _has_items(dataset) and not hasattr(dataset, "__iter__"):
        hint = "return an object with __len__ and __getitem__, or with __iter__"
    else:
        return
    kind = type(dataset).__name__
    what = kind
    if isinstance(dataset, tuple | list):
        what += " of tensors" if isinstance(tensors[0], Tensor) else " of arrays"
    raise CaptureError(f"{key}.factory: {factory} returned a {what}, not a dataset", hint=hint)
