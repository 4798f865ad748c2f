"""The samples of a script's ``DataLoader``, in the order in which the script reads them."""

from __future__ import annotations

import os
import random
import signal
from array import array
from collections.abc import Callable, Iterator, Sequence, Sized
from contextlib import contextmanager, nullcontext, suppress
from copy import copy
from dataclasses import dataclass
from functools import cached_property
from inspect import isgeneratorfunction, signature
from itertools import islice
from pathlib import Path as Directory
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

from pipectl.errors import CaptureError
from pipectl.objects import Kept, restoring, seed_everything
from pipectl.script.program import Path, name_of, reach
from pipectl.torch_api import read_sample, told_as_process
from pipectl.units import plural

_KEPT_EPOCHS = 16
"""More than those that the data are read ahead by."""
_MOST_DRAWN = 20_000
"""Random numbers between two epochs that are counted."""
_OF_ITERATOR = 2
"""Random numbers of 32 bits that an iterator of a loader draws for its processes."""
_MANY_BATCHES = 10_000_000
"""Of an epoch that is drawn part by part."""
_MOST_JOINED = 1000
"""Datasets within one."""
_ANY_SEEDS = (1, 2)
_PART = 4096
"""Batches of a part."""


class Told(NamedTuple):
    """A call of ``set_epoch`` by a script, for its first epoch.

    Args:
        owner: a sampler or a dataset.
        args, kwargs: all that it was called with.
        key: which of these is the number of the epoch.
    """

    owner: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    key: int | str

    @classmethod
    def of(
        cls, function: Callable[..., Any], owner: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Told | None:
        """The call of a method; None if it tells no number."""
        names = list[str]()
        with suppress(TypeError, ValueError):  # compiled code may tell no names
            names = [*signature(function).parameters][1 : len(args) + 1]
        key: int | str = 0 if args else next(iter(kwargs), 0)
        if "epoch" in names or "epoch" in kwargs:
            key = names.index("epoch") if "epoch" in names else "epoch"
        told = cls(owner, args, kwargs, key)
        return told if (args or kwargs) and isinstance(told._given()[1][key], int) else None

    def tell(self, epoch: int, owner: Any = None) -> None:
        """Call it for another epoch, from 0.

        Args:
            owner: a copy of the owner, to be told in its place.
        """
        (args, kwargs), given = self._given()
        given[self.key] += epoch
        (self.owner if owner is None else owner).set_epoch(*args, **kwargs)

    def _given(self) -> tuple[tuple[list[Any], dict[str, Any]], Any]:
        """Copies of the arguments, and those of them among which the number is."""
        args, kwargs = [*self.args], {**self.kwargs}
        return (args, kwargs), kwargs if isinstance(self.key, str) else args


class SharedGenerators:
    """The random numbers that all share, of torch, Python and NumPy, as they were at one time."""

    def __init__(self) -> None:
        self._states = torch.get_rng_state(), random.getstate(), np.random.get_state()

    def restore(self) -> None:
        """Set the generators back to that time."""
        torch.set_rng_state(self._states[0])
        random.setstate(self._states[1])
        np.random.set_state(self._states[2])

    def have_drawn(self) -> bool:
        """Whether torch, Python or NumPy has drawn since."""
        if not torch.equal(torch.get_rng_state(), self._states[0]):
            return True
        old: Any = self._states[2]
        new: Any = np.random.get_state()
        is_same = old[2] == new[2] and np.array_equal(old[1], new[1])
        return not is_same or random.getstate() != self._states[1]


class Generators:
    """What a loader draws the order of its samples from, as it was at one time: random numbers, and
    what its samplers keep.

    Args:
        loader: whose samplers may have counts, lists and generators of their own.
        is_iterated: whether an iterator of the loader is there, which has drawn nothing but the
            seed for its processes.
    """

    def __init__(self, loader: DataLoader[Any], *, is_iterated: bool = False) -> None:
        self.is_iterated = is_iterated
        samplers = samplers_of(loader)
        self._own = Kept(loader.generator, *samplers, besides=[loader.dataset])
        self.shared = SharedGenerators()
        self.state = None if loader.generator is None else loader.generator.get_state()
        """Of the loader's own generator."""

    def restore(self) -> None:
        """Set all back to that time."""
        self.shared.restore()
        self._own.restore()


def samplers_of(loader: DataLoader[Any]) -> Iterator[Any]:
    """Yield the samplers of a loader: of batches, of samples, and one within that of batches."""
    found = (loader.batch_sampler, loader.sampler, getattr(loader.batch_sampler, "sampler", None))
    yield from {id(each): each for each in found if each is not None}.values()


def draws_when_read(loader: DataLoader[Any]) -> bool:
    """Whether a loader draws the order of an epoch with its first batch, and not before."""
    is_lazy = isgeneratorfunction(getattr(type(loader.batch_sampler), "__iter__", None))
    return is_lazy and not loader.num_workers


def datasets_of(loader: DataLoader[Any]) -> Iterator[Any]:
    """Yield the dataset of a loader, and those within it: of which it is a part, or which it joins
    or changes.
    """
    waiting, known = [loader.dataset], set[int]()
    while waiting:
        each = waiting.pop()
        if id(each) not in known:
            known.add(id(each))
            yield each
            for held in getattr(each, "__dict__", {}).values():
                inner = held if isinstance(held, list | tuple) else (held,)
                waiting += [x for x in inner[:_MOST_JOINED] if isinstance(x, Dataset)]


class Order:
    """The indices of the samples of every epoch, as a loader draws them one after the other.

    The first epoch is the script's. A later one is, too, unless the script draws other random
    numbers in between. It keeps the first epoch and the last ones; one in between is drawn again,
    after all that come before it.

    Args:
        loader: of the script.
        start: the random numbers when the script began its first epoch.
        told: how the script tells samplers the number of an epoch.
        repeats: whether every epoch is the first one again.
        between: random numbers that the script draws before each further epoch.
    """

    def __init__(
        self,
        loader: DataLoader[Any],
        start: Generators,
        told: Sequence[Told] = (),
        *,
        repeats: bool = False,
        between: int = 0,
    ) -> None:
        self._loader, self._start, self._next = loader, start, start
        self._told, self._repeats, self._between = told, repeats, between
        self._count: int | None = None
        """Samples of an epoch."""
        batches: Any = loader.batch_sampler
        self._is_long = isinstance(batches, Sized) and len(batches) > _MANY_BATCHES
        self._batches: Iterator[Any] = iter(())
        self._epochs: dict[int, array[int]] = {}
        self._drawn = -1
        """Number of the last epoch that was drawn."""

    def __call__(self, epoch: int) -> Sequence[int]:
        """Return the indices of the samples of an epoch.

        Raises:
            CaptureError: its batches are not of the size of the loader's, or it has another number
                of samples than the first one.
        """
        epoch = 0 if self._repeats else epoch
        if epoch not in self._epochs:
            if epoch <= self._drawn:
                self._next, self._drawn = self._start, -1
            while self._drawn < epoch:
                self._drawn += 1
                self._epochs[self._drawn] = self._draw()
                if self._drawn > _KEPT_EPOCHS:
                    self._epochs.pop(self._drawn - _KEPT_EPOCHS, None)
        return self._epochs[epoch]

    def drawn_before(self, start: Generators) -> int | None:
        """Count the random numbers from the end of the first epoch to the start of the second.

        None if there are too many to count, or others than samplers and loaders draw.
        """
        before = Generators(self._loader)
        self(0)
        is_fresh, own = self._drawn == 0, self._generator
        with restoring(before.restore):
            self._next.restore()
            for count in range(_MOST_DRAWN if is_fresh else 0):
                if start.shared.have_drawn() if own is None else self._differs(start.state):
                    draw(1, own)
                    continue
                is_drawn = start.is_iterated and own is self._loader.generator
                return count - (_OF_ITERATOR if is_drawn else 0)
        return None

    @cached_property
    def _generator(self) -> torch.Generator | None:
        """That of the loader, if the order follows it alone; None for the shared one."""
        own = self._loader.generator
        return None if own is None or self.follows_shared_generators() else own

    def _differs(self, state: Tensor | None) -> bool:
        assert self._loader.generator is not None
        return state is None or not torch.equal(self._loader.generator.get_state(), state)

    def follows_shared_generators(self) -> bool:
        """Whether the order of an epoch depends on the random numbers that all share."""
        before, start = SharedGenerators(), copy(self._start)
        for seed in _ANY_SEEDS:
            seed_everything(seed)
            start.shared = SharedGenerators()
            other = Order(self._loader, start, self._told)
            before.restore()
            if other(0) != self(0):
                return True
        return False

    def _draw(self) -> array[int]:
        before = Generators(self._loader)
        with restoring(before.restore):
            self._next.restore()
            if self._drawn == 0 or not self._is_long:
                if self._drawn and self._between:
                    draw(self._between, self._generator)
                for told in self._told:
                    told.tell(self._drawn)
                self._batches = iter(self._loader.batch_sampler or ())
                stays = self._drawn > 0 and keeps_processes(self._loader)
                if not (stays or self._next.is_iterated):  # as an iterator of the loader does
                    draw(_OF_ITERATOR, self._loader.generator)
            limit = _PART if self._is_long else None
            sizes, indices = array("q"), array("q")
            for batch in islice(self._batches, limit):
                before_it = len(indices)
                indices.extend(map(int, batch))
                sizes.append(len(indices) - before_it)
            self._next = Generators(self._loader)
        size = batch_size_of(self._loader)
        size = size or next(iter(sizes), None)
        kind = type(self._loader.batch_sampler).__name__
        if size is not None and (set(sizes[:-1]) - {size} or max(sizes, default=0) > size):
            other = next(each for each in sizes if each != size)
            raise CaptureError(
                f"the batch_sampler of the DataLoader ({kind}) gives a batch of "
                f"{plural(other, 'sample')}, and those of a job have training.batch_size samples, "
                f"{size} by the batch_size of the sampler",
                hint="let it give batches of this size, of which the last alone may be smaller; or "
                "give the DataLoader a batch_size and a sampler",
            )
        self._count = len(indices) if self._count is None else self._count
        if len(indices) != self._count:
            epoch = f"{_PART} batches" if self._is_long else "epoch"
            raise CaptureError(
                f"the sampler of the DataLoader ({kind}) gives {plural(len(indices), 'sample')} in "
                f"{epoch} {self._drawn + 1}, and {self._count} in the first one",
                hint="let it give as many in every epoch",
            )
        return indices


def keeps_processes(loader: DataLoader[Any]) -> bool:
    """Whether one iterator of a loader, with its processes, reads all epochs."""
    return loader.persistent_workers and loader.num_workers > 0


def draw(count: int, generator: torch.Generator | None = None) -> None:
    """Draw random numbers of 32 bits."""
    torch.empty(count, dtype=torch.int32).random_(generator=generator)


def batch_size_of(loader: DataLoader[Any]) -> int | None:
    """Return the samples of the loader's batches; None if it does not say so."""
    size: int | None = loader.batch_size
    if size is None:
        size = getattr(loader.batch_sampler, "batch_size", None)
    return size


def size_of_first_batch(loader: DataLoader[Any]) -> int:
    """Return the samples of a batch of a loader whose sampler of batches does not say so."""
    before = Generators(loader)
    size = len(next(iter(loader.batch_sampler or ()), ()))
    before.restore()
    return size or 1


@contextmanager
def directory(path: str) -> Iterator[None]:
    """Be in the working directory of the script, against which it reads relative paths."""
    before = Directory.cwd()
    os.chdir(path)
    try:
        yield
    finally:
        with suppress(OSError):
            os.chdir(before)


@contextmanager
def own_signals() -> Iterator[None]:
    """Set back what the script answers to signals: ranks have answers of their own."""
    before = {number: signal.getsignal(number) for number in signal.valid_signals()}
    try:
        yield
    finally:
        for number, handler in before.items():
            if handler is not None and signal.getsignal(number) is not handler:
                signal.signal(number, handler)


class InProcess:
    """The dataset of a loader as its processes have it: after its ``worker_init_fn``, which may
    choose samples or open files. Where a rank reads samples itself, it is the only process.

    Args:
        place: the working directory of the script.
        told: see :func:`samples_of`.
    """

    def __init__(self, loader: DataLoader[Any], place: str, told: Sequence[Told] = ()) -> None:
        self._dataset, self._place, self._told = loader.dataset, place, told
        self._begin = loader.worker_init_fn if loader.num_workers else None
        self._known: tuple[int, Any] = -1, None

    def __getstate__(self) -> dict[str, Any]:
        """Another process begins anew; what this one has opened need not be copied."""
        return {**vars(self), "_known": (-1, None)}

    def __call__(self) -> Any:
        """Return the dataset of this process, which begins with the first call."""
        if self._known[0] != os.getpid():
            info = get_worker_info()
            self._known = os.getpid(), self.begun(info.id if info else 0)
        return self._known[1]

    def set_epoch(self, epoch: int, dataset: Any) -> None:
        """Tell a dataset, or those within it, the number of an epoch as the script does.

        Args:
            dataset: of the script, as it is or as this process has it.
        """
        with directory(self._place):
            for told in self._told:
                told.tell(epoch, dataset if told.owner is self._dataset else None)

    def begun(self, seed: int | None = None) -> Any:
        """Return the dataset of a process that begins now. Its random numbers stay as they are.

        Args:
            seed: of the numbers that ``worker_init_fn`` draws; by default that of the process.
        """
        if self._begin is None:
            return self._dataset
        generators, info = SharedGenerators(), get_worker_info()
        before, threads = dict(getattr(self._dataset, "__dict__", {})), torch.get_num_threads()
        if seed is not None:
            torch.manual_seed(seed)
        signals = own_signals() if info is None else nullcontext()
        with directory(self._place), signals, told_as_process(self._dataset):
            self._begin(0 if info is None else info.id)
        generators.restore()
        if info is not None:
            return self._dataset
        torch.set_num_threads(threads)
        own = _copied(self._dataset)
        if own is not self._dataset:  # processes that are started later begin with it as it was
            vars(self._dataset).clear()
            vars(self._dataset).update(before)
        return own


def _copied(value: Any) -> Any:
    """A copy with the same attributes; the value itself if there can be none."""
    try:
        other = object.__new__(type(value))
        vars(other).update(vars(value))
    except TypeError:
        return value
    return other


@dataclass
class Collate:
    """Makes a batch of samples, and takes from it what model and loss read.

    Args:
        function: the loader's own.
        inputs, targets: paths of the tensors that the model and the loss read.
        directory: see :func:`directory`.
    """

    function: Callable[[list[Any]], Any]
    inputs: list[Path]
    targets: list[Path]
    directory: str

    def __call__(self, samples: list[Any]) -> dict[str, dict[str, Any]]:
        """Return the tensors by name."""
        with directory(self.directory):
            batch = self.function(samples)
        return {
            "inputs": {name_of(path): reach(batch, path) for path in self.inputs},
            "targets": {name_of(path): reach(batch, path) for path in self.targets},
        }


class Samples(Dataset[Any]):
    """The script's dataset, as a job reads it.

    Attributes:
        collate_fn: makes a batch.
        order: the indices of an epoch, by its number.
    """

    def __init__(
        self, loader: DataLoader[Any], collate: Collate, order: Order, told: Sequence[Told]
    ) -> None:
        dataset: Any = loader.dataset
        self._dataset = dataset
        self._in_process = InProcess(loader, collate.directory, told)
        self._stays = loader.persistent_workers
        self.collate_fn = collate
        self.order = order
        if hasattr(dataset, "lengths"):
            self.lengths = dataset.lengths

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> Any:
        dataset = self._in_process()
        with directory(self.collate_fn.directory):
            return read_sample(dataset, index)

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch, from 0, where the script tells its dataset so."""
        # Processes that stay have copies of it, which are told the first number alone.
        self._in_process.set_epoch(0 if self._stays else epoch, self._in_process())


class Stream(IterableDataset[Any]):
    """The script's iterable dataset, as a job reads it.

    Attributes:
        collate_fn: makes a batch.
        in_turn: the loader's processes, the samples of its batches, whether it leaves incomplete
            ones out, and whether the processes stay. Its samples follow from these.
    """

    def __init__(self, loader: DataLoader[Any], collate: Collate, told: Sequence[Told]) -> None:
        self._dataset = loader.dataset
        self._in_process = InProcess(loader, collate.directory, told)
        self.collate_fn = collate
        size, stays = batch_size_of(loader) or 1, loader.persistent_workers
        self.in_turn = loader.num_workers, size, loader.drop_last, stays

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch, from 0, where the script tells its dataset so."""
        self._in_process.set_epoch(epoch, self._dataset)

    def __iter__(self) -> Iterator[Any]:
        dataset = self._in_process() if self.in_turn[-1] else self._in_process.begun()
        with directory(self.collate_fn.directory):
            samples = iter(dataset)
        while True:
            with directory(self.collate_fn.directory):
                try:
                    sample = next(samples)
                except StopIteration:
                    return
            yield sample


def described(dataset: Any) -> str:
    """What data are, in words: ``Subset of 100 samples``."""
    is_sized = not isinstance(dataset, IterableDataset) and isinstance(dataset, Sized)
    size = f" of {len(dataset):,} samples" if is_sized else ""
    return f"{type(dataset).__name__}{size}"


class HeldOut(Dataset[Any]):
    """The samples of a loader that the script evaluates with, each as often as an epoch has it.

    Attributes:
        collate_fn: makes a batch.
    """

    def __init__(self, loader: DataLoader[Any], collate: Collate, indices: Sequence[int]) -> None:
        self._in_process, self._indices = InProcess(loader, collate.directory), indices
        self.collate_fn = collate

    def __len__(self) -> int:
        return len(self._indices)

    def __getitem__(self, index: int) -> Any:
        dataset = self._in_process()
        with directory(self.collate_fn.directory):
            return read_sample(dataset, self._indices[index])


def held_out_samples(loader: DataLoader[Any], collate: Collate) -> HeldOut:
    """Return the samples of a loader in ascending order.

    Raises:
        CaptureError: its dataset has no numbered samples.
    """
    if isinstance(loader.dataset, IterableDataset) or loader.batch_sampler is None:
        raise CaptureError(
            "evaluation.data: the DataLoader of the script has a dataset without numbered samples",
            hint="name a function that returns a dataset with __len__ and __getitem__",
        )
    before = Generators(loader)
    indices = sorted(int(index) for batch in loader.batch_sampler for index in batch)
    before.restore()
    return HeldOut(loader, collate, indices)


def samples_of(
    loader: DataLoader[Any],
    collate: Collate,
    start: Generators,
    told: Sequence[Told],
    *,
    repeats: bool = False,
    between: int = 0,
) -> Any:
    """Return the dataset of a loader; for what is not here see :class:`Order`.

    Args:
        told: how the script tells the samplers, and the datasets within that of the loader, the
            number of an epoch.

    Raises:
        CaptureError: the loader makes no batches of samples.
    """
    if loader.batch_size is None and loader.batch_sampler is None:
        raise CaptureError(
            "the DataLoader has batch_size=None: its dataset gives whole batches, which cannot be "
            "divided into micro-batches",
            hint="let the dataset give samples, and the DataLoader make batches of them",
        )
    if isinstance(loader.dataset, IterableDataset):
        return Stream(loader, collate, told)
    samplers = {id(each) for each in samplers_of(loader)}
    of_order = [each for each in told if id(each.owner) in samplers]
    others = [each for each in told if id(each.owner) not in samplers]
    order = Order(loader, start, of_order, repeats=repeats, between=between)
    return Samples(loader, collate, order, others)


def draws_samples(data: Any) -> bool:
    """Whether a sample of :func:`samples_of` draws random numbers of generators that all share."""
    before, kept = SharedGenerators(), Kept(data)
    with restoring(before.restore, kept.restore):
        if isinstance(data, IterableDataset):
            next(iter(data), None)
        else:
            data[next(iter(data.order(0)))]
        return before.have_drawn()
