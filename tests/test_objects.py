"""What datasets and samplers keep is set back to what it was, or refused if it is too large."""

import random
import tracemalloc
from collections import deque

import numpy as np
import pytest
from torch.utils.data import Sampler

from pipectl import objects
from pipectl.errors import CaptureError
from pipectl.objects import Kept, restoring

COUNT = 50_000
CHANGES = {
    "shuffled": (list(range(COUNT)), random.shuffle),
    "filled": (deque(range(COUNT)), lambda own: own.append(0)),
    "replaced": (dict.fromkeys(range(COUNT)), lambda own: own.update(a=1)),
}


class Samples(Sampler):
    """A sampler that counts, and keeps something large."""

    def __init__(self, large):
        self.records = [[index, [index]] for index in range(20_000)]
        self.epochs, self.large, self.random = 0, large, random.Random(1)


@pytest.fixture
def few(monkeypatch):
    monkeypatch.setattr(objects, "_MAX_KEPT_BYTES", 2**18)


@pytest.mark.parametrize("name", CHANGES)
def test_what_is_too_large_to_be_copied_may_not_change(few, name):
    large, change = CHANGES[name]
    sampler = Samples(large)
    kept, wanted = Kept(sampler), sampler.random.random()
    sampler.epochs += 1
    kept.restore()
    assert (sampler.epochs, sampler.random.random()) == (0, wanted)
    change(large)
    said = r"'large', of 50,000 entries \(.*\), has changed as data were read.* more than 256 KiB"
    with pytest.raises(CaptureError, match=said):
        kept.restore()


def test_copies_of_what_data_keep_take_little_memory(few):
    sampler = Samples(np.arange(COUNT * 10))
    tracemalloc.start()
    try:
        kept = Kept(sampler)
        now, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert now < 2**22
    sampler.epochs = 7
    kept.restore()
    assert sampler.epochs == 0


@pytest.mark.parametrize("make", [random.Random, np.random.default_rng])
def test_generators_are_set_back_and_lists_copied_however_large_arrays_are(few, make):
    order, own = list(range(1000)), make(1)
    sampler = Samples([np.arange(25_000), np.arange(7000), [order, [own]]])
    sampler.records = []
    kept, wanted = Kept(sampler), own.random()
    order.reverse()
    kept.restore()
    assert (own.random(), order[0]) == (wanted, 0)


def test_what_fails_comes_before_what_cannot_be_set_back(few):
    sampler = Samples(list(range(COUNT)))
    kept = Kept(sampler)

    def fail():
        with restoring(kept.restore):
            sampler.large.clear()
            raise ValueError("the first")

    with pytest.raises(ValueError, match="the first"):
        fail()
