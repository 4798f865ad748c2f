"""Autocast and no_grad inside a model: properties of its operators, which can be cut apart."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from pipectl.capture import CapturedGraph, Cut, build_stage
from pipectl.capture.regions import WHOLE, Autocast, Region, arithmetic, region_of

HALF = Autocast("cpu", torch.bfloat16, enabled=True)
FULL = Autocast("cpu", torch.bfloat16, enabled=False)


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 3)


class Nested(Layers):
    """Half precision with a float32 softmax inside, and a weight used with and without grad."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            y = self.first(x)
            with torch.autocast("cpu", enabled=False):
                weights = (y.float() * 3).softmax(-1)
                with torch.no_grad():
                    shift = self.second(weights) * 0.5
            y = self.second(y * weights) + shift
        return self.head(y.float())


class Inference(Layers):
    def forward(self, x: Tensor) -> Tensor:
        with torch.inference_mode():
            features = self.first(x)
        return self.head(features.clone())


class Branches(Layers):
    """An autocast within a branch, which is one operator."""

    def forward(self, x: Tensor) -> Tensor:
        def half(x: Tensor) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                return self.first(x).float()

        y = torch.cond(x.sum() > -1e9, half, lambda x: self.first(x).sin(), (x,))
        return self.head(self.second(y))


class Written(Layers):
    """A value of several uses that is written where no gradients are recorded."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        with torch.no_grad():
            y[:, 0].mul_(0.5)
        z = self.second(y)
        return self.head(z + y) + y.mean()


class Asking(Layers):
    """Asks for dtypes, switches autocast off in between, and uses a weight with a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        wide = x.float()
        scaled = (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)
        with torch.autocast("cpu", enabled=False):
            angle = torch.sin(scaled.float())
        x = self.second(self.norm(scaled + angle.to(x.dtype)))
        return self.head(x * 1.5 if x.dtype == torch.bfloat16 else x)


class Switched(nn.Module):
    def __init__(self, enabled: bool) -> None:
        super().__init__()
        self.head, self.enabled = nn.Linear(4, 3), enabled

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=self.enabled):
            return self.head(x)


class Vectors(Dataset):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return torch.sin(torch.arange(4.0) + index), index % 3


@pytest.fixture(scope="module")
def job_named(make_job: Any) -> Any:
    """The job of a model of this file, shared by its tests."""
    here = f"{Path(__file__)}"
    return cache(lambda model: make_job(f"{here}:{model}", data=f"{here}:Vectors"))


def regions(graph: CapturedGraph) -> dict[str, Region]:
    return {node.name: region_of(node) for node in graph.operators}


def test_every_operator_knows_what_holds_for_it(job_named: Any) -> None:
    found = regions(job_named("Nested").training_graph(4))
    assert not any("autocast" in name or "grad" in name for name in found)
    assert found["linear"] == found["mul_2"] == Region((HALF,), gradients=True)
    assert found["softmax"] == Region((FULL,), gradients=True)
    assert found["linear_1"] == found["mul_1"] == Region((FULL,), gradients=False)
    assert found["linear_3"] == found["cross_entropy_loss"] == WHOLE


def test_no_grad_in_an_autocast_leaves_no_gradient(job_named: Any) -> None:
    graph = job_named("Nested").training_graph(4)
    assert not graph.requires_grad["mul_1"]
    assert graph.requires_grad["softmax"]


@pytest.mark.parametrize("model", ["Nested", "Branches", "Written"])
def test_one_stage_equals_the_model_to_the_bit(
    job_named: Any, assert_as_the_model: Any, model: str
) -> None:
    assert_as_the_model(job_named(model))
    assert (torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")) == (True, False)


def test_a_graph_captured_in_half_precision_equals_the_model_to_the_bit(
    make_job: Any, assert_as_the_model: Any
) -> None:
    here, training = Path(__file__), {"steps": 1, "batch_size": 8, "precision": "bf16"}
    job = make_job(f"{here}:Asking", data=f"{here}:Vectors", training=training)
    assert any(region.autocasts for region in regions(job.training_graph(4)).values())
    assert_as_the_model(job, "bf16")
    with arithmetic("bf16", torch.device("cpu")):
        assert job.model(job.loader.example(4)[0]).dtype == torch.bfloat16


def test_regions_can_be_cut_and_are_entered_once_for_neighbours(job_named: Any) -> None:
    graph = job_named("Nested").training_graph(4)
    names = [node.name for node in graph.operators]
    half = names.index("softmax")
    cut = Cut(graph, {name: int(i >= half) for i, name in enumerate(names)}, training=True)
    for stage, entered in ((0, 2), (1, 3)):
        module: Any = build_stage(cut, stage, 4).module
        called = [n.name for n in module.graph.nodes if n.name.startswith("enter")]
        assert len(called) == entered


def test_a_view_without_gradients_lets_none_through(job_named: Any) -> None:
    """Torch says of it that it requires one."""
    graph = job_named("Written").training_graph(4)
    assert [name for name, passes in graph.requires_grad.items() if not passes] == [
        name for name, region in regions(graph).items() if not region.gradients
    ]


def test_inference_mode_counts_as_no_grad(job_named: Any) -> None:
    enter = torch.inference_mode.__enter__
    graph = job_named("Inference").training_graph(4)
    assert region_of(graph.operators[0]) == Region((), gradients=False)
    assert not graph.requires_grad[graph.operators[0].name]
    assert torch.inference_mode.__enter__ is enter


def test_the_region_is_part_of_an_operators_signature(make_job: Any) -> None:
    """The same operators in another arithmetic are another model."""
    model, data = (f"{Path(__file__)}:{name}" for name in ("Switched", "Vectors"))
    one, other = (
        make_job(model, data=data, kwargs={"enabled": enabled}).training_graph(4)
        for enabled in (True, False)
    )
    assert [n.name for n in one.operators] == [n.name for n in other.operators]
    assert "'linear'" in str(one.difference(other.fingerprint, other.signatures))
