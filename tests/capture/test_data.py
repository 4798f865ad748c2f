"""Which samples a step takes, how they are padded and named, alike for every rank and loader."""

from __future__ import annotations

import os
import random
import re
from collections.abc import Callable, Iterator
from itertools import islice, pairwise
from multiprocessing import current_process
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, get_worker_info

from pipectl.capture.batch import Reader, by_name
from pipectl.capture.data import Loader, Samples, check_dataset
from pipectl.capture.model_with_loss import loss_of_outputs
from pipectl.capture.shares import target_weight
from pipectl.capture.slices import Span
from pipectl.errors import CaptureError, InvalidInputError, PipectlError, WorkerError
from pipectl.faults import is_ours

EQUALITY = Path(__file__).parents[1] / "equality" / "models.py"


def noisy(index: int) -> tuple[Tensor, int]:
    """A sample with every kind of random number."""
    drawn = [random.random(), np.random.rand(), float(torch.rand(()))]
    return torch.tensor([index, *drawn], dtype=torch.float64), index


class Mapped(Dataset):
    """So many samples, each as the function gives it."""

    def __init__(self, count: int = 10, sample: Callable[[int], Any] = noisy) -> None:
        self.count, self.sample = count, sample

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Any:
        return self.sample(index)


class Stream(IterableDataset):
    def __init__(self, count: int = 5) -> None:
        self.count = count

    def __iter__(self) -> Iterator[tuple[Tensor, int]]:
        """Draws the order at once, and further numbers with every sample."""
        order = list(range(self.count))
        random.shuffle(order)
        return map(noisy, order)


class Plain:
    """Iterable, and no class of torch's."""

    def __iter__(self) -> Iterator[tuple[Tensor, int]]:
        return iter(Stream())


def taken(loader: Loader, steps: int, micro_batch_size: int) -> list[Tensor]:
    planned = list(islice(loader.batches(), steps))
    return [inputs for inputs, _ in loader.micro_batches(planned, micro_batch_size)]


def indices(found: list[Tensor]) -> list[int]:
    return [int(row[0]) for batch in found for row in batch]


def test_order_and_augmentation_are_those_of_seed_and_epoch_in_any_process() -> None:
    loader, before = Loader(Mapped(), seed=1, batch_size=4), torch.get_rng_state()
    orders = [loader.order(epoch) for epoch in range(3)]
    assert torch.equal(torch.get_rng_state(), before)
    assert all(sorted(order) == list(range(10)) for order in orders)
    assert len({tuple(order) for order in orders}) == 3
    assert orders == [Loader(Mapped(), seed=1).order(epoch) for epoch in range(3)]
    assert orders[0] != Loader(Mapped(), seed=2).order(0)
    assert [batch.epoch for batch in islice(loader.batches(), 4)] == [0, 0, 0, 1]
    whole = Loader(Mapped(), seed=1, batch_size=4, drop_last=True)
    assert [(b.epoch, b.size) for b in islice(whole.batches(), 3)] == [(0, 4), (0, 4), (1, 4)]
    found = taken(loader, 6, 3)
    assert [len(batch) for batch in found] == [3, 1, 3, 1, 2] * 2
    assert indices(found) == orders[0] + orders[1]
    rows = torch.cat(found)
    first, second = (part[part[:, 0].argsort(), 1:] for part in rows.split(10))
    assert first.unique().numel() == 30
    assert not (first == second).any()
    elsewhere = Loader(Mapped(), seed=1, batch_size=4, workers=2)
    assert torch.equal(torch.cat(taken(elsewhere, 6, 2)), rows)
    as_they_are = Loader(Mapped(), seed=1, shuffle=False, batch_size=5)
    assert indices(taken(as_they_are, 2, 2)) == list(range(10))
    few = Loader(Mapped(3), seed=1)
    assert indices([few.example(5)[0]]) == [0, 1, 2, 0, 1]  # repeated where they are too few


class Failing(Mapped):
    """Sample 3 raises, samples of another shape cannot be collated, or the process is killed."""

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        if index == 3 and self.sample == "raises":
            raise KeyError("no row 3")
        if index == 3 and self.sample == "ends":
            os._exit(9)
        return torch.zeros(2 if index == 3 and self.sample == "ragged" else 1), index


PLACE = rf"raised KeyError: .* \(at {re.escape(__file__)}:\d+\)"


@pytest.mark.parametrize(
    ("how", "error", "message"),
    [
        ("raises", WorkerError, f"data: a loading process {PLACE}"),
        ("ends", WorkerError, r"data: DataLoader worker \(pid.* exited unexpectedly.*"),
        ("ragged", CaptureError, "data: samples cannot be collated into a batch: RuntimeError: .*"),
    ],
)
def test_an_error_in_a_loading_process_is_the_users(
    how: Any, error: type[PipectlError], message: str
) -> None:
    loader = Loader(Failing(10, how), seed=1, shuffle=False, workers=1, batch_size=4)
    with pytest.raises(error) as raised:
        taken(loader, 1, 2)
    assert re.fullmatch(message, raised.value.message), raised.value.message
    assert raised.value.hint
    assert not is_ours(raised.value)
    if how == "raises":
        with pytest.raises(CaptureError, match=f"^data: sample 3: {PLACE}"):
            loader.example(4)


def test_a_directory_in_which_processes_cannot_have_sockets_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They would wait for ever."""
    monkeypatch.setitem(vars(current_process())["_config"], "tempdir", f"/{'x' * 90}")
    with pytest.raises(InvalidInputError, match=r"^data\.workers: .* TMPDIR"):
        taken(Loader(Mapped(), seed=1, workers=1, batch_size=4), 1, 1)
    assert taken(Loader(Mapped(), seed=1, batch_size=4), 1, 1)


@pytest.mark.parametrize("dataset", [Stream(), Plain()], ids=["torch", "plain"])
def test_an_iterable_goes_round_and_round_in_full_batches(dataset: Any) -> None:
    loader = Loader(dataset, seed=1, batch_size=4)
    assert [batch.epoch for batch in islice(loader.batches(), 4)] == [0, 1, 2, 3]
    found = taken(loader, 4, 3)
    assert [len(batch) for batch in found] == [3, 1] * 4
    assert sorted(indices(found)[:5]) == list(range(5)) == sorted(indices(found)[5:10])
    assert indices(found)[:5] != indices(found)[5:10]


class Shared(IterableDataset):
    """Each process reads a part, if there are several, by torch's usual way to share out."""

    def __iter__(self) -> Iterator[tuple[Tensor, int]]:
        process = get_worker_info()
        first, stride = (0, 1) if process is None else (process.id, process.num_workers)
        return map(noisy, range(first, 10, stride))


@pytest.mark.parametrize("dataset", [Stream(10), Plain(), Shared()], ids=["torch", "plain", "own"])
def test_the_number_of_loading_processes_changes_no_sample_of_an_iterable(dataset: Any) -> None:
    """Neither if a run goes on with another number."""
    here = torch.cat(taken(Loader(dataset, seed=1, batch_size=4), 6, 2))
    elsewhere = Loader(dataset, seed=1, workers=3, batch_size=4)
    assert torch.equal(torch.cat(taken(elsewhere, 6, 2)), here)
    planned = list(islice(elsewhere.batches(), 6))
    resumed = [inputs for inputs, _ in elsewhere.micro_batches(planned, 4, skipped=3)]
    assert torch.equal(torch.cat(resumed), here[12:])


class Counting(IterableDataset):
    """Each pass has an order of its own, by what the dataset has kept of the passes before."""

    def __init__(self, kind: str) -> None:
        self.kind, self.passes, self.orders = kind, 0, [*range(9)]
        self.generator, self.file = random.Random(3), Path(__file__).open()  # noqa: SIM115
        self.inner = self if kind == "counts" else Counting("counts")

    def __iter__(self) -> Iterator[tuple[Tensor, int]]:
        inner, order = self.inner, self.orders
        if self.kind == "draws":
            self.generator.shuffle(order)
        else:
            order = random.Random(inner.passes).sample(range(9), 9)
            inner.passes += 1
        return ((torch.tensor([i]), i) for i in order)


@pytest.mark.parametrize("kind", ["counts", "draws", "counts within"])
def test_an_iterable_that_keeps_count_begins_with_its_first_pass(kind: str) -> None:
    """Whatever was read before, with any number of processes, and again if a run goes on."""
    plain = Counting(kind)
    expected = [index for _ in range(4) for _, index in plain]
    for workers in (0, 1, 2):
        loader = Loader(Counting(kind), seed=1, workers=workers, batch_size=4)
        for _ in range(2):
            assert [int(x) for x in loader.example(4)[0]] == expected[:4]
            assert next(loader.stream())[1] == expected[0]
            loader.read(Samples(0, range(2)))
        planned = list(islice(loader.batches(), 9))
        for skipped in (0, 5, 3):
            read = loader.micro_batches(planned, 2, skipped)
            assert [int(x) for inputs, _ in read for x in inputs] == expected[4 * skipped :]
        read = loader.micro_batches(planned, 2)
        first = indices([next(read)[0] for _ in range(9)])
        loader.example(4)
        assert first + indices([inputs for inputs, _ in read]) == expected


class Curriculum(Mapped):
    """Samples of a map-style dataset that depend on the epoch that it is told."""

    epoch = -1

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return torch.tensor([100 * self.epoch + index]), index


class CurriculumStream(Curriculum, IterableDataset):
    """The same of an iterable."""

    def __iter__(self) -> Iterator[tuple[Tensor, int]]:
        return map(self.__getitem__, range(self.count))


@pytest.mark.parametrize("kind", [Curriculum, CurriculumStream])
def test_a_dataset_is_told_the_epoch_that_is_read(kind: Any) -> None:
    for workers in (0, 2):
        loader = Loader(kind(6), seed=1, workers=workers, batch_size=3, shuffle=False)
        expected = [100 * epoch + index for epoch in range(3) for index in range(6)]
        assert indices([loader.example(3)[0]]) == expected[:3]
        planned = list(islice(loader.batches(), 6))
        for skipped in (0, 3):
            read = loader.micro_batches(planned, 3, skipped)
            first = indices([next(read)[0]])
            loader.example(3)  # as where the model is captured for another size
            rest = first + indices([inputs for inputs, _ in read])
            assert rest == expected[3 * skipped :]


@pytest.mark.parametrize("dataset", [Mapped(12), Stream(), Plain()], ids=["map", "torch", "plain"])
def test_replicas_and_resumed_runs_take_the_samples_of_whole_batches(dataset: Any) -> None:
    loader = Loader(dataset, seed=1, batch_size=4)
    planned = list(islice(loader.batches(), 4))

    def loaded(*rows: range, skipped: int = 0) -> list[Tensor]:
        return [inputs for inputs, _ in loader.pieces(planned, lambda _: rows, skipped)]

    whole = loaded(range(4))
    parts = loaded(range(1, 2), range(3, 4), skipped=2)
    expected = [row for batch in whole[2:] for row in (batch[1:2], batch[3:])]
    assert len(parts) == 4
    assert all(map(torch.equal, parts, expected))


def test_samples_of_earlier_steps_are_read_when_the_data_are_opened() -> None:
    """Not within the first step, in which a rank that does not go on would count as lost."""
    read = list[int]()

    class Noting(IterableDataset):
        def __iter__(self) -> Iterator[tuple[Tensor, int]]:
            for index in range(10):
                read.append(index)
                yield noisy(index)

    loader = Loader(Noting(), seed=1, batch_size=4)
    opened = loader.micro_batches(islice(loader.batches(), 5), 2, skipped=4)
    assert read == [*range(10), *range(6)]
    assert indices([next(opened)[0]]) == [6, 7]


def test_a_generator_is_read_once_and_then_refused() -> None:
    loader = Loader(iter(Stream()), seed=1, batch_size=4)
    loaded = loader.micro_batches(islice(loader.batches(), 3), 4)
    next(loaded)
    with pytest.raises(CaptureError, match=r"^data: epoch 2 of the dataset has no samples\n"):
        next(loaded)


class Shifted(IterableDataset):
    """Arrays in an order that it draws; its ``collate_fn`` makes tensors, and draws, too."""

    def __iter__(self) -> Iterator[tuple[Any, Any]]:
        order = random.sample(range(8), 8)
        return ((np.full(3, index, "f4"), np.random.rand(1).astype("f4")) for index in order)

    @staticmethod
    def collate_fn(samples: list[Any]) -> tuple[Tensor, Tensor]:
        assert all(isinstance(sample, tuple) for sample in samples)
        vectors, targets = (torch.from_numpy(np.stack(part)) for part in zip(*samples, strict=True))
        return vectors, targets + random.random() + np.random.rand() + torch.rand(1)


def test_collate_fn_of_an_iterable_has_its_samples_and_draws_the_same_whatever_runs_between() -> (
    None
):
    def read(workers: int, seed: int) -> list[Tensor]:
        found = []
        loader = Loader(Shifted(), seed=1, workers=workers, batch_size=4)
        for batch in loader.micro_batches(islice(loader.batches(), 2), 2):
            found.append(torch.cat(batch, 1))
            torch.manual_seed(seed)
            random.seed(seed)
            np.random.seed(seed)
        return found

    expected = read(0, seed=5)
    assert all(map(torch.equal, read(1, seed=5), expected))
    assert all(map(torch.equal, read(1, seed=6), expected))
    assert len({float(batch[0, -1]) for batch in expected}) == 4
    loader = Loader(Shifted(), seed=1)
    (inputs, _), *_ = loader.micro_batches([Samples(0, range(4))], 2)
    assert torch.equal(inputs, loader.example(2)[0])  # as where the model is captured


class Endless(Dataset):
    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return torch.zeros(2), index


@pytest.mark.parametrize(
    ("dataset", "message", "hint"),
    [
        *((empty, "the dataset is empty", "arguments") for empty in (Mapped(0), Stream(0), [])),
        (Endless(), "has __getitem__ but no __len__", "add __len__"),
        (
            Mapped(4, lambda index: (torch.zeros(index + 1), index)),
            "samples cannot be collated into a batch: Runtime",
            "name lengths to pad them to under data.buckets",
        ),
    ],
    ids=["map", "iterable", "list", "endless", "ragged"],
)
def test_data_that_make_no_batch(dataset: Any, message: str, hint: str) -> None:
    with pytest.raises(CaptureError, match=f"^data: {message}") as raised:
        Loader(dataset, seed=1).example(3)
    assert hint in str(raised.value.hint)


class Doubled(Mapped):
    """Gives something else for a list of indices, which a DataLoader asks for."""

    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [self.sample(2 * index) for index in indices]


class InLists:
    """No class of torch's, and has no samples one by one."""

    def __len__(self) -> int:
        return 10

    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [noisy(index) for index in indices]


@pytest.mark.parametrize("dataset", [Doubled(), Subset(Doubled(), range(9)), InLists()])
def test_samples_are_read_by_the_method_that_a_loader_of_torch_calls(dataset: Any) -> None:
    check_dataset(dataset, "data", "make")
    (expected, _), *_ = DataLoader(dataset, 3)
    found, _ = Loader(dataset, seed=0, batch_size=3, shuffle=False).example(3)
    assert torch.equal(found[:, 0], expected[:, 0])


def test_data_that_keep_what_they_read_have_the_samples_that_they_began_with() -> None:
    rows = [(torch.full((2,), float(index)), index) for index in range(6)]

    class Keeping(Dataset):
        def __len__(self) -> int:
            return len(rows)

        def __getitem__(self, index: int) -> Any:
            rows.append(rows[index])
            return rows[index]

    loader = Loader(Keeping(), seed=1, batch_size=4)
    order = loader.order(0)
    batches = loader.micro_batches(islice(loader.batches(), 2), 4)
    read = [index for _, targets in batches for index in targets.tolist()]
    assert (read, len(rows), loader.samples) == (order, 12, 6)


# Batches of sequences of several lengths

BUCKETS = (4, 8, 12)
ORDERS = [[7, 6, 5, 4, 1, 0], [0, 1, 4, 5, 6, 7]]


def sequences(each: list[int], form: Any = lambda ids: (ids, ids + 1), **more: Any) -> Mapped:
    """The numbers of their samples, as often as these are long; attributes of the dataset."""
    dataset = Mapped(len(each), lambda index: form(torch.full((each[index],), index)))
    vars(dataset).update(more)
    return dataset


def loader_of(dataset: Any, **options: Any) -> Loader:
    pad = {"inputs": 99, "targets": -100}
    return Loader(dataset, **{"seed": 1, "buckets": BUCKETS, "pad": pad, **options})


@given(
    lengths=st.lists(st.integers(0, 12), min_size=1, max_size=60),
    size=st.integers(1, 9),
    drop_last=st.booleans(),
)
def test_every_epoch_takes_every_sample_once_in_batches_of_one_bucket(
    lengths: list[int], size: int, drop_last: bool
) -> None:
    loader = loader_of(sequences(lengths), batch_size=size, drop_last=drop_last)
    kinds = []
    for epoch in range(3):
        order, taken = loader.order(epoch), list[int]()
        batches = loader.epoch(epoch)
        for batch in batches:
            mine = [order[position] for position in batch.positions]
            fits = [next(b for b in BUCKETS if lengths[index] <= b) for index in mine]
            assert set(fits) == {batch.length}
            assert batch.tokens == sum(lengths[index] for index in mine)
            assert batch.size == size or not drop_last
            taken += mine
        assert sorted(order) == list(range(len(lengths)))
        assert len(set(taken)) == len(taken)
        assert drop_last or len(taken) == len(lengths)
        kinds.append(sorted((batch.size, batch.length) for batch in batches))
    assert kinds[0] == kinds[1] == kinds[2]  # the steps of every epoch have been seen in the first


@pytest.mark.parametrize("more", [{}, {"lengths": [5, 2, 14, 12, 1, 8, 3, 7]}])
def test_an_order_may_leave_samples_out(more: dict[str, Any]) -> None:
    """As a sampler of a script does. The longest sample, which no bucket fits, is left out, too."""
    dataset = sequences([5, 2, 14, 12, 1, 8, 3, 7], **more)
    loader = loader_of(dataset, batch_size=2, order=lambda epoch: ORDERS[epoch])
    assert (loader.samples, loader.counts, loader.lengths) == (6, (3, 3), (4, 8))
    for epoch in range(2):
        assert sorted(loader.order(epoch)) == [0, 1, 4, 5, 6, 7]
        taken = [p for batch in loader.epoch(epoch) for p in batch.positions]
        assert sorted(taken) == list(range(6))


def test_buckets_refuse_an_order_with_other_numbers_of_each_length_in_another_epoch() -> None:
    loader = loader_of(sequences([5, 2, 7]), batch_size=1, order=lambda epoch: [epoch, 2])
    with pytest.raises(CaptureError, match="different numbers of samples in the buckets"):
        loader.epoch(0)


def test_epochs_mix_lengths_in_orders_of_their_own() -> None:
    loader = loader_of(sequences([1 + index % 12 for index in range(240)]), batch_size=4)
    first, second = ([batch.length for batch in loader.epoch(epoch)] for epoch in range(2))
    assert first != second
    assert sum(a != b for a, b in pairwise(first)) > 20


@pytest.mark.parametrize("workers", [0, 2])
def test_a_batch_is_padded_to_the_length_of_its_bucket(workers: int) -> None:
    dataset = sequences([5, 2, 7, 12, 1, 8])
    loader = loader_of(dataset, batch_size=2, workers=workers, shuffle=False)
    planned = list(islice(loader.batches(), 4))
    assert [(batch.length, batch.size) for batch in planned] == [(8, 2), (4, 2), (8, 1), (12, 1)]
    loaded = list(loader.micro_batches(planned, 2))
    assert [tuple(inputs.shape) for inputs, _ in loaded] == [(2, 8), (2, 4), (1, 8), (1, 12)]
    inputs, targets = loaded[0]
    assert inputs.tolist() == [[0] * 5 + [99] * 3, [2] * 7 + [99]]
    assert targets.tolist() == [[1] * 5 + [-100] * 3, [3] * 7 + [-100]]


class Marks(NamedTuple):
    ids: Any
    score: Any


def as_lists(ids: Tensor) -> dict[str, Any]:
    """As datasets of HuggingFace give them: lists under keys."""
    return {"input_ids": ids.tolist(), "mask": [1] * len(ids), "score": 0.5}


def pad_to_longest(samples: list[Any]) -> dict[str, Tensor]:
    """Makes the mask itself, which shows the real lengths."""
    ids = [inputs for inputs, _ in samples]
    mask = [torch.ones(len(each), dtype=torch.bool) for each in ids]
    pad = nn.utils.rnn.pad_sequence
    return {"ids": pad(ids, batch_first=True), "mask": pad(mask, batch_first=True)}


def test_fields_are_padded_by_their_names_wherever_they_are() -> None:
    inputs, targets = loader_of(
        sequences([3, 2], as_lists), pad={"input_ids": 7, "mask": 0}
    ).example(2)
    assert inputs["input_ids"].tolist() == [[0, 0, 0, 7], [1, 1, 7, 7]]
    assert inputs["mask"].tolist() == [[1, 1, 1, 0], [1, 1, 0, 0]]
    assert inputs["score"].tolist() == [0.5, 0.5]
    assert targets.keys() == inputs.keys()
    nested = sequences([1, 2], lambda ids: (Marks(ids, 0.5), {"next": ids, "weight": 1.0}))
    marks, targets = loader_of(nested, pad={"inputs": 5, "next": -1}).example(2)
    assert isinstance(marks, Marks)
    assert marks.ids.tolist() == [[0, 5, 5, 5], [1, 1, 5, 5]]
    assert targets["next"].tolist() == [[0, -1, -1, -1], [1, 1, -1, -1]]
    assert targets["weight"].tolist() == [1.0, 1.0]
    collated = sequences([3, 2], collate_fn=pad_to_longest, lengths=[3, 2])
    inputs, _ = loader_of(collated, pad={"ids": 9, "mask": False}).example(2)
    assert inputs["ids"].tolist() == [[0, 0, 0, 9], [1, 1, 0, 9]]
    assert inputs["mask"].tolist() == [[True] * 3 + [False], [True] * 2 + [False] * 2]


TOO_LONG = "sample 1 has length 14, and the longest of data.buckets is 12 (2 samples are longer)"
FIELDS = "but the sequences have the fields input_ids, mask, score"
LISTS = sequences([3], as_lists)


@pytest.mark.parametrize(
    ("dataset", "options", "message"),
    [
        (sequences([3, 14, 2, 13]), {}, f"data: {TOO_LONG}"),
        (sequences([3, 14, 13]), {"section": "evaluation.data"}, f"evaluation.data: {TOO_LONG}"),
        (
            sequences([3, 10], lengths=[3]),
            {},
            "data: has 2 samples, but its attribute lengths has 1 entries",
        ),
        (
            sequences([3, 10], lengths=[3, 7]),
            {},
            "data: 'inputs' of sample 1 has length 10, but its bucket (data.buckets) has 8",
        ),
        (LISTS, {"pad": {"input_id": 0}}, f"data: data.pad names 'input_id', {FIELDS}"),
        (LISTS, {"pad": {"mask": 0, "label": 0}}, f"data: data.pad names 'label', {FIELDS}"),
        (
            Stream(),
            {},
            "data: is iterable, so that data.buckets cannot sort its samples by length",
        ),
    ],
)
def test_data_that_fit_no_bucket_are_refused(dataset: Any, options: Any, message: str) -> None:
    with pytest.raises(CaptureError) as raised:
        loader_of(dataset, **options).example(2, length=8)
    assert raised.value.message == message
    assert raised.value.hint


class Padless(nn.Module):
    """Asks for the length in all the ways that models do."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.head = nn.Embedding(37, 8), nn.Linear(8, 37)
        self.register_buffer("table", torch.randn(1, 12, 8), persistent=False)
        self.register_buffer("seen", torch.ones(12, 12, dtype=torch.bool).tril(), persistent=False)

    def forward(self, ids: Tensor) -> Tensor:
        length = ids.size(1)
        assert length <= 12, "too long"
        x = self.tokens(ids) + self.table[:, :length]
        seen = self.seen[:length, :length]
        scores = (x @ x.mT).masked_fill(~seen, float("-inf")) / length**0.5
        return self.head(scores.softmax(-1) @ x)


class FixedLength(Padless):
    """Fixes the length of each graph, but computes the same for every length up to a limit."""

    def __init__(self, limit: int) -> None:
        super().__init__()
        self.limit = limit

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids)
        x = x.relu() if ids.shape[1] > self.limit else x
        return self.head(x + torch.linspace(0, 1, int(ids.shape[1]))[:, None])


def mean_by_length(outputs: Tensor, targets: Tensor) -> Tensor:
    """Of targets whose length is free even if that of the inputs is not."""
    return outputs.sum() / outputs.shape[0] / torch.ones(targets.shape[1]).sum()


@pytest.mark.parametrize(
    ("model", "kwargs", "loss", "count"),
    [
        ("Padless", {}, f"{EQUALITY}:token_loss", 1),
        ("FixedLength", {"limit": 12}, f"{EQUALITY}:token_loss", 3),
        ("FixedLength", {"limit": 12}, f"{__file__}:mean_by_length", 3),
        ("FixedLength", {"limit": 10}, f"{EQUALITY}:token_loss", 0),
    ],
)
def test_the_graph_of_a_length_gives_what_the_model_gives_or_a_length_is_refused(
    make_job: Any, run_whole: Any, model: str, kwargs: Any, loss: str, count: int
) -> None:
    buckets = {"buckets": [5, 8, 12], "pad": {"inputs": 0, "targets": -100}}
    data = {"factory": f"{EQUALITY}:Sentences", **buckets}
    job = make_job(f"{__file__}:{model}", kwargs=kwargs, loss=loss, data=data)
    if not count:
        with pytest.raises(CaptureError) as raised:
            job.check_shapes(4)
        assert raised.value.message.startswith(
            "model: its graph for sequences of 12 (data.buckets) differs from that for 5: "
        )
        return
    for graph_of in (job.training_graph, job.evaluation_graph):
        assert len({id(graph_of(3, length)) for length in (0, 5, 8, 12)}) == count
    assert job.training_graph(3).tokens_per_sample
    for length in (5, 8, 12):
        plain = job.wrapper(*job.loader.example(3, length=length))
        assert torch.equal(run_whole(job, Span.of(3, length)), plain)
    job.check_shapes(3)


# Batches by name: tensors and numbers are the graph's, all else is nobody's

CAPTURED = "but the model was captured with [samples, 6] of torch.float32"
DIFFERS = "a batch differs from the training batch that was captured"


def mean_by_count(outputs: Tensor, targets: dict[str, Any]) -> Tensor:
    return nn.functional.cross_entropy(outputs, targets["y"], reduction="sum") / targets["count"]


@pytest.fixture(scope="module")
def described(make_job: Any) -> Any:
    return make_job("mlp", data="Described", loss=f"{__file__}:mean_by_count")


def test_tensors_and_numbers_are_found_by_their_keys_in_any_order_beside_any_number_of_texts(
    described: Any,
) -> None:
    graph, reader = described.training_graph(4), Reader(described.training_graph(4))
    for size in (1, 4, 6):
        inputs, targets = described.loader.example(size)
        found = by_name(graph, (inputs, targets))
        assert {name: getattr(value, "shape", value) for name, value in found.items()} == {
            "inputs": (size, 6),
            "targets_y": (size,),
            "targets_id": (size, 2),
            "targets_count": size,
        }
        turned = by_name(graph, [inputs, dict(reversed(targets.items()))])
        assert list(turned) == list(found)
        assert all(turned[name] is value for name, value in found.items())
    reader.check(reader.read(described.loader.example(4)), 4, ())
    with pytest.raises(CaptureError, match=r"^data: 'targets_count' .* number 2, .* with 4, and"):
        reader.check(reader.read(described.loader.example(2)), 2, ())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"more": torch.zeros(4)}, "tensor targets['more'] is new"),
        (
            {"id": None, "count": torch.zeros(4)},
            "tensor targets['id'] is missing, number targets['count'] is missing, "
            "tensor targets['count'] is new",
        ),
        (
            {"boxes": [1, 2, 3, 4, 5]},
            "number targets['boxes'][0] is new, number targets['boxes'][1] is new, "
            "number targets['boxes'][2] is new, and 2 more",
        ),
    ],
)
def test_other_tensors_or_numbers_are_refused(
    described: Any, change: dict[str, Any], message: str
) -> None:
    inputs, targets = described.loader.example(4)
    for training, section in ((True, "data"), (False, "evaluation.data")):
        with pytest.raises(CaptureError) as raised:
            by_name(described.training_graph(4), (inputs, {**targets, **change}), training=training)
        assert raised.value.message == f"{section}: {DIFFERS}: {message}"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x: x[:3], "of a micro-batch has 3 samples, not 4"),
        (lambda x: x[:, :5], f"of a batch is [4, 5] of torch.float32, {CAPTURED}"),
        (lambda x: x.double(), f"of a batch is [4, 6] of torch.float64, {CAPTURED}"),
    ],
    ids=["fewer samples", "other shape", "other type"],
)
def test_batches_of_another_form_are_refused(described: Any, change: Any, message: str) -> None:
    reader = Reader(described.training_graph(4))
    inputs, targets = described.loader.example(4)
    found = reader.read((change(inputs), targets))
    with pytest.raises(CaptureError) as raised:
        reader.check(found, 4, ["inputs"])
    assert raised.value.message == f"data: 'inputs' {message}"


def marked() -> list[Any]:
    nested = Marks([torch.ones(2), {"weight": torch.ones(1)}], torch.tensor(1))
    return [(torch.ones(6), nested)] * 8


def loss_of_marks(outputs: Tensor, targets: Marks) -> Tensor:
    return nn.functional.cross_entropy(outputs, targets.score)


def test_named_tuples_and_lists_are_taken_apart(make_job: Any) -> None:
    job = make_job("mlp", data=f"{__file__}:marked", loss=f"{__file__}:loss_of_marks")
    inputs, marks = job.loader.example(3)
    found = by_name(job.training_graph(4), (inputs, marks._replace(ids=tuple(marks.ids))))
    expected = [inputs, marks.ids[0], marks.ids[1]["weight"], marks.score]
    assert [id(value) for value in found.values()] == [id(value) for value in expected]


OWN_NAMES = """
import torch
from torch import nn
from torch.utils.data import TensorDataset

class Net(nn.Linear):
    def __init__(self, **names):
        super().__init__(4, 1)

class Data(TensorDataset):
    collate_fn = None
    def __init__(self):
        super().__init__(torch.randn(16, 4), torch.randn(16, 1))
        self.order = 3

class Mappings(nn.Linear):
    def __init__(self):
        super().__init__(4, 1)
    def forward(self, a):
        return super().forward(a)

def mappings():
    return [({"a": torch.randn(4)}, {"a": torch.randn(1)}) for _ in range(16)]

def failing(outputs, targets):
    return nn.functional.mse_loss(outputs, targets["b"])
"""


def test_attributes_of_a_dataset_that_are_none_or_its_own_business_leave_it_as_it_is(
    make_job, tmp_path: Path
) -> None:
    path = tmp_path / "own_names.py"
    path.write_text(OWN_NAMES)
    job = make_job(f"{path}:Net", loss="torch.nn:MSELoss", data=f"{path}:Data")
    assert sorted(job.loader.order(0)) == list(range(16)) != job.loader.order(0)
    inputs, targets = job.loader.example(3)
    assert (inputs.shape, targets.shape) == ((3, 4), (3, 1))


def test_a_loss_that_fails_on_other_mappings_than_the_models_is_refused(
    make_job, tmp_path: Path
) -> None:
    path = tmp_path / "own_names.py"
    path.write_text(OWN_NAMES)
    job = make_job(f"{path}:Mappings", loss=f"{path}:failing", data=f"{path}:mappings")
    refusal = job.misfit(4)
    assert isinstance(refusal, CaptureError)
    assert "raised KeyError: 'b'" in refusal.message
    assert "loss(outputs, targets)" in str(refusal.hint)


@pytest.mark.parametrize(
    ("weight", "says"),
    [
        (None, "a NoneType (None)"),
        (torch.ones(3), "a Tensor of shape [3]"),
        (float("nan"), "a float (nan)"),
        (-1, "a int (-1)"),
    ],
)
def test_a_weight_of_targets_is_one_number_from_0_on(weight: Any, says: str) -> None:
    assert target_weight(lambda _: torch.tensor(2), "m:w", None) == 2
    with pytest.raises(CaptureError) as caught:
        target_weight(lambda _: weight, "m:w", None)
    assert caught.value.message == f"loss.weight: m:w returned {says}, not one number from 0 on"


class Outputs(NamedTuple):
    logits: Tensor
    loss: Tensor


def test_the_loss_of_a_named_tuple_is_its_field_loss() -> None:
    outputs = Outputs(torch.zeros(2, 3), torch.ones(()))
    assert loss_of_outputs(outputs) is outputs.loss
    assert loss_of_outputs((outputs.loss, outputs.logits)) is outputs.loss


def test_a_dataset_of_two_loaders_is_told_the_epoch_that_each_reads():
    dataset = Curriculum(4)
    training, held_out = (Loader(dataset, seed=0, batch_size=4, shuffle=False) for _ in range(2))
    batches = training.micro_batches(islice(training.batches(), 3), 2)
    first = [next(batches)[0] for _ in range(3)]  # of the second epoch, half
    assert [int(x) // 100 for inputs in first for x in inputs] == [0, 0, 0, 0, 1, 1]
    (evaluated, _), *_ = held_out.micro_batches(islice(held_out.batches(), 1), 4)
    assert [int(x) // 100 for x in evaluated] == [0, 0, 0, 0]
    assert [int(x) // 100 for x in next(batches)[0]] == [1, 1]
