"""Batches of sequences of several lengths: who is in which, how they are padded and captured."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.data import Dataset, IterableDataset

from pipectl.capture.data import Loader
from pipectl.capture.slices import Rows
from pipectl.errors import CaptureError

BUCKETS = (4, 8, 12)
EQUALITY = Path(__file__).parents[1] / "equality" / "models.py"


class Sequences(Dataset):
    """The numbers of their samples, as often as these are long."""

    lengths: list[int]
    """Told only where a test sets them."""

    def __init__(self, lengths: list[int]) -> None:
        self.each = lengths

    def __len__(self) -> int:
        return len(self.each)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        ids = torch.full((self.each[index],), index)
        return ids, ids + 1


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
    loader = loader_of(Sequences(lengths), batch_size=size, drop_last=drop_last)
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


def test_epochs_mix_lengths_in_orders_of_their_own() -> None:
    loader = loader_of(Sequences([1 + index % 12 for index in range(240)]), batch_size=4)
    lengths = [[batch.length for batch in loader.epoch(epoch)] for epoch in range(2)]
    assert lengths[0] != lengths[1]
    assert sum(a != b for a, b in zip(lengths[0], lengths[0][1:], strict=False)) > 20
    again = loader_of(Sequences([1 + index % 12 for index in range(240)]), batch_size=4)
    assert again.order(1) == loader.order(1)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_batch_is_padded_to_the_length_of_its_bucket(workers: int) -> None:
    dataset = Sequences([5, 2, 7, 12, 1, 8])
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
    score: float


class Mapped(Sequences):
    """As datasets of HuggingFace give them: lists under keys."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        ids = [index] * self.each[index]
        return {"input_ids": ids, "mask": [1] * len(ids), "score": 0.5}


def test_fields_of_mappings_have_the_names_of_their_keys() -> None:
    loader = loader_of(Mapped([3, 2]), pad={"input_ids": 7, "mask": 0})
    inputs, targets = loader.example(2)
    assert inputs["input_ids"].tolist() == [[0, 0, 0, 7], [1, 1, 7, 7]]
    assert inputs["mask"].tolist() == [[1, 1, 1, 0], [1, 1, 0, 0]]
    assert inputs["score"].tolist() == [0.5, 0.5]
    assert targets.keys() == inputs.keys()


def test_fields_within_the_parts_of_a_pair() -> None:
    class Nested(Sequences):
        def __getitem__(self, index: int) -> Any:
            ids = torch.full((self.each[index],), index)
            return Marks(ids, 0.5), {"next": ids, "weight": 1.0}

    marks, targets = loader_of(Nested([1, 2]), pad={"inputs": 5, "next": -1}).example(2)
    assert isinstance(marks, Marks)
    assert marks.ids.tolist() == [[0, 5, 5, 5], [1, 1, 5, 5]]
    assert targets["next"].tolist() == [[0, -1, -1, -1], [1, 1, -1, -1]]
    assert targets["weight"].tolist() == [1.0, 1.0]


class Collated(Sequences):
    """Pads each batch to its longest, and makes the mask itself, which shows the real lengths."""

    def collate_fn(self, samples: list[Any]) -> dict[str, Tensor]:
        ids = [inputs for inputs, _ in samples]
        mask = [torch.ones(len(each), dtype=torch.bool) for each in ids]
        pad = nn.utils.rnn.pad_sequence
        return {"ids": pad(ids, batch_first=True), "mask": pad(mask, batch_first=True)}


def test_what_a_collate_fn_pads_to_the_longest_is_padded_on() -> None:
    dataset = Collated([3, 2])
    dataset.lengths = [3, 2]
    inputs, _ = loader_of(dataset, pad={"ids": 9, "mask": False}).example(2)
    assert inputs["ids"].tolist() == [[0, 0, 0, 9], [1, 1, 0, 9]]
    assert inputs["mask"].tolist() == [[True] * 3 + [False], [True] * 2 + [False] * 2]


def with_lengths(*lengths: int) -> Sequences:
    dataset = Sequences([3, 10])
    dataset.lengths = list(lengths)
    return dataset


class Stream(IterableDataset):
    def __iter__(self) -> Any:
        return iter(())


TOO_LONG = "sample 1 has length 14, and the longest of data.buckets is 12 (2 samples are longer)"
FIELDS = "but the sequences have the fields input_ids, mask, score"


@pytest.mark.parametrize(
    ("dataset", "options", "message"),
    [
        (Sequences([3, 14, 2, 13]), {}, f"data: {TOO_LONG}"),
        (Sequences([3, 14, 13]), {"section": "evaluation.data"}, f"evaluation.data: {TOO_LONG}"),
        (with_lengths(3), {}, "data: has 2 samples, but its attribute lengths has 1 entries"),
        (
            with_lengths(3, 7),
            {},
            "data: 'inputs' of sample 1 has length 10, but its bucket (data.buckets) has 8",
        ),
        (Mapped([3]), {"pad": {"input_id": 0}}, f"data: data.pad names 'input_id', {FIELDS}"),
        (Mapped([3]), {"pad": {"mask": 0, "label": 0}}, f"data: data.pad names 'label', {FIELDS}"),
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
    assert raised.value.cure


# Jobs with buckets


def gpt_job(make_job: Any, **more: Any) -> Any:
    buckets = {"buckets": [5, 8, 12], "pad": {"inputs": 0, "targets": -100}}
    data = {"factory": f"{EQUALITY}:Sentences", **buckets}
    return make_job(
        more.pop("model", f"{EQUALITY}:gpt"), loss=f"{EQUALITY}:token_loss", data=data, **more
    )


def test_one_graph_serves_all_lengths_up_to_that_of_the_table(make_job: Any) -> None:
    job = gpt_job(make_job)
    graphs = [job.training_graph(4, length) for length in (0, 5, 8, 12)]
    assert all(graph is graphs[0] for graph in graphs)
    job.check_shapes(4)
    evaluated = [job.evaluation_graph(4, length) for length in (5, 12)]
    assert evaluated[0] is evaluated[1]
    assert graphs[0].tokens_per_sample


@pytest.mark.parametrize("model", ["Padless", "FixedLength"])
def test_the_graph_of_a_length_gives_what_the_model_gives(
    make_job: Any, run_whole: Any, model: str
) -> None:
    job = gpt_job(make_job, model=f"{__file__}:{model}")
    graphs = {id(job.training_graph(3, length)) for length in (5, 8, 12)}
    assert len(graphs) == (1 if model == "Padless" else 3)
    for length in (5, 8, 12):
        plain = job.step(*job.loader.example(3, length=length))
        assert torch.equal(run_whole(job, Rows.of(3, length)), plain)
    job.check_shapes(3)


def test_a_model_that_computes_something_else_for_a_length_is_refused(make_job: Any) -> None:
    job = gpt_job(make_job, model=f"{__file__}:Branching")
    with pytest.raises(CaptureError) as raised:
        job.check_shapes(4)
    assert raised.value.message.startswith(
        "model: its graph for sequences of 12 (data.buckets) differs from that for 5: "
    )


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
    """Fixes the length of each graph, but computes the same for every length."""

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids)
        return self.head(x + torch.linspace(0, 1, int(ids.shape[1]))[:, None])


class Branching(Padless):
    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids)
        return self.head(x.relu() if ids.shape[1] > 10 else x)
