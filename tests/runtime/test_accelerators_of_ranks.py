"""Which accelerator a rank takes, whatever its launcher shows it."""

from __future__ import annotations

import pytest
import torch

from pipectl.runtime import device


@pytest.mark.parametrize(
    ("asked", "seen", "taken"),
    [
        (4, 4, [0, 1, 2, 3]),
        (2, 2, [0, 1, 0, 1]),
        (8, 8, [0, 1, 2, 3]),
        (4, 1, [0, 0, 0, 0]),  # each rank is shown its own, always under the number 0
        (2, 4, [0, 1, 0, 1]),
    ],
)
def test_ranks_of_a_node_take_turns(
    monkeypatch: pytest.MonkeyPatch, asked: int, seen: int, taken: list[int]
) -> None:
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: seen)
    monkeypatch.setattr(device, "AcceleratorDevice", lambda index, in_place: index)
    assert [device.choose_device(asked, local) for local in range(4)] == taken
