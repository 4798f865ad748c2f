"""Ranks on a real accelerator, which they share: the same training as on one rank, and on the CPU.

Kernels of accelerators add in other orders than the CPU's, so results agree within rounding; SGD
does not magnify what is tiny.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from mpi4py import MPI
from torch import Tensor, nn

from pipectl.runs import read_errors, read_heartbeat
from pipectl.runtime import checkpoint
from pipectl.runtime.checkpoint import Keep, Saver, take_snapshot
from pipectl.runtime.device import Staging
from pipectl.runtime.manifest import Manifest
from pipectl.runtime.optimizer import Updater

MODELS = Path(__file__).parents[1] / "equality" / "models.py"
ROUNDING = 1e-4
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.accelerator.is_available(), reason="no accelerator here"),
]


@pytest.fixture
def trained(make_run, train) -> Any:
    """``trained(ranks, gpus, **sections)``: the weights at the end."""

    def weights(ranks: int, gpus: int, **sections: Any) -> dict[str, Tensor]:
        resources = {"tasks_per_node": ranks, "gpus_per_node": gpus}
        run = make_run(ranks, resources=resources, **sections)
        train(run)
        assert read_errors(run) == []
        beat = read_heartbeat(run)
        assert len(beat.ranks) == ranks
        return checkpoint.load(run.checkpoints / "step-000005")

    return weights


def assert_agree(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        torch.testing.assert_close(tensor, other[name], rtol=ROUNDING, atol=ROUNDING, msg=name)


@pytest.mark.mpi
def test_one_rank_trains_what_it_trains_on_the_cpu(trained: Any) -> None:
    assert_agree(trained(1, gpus=1), trained(1, gpus=0))


@pytest.mark.mpi
@pytest.mark.parametrize("schedule", ["gpipe", "zb-h1"])
def test_two_ranks_that_share_an_accelerator_train_what_one_does(
    trained: Any, schedule: str
) -> None:
    pipeline = {"micro_batches": 2, "stages": 2, "schedule": schedule}
    assert_agree(trained(1, gpus=1), trained(2, gpus=1, pipeline=pipeline))


@pytest.mark.mpi
@pytest.mark.parametrize(
    ("model", "pipeline", "precision"),
    [
        ("tied", {"offload": "host"}, "float32"),
        ("cnn", {"recompute": "all"}, "float32"),
        ("gpt", {}, "float16"),
    ],
)
def test_models_that_make_tensors_drop_out_and_keep_statistics(
    trained: Any, model: str, pipeline: dict[str, str], precision: str
) -> None:
    """The same masks on one rank and on two: they follow from the seed on any device."""
    tokens = model != "cnn"
    job = {
        "model": {"factory": f"{MODELS}:{model}"},
        "loss": {"factory": f"{MODELS}:token_loss" if tokens else "torch.nn:CrossEntropyLoss"},
        "data": {"factory": f"{MODELS}:{'Tokens' if tokens else 'Images'}"},
        "training": {"steps": 5, "batch_size": 4, "precision": precision},
    }
    one = trained(1, gpus=1, **job)
    two = trained(2, gpus=2, **job, pipeline={"micro_batches": 2, "stages": 2, **pipeline})
    assert_agree(one, two)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
@pytest.mark.parametrize("piece_bytes", [64, 1 << 20])
def test_messages_go_through_host_memory_and_back(dtype: torch.dtype, piece_bytes: int) -> None:
    device = torch.accelerator.current_accelerator()
    assert device is not None
    sent = torch.arange(1000, device=device).to(dtype)
    staging = Staging(device)
    message, copied = staging.outgoing(sent, piece_bytes)
    assert len(copied) == -(-sent.nbytes // piece_bytes)
    for event in copied:
        event.synchronize()
    received = staging.incoming(message)
    assert received.device.type == device.type
    assert torch.equal(received.cpu(), sent.cpu())


@pytest.mark.parametrize("name", ["AdamW", "SGD", "NAdam", "Adafactor", "ASGD"])
@pytest.mark.parametrize("dimensions", [0, 1])
def test_optimizers_go_on_with_their_numbers_where_they_were(
    tmp_path: Path, name: str, dimensions: int
) -> None:
    """What they remember of a parameter without dimensions is a number, as a count of steps is."""
    device = torch.accelerator.current_accelerator()
    found = []
    for _ in range(2):
        parameter = nn.Parameter(torch.ones((3,) * dimensions, device=device))
        options = {"momentum": 0.9} if name == "SGD" else {}
        found.append((parameter, getattr(torch.optim, name)([parameter], lr=0.1, **options)))
    (parameter, optimizer), (again, other) = found
    update(parameter, optimizer)
    saver = Saver(MPI.COMM_SELF, tmp_path, Keep(1), 1, print)
    named = {"model.scale": parameter}
    saver.start(Manifest(1, 1, {}), take_snapshot(named, {*named}, Updater(optimizer, None), named))
    saver.finish()
    stored = checkpoint.load(tmp_path / "step-000001")
    stored.restore_states({"model.scale": again})
    stored.restore_optimizer(other, {"model.scale": again})
    assert places(other) == places(optimizer)
    for each in found:
        update(*each)
    assert torch.equal(again, parameter)


def update(parameter: nn.Parameter, optimizer: torch.optim.Optimizer) -> None:
    parameter.grad = torch.full_like(parameter, 0.5)
    optimizer.step()


def places(optimizer: torch.optim.Optimizer) -> dict[str, torch.device]:
    """Where what an optimizer remembers of its one parameter is."""
    (state,) = optimizer.state.values()
    return {key: value.device for key, value in state.items() if isinstance(value, Tensor)}
