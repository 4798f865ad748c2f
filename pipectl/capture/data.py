"""Batches: which samples each step takes, and loading them the same way on every rank.

Samples are drawn in an order that follows from the run seed alone, and python, numpy and torch
are seeded before each sample, so a rank that loads the inputs and a rank that loads the targets
see the same augmentation. What a ``collate_fn`` draws follows from the last sample of its
micro-batch, or, of iterable data, from the place of the micro-batch in the run.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from dataclasses import dataclass
from itertools import count, islice
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate, get_worker_info

from pipectl.capture.batch import split_sample
from pipectl.capture.factories import call
from pipectl.capture.randomness import seed_of
from pipectl.errors import CaptureError

Sample = tuple[int, int]
"""(epoch, index) of a sample."""
Pieces = Callable[[int], Sequence[range]]
"""From the samples of a batch to the positions in it that are loaded, piece by piece."""


def split_batch(samples: int, micro_batch_size: int) -> list[int]:
    """Sizes of the micro-batches of a batch: all full but the last, which takes the rest."""
    return [len(positions) for positions in micro_batches_of(samples, micro_batch_size)]


def micro_batches_of(samples: int, micro_batch_size: int) -> list[range]:
    """Positions within a batch of its micro-batches."""
    return [
        range(start, min(start + micro_batch_size, samples))
        for start in range(0, samples, micro_batch_size)
    ]


@dataclass(frozen=True)
class Batches:
    """Sizes of the batches of a run, without end: epoch follows epoch.

    Args:
        samples: of the dataset; None for an iterable one, whose batches are always full.
        drop_last: whether the rest of an epoch that fills no batch is left out.
    """

    samples: int | None
    batch_size: int
    drop_last: bool = False

    def __iter__(self) -> Iterator[tuple[int, range]]:
        """(epoch, positions within the epoch) of every batch."""
        epoch = 0
        while True:
            for positions in self.of_epoch():
                yield epoch, positions
            epoch += 1

    def of_epoch(self) -> Iterator[range]:
        """Positions of the batches of one epoch."""
        if self.samples is None:
            yield range(self.batch_size)
            return
        stop = self.samples - self.samples % self.batch_size if self.drop_last else self.samples
        for start in range(0, stop, self.batch_size):
            yield range(start, min(start + self.batch_size, stop))


class Loader:
    """Micro-batches of one dataset on a rank that needs them.

    Args:
        dataset: map-style (``__len__`` and ``__getitem__``) or iterable; may bring its own
            ``collate_fn``.
        seed: of the run.
        workers: loader processes; 0 loads in this one.
        shuffle: whether each epoch takes the samples in an order of its own.
    """

    def __init__(self, dataset: Any, *, seed: int, workers: int = 0, shuffle: bool = True) -> None:
        self._dataset = dataset
        self._seed = seed
        self._workers = workers
        self._shuffle = shuffle
        self._iterable = isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__")
        self.collate: Callable[[list[Any]], Any] = getattr(dataset, "collate_fn", default_collate)
        # The dataset's own may look at all samples of a micro-batch, and draw numbers for it.
        self.takes_whole = self.collate is not default_collate

    @property
    def samples(self) -> int | None:
        """Size of the dataset; None if it is iterable.

        Raises:
            CaptureError: a map-style dataset that has no length, or is empty.
        """
        if self._iterable:
            return None
        if not isinstance(self._dataset, Sized):
            raise CaptureError(
                "data: has __getitem__ but no __len__", cure="add __len__ to the dataset"
            )
        if not len(self._dataset):
            raise CaptureError("data: the dataset is empty", cure="check the arguments of data:")
        return len(self._dataset)

    def example(self, size: int, first: int = 0) -> tuple[Any, Any]:
        """``size`` samples, collated, as (inputs, targets); repeated if too few.

        Args:
            first: index of the first one in a dataset that is not iterable.
        """
        count = self.samples

        def load() -> list[Any]:
            if count is None:
                return list(islice(_SeededStream(self._dataset, self._seed, 0), size))
            seeded = _Seeded(self._dataset, self._seed)
            return [seeded[0, (first + index) % count] for index in range(min(size, count))]

        samples = call(load, "data")
        if not samples:
            raise CaptureError("data: the dataset is empty", cure="check the arguments of data:")
        return split_sample(self._collate([samples[i % len(samples)] for i in range(size)]))

    def micro_batches(
        self, batches: Iterable[tuple[int, range]], micro_batch_size: int, skipped: int = 0
    ) -> Iterator[tuple[Any, Any]]:
        """(inputs, targets) of every micro-batch of ``batches``, in order; see :meth:`pieces`."""
        return self.pieces(
            batches, lambda samples: micro_batches_of(samples, micro_batch_size), skipped
        )

    def pieces(
        self, batches: Iterable[tuple[int, range]], pieces_of: Pieces, skipped: int = 0
    ) -> Iterator[tuple[Any, Any]]:
        """(inputs, targets) of parts of ``batches``, in order; other samples are not loaded.

        Of an iterable dataset, they are read and dropped.

        Args:
            pieces_of: positions within a batch of so many samples that are loaded at once, rising.
            skipped: how many batches at the beginning were used before.
        """
        if self._iterable:
            collated: Iterable[Any] = self._stream(batches, pieces_of, skipped)
        else:
            collated = DataLoader(
                _Seeded(self._dataset, self._seed),
                batch_sampler=self._samples(islice(batches, skipped, None), pieces_of),
                collate_fn=self._collate,
                num_workers=self._workers,
            )
        return (split_sample(batch) for batch in collated)

    def order(self, epoch: int) -> list[int]:
        """Index of the sample at every position of an epoch."""
        samples = self.samples or 0
        if not self._shuffle:
            return list(range(samples))
        generator = torch.Generator().manual_seed(seed_of(self._seed, "epoch", epoch) >> 1)
        return torch.randperm(samples, generator=generator).tolist()

    def _samples(
        self, batches: Iterable[tuple[int, range]], pieces_of: Pieces
    ) -> Iterator[list[Sample]]:
        """The samples of every piece."""
        current_epoch, order = -1, list[int]()
        for epoch, positions in batches:
            if epoch != current_epoch:
                current_epoch, order = epoch, self.order(epoch)
            for piece in pieces_of(len(positions)):
                yield [(epoch, order[positions.start + position]) for position in piece]

    def _stream(
        self, batches: Iterable[tuple[int, range]], pieces_of: Pieces, skipped: int
    ) -> Iterator[Any]:
        samples = self._endless()
        for number, (_, positions) in enumerate(batches):
            position = 0
            for piece in pieces_of(len(positions)) if number >= skipped else ():
                _skip(samples, piece.start - position)
                piece_samples = list(islice(samples, len(piece)))
                # Where samples come from processes, the generators are as computations left them.
                _seed(seed_of(self._seed, "piece", number, piece.start))
                yield self._collate(piece_samples)
                position = piece.stop
            _skip(samples, len(positions) - position)

    def _endless(self) -> Iterator[Any]:
        for epoch in count():
            samples = _SeededStream(self._dataset, self._seed, epoch)
            empty = True
            loaded = DataLoader(
                samples, batch_size=None, collate_fn=_as_it_is, num_workers=self._workers
            )
            for sample in loaded:
                empty = False
                yield sample
            if empty:
                raise CaptureError(
                    f"data: epoch {epoch + 1} of the dataset has no samples",
                    cure="__iter__ must start from the beginning each time; a generator can be "
                    "read only once",
                )

    def _collate(self, samples: list[Any]) -> Any:
        try:
            return self.collate(samples)
        except Exception as error:
            raise CaptureError(
                f"data: samples cannot be collated into a batch: {type(error).__name__}: {error}",
                cure="make samples of equal shape, or give the dataset a collate_fn",
            ) from error


def _as_it_is(sample: Any) -> Any:
    """What `DataLoader` otherwise makes tensors of, the dataset's own `collate_fn` joins."""
    return sample


def _skip(samples: Iterator[Any], count: int) -> None:
    deque(islice(samples, count), maxlen=0)


def seed_sample(seed: int, epoch: int, index: int) -> None:
    """Seed python, numpy and torch for one sample."""
    _seed(seed_of(seed, "sample", epoch, index))


def _seed(value: int) -> None:
    random.seed(value)
    np.random.seed(value & 0xFFFFFFFF)
    torch.default_generator.manual_seed(value)


class _Seeded(Dataset[Any]):
    """A map-style dataset whose samples depend on (seed, epoch, index) alone."""

    def __init__(self, dataset: Any, seed: int) -> None:
        self._dataset = dataset
        self._seed = seed

    def __getitem__(self, sample: Sample) -> Any:
        epoch, index = sample
        seed_sample(self._seed, epoch, index)
        return self._dataset[index]


class _SeededStream(IterableDataset[Any]):
    """One epoch of an iterable dataset, with the generators seeded before each sample.

    Otherwise its random numbers would follow from what the rank has computed in between.
    """

    def __init__(self, dataset: Iterable[Any], seed: int, epoch: int) -> None:
        self._dataset = dataset
        self._seed = seed
        self._epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        worker = get_worker_info()
        first, stride = (worker.id, worker.num_workers) if worker else (0, 1)
        seed_sample(self._seed, self._epoch, first)
        samples = iter(self._dataset)
        for index in count(first, stride):
            seed_sample(self._seed, self._epoch, index)
            try:
                sample = next(samples)
            except StopIteration:
                return
            yield sample


def check_dataset(dataset: Any, key: str, factory: str) -> None:
    """Refuse what is no dataset but is often taken for one.

    Args:
        key: of the section of the spec that names the factory.

    Raises:
        CaptureError: saying what was returned and what was expected.
    """
    tensors = dataset if isinstance(dataset, tuple | list) else [dataset]
    if isinstance(dataset, DataLoader):
        cure = (
            "return the dataset itself: batches are made by training.batch_size and "
            "pipeline.micro_batches, shuffled by data.shuffle, loaded by data.workers processes; "
            "a collate_fn is an attribute of the dataset"
        )
    elif tensors and all(isinstance(item, Tensor) for item in tensors):
        cure = "return torch.utils.data.TensorDataset(inputs, targets)"
    elif not hasattr(dataset, "__getitem__") and not hasattr(dataset, "__iter__"):
        cure = "return an object with __len__ and __getitem__, or with __iter__"
    else:
        return
    kind = type(dataset).__name__
    what = f"{kind} of tensors" if isinstance(dataset, tuple | list) else kind
    raise CaptureError(f"{key}.factory: {factory} returned a {what}, not a dataset", cure=cure)
