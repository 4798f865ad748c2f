"""What datasets and samplers keep is set back to what it was, or refused if it is too large."""

import random
import tracemalloc
from collections import deque

import numpy as np
import pytest
from torch.utils.data import Sampler

from pipectl import objects
from pipectl.errors import CaptureError
from pipectl.objects import Kept

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
    with pytest.raises(CaptureError, match=r"'large', of .* has changed as data were read"):
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
