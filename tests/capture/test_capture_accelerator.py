"""An accelerator of any kind: pretended, as torch knows those of other vendors."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pipectl.capture import randomness, regions
from pipectl.capture.randomness import seed_operator
from pipectl.capture.regions import _devices, accelerator_in_use


@pytest.fixture
def pretend(monkeypatch: pytest.MonkeyPatch) -> Any:
    def make(module: Any) -> None:
        monkeypatch.setattr(regions, "accelerator", lambda: ("npu", module))
        monkeypatch.setattr(randomness, "accelerator", lambda: ("npu", module))

    return make


def test_one_that_nobody_has_used_is_left_alone(pretend: Any) -> None:
    pretend(SimpleNamespace(is_initialized=lambda: False))
    assert accelerator_in_use() is None
    seed_operator(1, 2)


def test_an_operator_is_seeded_on_the_current_one(pretend: Any) -> None:
    generators = [torch.Generator().manual_seed(3), torch.Generator()]
    pretend(SimpleNamespace(default_generators=generators, current_device=lambda: 1))
    seed_operator(1, 2)
    expected = torch.default_generator.initial_seed()
    assert [each.initial_seed() for each in generators] == [3, expected]


def test_one_without_generators_of_its_own_is_seeded_as_a_whole(pretend: Any) -> None:
    seeds: list[int] = []
    pretend(SimpleNamespace(manual_seed=seeds.append))
    seed_operator(1, 2)
    assert seeds == [torch.default_generator.initial_seed()]
    # An autocast that was captured on the CPU applies to both.
    assert [list(_devices(kind)) for kind in ("cpu", "npu", "cuda")] == [
        ["cpu", "npu"],
        ["npu"],
        [],
    ]
