"""Models built without memory: each tensor comes to be by the factory's own rule, alone."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from pipectl.capture.deferred import Deferred
from pipectl.capture.tensors import is_deferred
from pipectl.errors import CaptureError


class Block(nn.Module):
    """Parameters of several origins, tables as buffer and attribute, a value read in between."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.scale = nn.Parameter(torch.ones(width) * 0.5)
        self.drawn = nn.Parameter(torch.randn(width, width) * 0.02)
        self.norm = nn.BatchNorm1d(width)
        rates = torch.linspace(0, 0.3, 4)
        self.dropout = nn.Dropout(rates[2].item())
        angles = torch.outer(torch.arange(6), 1.0 / 10.0 ** torch.arange(0, width, 2).div(width))
        self.register_buffer("table", torch.polar(torch.ones_like(angles), angles))
        self.register_buffer("mask", torch.tensor([[1, 0], [2, 3]]).tril(), persistent=False)
        self.levels = torch.tensor([0.5, 0.25]).cumsum(0)


def build() -> nn.Module:
    block = Block(8)
    model = nn.Sequential(block, copy.deepcopy(block), nn.Linear(8, 3))
    nn.init.normal_(model[2].weight, mean=2.0, std=1e-3)
    with torch.no_grad():
        model[2].weight[:, 0].zero_()
    model[1].scale = model[0].scale
    return model


def deferred(factory: Callable[[], nn.Module], seed: int = 3) -> tuple[Deferred, nn.Module]:
    notes = Deferred(seed)
    return notes, notes.build(factory)


def tensors(model: nn.Module) -> dict[str, Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


@pytest.fixture(scope="module")
def values() -> dict[str, Tensor]:
    notes, model = deferred(build)
    return {name: notes.make(tensor, name) for name, tensor in tensors(model).items()}


def test_no_tensor_has_memory_at_first() -> None:
    _, model = deferred(lambda: nn.Linear(2**20, 2**20))  # 4 TiB
    assert all(is_deferred(tensor) for tensor in tensors(model).values())


def test_tensors_are_those_of_an_ordinary_model_but_for_random_values(
    values: dict[str, Tensor],
) -> None:
    ordinary = tensors(build())
    assert values.keys() == ordinary.keys()
    for name, tensor in ordinary.items():
        assert type(values[name]) is type(tensor), name
        for trait in ("dtype", "shape", "requires_grad"):
            assert getattr(values[name], trait) == getattr(tensor, trait), name
        assert values[name].stride() == tensor.stride(), name
    fixed = [name for name in values if not any(part in name for part in ("linear", "drawn", "2."))]
    assert len(fixed) == 15
    assert all(torch.equal(values[name], ordinary[name]) for name in fixed)


def test_random_parameters_follow_the_rule_of_the_factory(values: dict[str, Tensor]) -> None:
    bound = 8**-0.5
    assert 0.8 * bound < float(values["0.linear.weight"].detach().abs().max()) <= bound
    assert 0.015 < float(values["0.drawn"].detach().std()) < 0.025
    assert float((values["2.weight"][:, 1:] - 2.0).detach().abs().max()) < 0.01
    assert torch.equal(values["2.weight"][:, 0], torch.zeros(3))


def test_copies_are_equal_and_layers_are_not(values: dict[str, Tensor]) -> None:
    assert torch.equal(values["0.linear.weight"], values["1.linear.weight"])
    assert not torch.equal(values["0.linear.weight"].detach(), values["0.drawn"].detach())


def test_a_tensor_depends_on_the_seed_alone_and_no_generator_on_it(
    values: dict[str, Tensor],
) -> None:
    notes, model = deferred(build)
    torch.rand(7)
    before = torch.get_rng_state()
    for name, tensor in reversed(tensors(model).items()):
        assert torch.equal(notes.make(tensor, name), values[name]), name
    assert torch.equal(torch.get_rng_state(), before)
    notes, model = deferred(build, seed=4)
    assert not torch.equal(notes.make(model[0].drawn, "0.drawn"), values["0.drawn"])


def test_values_that_the_factory_reads_and_plain_attributes_are_made_at_once() -> None:
    _, model = deferred(build)
    assert model[0].dropout.p == pytest.approx(0.2)
    assert torch.equal(model[0].levels, torch.tensor([0.5, 0.75]))


def test_a_parameter_without_values() -> None:
    class Forgotten(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.empty(3))

    notes, model = deferred(Forgotten)
    with pytest.raises(
        CaptureError, match="weight is created in the factory but never init"
    ) as found:
        notes.make(model.weight, "weight")
    assert found.value.cure is not None
    assert "model.weights" in found.value.cure


@pytest.mark.parametrize("model", ["gpt", "tied", "cnn", "dense"])
def test_the_graphs_are_those_of_an_ordinary_model(make_job, job_of, model: str) -> None:
    eager, per_rank = job_of(model), make_job(model, materialize="per_rank")
    for graph in ("training_graph", "evaluation_graph"):
        expected, found = getattr(eager, graph)(4), getattr(per_rank, graph)(4)
        assert found.fingerprint == expected.fingerprint
        assert found.groups == expected.groups
        assert found.requires_grad == expected.requires_grad
    assert all(is_deferred(tensor) for tensor in per_rank.states.values())
    assert per_rank.tied == eager.tied


def test_only_what_is_asked_for_is_materialized(make_job) -> None:
    captured = make_job("cnn", materialize="per_rank")
    captured.materialize(["model.head.weight", "model.stem.1.running_var"])
    real = [name for name, tensor in captured.states.items() if not is_deferred(tensor)]
    assert sorted(real) == ["model.head.weight", "model.stem.1.running_var"]
    assert torch.equal(captured.states["model.stem.1.running_var"], torch.ones(8))


def test_a_factory_that_needs_values_names_the_way_out(make_job, tmp_path: Path) -> None:
    (tmp_path / "needy.py").write_text(
        "import torch\n"
        "class Needy(torch.nn.Linear):\n"
        "    def __init__(self):\n"
        "        super().__init__(2, 2)\n"
        "        self.weight.detach().numpy()\n"
    )
    with pytest.raises(CaptureError, match=r"needy.py:5.*materialize: per_rank") as found:
        make_job(f"{tmp_path / 'needy.py'}:Needy", materialize="per_rank")
    assert found.value.cure is not None
    assert "materialize: eager" in found.value.cure


class Plain(nn.Module):
    """Two layers; perhaps another one made before them."""

    def __init__(self, *, more: bool = False, look: bool = False) -> None:
        super().__init__()
        if more:
            self.added = nn.Linear(5, 5)
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.seen = float(self.second.weight.detach().sum()) if look else 0.0


def all_of(factory: Callable[[], nn.Module]) -> dict[str, Tensor]:
    notes, model = deferred(factory)
    return {name: notes.make(tensor, name).detach() for name, tensor in tensors(model).items()}


def test_a_layer_that_is_added_changes_no_other() -> None:
    before, after = all_of(Plain), all_of(lambda: Plain(more=True))
    assert after.keys() - before.keys() == {"added.weight", "added.bias"}
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_what_the_factory_saw_is_what_the_parameter_gets() -> None:
    notes, model = deferred(lambda: Plain(look=True))
    made = notes.make(model.second.weight, "second.weight")
    assert float(made.detach().sum()) == pytest.approx(model.seen)


def test_halves_of_one_draw_belong_together() -> None:
    class Halves(nn.Module):
        def __init__(self, *, more: bool = False) -> None:
            super().__init__()
            if more:
                self.added = nn.Parameter(torch.randn(3))
            drawn = torch.randn(2, 8)
            self.low, self.high = nn.Parameter(drawn[0].clone()), nn.Parameter(drawn[1].clone())
            self.whole = nn.Parameter(drawn)

    values, more = all_of(Halves), all_of(lambda: Halves(more=True))
    assert torch.equal(torch.stack([values["low"], values["high"]]), values["whole"])
    assert torch.equal(values["whole"], more["whole"])
    assert not torch.equal(values["low"], values["high"])


def test_copies_of_a_layer_that_is_not_in_the_model_are_equal() -> None:
    def factory() -> nn.Module:
        layer = nn.Linear(4, 4)
        nn.Linear(4, 4)
        return nn.Sequential(copy.deepcopy(layer), copy.deepcopy(layer))

    values = all_of(factory)
    assert torch.equal(values["0.weight"], values["1.weight"])
