"""Weights on disk: whole or not at all, damage found, the user's own names."""

from __future__ import annotations

import json
import math
import os
import re
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from mpi4py import MPI
from safetensors.torch import load_file
from torch import nn

from pipectl import torch_api
from pipectl.capture import tensor_file
from pipectl.errors import CaptureError, DataFileError, MismatchError, UsageError
from pipectl.runs import best_checkpoint, checkpoints, step_of
from pipectl.runtime import checkpoint
from pipectl.runtime.checkpoint import Keep, Saver, saved_names, take_snapshot
from pipectl.runtime.manifest import Manifest
from pipectl.runtime.optimizer import Updater
from pipectl.runtime.stopping import EarlyStopping
from pipectl.spec.models import EarlyStopping as EarlyStoppingSpec

THREE = Keep(3)
TABLE = torch.arange(8.0).view(2, 4)
STATES = {
    "model.a.weight": torch.arange(6.0).view(2, 3),
    "model.a.transposed": torch.arange(6.0).view(2, 3).t(),
    "model.count": torch.tensor(5),
    "model.half": torch.ones(2, dtype=torch.bfloat16),
    "model.empty": torch.zeros(0, 4),
    **{f"model.{dtype} ä": torch.arange(6).view(2, 3).to(dtype) for dtype in tensor_file.CODES},
    "model.sine": TABLE[0],  # two buffers that look into one memory
    "model.cosine": TABLE[1],
    "model.scratch": torch.tensor([2.5]),  # that a state dict leaves out
    "loss.temperature": torch.ones(1),
    "loss.scratch": torch.zeros(1),
}
LEFT_OUT = {"model.scratch", "loss.scratch"}
PERSISTENT = {n.removeprefix("model.") for n in STATES if n[:5] == "model" and n not in LEFT_OUT}


def save(
    directory: Path,
    step: int,
    keep: Keep = THREE,
    *further: Any,
    states: Any = STATES,
    **more: Any,
) -> Path:
    writer = Saver(MPI.COMM_SELF, directory, keep, 1, *(further or [print]))
    own = take_snapshot(states, {n: n for n in states.keys() - LEFT_OUT}, Updater(None, None), {})
    losses = (0.5, math.nan, math.inf, -math.inf)
    writer.start(Manifest(step, 4, {"b.weight": "a.weight"}, losses=losses, **more), own)
    writer.finish()
    return directory / f"step-{step:06d}"


def test_all_states_come_back_and_the_weights_have_the_names_of_the_users_model(tmp_path):
    """A loss and buffers that a state dict leaves out are beside them; the manifest says where, and
    other programs read the files."""
    other = {name: torch.zeros_like(tensor) for name, tensor in STATES.items()}
    saved = save(tmp_path, 7, states=other)
    save(tmp_path, 7)  # it is replaced
    stored = checkpoint.load(saved)
    assert stored.keys() == {*PERSISTENT, "b.weight"}
    assert stored.loss == {"temperature": STATES["loss.temperature"]}
    (weights,) = saved.glob("*.safetensors")
    foreign = load_file(weights)
    assert foreign.keys() == PERSISTENT
    for name in PERSISTENT:
        assert same(stored[name], STATES[f"model.{name}"]), name
        assert same(foreign[name], STATES[f"model.{name}"]), name
    assert torch.equal(stored["b.weight"], stored["a.weight"])
    found = {
        name: torch.empty_strided(t.shape, t.stride(), dtype=t.dtype) for name, t in STATES.items()
    }
    stored.restore_states(found)
    assert all(same(found[name], STATES[name]) for name in STATES)
    manifest = json.loads((saved / "manifest.json").read_text(), parse_constant=pytest.fail)
    assert (manifest["version"], manifest["step"]) == (1, 7)
    (shard,) = manifest["shards"]
    assert {*shard["names"]} == PERSISTENT
    assert shard["bytes"] == (saved / shard["file"]).stat().st_size
    assert manifest["aliases"] == {"b.weight": "a.weight"}
    assert repr(stored.manifest.losses) == repr((0.5, math.nan, math.inf, -math.inf))
    for name, tensor in {"c": torch.ones(1), "count": torch.ones(3), "half": torch.ones(2)}.items():
        with pytest.raises(MismatchError, match="step-000007: has"):
            stored.restore_states({f"model.{name}": tensor})


class Renaming(nn.Module):
    """A buffer that only its second name keeps, and a parameter that a hook leaves out."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(1, 1), nn.Module(), nn.Module()
        mask = torch.ones(2)
        self.a.register_buffer("mask", mask, persistent=False)
        self.b.register_buffer("bias", mask)
        self.c.register_buffer("bias", mask)
        self.register_buffer("scratch", torch.zeros(1), persistent=False)
        self.register_state_dict_post_hook(lambda _, found, *__: found.pop("a.weight"))


def test_a_tensor_is_saved_under_its_first_name_in_a_state_dict_and_restored(tmp_path):
    model = Renaming()
    persistent = {f"model.{name}" for name in torch_api.persistent_names(model)}
    tied = {"model.b.bias": "model.a.mask", "model.c.bias": "model.a.mask"}
    names, aliases = saved_names(persistent, tied)
    first = {"model.a.mask": model.a.mask, "model.scratch": model.scratch}
    states = {f"model.{name}": each.detach() for name, each in model.named_parameters()} | first
    writer = Saver(MPI.COMM_SELF, tmp_path, THREE, 1, print)
    writer.start(Manifest(1, 4, aliases), take_snapshot(states, names, Updater(None, None), {}))
    writer.finish()
    stored = checkpoint.load(tmp_path / "step-000001")
    assert stored.keys() == {"a.weight", "a.bias", "b.bias", "c.bias"}
    assert torch.equal(stored["c.bias"], torch.ones(2))
    found = {name: torch.full_like(tensor, 7) for name, tensor in states.items()}
    stored.restore_states(found)
    assert all(same(found[name], tensor) for name, tensor in states.items())


def test_a_manifest_that_could_not_be_read_again_is_not_written(tmp_path):
    with pytest.raises(DataFileError, match=r"manifest\.json: aliases: must give"):
        Manifest(1, 4, {"b.bias": "a.mask"}).save(tmp_path)
    assert not any(tmp_path.iterdir())


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """To the bit, which torch does not compare of all types."""
    octets = (each.contiguous().view(-1).view(torch.uint8) for each in (one, other))
    return one.dtype == other.dtype and one.shape == other.shape and torch.equal(*octets)


PASSED_OVER = [(9, Keep(2)), (12, Keep(2)), (3, Keep(1)), (6, Keep(1))]
"""Later ones were damaged, or the run would not have gone on from before them."""


@pytest.mark.parametrize(
    ("saves", "kept"),
    [
        ([(step, Keep(2)) for step in (5, 10, 999_999, 1_000_000)], [999_999, 1_000_000]),
        ([(step, Keep(2, keep_every=3)) for step in range(1, 8)], [3, 6, 7]),
        (PASSED_OVER, [6, 9, 12]),
        ([*PASSED_OVER, (12, Keep(1))], [12]),
    ],
)
def test_the_newest_are_kept_and_some_for_good(tmp_path, saves, kept):
    for step, keep in saves:
        save(tmp_path, step, keep)
    assert {path.name for path in tmp_path.iterdir()} == {f"step-{step:06d}" for step in kept}


def test_the_best_is_kept_until_a_better_one_is_on_the_disk(tmp_path, monkeypatch):
    """By the metric of the job as it is now; a checkpoint that cannot be written is not it."""
    by_score, missed = EarlyStoppingSpec(metric="score", mode="max"), list[str]()

    def evaluate(
        stopping: EarlyStopping, step: int, score: float, *, keep_best: bool = True
    ) -> list[int | None]:
        stopping.watch(step, {"score": score, "loss": score})
        values = tuple(stopping.metric_values)
        keep = Keep(1, keep_best=keep_best)
        with suppress(UsageError):
            save(tmp_path, step, keep, missed.append, best=stopping.best, metric_values=values)
        return [step_of(path) for path in reversed(checkpoints(tmp_path))]

    def best() -> tuple[int, float, int | None]:
        found = best_checkpoint(tmp_path)
        return step_of(found.path), found.best.value, found.missed and found.missed.step

    first = EarlyStopping(by_score)
    assert evaluate(first, 1, math.nan) == [1]
    assert best_checkpoint(tmp_path) is None
    assert evaluate(first, 2, -math.inf) == [2]
    assert evaluate(first, 3, 0.5) == [3]
    assert evaluate(first, 4, 0.5) == [3, 4]
    assert [evaluate(first, 5, 0.1), best()] == [[3, 5], (3, 0.5, None)]
    newest = tmp_path / "step-000005" / "manifest.json"
    whole = newest.read_text()
    for damaged in ("", whole[:20], whole[:-3]):
        newest.write_text(damaged)
        assert best() == (3, 0.5, None)
    newest.write_text(whole)
    with monkeypatch.context() as patch:
        patch.setattr("pipectl.runtime.checkpoint.snapshot.write_tensors", full)
        assert evaluate(first, 6, 0.9) == [3, 5]
        # A file that is not where rank 0 looks for it.
        patch.setattr("pipectl.runtime.checkpoint.snapshot.write_tensors", lambda *_: (9, "00"))
        assert evaluate(first, 7, 0.9) == [3, 5]
    assert "step 7 was not written: rank-0000.safetensors is not in " in missed[-1]
    assert [evaluate(first, 8, 0.8), best()] == [[3, 8], (3, 0.5, 6)]
    manifest = Manifest.load(tmp_path / "step-000008")
    again, other = EarlyStopping(by_score), EarlyStopping(None, keeps_best=True)
    for stopping in (again, other):  # as runs that go on do, the second one by the loss
        stopping.restore(manifest.metric_values, manifest.best)
    assert [evaluate(again, 9, 0.85), evaluate(again, 10, 1.0)] == [[3, 9], [10]]
    assert best() == (10, 1.0, None)
    assert (other.best, other.metric_values) == (None, [])
    found = [evaluate(other, step, loss) for step, loss in ((11, 3.0), (12, 2.0), (13, 4.0))]
    assert found == [[11], [12], [12, 13]]
    assert evaluate(other, 14, 4.0, keep_best=False) == [14]


def test_a_checkpoint_has_its_name_once_all_it_needs_is_on_the_disk(tmp_path, monkeypatch):
    """Files, folders and the manifest, and the figures of its step, which a run that goes on from
    it does not make again; behind the renaming, the name."""
    synced: set[tuple[str, bool]] = set()
    asked: list[tuple[int, bool]] = []
    checkpoint = tmp_path / "step-000007"

    def sync(handle: int) -> None:
        path = Path(f"/proc/self/fd/{handle}").readlink().relative_to(tmp_path)
        text = re.sub(r"/\.manifest\.json\..*", "/manifest.json", str(path))
        synced.add((text, checkpoint.exists()))

    def has_figures(step: int) -> bool:
        asked.append((step, checkpoint.exists()))
        return len(asked) > 3

    monkeypatch.setattr(os, "fsync", sync)
    save(tmp_path, 7, THREE, print, has_figures)
    assert asked == [(7, False)] * 4
    files = "rank-0000.safetensors", "training/rank-0000.safetensors", "manifest.json"
    part = ".step-000007.partial-1"
    before = {part, f"{part}/training", *(f"{part}/{file}" for file in files)}
    assert synced == {*((path, False) for path in before), (".", True)}


MANIFEST, SHARD = "manifest.json", "rank-0000.safetensors"


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        (SHARD, lambda old: bytes([*old[:-1], old[-1] ^ 1]), "damaged"),
        (SHARD, lambda old: old[:-8], "missing or damaged"),
        (SHARD, lambda _: None, "missing or damaged"),
        (MANIFEST, lambda _: None, "no such file"),
        (MANIFEST, lambda _: b"{}", ""),
        (MANIFEST, lambda _: b'{"shards": [{}], "aliases": {}}', ""),
    ],
)
def test_damage_is_found(tmp_path, name, change, words):
    saved = save(tmp_path, 3)
    content = change((saved / name).read_bytes())
    (saved / name).unlink()
    if content is not None:
        (saved / name).write_bytes(content)
    with pytest.raises(DataFileError) as raised:
        checkpoint.load(saved)
    assert str(saved / name) in raised.value.message
    assert raised.value.message.endswith(words)
    assert raised.value.hint == "use another checkpoint of the run"


def out_of_memory(*_: object) -> Any:
    raise MemoryError


def full(*_: object) -> Any:
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize(
    ("broken", "how", "words"),
    [
        ("snapshot.write_tensors", full, "No space left on device"),
        ("saver.Manifest.save", out_of_memory, "MemoryError"),
        ("saver.shutil.disk_usage", full, "No space left on device"),
        ("saver.shutil.disk_usage", lambda _: SimpleNamespace(free=20), "454 B, and 20 B are free"),
    ],
)
def test_a_disk_that_fails_leaves_the_old_one_and_is_told(
    tmp_path, monkeypatch, broken, how, words
):
    old = save(tmp_path, 3, Keep(1))
    monkeypatch.setattr(f"pipectl.runtime.checkpoint.{broken}", how)
    warnings: list[str] = []
    with pytest.raises(UsageError, match=rf"the last checkpoint: .*{words}"):
        save(tmp_path, 6, Keep(1), warnings.append)
    (warning,) = warnings
    assert warning.startswith("the checkpoint of step 6 was not written: ")
    assert [path.name for path in tmp_path.iterdir()] == ["step-000003"]
    assert checkpoint.load(old)["count"] == 5


@pytest.mark.parametrize(
    ("name", "room", "is_copy"),
    [
        ("AdamW", 0, False),
        ("AdamW", 150, False),
        ("AdamW", 10_000, True),
        *((name, None, True) for name in ("SGD", "ASGD", "Rprop", "Adafactor", "Nested", "Turned")),
    ],
)
def test_training_goes_on_to_the_bit_from_a_checkpoint(tmp_path, monkeypatch, name, room, is_copy):
    """A rank without memory for a copy of the state writes it before training goes on, which is
    said once, with the rank that writes most."""
    kind = {"Nested": Nested, "Turned": Turned}.get(name) or getattr(torch.optim, name)
    everyone = [(1024, is_copy), (2048, is_copy), (4096, True)]
    monkeypatch.setattr("pipectl.runtime.checkpoint.saver.gather_all", lambda *_: everyone)
    warnings: list[str] = []
    parameters, number = some_parameters(), torch.tensor(5)
    updater = Updater(kind(parameters.values(), lr=0.1), None, parameters=parameters)
    train(updater, parameters, range(3))
    states = {**parameters, "model.count": number, "model.scratch": number}
    names = {name: name for name in (*parameters, "model.count")}
    writer = Saver(MPI.COMM_SELF, tmp_path, Keep(2), 1, warnings.append)
    for step in (2, 3):
        own = take_snapshot(states, names, updater, parameters, room)
        assert own.is_copy == is_copy == (own.weights["count"].data_ptr() != number.data_ptr())
        writer.start(Manifest(step, 4, {}, updates=updater.updates), own)
    number += 1  # as forwards do
    train(updater, parameters, range(3, 6))  # while it is written
    writer.finish()
    words = "rank 1 (and 1 more) has no memory for a copy of the 2.00 KiB that it saves: training"
    assert [warning[: len(words)] for warning in warnings] == [words] * (not is_copy)
    stored = checkpoint.load(tmp_path / "step-000003")
    again = {name: nn.Parameter(torch.zeros_like(p)) for name, p in parameters.items()}
    numbers = {name: torch.tensor(0) for name in states.keys() - parameters.keys()}
    stored.restore_states({**again, **numbers})
    assert [*numbers.values()] == [5, 5]
    other = Updater(kind(again.values(), lr=0.1), None, parameters=again)
    stored.restore_optimizer(other.optimizer, again)
    train(other, again, range(3, 6))
    assert stored.manifest.updates == 3
    assert all(torch.equal(again[name], parameters[name]) for name in again)


def test_an_optimizer_that_cannot_be_saved_is_named() -> None:
    parameters = some_parameters()
    optimizer = torch.optim.SGD(list(parameters.values()), lr=0.1)
    optimizer.state[parameters["model.a"]]["seen"] = {object()}
    with pytest.raises(CaptureError, match="the state of a/seen is a set"):
        take_snapshot(parameters, {n: n for n in parameters}, Updater(optimizer, None), parameters)


class Nested(torch.optim.Optimizer):
    """Keeps a list, a tuple, a dictionary with numbers, and what is no number."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

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


def train(updater: Updater, parameters: dict[str, nn.Parameter], steps: range) -> None:
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        for parameter in parameters.values():
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        updater.step()


class Turned(torch.optim.Optimizer):
    """Goes over the memory of a state in an order of its own, as kernels do."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    def step(self) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            sums = state.setdefault("sums", torch.zeros(parameter.shape).mT.contiguous().mT)
            memory = sums.as_strided((sums.numel(),), (1,))
            memory += torch.arange(sums.numel()) * parameter.grad.sum()
            parameter.data -= sums
