"""Weights of a job: made without memory by the factory's own rules, or read from a checkpoint."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file, save_model
from torch import Tensor, nn

from pipectl.capture import CapturedJob
from pipectl.capture.deferred import Deferred
from pipectl.capture.factories import find
from pipectl.capture.tensors import is_deferred
from pipectl.capture.weights import Weights
from pipectl.errors import CaptureError, DataFileError, SpecError

EQUALITY = Path(__file__).parents[1] / "equality" / "models.py"


class Block(nn.Module):
    """Parameters of several origins, halves of a draw, tables in several places, a value read."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.scale = nn.Parameter(torch.ones(width) * 0.5)
        self.drawn = nn.Parameter(torch.randn(width, width) * 0.02)
        halves = torch.randn(2, width)
        self.low, self.high = (nn.Parameter(half.clone()) for half in halves)
        self.whole = nn.Parameter(halves)
        self.norm = nn.BatchNorm1d(width)
        rates = torch.linspace(0, 0.3, 4)
        self.dropout = nn.Dropout(rates[2].item())
        angles = torch.outer(torch.arange(6), 1.0 / 10.0 ** torch.arange(0, width, 2).div(width))
        self.register_buffer("table", torch.polar(torch.ones_like(angles), angles))
        self.register_buffer("mask", torch.tensor([[1, 0], [2, 3]]).tril(), persistent=False)
        self.levels = torch.tensor([0.5, 0.25]).cumsum(0)


def build(more: bool = False, look: bool = False) -> nn.Sequential:
    """Two equal blocks and a layer; perhaps another layer made before them, or a look at values."""
    added = nn.Linear(5, 5) if more else None
    block = Block(8)
    model = nn.Sequential(block, copy.deepcopy(block), nn.Linear(8, 3))
    if added is not None:
        model.added = added
    block.seen = float(block.drawn.detach().sum()) if look else 0.0
    nn.init.normal_(model[2].weight, mean=2.0, std=1e-3)
    with torch.no_grad():
        model[2].weight[:, 0].zero_()
    model[1].scale = model[0].scale
    return model


def tensors(model: nn.Module) -> dict[str, Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def made(factory: Callable[[], Any], seed: int = 3) -> tuple[Any, dict[str, Tensor]]:
    """The model without memory, and its tensors, made last to first."""
    notes = Deferred(seed)
    model = notes.build(factory)
    names = reversed(tensors(model).items())
    return model, {name: notes.make(tensor, name).detach() for name, tensor in names}


def test_tensors_are_those_of_an_ordinary_model_but_for_random_values() -> None:
    notes, ordinary = Deferred(3), tensors(build())
    model = notes.build(build)
    assert tensors(model).keys() == ordinary.keys()
    values = {name: notes.make(tensor, name) for name, tensor in tensors(model).items()}
    for name, tensor in ordinary.items():
        assert type(values[name]) is type(tensor), name
        for trait in ("dtype", "shape", "requires_grad"):
            assert getattr(values[name], trait) == getattr(tensor, trait), name
        assert values[name].stride() == tensor.stride(), name
    drawn = ("linear", "drawn", "low", "high", "whole", "2.")
    fixed = [name for name in values if not any(part in name for part in drawn)]
    assert len(fixed) == 15
    assert all(torch.equal(values[name], ordinary[name]) for name in fixed)
    # Values that the factory reads, and plain attributes, are made at once.
    assert model[0].dropout.p == pytest.approx(0.2)
    assert torch.equal(model[0].levels, torch.tensor([0.5, 0.75]))


def test_random_values_follow_the_rule_of_the_factory_and_depend_on_the_seed_alone() -> None:
    _, values = made(build)
    torch.rand(7)
    before = torch.get_rng_state()
    again, others = made(build)[1], made(build, seed=4)[1]
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(again[name], tensor) for name, tensor in values.items())
    assert not torch.equal(others["0.drawn"], values["0.drawn"])
    bound = 8**-0.5
    assert 0.8 * bound < float(values["0.linear.weight"].abs().max()) <= bound
    assert 0.015 < float(values["0.drawn"].std()) < 0.025
    assert float((values["2.weight"][:, 1:] - 2.0).abs().max()) < 0.01
    assert torch.equal(values["2.weight"][:, 0], torch.zeros(3))
    assert torch.equal(values["0.linear.weight"], values["1.linear.weight"])  # copies
    assert not torch.equal(values["0.linear.weight"], values["0.drawn"])
    assert torch.equal(torch.stack([values["0.low"], values["0.high"]]), values["0.whole"])
    assert not torch.equal(values["0.low"], values["0.high"])


def test_a_layer_that_is_added_or_looked_at_changes_no_other() -> None:
    _, values = made(build)
    _, more = made(lambda: build(more=True))
    assert more.keys() - values.keys() == {"added.weight", "added.bias"}
    assert all(torch.equal(values[name], more[name]) for name in values)
    model, looked = made(lambda: build(look=True))
    assert float(looked["0.drawn"].sum()) == pytest.approx(model[0].seen)


@pytest.mark.parametrize("model", ["gpt", "tied", "cnn", "dense"])
def test_the_graphs_are_those_of_an_ordinary_model_and_only_what_is_asked_for_is_made(
    make_job, job_of, model: str
) -> None:
    eager, per_rank = job_of(model), make_job(model, materialize="per_rank")
    for graph in ("training_graph", "evaluation_graph"):
        expected, found = getattr(eager, graph)(4), getattr(per_rank, graph)(4)
        assert found.fingerprint == expected.fingerprint
        assert found.groups == expected.groups
        assert found.requires_grad == expected.requires_grad
    assert all(is_deferred(tensor) for tensor in per_rank.states.values())
    tied = {"model.head.weight": "model.tokens.weight"} if model == "tied" else {}
    assert per_rank.tied == eager.tied == tied
    first, *_, last = per_rank.states
    per_rank.materialize([first, last])
    real = [name for name, tensor in per_rank.states.items() if not is_deferred(tensor)]
    assert real == [first, last]


FACTORIES = """
import torch

class Needy(torch.nn.Linear):
    def __init__(self):
        super().__init__(2, 2)
        self.weight.detach().numpy()

class Forgotten(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.empty(3))
"""


@pytest.mark.parametrize(
    ("factory", "message", "hint"),
    [
        ("Needy", r"factories.py:7.*materialize: per_rank", "materialize: eager"),
        ("Forgotten", "weight is created in the factory but never init", "model.weights"),
    ],
)
def test_a_factory_that_needs_values_or_gives_none_names_the_way_out(
    make_job, tmp_path: Path, factory: str, message: str, hint: str
) -> None:
    path = tmp_path / "factories.py"
    path.write_text(FACTORIES)

    def values() -> None:
        job = make_job(f"{path}:{factory}", materialize="per_rank")
        job.materialize(job.states)

    with pytest.raises(CaptureError, match=message) as found:
        values()
    assert hint in str(found.value.hint)


# Weights to start from

Start = Callable[..., dict[str, Tensor]]


@pytest.fixture(params=["eager", "per_rank"])
def start(
    request: pytest.FixtureRequest, make_job: Callable[..., CapturedJob], tmp_path: Path
) -> Start:
    """``start(contents)`` of a file, or of a path: the states of a job by the user's names."""

    def started(given: dict[str, Tensor] | Path, model: str = "gpt") -> dict[str, Tensor]:
        path = given if isinstance(given, Path) else tmp_path / "w.safetensors"
        if not isinstance(given, Path):
            save_file(given, path)
        job = make_job(model, materialize=request.param, weights=str(path))
        job.materialize(job.states)
        return {name.removeprefix("model."): tensor for name, tensor in job.states.items()}

    return started


def model(name: str) -> nn.Module:
    torch.manual_seed(1)
    built: nn.Module = find(f"{EQUALITY}:{name}")()
    return built


def contents() -> dict[str, Tensor]:
    return {key: tensor.clone() for key, tensor in model("gpt").state_dict().items()}


def shards(directory: Path, tensors: dict[str, Tensor]) -> Path:
    """As on model hubs: two files and an index, which is returned."""
    names = sorted(tensors)
    parts = {"model-1.safetensors": names[::2], "model-2.safetensors": names[1::2]}
    for file, inside in parts.items():
        save_file({name: tensors[name] for name in inside}, directory / file)
    weight_map = {name: file for file, inside in parts.items() for name in inside}
    index = directory / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return index


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert [name for name in expected if not torch.equal(found[name], expected[name])] == []


def test_one_file_or_shards_with_an_index_or_without(start: Start, tmp_path: Path) -> None:
    index = shards(tmp_path, contents())
    assert_equal(start(tmp_path), contents())
    save_file({"stray": torch.ones(1)}, tmp_path / "other.safetensors")
    assert_equal(start(tmp_path), contents())
    assert_equal(start(index), contents())
    index.unlink()
    (tmp_path / "other.safetensors").unlink()
    assert_equal(start(tmp_path), contents())
    narrow = {name: tensor.bfloat16() for name, tensor in contents().items()}
    assert_equal(start(narrow), {name: tensor.float() for name, tensor in narrow.items()})


def test_a_tied_parameter_is_stored_under_one_of_its_names(start: Start, tmp_path: Path) -> None:
    save_model(model("tied"), tmp_path / "w.safetensors")
    expected = model("tied").state_dict()
    found = start(tmp_path / "w.safetensors", "tied")
    assert set(expected) - set(found) == {"head.weight"}
    assert all(torch.equal(found[name], expected[name]) for name in found)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"norm.bias": None}, "has no 'norm.bias'"),
        ({"norm.bais": torch.ones(24)}, "'norm.bais' is not in the model; did you mean"),
        ({"norm.bias": torch.ones(25)}, r"'norm.bias' has shape \[25\], not \[24\]"),
        ({"norm.bias": torch.ones(24).double()}, "'norm.bias' is F64, which torch.float32"),
        ({"norm.bias": torch.ones(24).int()}, "'norm.bias' is I32, which torch.float32 does not"),
        ({"norm.bias": torch.ones(24).to(torch.uint16)}, "'norm.bias' is U16, which torch.float32"),
        ({"norm.bias": torch.ones(24).to(torch.float8_e5m2)}, "'norm.bias' is F8_E5M2, which"),
        (dict.fromkeys(contents()), r"(has no '[^']+'; ){4}and 26 more"),
    ],
)
def test_a_checkpoint_that_does_not_fit(start: Start, change: Any, said: str) -> None:
    changed = {**contents(), "a": None, **change}
    changed = {name: tensor for name, tensor in changed.items() if tensor is not None}
    with pytest.raises(DataFileError, match=f"w.safetensors: does not fit the model: {said}"):
        start(changed or {"a": torch.ones(1)})


def test_a_buffer_that_only_its_second_name_keeps_is_not_left_as_it_was(tmp_path: Path) -> None:
    save_file({"a": torch.ones(1)}, tmp_path / "w.safetensors")
    wrapper = nn.Module()
    wrapper.model = nn.Module()
    wrapper.model.register_buffer("a", torch.zeros(1))
    wrapper.model.register_buffer("mask", torch.zeros(1), persistent=False)
    wrapper.model.register_buffer("bias", wrapper.model.mask)
    states = {f"model.{name}": getattr(wrapper.model, name) for name in ("a", "mask")}
    weights = Weights(tmp_path / "w.safetensors")
    with pytest.raises(DataFileError, match="does not fit the model: has no 'mask'"):
        weights.match(wrapper, states, {"model.bias": "model.mask"})


def test_files_that_are_no_checkpoints_or_missing(tmp_path: Path, start: Start) -> None:
    (tmp_path / "w.safetensors").write_bytes(b"not at all")
    (tmp_path / "w.index.json").write_text("{}")
    (tmp_path / "empty").mkdir()
    (tmp_path / "twice").mkdir()
    for name in ("a", "b"):
        save_file({"w": torch.ones(1)}, tmp_path / "twice" / f"{name}.safetensors")
    for name, message in {
        "w.safetensors": "w.safetensors: cannot be read as safetensors",
        "w.index.json": "w.index.json: is not an index",
        "empty": "empty: contains no .safetensors file",
        "twice": "'w' is in a.safetensors and b.safetensors",
    }.items():
        with pytest.raises(DataFileError, match=message):
            Weights(tmp_path / name)
    with pytest.raises(SpecError, match=r"model.weights: no such file or directory: .*nowhere"):
        start(tmp_path / "nowhere")
