"""Which samples a step takes, and that every rank and every loader sees them alike."""

from __future__ import annotations

import os
import random
import re
from collections.abc import Iterator
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset, default_collate

from pipectl.capture.data import Loader, Samples
from pipectl.errors import CaptureError, PipectlError, WorkerError
from pipectl.faults import is_ours


class Noisy(Dataset):
    """Every kind of random number in every sample."""

    def __init__(self, count: int = 10) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        drawn = [random.random(), np.random.rand(), float(torch.rand(()))]
        return torch.tensor([index, *drawn], dtype=torch.float64), index


class NoisyStream(IterableDataset):
    def __init__(self, count: int = 5) -> None:
        self.count = count

    def __iter__(self) -> Iterator[tuple[Tensor, int]]:
        """Draws the order at once, and further numbers with every sample."""
        order = list(range(self.count))
        random.shuffle(order)
        return self.samples(order)

    def samples(self, order: list[int]) -> Iterator[tuple[Tensor, int]]:
        for index in order:
            drawn = [random.random(), np.random.rand(), float(torch.rand(()))]
            yield torch.tensor([index, *drawn], dtype=torch.float64), index


class Plain:
    """Iterable, and no class of torch's."""

    def __iter__(self) -> Iterator[tuple[Tensor, int]]:
        return iter(NoisyStream())


def taken(loader: Loader, steps: int, micro_batch_size: int) -> list[Tensor]:
    planned = list(islice(loader.batches(), steps))
    return [inputs for inputs, _ in loader.micro_batches(planned, micro_batch_size)]


def indices(found: list[Tensor]) -> list[int]:
    return [int(row[0]) for batch in found for row in batch]


@pytest.mark.parametrize(
    ("dataset", "drop_last", "expected"),
    [
        (Noisy(), False, [(0, 4), (0, 4), (0, 2), (1, 4)]),
        (Noisy(), True, [(0, 4), (0, 4), (1, 4), (1, 4)]),
        (NoisyStream(), False, [(0, 4), (1, 4), (2, 4), (3, 4)]),
    ],
    ids=["all", "full ones", "iterable"],
)
def test_epoch_follows_epoch(dataset: Any, drop_last: bool, expected: list[Any]) -> None:
    loader = Loader(dataset, seed=1, batch_size=4, drop_last=drop_last)
    assert [(batch.epoch, batch.size) for batch in islice(loader.batches(), 4)] == expected


def test_the_order_is_a_permutation_of_its_own_each_epoch() -> None:
    loader, before = Loader(Noisy(), seed=1), torch.get_rng_state()
    orders = [loader.order(epoch) for epoch in range(3)]
    assert torch.equal(torch.get_rng_state(), before)
    assert all(sorted(order) == list(range(10)) for order in orders)
    assert len({tuple(order) for order in orders}) == 3
    assert orders == [Loader(Noisy(), seed=1).order(epoch) for epoch in range(3)]
    assert orders[0] != Loader(Noisy(), seed=2).order(0)


def test_without_shuffle_samples_come_as_they_are() -> None:
    loader = Loader(Noisy(), seed=1, shuffle=False, batch_size=5)
    assert indices(taken(loader, 2, 2)) == list(range(10))


def test_micro_batches_take_the_samples_of_the_order() -> None:
    loader = Loader(Noisy(), seed=1, batch_size=4)
    found = taken(loader, 4, 3)
    assert [len(batch) for batch in found] == [3, 1, 3, 1, 2, 3, 1]
    assert indices(found) == [*loader.order(0), *loader.order(1)[:4]]


def test_loader_processes_see_the_same_samples() -> None:
    here, there = (
        torch.cat(taken(Loader(Noisy(), seed=1, workers=n, batch_size=4), 3, 2)) for n in (0, 2)
    )
    assert torch.equal(here, there)
    assert here[:, 1:].unique().numel() == 30


class Failing(Noisy):
    """Sample 3 raises, samples of another shape cannot be collated, or the process is killed."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        if index == 3 and self.how == "raises":
            raise KeyError("no row 3")
        if index == 3 and self.how == "ends":
            os._exit(9)
        return torch.zeros(2 if index == 3 and self.how == "ragged" else 1), index


@pytest.mark.parametrize(
    ("how", "error", "message"),
    [
        (
            "raises",
            WorkerError,
            rf"data: a loading process raised KeyError: .* \(at {__file__}:\d+\)",
        ),
        ("ends", WorkerError, r"data: DataLoader worker \(pid.* exited unexpectedly.*"),
        ("ragged", CaptureError, "data: samples cannot be collated into a batch: RuntimeError: .*"),
    ],
)
def test_an_error_in_a_loading_process_is_the_users(
    how: str, error: type[PipectlError], message: str
) -> None:
    loader = Loader(Failing(how), seed=1, shuffle=False, workers=1, batch_size=4)
    with pytest.raises(error) as raised:
        taken(loader, 1, 2)
    assert re.fullmatch(message, raised.value.message), raised.value.message
    assert raised.value.cure
    assert not is_ours(raised.value)


def test_a_sample_is_augmented_anew_each_epoch() -> None:
    found = torch.cat(taken(Loader(Noisy(), seed=1), 2, 10))
    rows = {}
    for row in found:
        rows.setdefault(int(row[0]), []).append(row[1:])
    assert all(not torch.equal(first, second) for first, second in rows.values())


@pytest.mark.parametrize("dataset", [NoisyStream(), Plain()], ids=["torch", "plain"])
def test_an_iterable_goes_round_and_round_in_full_batches(dataset: Any) -> None:
    found = taken(Loader(dataset, seed=1, batch_size=4), 4, 3)
    assert [len(batch) for batch in found] == [3, 1] * 4
    assert sorted(indices(found)[:5]) == list(range(5)) == sorted(indices(found)[5:10])
    assert indices(found)[:5] != indices(found)[5:10]


def test_a_generator_is_read_once_and_then_refused() -> None:
    samples = (sample for sample in NoisyStream())
    loader = Loader(samples, seed=1, batch_size=4)
    loaded = loader.micro_batches(islice(loader.batches(), 3), 4)
    next(loaded)
    with pytest.raises(CaptureError) as raised:
        next(loaded)
    assert raised.value.message == "data: epoch 2 of the dataset has no samples"


class Unconverted(IterableDataset):
    """Pairs of arrays, of which its `collate_fn` makes tensors itself."""

    def __iter__(self) -> Iterator[tuple[Any, Any]]:
        return ((np.full(3, index, "f4"), np.zeros(1, "f4")) for index in range(4))

    @staticmethod
    def collate_fn(samples: list[Any]) -> tuple[Tensor, Tensor]:
        assert all(isinstance(sample, tuple) for sample in samples)
        vectors, targets = zip(*samples, strict=True)
        return torch.from_numpy(np.stack(vectors)), torch.from_numpy(np.stack(targets))


@pytest.mark.parametrize("workers", [0, 1])
def test_collate_fn_of_an_iterable_is_given_what_the_data_set_gives(workers: int) -> None:
    """In the training, as where the model is captured."""
    loader = Loader(Unconverted(), seed=1, workers=workers)
    first, _ = loader.micro_batches([Samples(0, range(4))], 2)
    assert all(map(torch.equal, first, loader.example(2)))


class Shifted(NoisyStream):
    @staticmethod
    def collate_fn(samples: list[Any]) -> Any:
        vectors, targets = default_collate(samples)
        return vectors + random.random() + np.random.rand() + torch.rand(1), targets


def test_what_collate_fn_draws_for_an_iterable_does_not_depend_on_what_runs_between() -> None:
    def read(workers: int, seed: int) -> list[Tensor]:
        found = []
        loader = Loader(Shifted(), seed=1, workers=workers, batch_size=4)
        for inputs, _ in loader.micro_batches(islice(loader.batches(), 2), 2):
            found.append(inputs)
            torch.manual_seed(seed)
            random.seed(seed)
            np.random.seed(seed)
        return found

    expected = read(0, seed=5)
    assert all(map(torch.equal, read(1, seed=5), expected))
    assert all(map(torch.equal, read(1, seed=6), expected))
    shifts = [inputs.flatten()[0] for inputs in expected]
    assert len(set(map(float, shifts))) == 4


def test_an_example_is_repeated_where_samples_are_too_few() -> None:
    inputs, _ = Loader(Noisy(3), seed=1).example(5)
    assert indices([inputs]) == [0, 1, 2, 0, 1]


class Ragged(Noisy):
    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return torch.zeros(index + 1), index


class Endless(Dataset):
    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return torch.zeros(2), index


@pytest.mark.parametrize(
    ("dataset", "message", "cure"),
    [
        *((empty, "the dataset is empty", "arguments") for empty in (Noisy(0), NoisyStream(0), [])),
        (Endless(), "has __getitem__ but no __len__", "add __len__"),
        (
            Ragged(),
            "samples cannot be collated into a batch: Runtime",
            "name lengths to pad them to under data.buckets",
        ),
    ],
    ids=["map", "iterable", "list", "endless", "ragged"],
)
def test_data_that_make_no_batch(dataset: Any, message: str, cure: str) -> None:
    with pytest.raises(CaptureError, match=f"^data: {message}") as raised:
        Loader(dataset, seed=1).example(3)
    assert cure in str(raised.value.cure)


def test_a_sample_that_cannot_be_read_names_the_users_line(make_job) -> None:
    with pytest.raises(CaptureError) as raised:
        make_job("mlp", data="Raising").training_graph(2)
    assert raised.value.message.startswith("data: sample 0: raised OSError: the disk is gone (at ")
    assert "models.py:" in raised.value.message
