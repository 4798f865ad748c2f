"""What becomes of a buffer in which each replica of a stage has written."""

import pytest
import torch

from pipectl.runtime.replicas import agree


@pytest.mark.parametrize(
    ("taken", "split", "count"), [([[0, 1, 2]] * 2, True, 8), ([[0, 2, 4], [1, 3, 5]], False, 11)]
)
def test_a_micro_batch_that_replicas_split_counts_once(
    taken: list[list[int]], split: bool, count: int
) -> None:
    before, after = torch.tensor([5]), torch.tensor([[8], [8]])
    assert agree(after, taken, before, split=split).tolist() == [count]


def test_a_mean_weighs_replicas_by_their_micro_batches() -> None:
    after = torch.tensor([[0.0], [12.0]])
    assert agree(after, [[0, 2], [1]], None, split=False).tolist() == [4.0]
