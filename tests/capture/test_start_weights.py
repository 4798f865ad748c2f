"""Weights to start from: what a checkpoint may be, and what is said where it does not fit."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file, save_model
from torch import Tensor, nn

from pipectl.capture import CapturedJob
from pipectl.capture.factories import find
from pipectl.capture.weights import Weights
from pipectl.errors import DataFileError, SpecError

EQUALITY = Path(__file__).parents[1] / "equality" / "models.py"
Start = Callable[..., dict[str, Tensor]]


@pytest.fixture(params=["eager", "per_rank"])
def start(request: pytest.FixtureRequest, make_job: Callable[..., CapturedJob]) -> Start:
    """``start(path, model)``: the states of a job by the names of the user's model."""

    def started(path: Path, model: str = "gpt") -> dict[str, Tensor]:
        job = make_job(model, materialize=request.param, weights=str(path))
        job.materialize(job.states)
        return {name.removeprefix("model."): tensor for name, tensor in job.states.items()}

    return started


def model(name: str) -> nn.Module:
    torch.manual_seed(1)
    built: nn.Module = find(f"{EQUALITY}:{name}")()
    return built


def contents(name: str = "gpt") -> dict[str, Tensor]:
    return {key: tensor.clone() for key, tensor in model(name).state_dict().items()}


def shards(directory: Path, tensors: dict[str, Tensor]) -> None:
    """As on model hubs: two files and an index."""
    names = sorted(tensors)
    parts = {"model-1.safetensors": names[::2], "model-2.safetensors": names[1::2]}
    for file, inside in parts.items():
        save_file({name: tensors[name] for name in inside}, directory / file)
    weight_map = {name: file for file, inside in parts.items() for name in inside}
    index = {"metadata": {}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert [name for name in expected if not torch.equal(found[name], expected[name])] == []


@pytest.mark.parametrize(
    ("path", "is_indexed"),
    [("", True), ("model.safetensors.index.json", True), ("", False), ("w.safetensors", False)],
)
def test_one_file_or_shards_with_an_index_or_without(
    start: Start, tmp_path: Path, path: str, is_indexed: bool
) -> None:
    if path == "w.safetensors":
        save_file(contents(), tmp_path / path)
    else:
        shards(tmp_path, contents())
    if is_indexed:
        save_file({"stray": torch.ones(1)}, tmp_path / "other.safetensors")
    else:
        (tmp_path / "model.safetensors.index.json").unlink(missing_ok=True)
    assert_equal(start(tmp_path / path), contents())


def test_a_tied_parameter_is_stored_under_one_of_its_names(start: Start, tmp_path: Path) -> None:
    save_model(model("tied"), tmp_path / "w.safetensors")
    expected = model("tied").state_dict()
    found = start(tmp_path / "w.safetensors", "tied")
    assert set(expected) - set(found) == {"head.weight"}
    assert all(torch.equal(found[name], expected[name]) for name in found)


def test_narrow_types_become_the_model_s(start: Start, tmp_path: Path) -> None:
    narrow = {name: tensor.bfloat16() for name, tensor in contents().items()}
    save_file(narrow, tmp_path / "w.safetensors")
    assert_equal(start(tmp_path / "w.safetensors"), {name: t.float() for name, t in narrow.items()})


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
    ],
)
def test_a_checkpoint_that_does_not_fit(
    start: Start, tmp_path: Path, change: dict[str, Tensor | None], said: str
) -> None:
    changed = {**contents(), **change}
    save_file({k: v for k, v in changed.items() if v is not None}, tmp_path / "w.safetensors")
    with pytest.raises(DataFileError, match=f"w.safetensors: does not fit the model: {said}"):
        start(tmp_path / "w.safetensors")


def test_only_the_first_problems_are_listed(start: Start, tmp_path: Path) -> None:
    save_file({"a": torch.ones(1)}, tmp_path / "w.safetensors")
    with pytest.raises(DataFileError, match=r"(has no '[^']+'; ){4}and 26 more"):
        start(tmp_path / "w.safetensors")


def test_files_that_are_no_checkpoints(tmp_path: Path) -> None:
    (tmp_path / "w.safetensors").write_bytes(b"not at all")
    with pytest.raises(DataFileError, match=r"w.safetensors: cannot be read as safetensors"):
        Weights(tmp_path / "w.safetensors")
    (tmp_path / "w.index.json").write_text("{}")
    with pytest.raises(DataFileError, match=r"w.index.json: is not an index"):
        Weights(tmp_path / "w.index.json")
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataFileError, match=r"empty: contains no .safetensors file"):
        Weights(tmp_path / "empty")


def test_a_name_in_two_files(tmp_path: Path) -> None:
    for name in ("a", "b"):
        save_file({"w": torch.ones(1)}, tmp_path / f"{name}.safetensors")
    with pytest.raises(DataFileError, match=r"'w' is in a.safetensors and b.safetensors"):
        Weights(tmp_path)


def test_a_checkpoint_that_is_missing(start: Start, tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"model.weights: no such file or directory: .*nowhere"):
        start(tmp_path / "nowhere")
