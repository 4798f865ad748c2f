"""`pipectl export`: files that load into the user's own model."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint
from mpi4py import MPI
from safetensors.torch import load_file, save_file
from torch import nn

from pipectl.runs import Best
from pipectl.runtime.checkpoint import Keep, Saver, load, take_snapshot
from pipectl.runtime.checkpoint.export import export_directory
from pipectl.runtime.manifest import Manifest
from pipectl.runtime.optimizer import Updater


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4)
        self.second.weight = self.first.weight


@pytest.fixture
def model():
    torch.manual_seed(3)
    return Tied()


@pytest.fixture
def saved(model, finished):
    """A run with checkpoints of steps 5, the best, and 10."""
    return save(model, finished, {})


def save(model, finished, of_loss):
    found = {f"model.{n}": t for n, t in model.state_dict().items() if n != "second.weight"}
    found |= of_loss
    saver = Saver(MPI.COMM_SELF, finished / "checkpoints", Keep(3), 1, print)
    for step in (5, 10):
        best = Best(5, "accuracy", "max", 0.75)
        manifest = Manifest(step, 4, {"second.weight": "first.weight"}, best=best)
        names = {name: name for name in found if name != "model.scratch"}
        saver.start(manifest, take_snapshot(found, names, Updater(None, None), {}))
        found = {name: tensor + 1 for name, tensor in found.items()}
    saver.finish()
    return finished


def check_loads(tensors, model):
    other = Tied()
    other.load_state_dict(tensors, strict=True)
    assert torch.equal(other.second.weight, model.first.weight + 1)
    assert torch.equal(other.norm.running_var, model.norm.running_var + 1)


def test_one_file_loads_into_the_model(cli, saved, model):
    result = cli("export", "last")
    assert (result.code, result.err) == (0, "")
    assert result.out == "model.safetensors: 9 tensors, 232 B, after step 10\n"
    check_loads(load_file("model.safetensors"), model)
    result = cli("export", "last", "--step", "5", "-o", "a/b.safetensors", "--json")
    answer = {"path": "a/b.safetensors", "step": 5, "bytes": 232, "loss": None, "best": None}
    assert result.json == answer
    assert torch.equal(load_file("a/b.safetensors")["first.weight"], model.first.weight)
    best = {"step": 5, "metric": "accuracy", "mode": "max", "value": 0.75}
    assert cli("export", "last", "--best", "-o", "b", "--json").json == {
        **answer, "path": "b", "best": best,
    }  # fmt: skip
    status = cli("status", "last", "--json").json
    assert (status["best"], status["best_checkpoint"]) == (best, f"{saved}/checkpoints/step-000005")
    text = "accuracy 0.75, the largest"
    assert f"best          after step 5: {text}\n" in cli("status", "last").out
    result = cli("export", "last", "--best", "-o", "c")
    assert result.out == f"c: 9 tensors, 232 B, after step 5 ({text})\n"
    shutil.rmtree(saved / "checkpoints/step-000005")
    assert "has no checkpoint" in cli("export", "last", "--best").err
    assert f"{text}; there is no checkpoint of it" in cli("status", "last").out


def test_a_best_value_that_is_infinite_is_null_for_programs(cli, saved):
    for path in saved.glob("checkpoints/*/manifest.json"):
        text = path.read_text()
        assert text.count(": 0.75") == 1
        path.write_text(text.replace(": 0.75", ': "inf"'))
    best = {"step": 5, "metric": "accuracy", "mode": "max", "value": None}
    assert cli("status", "last", "--json").json["best"] == best
    assert cli("export", "last", "--best", "-o", "b", "--json").json["best"] == best
    assert "after step 5: accuracy inf, the largest" in cli("status", "last").out


def test_weights_of_the_loss_have_a_file_of_their_own(cli, finished, model):
    run = save(model, finished, {"loss.centres": torch.ones(2, 3)})
    result = cli("export", "last")
    assert result.out.splitlines()[1] == "model-loss.safetensors: 1 tensor, 24 B, of the loss"
    check_loads(load_file("model.safetensors"), model)
    (centres,) = load_file("model-loss.safetensors").values()
    assert torch.equal(centres, torch.full((2, 3), 2.0))
    Path("model.safetensors").unlink()
    assert "model-loss.safetensors: already exists" in cli("export", "last").err
    for form in ("hf", "dcp"):
        result = cli("export", "last", "--format", form, "-o", form, "--step", "5", "--json")
        assert result.json["loss"] == f"{form}/loss/model.safetensors"
        assert load_file(result.json["loss"]).keys() == {"centres"}
    (run / "checkpoints/step-000010/training/rank-0000.safetensors").write_bytes(b"")
    assert "training/rank-0000.safetensors: missing or damaged" in cli("export", "last").err


def test_directories_for_from_pretrained_have_an_index_of_several_files_and_for_torch_its_own(
    cli, saved, model
):
    assert cli("export", "last", "--format", "hf").code == 0
    assert [path.name for path in Path("model").iterdir()] == ["model.safetensors"]
    check_loads(load_file("model/model.safetensors"), model)
    assert cli("export", "last", "--shard-size", "100B", "-o", "out").code == 0
    index = json.loads(Path("out/model.safetensors.index.json").read_text())
    assert index["metadata"] == {"total_size": 232}
    files = sorted(set(index["weight_map"].values()))
    assert len(files) > 1
    assert sorted(path.name for path in Path("out").glob("*.safetensors")) == files
    check_loads({n: t for file in files for n, t in load_file(f"out/{file}").items()}, model)
    assert cli("export", "last", "--format", "dcp", "-o", "a/dcp").code == 0
    assert [path.name for path in Path("a").iterdir()] == ["dcp"]
    state = {name: torch.zeros_like(tensor) for name, tensor in model.state_dict().items()}
    checkpoint: Any = torch.distributed.checkpoint
    checkpoint.load(state, checkpoint_id="a/dcp", no_dist=True)
    check_loads(state, model)


def test_what_only_training_needs_is_not_needed_for_weights(cli, finished, model):
    """It may have been deleted for its size."""
    run = save(model, finished, {"model.scratch": torch.ones(1)})
    (run / "checkpoints/step-000010/training/rank-0000.safetensors").unlink()
    assert cli("export", "last").code == 0
    check_loads(load_file("model.safetensors"), model)


def test_names_types_and_files_of_another_directory(cli, saved, model):
    """Without the prefix of the run's names or with one more, as the files have them."""
    base = Path("base")
    base.mkdir()
    (base / "config.json").write_text("{}")
    (base / "notes.md").write_text("of the author")
    half = {f"net.{name}": tensor.to(torch.bfloat16) for name, tensor in model.state_dict().items()}
    save_file({name: tensor.clone() for name, tensor in half.items()}, base / "a.safetensors")
    assert cli("export", "last", "--like", "base", "-o", "out").code == 0
    assert {path.name for path in Path("out").iterdir()} == {"config.json", "model.safetensors"}
    exported = load_file("out/model.safetensors")
    assert exported.keys() == half.keys()
    expected = (model.first.weight.detach() + 1).to(torch.bfloat16)
    assert torch.equal(exported["net.second.weight"], expected)


def test_what_cannot_be_exported_is_named(cli, saved, model):
    Path("here").write_text("mine")
    (saved / "checkpoints/step-000010/rank-0000.safetensors").write_bytes(b"")
    for words, code, error in (
        (f"{saved.name} --step 7", 2, "has no checkpoint of step 7\n  it has those of steps 5, 10"),
        (f"{saved.name} -o here", 2, "here: already exists"),
        (f"{saved.name} --best --step 5", 2, "--step: has no meaning with --best"),
        (f"{saved.name} --format dcp --shard-size 1GB", 2, "--shard-size: has no meaning"),
        (f"{saved.name} --shard-size many", 2, "not a size"),
        (saved.name, 3, "rank-0000.safetensors: missing or damaged"),
    ):
        result = cli("export", *words.split())
        assert (result.code, result.out, error in result.err) == (code, "", True), result.err
    assert Path("here").read_text() == "mine"
    for change, error in (
        ({"first.weight": torch.zeros(5, 4)}, "'first.weight' has shape [5, 4], and [4, 4]"),
        ({"third.weight": torch.zeros(1)}, "the run has no 'third.weight'"),
        ({"norm.bias": None}, "'norm.bias' of the run is not there"),
        (dict.fromkeys(model.state_dict()), "'first.bias' of the run is not there"),
    ):
        tensors = {**{name: t.clone() for name, t in model.state_dict().items()}, **change}
        save_file({name: t for name, t in tensors.items() if t is not None}, "base.safetensors")
        result = cli("export", "last", "--step", "5", "--like", "base.safetensors", "-o", "out")
        assert (result.code, Path("out").exists()) == (3, False)
        assert error in " ".join(result.err.split())
    assert not Path("model.safetensors").exists()


def test_what_others_have_put_into_a_shared_directory_is_not_written(cli, saved, model):
    """Links by names that an export might use; and files are as open as their directory."""
    base, out, others = (Path(name) for name in ("base", "out", "others"))
    for directory in (base, out, others):
        directory.mkdir()
    (base / "config.json").write_text("{}")
    save_file({n: t.clone() for n, t in model.state_dict().items()}, base / "a.safetensors")
    (others / "file").write_text("of another")
    names = ("config.json", "model.safetensors", "dcp", "single")
    for name in names:
        (out / f".{name}.partial").symlink_to(
            (others / ("" if name == "dcp" else "file")).resolve()
        )
    out.chmod(0o755)
    umask = os.umask(0o022)
    try:
        assert cli("export", "last", "--format", "dcp", "-o", "out/dcp").code == 0
        assert cli("export", "last", "-o", "out/single").code == 0
        export_directory(load(saved / "checkpoints/step-000010"), out, 10**9, base)
    finally:
        os.umask(umask)
    assert [(path.name, path.read_text()) for path in others.iterdir()] == [("file", "of another")]
    assert (out / "single").stat().st_mode & 0o777 == 0o644
    assert (out / "config.json").stat().st_mode & 0o777 == 0o644
    left = {path.name for path in out.rglob("*") if path.name[0] == "."} - {".metadata"}
    assert left == {f".{name}.partial" for name in names}


@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError(28, "No space left on device")])
@pytest.mark.parametrize("size", [(), ("--shard-size", "100B"), ("--format", "dcp")])
def test_an_export_that_ends_early_leaves_nothing_behind(cli, saved, monkeypatch, error, size):
    files = []

    def sync(file):
        files.append(file)
        if len(files) == (2 if size else 1):
            raise error

    with monkeypatch.context() as patch:
        patch.setattr("pipectl.capture.tensor_file.os.fsync", sync)
        result = cli("export", "last", "-o", "new/out", *size)
    assert (result.code, result.out) == (130 if isinstance(error, KeyboardInterrupt) else 2, "")
    if isinstance(error, OSError):
        assert ": cannot be written: No space left on device\n" in result.err
    assert [path for path in Path("new").rglob("*") if path.is_file()] == []
    assert cli("export", "last", "-o", "new/out", *size).code == 0
