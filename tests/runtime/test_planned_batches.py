"""Which steps are recorded: those with the batch that a plan predicts."""

import weakref
from types import SimpleNamespace

import pytest

from pipectl.capture.data import Loader, Samples
from pipectl.runtime.tracing import PlannedBatches


class Sequences(list[list[int]]):
    """Four sequences of each of two lengths."""

    @property
    def lengths(self) -> list[int]:
        return list(map(len, self))


@pytest.mark.parametrize(
    ("samples", "step", "steps", "recorded"),
    [
        (17, 10, 20, 11),  # 5 steps an epoch, of which the last has one sample
        (17, 10, 10, 9),
        (17, 10, 5, 4),
        (17, 10, 7, 7),
        (16, 10, 4, 4),
        (16, 10, 12, 10),
        (17, 1, 1, 1),
        (3, 10, 2, 2),
    ],
)
def test_the_nearest_step_with_a_full_batch_is_recorded(samples, step, steps, recorded):
    loader = Loader([0] * samples, seed=0, batch_size=4)
    planned = PlannedBatches(loader, SimpleNamespace(batch_size=4))
    assert planned.nearest([step], steps) == {recorded}


def test_no_list_of_batches_outlives_the_search_and_none_is_made_for_nothing(monkeypatch):
    class Batches(list[Samples]):
        """May have weak references."""

    made = []

    def epoch(number: int) -> Batches:
        batches = Batches(plain(number))
        made.append(weakref.ref(batches))
        return batches

    loader = Loader([0] * 17, seed=0, batch_size=4)
    plain = loader.epoch
    monkeypatch.setattr(loader, "epoch", epoch)
    planned = PlannedBatches(loader, SimpleNamespace(batch_size=4))
    assert planned.nearest([], 20) == frozenset()
    assert made == []
    assert planned.nearest([2, 3, 4], 20) == {2, 3, 4}
    assert [each() for each in made] == [None]  # made once


def test_a_step_with_the_longest_sequences_is_recorded():
    data = Sequences([[0] * length for length in (3, 3, 3, 3, 8, 8, 8, 8)])
    loader = Loader(data, seed=0, batch_size=4, buckets=(4, 8))
    planned = PlannedBatches(loader, SimpleNamespace(batch_size=4))
    lengths = [batch.length for epoch in range(10) for batch in loader.epoch(epoch)]
    assert {4, 8} == set(lengths)
    for step in range(1, 15):
        assert planned.nearest([step], 20) == {step + lengths[step - 1 :].index(8)}
    short = next(batch for batch in loader.epoch(0) if batch.length == 4)
    assert planned.differs(short) == "its sequences were padded to 4 positions, not 8"
