"""Weights on disk: whole or not at all, damage found, the user's own names."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from mpi4py import MPI
from torch import Tensor, nn

from pipectl.errors import CaptureError, DataFileError, MismatchError, UsageError
from pipectl.runtime import checkpoint
from pipectl.runtime.checkpoint import Keep, Saver, take_snapshot
from pipectl.runtime.manifest import Manifest
from pipectl.runtime.optimizer import Stepper

THREE = Keep(3)


@pytest.fixture
def states() -> dict[str, Tensor]:
    return {
        "model.a.weight": torch.arange(6.0).view(2, 3),
        "model.a.transposed": torch.arange(6.0).view(2, 3).t(),
        "model.count": torch.tensor(5),
        "model.half": torch.ones(2, dtype=torch.bfloat16),
        "loss.temperature": torch.ones(1),
    }


def save(
    directory: Path,
    step: int,
    states: dict[str, Tensor],
    keep: Keep = THREE,
    stepper: Stepper | None = None,
    warnings: list[str] | None = None,
) -> Path:
    saver = Saver(MPI.COMM_SELF, directory, keep, 1, ([] if warnings is None else warnings).append)
    persistent = states.keys() - {"model.scratch"}
    own = take_snapshot(states, persistent, stepper or Stepper(None, None), {})
    saver.start(Manifest(step, 4, {"b.weight": "a.weight"}), own)
    saver.finish()
    return directory / f"step-{step:06d}"


def test_losses_that_are_not_finite_come_back_from_a_manifest(tmp_path: Path) -> None:
    losses = (0.5, math.nan, math.inf, -math.inf)
    Manifest(1, 4, {}, losses=losses).save(tmp_path)
    json.loads((tmp_path / "manifest.json").read_text(), parse_constant=pytest.fail)
    assert repr(Manifest.load(tmp_path).losses) == repr(losses)


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
        save(tmp_path, step, states, Keep(2))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-1000000", "step-999999"]


def test_a_checkpoint_is_on_the_disk_before_it_has_its_name(
    tmp_path: Path, states: dict[str, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files and folders first, the manifest too; behind the renaming, the name."""
    synced: set[tuple[str, bool]] = set()

    def sync(handle: int) -> None:
        path = Path(f"/proc/self/fd/{handle}").readlink().relative_to(tmp_path)
        text = re.sub(r"/\.manifest\.json\..*", "/manifest.json", str(path))
        synced.add((text, (tmp_path / "step-000007").exists()))

    monkeypatch.setattr(os, "fsync", sync)
    save(tmp_path, 7, states)
    files = "rank-0000.safetensors", "training/rank-0000.safetensors", "manifest.json"
    part = ".step-000007.partial-1"
    before = {part, f"{part}/training", *(f"{part}/{file}" for file in files)}
    assert synced == {*((path, False) for path in before), (".", True)}


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


DAMAGE: dict[str, tuple[str, Callable[[bytes], bytes | None], str]] = {
    "flipped bit": (
        "rank-0000.safetensors",
        lambda old: bytes([*old[:-1], old[-1] ^ 1]),
        "damaged",
    ),
    "truncated": ("rank-0000.safetensors", lambda old: old[:-8], "missing or damaged"),
    "missing": ("rank-0000.safetensors", lambda _: None, "missing or damaged"),
    "no manifest": ("manifest.json", lambda _: None, "no such file"),
    "no JSON": ("manifest.json", lambda _: b"{", ""),
    "no object": ("manifest.json", lambda _: b"[]", ""),
    "no shards": ("manifest.json", lambda _: b"{}", ""),
    "no shard": ("manifest.json", lambda _: b'{"shards": [{}], "aliases": {}}', ""),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_found(saved: Path, damage: str) -> None:
    name, change, words = DAMAGE[damage]
    content = change((saved / name).read_bytes())
    (saved / name).unlink()
    if content is not None:
        (saved / name).write_bytes(content)
    with pytest.raises(DataFileError) as raised:
        checkpoint.load(saved)
    assert str(saved / name) in raised.value.message
    assert raised.value.message.endswith(words)
    assert raised.value.cure == "use another checkpoint of the run"


def test_an_interrupted_save_leaves_the_old_one(
    tmp_path: Path, states: dict[str, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever a process that was killed had written: the next one begins with removing it."""
    old = save(tmp_path, 3, states, Keep(1))
    partial = tmp_path / ".step-000006.partial-1"
    partial.mkdir()
    (partial / "rank-0000.safetensors").write_bytes(b"half")
    assert checkpoint.load(old)["count"] == 5
    save(tmp_path, 9, states, Keep(1))
    assert [path.name for path in tmp_path.iterdir()] == ["step-000009"]


def test_a_checkpoint_that_was_moved_aside_moves_back(
    tmp_path: Path, states: dict[str, Tensor]
) -> None:
    """A process was killed between the two renames that replace a checkpoint."""
    old = save(tmp_path, 3, states)
    old.rename(tmp_path / ".step-000003.old")
    save(tmp_path, 6, states)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-000003", "step-000006"]
    assert checkpoint.load(old)["count"] == 5


@pytest.mark.parametrize("broken", ["write_tensors", "disk_usage"])
def test_a_disk_that_fails_leaves_the_old_one_and_is_told(
    tmp_path: Path, states: dict[str, Tensor], monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    old = save(tmp_path, 3, states, Keep(1))
    module = f"snapshot.{broken}" if broken == "write_tensors" else "saver.shutil.disk_usage"

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(f"pipectl.runtime.checkpoint.{module}", full)
    warnings: list[str] = []
    with pytest.raises(UsageError, match=r"the last checkpoint: .*No space left on device"):
        save(tmp_path, 6, states, Keep(1), warnings=warnings)
    (warning,) = warnings
    assert warning.startswith("the checkpoint of step 6 was not written: ")
    assert [path.name for path in tmp_path.iterdir()] == ["step-000003"]
    assert checkpoint.load(old)["count"] == 5


def test_space_is_looked_for_first(
    tmp_path: Path, states: dict[str, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "pipectl.runtime.checkpoint.saver.shutil.disk_usage", lambda _: SimpleNamespace(free=20)
    )
    with pytest.raises(UsageError, match=r"it takes 65 B, and 20 B are free"):
        save(tmp_path, 6, states)


def test_some_checkpoints_are_kept_for_good(tmp_path: Path, states: dict[str, Tensor]) -> None:
    for step in range(1, 8):
        save(tmp_path, step, states, Keep(2, keep_every=3))
    found = sorted(path.name for path in tmp_path.iterdir())
    assert found == ["step-000003", "step-000006", "step-000007"]


def test_later_ones_that_were_passed_over_take_no_place(
    tmp_path: Path, states: dict[str, Tensor]
) -> None:
    """They were damaged, or the run would not have gone on from before them."""
    for step, newest in ((9, 2), (12, 2), (3, 1), (6, 1)):
        save(tmp_path, step, states, Keep(newest))
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "step-000006", "step-000009", "step-000012",
    ]  # fmt: skip
    save(tmp_path, 12, states, Keep(1))
    assert [path.name for path in tmp_path.iterdir()] == ["step-000012"]


def test_a_checkpoint_waits_for_what_belongs_before_it(
    tmp_path: Path, states: dict[str, Tensor]
) -> None:
    """The figures of its step, which a run that goes on from it does not make again."""
    asked: list[tuple[int, bool]] = []

    def ready(step: int) -> bool:
        asked.append((step, (tmp_path / "step-000006").exists()))
        return len(asked) > 3

    saver = Saver(MPI.COMM_SELF, tmp_path, THREE, 1, print, ready)
    own = take_snapshot(states, states.keys(), Stepper(None, None), {})
    saver.start(Manifest(6, 4, {}), own)
    saver.finish()
    assert asked == [(6, False)] * 4
    assert (tmp_path / "step-000006").exists()


def test_other_states_are_kept_out_of_the_weights(
    tmp_path: Path, states: dict[str, Tensor]
) -> None:
    """Of the loss, and buffers that a state dict leaves out; strides are those of the model."""
    states["model.scratch"] = torch.tensor([2.5])
    stored = checkpoint.load(save(tmp_path, 6, states))
    assert "scratch" not in stored
    assert all("temperature" not in name for name in stored)
    found = {name: torch.empty_strided(t.shape, t.stride(), dtype=t.dtype) for name, t in
             states.items()}  # fmt: skip
    stored.restore_states(found)
    assert all(torch.equal(found[name], states[name]) for name in states)


def test_a_checkpoint_of_another_model_is_refused(
    tmp_path: Path, states: dict[str, Tensor]
) -> None:
    stored = checkpoint.load(save(tmp_path, 6, states))
    half = {"model.half": torch.ones(2)}
    for other in ({"model.c": torch.ones(1)}, {"model.count": torch.ones(3)}, half):
        with pytest.raises(MismatchError, match="step-000006: has"):
            stored.restore_states(other)


@pytest.mark.parametrize(
    "make",
    [
        lambda found: torch.optim.SGD(found, lr=0.1, momentum=0.9),
        lambda found: torch.optim.SGD(found, lr=0.1),
        lambda found: torch.optim.AdamW(found, lr=0.1, amsgrad=True),
        lambda found: torch.optim.Adagrad(found, lr=0.1),
        lambda found: torch.optim.ASGD(found, lr=0.1),
        lambda found: torch.optim.Rprop(found, lr=0.1),
        lambda found: torch.optim.Adafactor(found, lr=0.1),
        lambda found: Nested(found, {}),
    ],
)
def test_optimizers_go_on_to_the_bit(tmp_path: Path, make: Any) -> None:
    parameters = some_parameters()
    stepper = Stepper(make(list(parameters.values())), None)
    train(stepper, parameters, range(3))
    saver = Saver(MPI.COMM_SELF, tmp_path, Keep(1), 1, print)
    manifest = Manifest(3, 4, {}, updates=stepper.updates)
    saver.start(manifest, take_snapshot(parameters, set(parameters), stepper, parameters))
    train(stepper, parameters, range(3, 6))  # while it is written
    saver.finish()
    stored = checkpoint.load(tmp_path / "step-000003")
    again = {name: nn.Parameter(torch.zeros_like(p)) for name, p in parameters.items()}
    stored.restore_states(again)
    other = Stepper(make(list(again.values())), None)
    stored.restore_optimizer(other.optimizer, again)
    train(other, again, range(3, 6))
    assert stored.manifest.updates == 3
    assert all(torch.equal(again[name], parameters[name]) for name in again)


def test_an_optimizer_that_cannot_be_saved_is_named() -> None:
    parameters = some_parameters()
    optimizer = torch.optim.SGD(list(parameters.values()), lr=0.1)
    optimizer.state[parameters["model.a"]]["seen"] = {object()}
    with pytest.raises(CaptureError, match="the state of a/seen is a set"):
        take_snapshot(parameters, set(parameters), Stepper(optimizer, None), parameters)


class Nested(torch.optim.Optimizer):
    """Keeps a list, a tuple, a dictionary with numbers, and what is no number."""

    def step(self) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            history = state.setdefault("history", [])
            last = state.get("last", (0, None, {}, math.inf))
            assert (type(last), last[0], last[3]) == (tuple, len(history), math.inf)
            history.append(parameter.grad.clone())
            state["last"] = (len(history), None, {2: parameter.grad.clone()}, math.inf)
            parameter.data -= 0.1 * sum(history) * state["last"][2][2].sign()


def some_parameters() -> dict[str, nn.Parameter]:
    generator = torch.Generator().manual_seed(1)
    names = "model.a", "model.b", "loss.c"
    return {name: nn.Parameter(torch.randn(3, 4, generator=generator)) for name in names}


def train(stepper: Stepper, parameters: dict[str, nn.Parameter], steps: range) -> None:
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        for parameter in parameters.values():
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        stepper.step()
