"""Training through any plan gives what one rank gives, to the bit; one rank gives plain PyTorch.

All processes are real MPI ranks with one thread each; the stages are random convex cuts.
"""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from pipectl.capture.data import Batches, Loader, split_batch
from pipectl.capture.step import seed_everything
from pipectl.runs import RunDirectory, read_metrics
from pipectl.runtime import checkpoint

HERE = Path(__file__).parent


def imported(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"equality_{name}", HERE / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


CELLS = imported("cells")
MODELS = imported("models")
ALL = list(CELLS.cells())


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every cell, trained on 1, 2, 3 and 4 ranks, and on one without dropout."""
    directory = tmp_path_factory.mktemp("equality")
    beside = Path(sys.prefix) / "bin" / "mpiexec"
    mpiexec = str(beside) if beside.exists() else shutil.which("mpiexec")
    assert mpiexec, "no mpiexec: pip install mpich"
    command = [sys.executable, "-m", "mpi4py", str(HERE / "cells.py"), str(directory)]
    for ranks, extra in ((1, []), (2, []), (3, []), (4, []), (1, ["plain"])):
        done = subprocess.run(
            [mpiexec, "-n", str(ranks), *command, *extra],
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-4000:]
    return directory


def weights(run: Path) -> dict[str, Tensor]:
    saved = sorted((run / "checkpoints").glob("step-*"))
    return checkpoint.load(saved[-1])


def figures(run: Path) -> list[tuple[Any, ...]]:
    """Losses, gradient norms and evaluations, in order of their steps."""
    lines = read_metrics(RunDirectory(run))
    found = [(line["step"], line.get("loss"), line.get("gradient_norm")) for line in lines]
    evaluations = [line["evaluation"] for line in lines if "evaluation" in line]
    return [*sorted(item for item in found if item[1] is not None), *evaluations]


@pytest.mark.mpi
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("cell", ALL, ids=str)
def test_weights_and_losses_equal_one_rank_to_the_bit(trained: Path, cell: Any, ranks: int) -> None:
    reference = trained / "1" / str(CELLS.Cell(cell.model, "gpipe", cell.batch))
    found = trained / str(ranks) / str(cell)
    expected, actual = weights(reference), weights(found)
    assert expected.keys() == actual.keys()
    different = [name for name in expected if not torch.equal(expected[name], actual[name])]
    assert different == []
    assert figures(found) == figures(reference)


@pytest.mark.mpi
def test_the_cuts_include_gradients_that_return_use_by_use(trained: Path) -> None:
    """The rarest path of all, taken only by cuts whose stages interleave a value's uses."""
    split = [json.loads(file.read_text()) for file in trained.glob("*/dense-*/split_uses.json")]
    assert any(split)


@pytest.mark.mpi
def test_training_moves_every_weight_and_lowers_the_loss(trained: Path) -> None:
    """The table would also be equal if nothing were trained."""
    run = trained / "4" / str(CELLS.Cell("gpt", "1f1b", "divisible"))
    seed_everything(3)
    first = MODELS.gpt().state_dict()
    assert all(not torch.equal(first[name], tensor) for name, tensor in weights(run).items())
    losses = [item[1] for item in figures(run) if isinstance(item, tuple)]
    assert losses[-1] < losses[0]


@pytest.mark.mpi
@pytest.mark.parametrize("batch", CELLS.BATCHES)
@pytest.mark.parametrize("model", ["gpt", "cnn", "dense"])
def test_one_rank_equals_a_plain_loop_to_the_bit(trained: Path, model: str, batch: str) -> None:
    plain = plain_loop(model, batch, steps=CELLS.STEPS)
    found = weights(trained / "plain" / str(CELLS.Cell(model, "1f1b", batch)))
    assert plain.keys() == found.keys()
    different = [name for name in plain if not torch.equal(plain[name], found[name])]
    assert different == []


@pytest.mark.mpi
@pytest.mark.parametrize("batch", CELLS.BATCHES)
def test_tied_gradients_equal_a_plain_loop_within_rounding(trained: Path, batch: str) -> None:
    """After one step of SGD with rate 1, the weights differ by what the gradients do."""
    plain = plain_loop("tied", batch, steps=1)
    found = weights(trained / "plain" / str(CELLS.Cell("tied", "1f1b", batch)))
    seed_everything(3)
    first = MODELS.tied(dropout=0.0).state_dict()
    largest = max(float((first[name] - tensor).abs().max()) for name, tensor in plain.items())
    worst = max(float((plain[name] - found[name]).abs().max()) for name in plain)
    assert worst <= 1e-5 * largest
    assert torch.equal(found["head.weight"], found["tokens.weight"])


def plain_loop(model: str, batch: str, steps: int) -> dict[str, Tensor]:
    """What a user would write: the untouched model, one process, gradient accumulation."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return _plain_loop(model, batch, steps)
    finally:
        torch.set_num_threads(threads)


def _plain_loop(name: str, batch: str, steps: int) -> dict[str, Tensor]:
    tied = name == "tied"
    batch_size, micro_batches = CELLS.BATCHES[batch]
    size = -(-batch_size // micro_batches)
    seed_everything(3)
    model = getattr(MODELS, name)(dropout=0.0)
    tokens = name in ("gpt", "tied")
    loss_of = MODELS.token_loss if tokens else torch.nn.CrossEntropyLoss()
    loader = Loader(MODELS.Tokens() if tokens else MODELS.Images(), seed=3)
    rate = {"lr": 1.0} if tied else {"lr": 0.003}
    kind = torch.optim.SGD if tied else torch.optim.AdamW
    optimizer = kind(model.parameters(), **rate)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=12)
    batches = Batches(45, batch_size)
    planned = [found for _, found in zip(range(steps), batches, strict=False)]
    loaded = loader.micro_batches(planned, size)
    for _, positions in planned:
        for samples in split_batch(len(positions), size):
            inputs, targets = next(loaded)
            loss = loss_of(model(inputs), targets)
            (loss * (samples / len(positions))).backward()
        if not tied:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    return {key: tensor.detach().clone() for key, tensor in model.state_dict().items()}
