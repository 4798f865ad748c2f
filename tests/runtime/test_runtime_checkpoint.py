"""Weights on disk: whole or not at all, damage found, the user's own names."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from mpi4py import MPI
from torch import Tensor

from pipectl.errors import DataFileError
from pipectl.runtime import checkpoint


@pytest.fixture
def states() -> dict[str, Tensor]:
    return {
        "model.a.weight": torch.arange(6.0).view(2, 3),
        "model.a.transposed": torch.arange(6.0).view(2, 3).t(),
        "model.count": torch.tensor(5),
        "model.half": torch.ones(2, dtype=torch.bfloat16),
        "loss.temperature": torch.ones(1),
    }


def save(directory: Path, step: int, states: dict[str, Tensor], keep: int = 3) -> Path:
    aliases = {"model.b.weight": "model.a.weight"}
    return checkpoint.save(MPI.COMM_SELF, directory, step, states, aliases, keep)


def test_weights_come_back_under_the_names_of_the_users_model(
    tmp_path: Path, states: dict[str, Tensor]
) -> None:
    saved = save(tmp_path, 7, states)
    assert saved == tmp_path / "step-000007"
    found = checkpoint.load(saved)
    assert found.keys() == {"a.weight", "a.transposed", "count", "half", "b.weight"}
    assert all(
        torch.equal(found[n.removeprefix("model.")], t) for n, t in states.items() if "model" in n
    )
    assert torch.equal(found["b.weight"], found["a.weight"])


def test_states_that_look_into_one_memory_are_saved(tmp_path: Path) -> None:
    """As rotary tables are: two buffers, views of one tensor."""
    table = torch.arange(8.0).view(2, 4)
    saved = save(tmp_path, 1, {"model.a.weight": table[0], "model.sin": table[1]})
    found = checkpoint.load(saved)
    assert found["a.weight"].tolist() == [0, 1, 2, 3]
    assert found["sin"].tolist() == [4, 5, 6, 7]


def test_only_the_newest_are_kept(tmp_path: Path, states: dict[str, Tensor]) -> None:
    for step in (5, 10, 999_999, 1_000_000):
        save(tmp_path, step, states, keep=2)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-1000000", "step-999999"]


def test_saving_a_step_again_replaces_it(tmp_path: Path, states: dict[str, Tensor]) -> None:
    save(tmp_path, 5, states)
    states["model.count"] = torch.tensor(6)
    assert checkpoint.load(save(tmp_path, 5, states))["count"] == 6


def test_the_manifest_says_what_is_where(tmp_path: Path, states: dict[str, Tensor]) -> None:
    manifest = json.loads((save(tmp_path, 7, states) / "manifest.json").read_text())
    assert manifest["version"] == 1
    assert manifest["step"] == 7
    (shard,) = manifest["shards"]
    assert shard["names"] == ["a.transposed", "a.weight", "count", "half"]
    assert shard["bytes"] == (tmp_path / "step-000007" / shard["file"]).stat().st_size
    assert manifest["aliases"] == {"b.weight": "a.weight"}


@pytest.fixture
def saved(tmp_path: Path, states: dict[str, Tensor]) -> Path:
    return save(tmp_path, 3, states)


def refused(directory: Path) -> str:
    with pytest.raises(DataFileError) as raised:
        checkpoint.load(directory)
    assert raised.value.cure == "use another checkpoint of the run"
    return raised.value.message


def test_a_flipped_bit_is_found(saved: Path) -> None:
    shard = saved / "rank-0000.safetensors"
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    assert refused(saved) == f"{shard}: missing or damaged"


def test_a_truncated_shard_is_found(saved: Path) -> None:
    shard = saved / "rank-0000.safetensors"
    shard.write_bytes(shard.read_bytes()[:-8])
    assert refused(saved) == f"{shard}: missing or damaged"


def test_a_missing_shard_is_found(saved: Path) -> None:
    (saved / "rank-0000.safetensors").unlink()
    assert refused(saved).endswith("rank-0000.safetensors: missing or damaged")


def test_a_missing_manifest_is_found(saved: Path) -> None:
    (saved / "manifest.json").unlink()
    assert refused(saved) == f"{saved / 'manifest.json'}: no such file"


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"shards": [{}], "aliases": {}}'])
def test_a_damaged_manifest_is_found(saved: Path, text: str) -> None:
    (saved / "manifest.json").write_text(text)
    assert str(saved / "manifest.json") in refused(saved)


def test_an_interrupted_save_leaves_the_old_one(
    tmp_path: Path, states: dict[str, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    old = save(tmp_path, 3, states, keep=1)

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "_write_manifest", interrupted)
        with pytest.raises(KeyboardInterrupt):
            save(tmp_path, 6, states, keep=1)
    assert sorted(tmp_path.glob("step-*")) == [old]
    assert checkpoint.load(old)["count"] == 5
    save(tmp_path, 6, states, keep=1)
    assert [path.name for path in tmp_path.iterdir()] == ["step-000006"]
