"""A rank that has no memory for a copy of what it saves writes it before training goes on."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from mpi4py import MPI
from safetensors.torch import load_file
from torch import nn

from pipectl.capture import tensor_file
from pipectl.runtime import checkpoint
from pipectl.runtime.checkpoint import Keep, Saver, take_snapshot
from pipectl.runtime.manifest import Manifest, Shard
from pipectl.runtime.optimizer import Stepper

SIZE = 1000


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


@pytest.mark.parametrize("room", [None, 0, 7 * SIZE, 100 * SIZE])
def test_a_checkpoint_has_the_state_of_its_step_with_or_without_a_copy(
    tmp_path: Path, room: int | None
) -> None:
    warnings: list[str] = []
    mine, count = parameters(), torch.tensor(5)
    stepper = stepper_of(mine)
    trained(stepper, mine, 2)
    before = {name.removeprefix("model."): p.detach().clone() for name, p in mine.items()}
    saver = Saver(MPI.COMM_SELF, tmp_path, Keep(2), 1, warnings.append)
    states = {**mine, "model.count": count, "model.scratch": count}
    for step in (1, 2):
        found = take_snapshot(states, {*mine, "model.count"}, stepper, mine, room)
        assert found.is_copy == (room is None or room >= found.size_bytes)
        assert found.is_copy == (found.weights["count"].data_ptr() != count.data_ptr())
        saver.start(Manifest(step, 4, {}), found)
    count += 1  # as forwards do
    trained(stepper, mine, 1)
    saver.finish()
    assert len(warnings) == (not found.is_copy)
    assert all("training waits while they are written" in warning for warning in warnings)
    stored = checkpoint.load(tmp_path / "step-000002")
    assert stored["count"] == 5
    assert all(torch.equal(stored[name], value) for name, value in before.items())
    again = parameters()
    stored.restore_states(again)
    other = stepper_of(again)
    stored.restore_optimizer(other.optimizer, again)
    trained(other, again, 1)
    assert all(torch.equal(again[name], mine[name]) for name in mine)


def test_files_are_what_other_programs_read(tmp_path: Path) -> None:
    """All types, empty tensors, numbers, strides; notes and names that are no ASCII."""
    types = [*tensor_file.CODES]
    given = {f"{index}-ä": torch.zeros(3, 2).to(dtype).t() for index, dtype in enumerate(types)}
    given |= {"empty": torch.zeros(0, 4), "number": torch.tensor(2.5)}
    written = tensor_file.write_tensors(tmp_path / "x", given, given.__getitem__, {"note": "é"})
    assert Shard("x", *written, tuple(given)).is_whole(tmp_path)
    found = load_file(tmp_path / "x")
    assert found.keys() == given.keys()
    assert all(found[name].dtype == tensor.dtype for name, tensor in given.items())
    assert all(torch.equal(found[name].float(), t.float()) for name, t in given.items()
               if not t.is_complex())  # fmt: skip
