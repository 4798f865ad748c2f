"""Where there is no room for copies, tensors are written before they change."""

from __future__ import annotations

from pathlib import Path
from threading import Event
from typing import Any

import pytest
import torch
from mpi4py import MPI
from safetensors.torch import load_file
from torch import nn

from pipectl.errors import UsageError
from pipectl.runs import Manifest
from pipectl.runtime import checkpoint
from pipectl.runtime.checkpoint import Keep, Saver, Snapshot, take_snapshot, tensor_file
from pipectl.runtime.stepper import Stepper

SIZE = 1000
ROOMS = [None, 0, 4 * SIZE, 7 * SIZE, 100 * SIZE]
"""Bytes: for all, for none, for a part."""


def parameters() -> dict[str, nn.Parameter]:
    generator = torch.Generator().manual_seed(1)
    sizes = {"a": SIZE, "b": SIZE // 2, "c": 3}
    return {
        f"model.{n}": nn.Parameter(torch.randn(s, generator=generator)) for n, s in sizes.items()
    }


def trained(stepper: Stepper, given: dict[str, nn.Parameter], steps: int) -> None:
    for _ in range(steps):
        for parameter in given.values():
            parameter.grad = torch.ones_like(parameter)
        stepper.step()


def stepper_of(given: dict[str, nn.Parameter]) -> Stepper:
    return Stepper(torch.optim.AdamW(list(given.values()), lr=0.1), None)


def snapshot(
    given: dict[str, nn.Parameter], stepper: Stepper, room: int | None, count: torch.Tensor
) -> Snapshot:
    states = {**given, "model.count": count, "model.scratch": count}
    return take_snapshot(states, {*given, "model.count"}, stepper, given, None, room)


@pytest.mark.parametrize("room", ROOMS)
def test_a_checkpoint_has_the_state_of_its_step_whatever_was_lent(
    tmp_path: Path, room: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The writer is held up until the next update wants the tensors."""
    wanted = Event()
    written = tensor_file.TensorFile.write

    def slow(self: Any, tensors: Any) -> None:
        wanted.wait()
        written(self, tensors)

    monkeypatch.setattr(tensor_file.TensorFile, "write", slow)
    mine, count = parameters(), torch.tensor(5)
    stepper = stepper_of(mine)
    trained(stepper, mine, 2)
    before = {name.removeprefix("model."): p.detach().clone() for name, p in mine.items()}
    saver = Saver(MPI.COMM_SELF, tmp_path, Keep(1), 1, print)

    def give_back() -> None:
        wanted.set()
        saver.give_back()

    stepper.before_update = give_back
    saver.start(Manifest(2, 4, {}), snapshot(mine, stepper, room, count))
    count += 1  # as forwards do
    trained(stepper, mine, 1)
    saver.finish()
    stored = checkpoint.load(tmp_path / "step-000002")
    assert stored["count"] == 5
    assert all(torch.equal(stored[name], value) for name, value in before.items())
    again = parameters()
    stored.restore_states(again)
    other = stepper_of(again)
    stored.restore_optimizer(other.optimizer, again)
    trained(other, again, 1)
    assert all(torch.equal(again[name], mine[name]) for name in mine)


@pytest.mark.parametrize("room", ROOMS)
def test_no_more_is_copied_than_there_is_room_for(room: int | None) -> None:
    mine, count = parameters(), torch.zeros(SIZE // 4)
    stepper = stepper_of(mine)
    trained(stepper, mine, 1)
    found = snapshot(mine, stepper, room, count)
    copies = [*found.weights.copies.values(), *found.training.copies.values()]
    copied = sum(tensor.nbytes for tensor in copies)
    unavoidable = 2 * count.nbytes
    everything = found.size_bytes
    if room is None or room >= everything:
        assert copied == everything
        assert found.given_back.is_set()
    else:
        assert copied <= max(room, unavoidable)
        assert copied >= min(room, everything) - 4 * SIZE  # the largest that may not fit
        assert not found.given_back.is_set()
    buffers = found.weights.tensors["count"], found.training.tensors["state/model.scratch"]
    assert all(buffer.data_ptr() != count.data_ptr() for buffer in buffers)


@pytest.mark.parametrize("broken", [(tensor_file.TensorFile, "write"), (Path, "mkdir")])
def test_a_writer_that_fails_gives_everything_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: tuple[type, str]
) -> None:
    mine = parameters()
    warnings: list[str] = []
    saver = Saver(MPI.COMM_SELF, tmp_path, Keep(1), 1, warnings.append)
    stepper = stepper_of(mine)
    monkeypatch.setattr(*broken, full)
    saver.start(Manifest(2, 4, {}), snapshot(mine, stepper, 0, torch.zeros(1)))
    saver.give_back()
    assert not saver.borrows
    with pytest.raises(UsageError, match=r"the last checkpoint: .*No space left on device"):
        saver.finish()


def full(path: Any, *_: object, **__: object) -> None:
    """The folder of all checkpoints is there, so only what is within it cannot be made."""
    if not (isinstance(path, Path) and path.exists()):
        raise OSError(28, "No space left on device")


def test_files_are_what_other_programs_read(tmp_path: Path) -> None:
    """All types, empty tensors, numbers, strides; notes and names that are no ASCII."""
    types = [*tensor_file.CODES]
    given = {f"{index}-ä": torch.zeros(3, 2).to(dtype).t() for index, dtype in enumerate(types)}
    given |= {"empty": torch.zeros(0, 4), "number": torch.tensor(2.5)}
    given = dict(sorted(given.items(), key=lambda item: -item[1].element_size()))
    file = tensor_file.TensorFile(tmp_path / "x", given, {"note": "é"})
    file.write(given.values())
    shard = file.finish("x", given)
    assert shard.is_whole(tmp_path)
    found = load_file(tmp_path / "x")
    assert found.keys() == given.keys()
    assert all(found[name].dtype == tensor.dtype for name, tensor in given.items())
    assert all(torch.equal(found[name].float(), t.float()) for name, t in given.items()
               if not t.is_complex())  # fmt: skip
