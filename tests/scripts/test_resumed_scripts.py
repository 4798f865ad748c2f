"""Jobs of scripts that go on from a checkpoint, with more steps or other arguments."""

import json
import sys
from importlib.machinery import SourceFileLoader
from pathlib import Path

import pytest

from pipectl.runs import RunDirectory, read_metrics, sources
from pipectl.runs.code import Code, keep, using_code_of
from pipectl.script import Command
from pipectl.script.plain import own_losses
from pipectl.script.run import as_main
from pipectl.spec import load

SCRIPT = """
import argparse
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int)
parser.add_argument("--lr", type=float, default=0.1)
parser.add_argument("--amsgrad", action="store_true")
arguments = parser.parse_args()
torch.manual_seed(0)
rows = torch.randn(48, 4), torch.randint(0, 3, (48,))
loader = DataLoader(TensorDataset(*rows), batch_size=8, shuffle=True)
model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))
optimizer = torch.optim.Adam(model.parameters(), arguments.lr, amsgrad=arguments.amsgrad)
schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
for epoch in range(arguments.epochs):
    for x, y in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    schedule.step()
"""
STOPPED, STEPS = 8, 15
"""In the middle of the second epoch of six steps, and of the third one."""


@pytest.fixture
def run_of(tmp_path, run_in, monkeypatch):
    """``run_of(ranks, steps, *arguments)``: the run of a job of the script."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    (tmp_path / "train.py").write_text(SCRIPT)

    def make(ranks, steps, *arguments):
        job = tmp_path / "job.yaml"
        job.write_text(json.dumps({
            "script": {"file": "./train.py", "arguments": arguments},
            "training": {"steps": steps, "batch_size": 8},
            "pipeline": {"stages": ranks, "micro_batches": 2},
            "resources": {"tasks_per_node": ranks},
            "checkpoint": {"every": STOPPED},
        }))  # fmt: skip
        return run_in(tmp_path / "runs", load(job))

    return make


def steps_of(run):
    return {x.step: (x.loss, x.learning_rate) for x in read_metrics(run) if x.is_step}


@pytest.mark.mpi
@pytest.mark.timeout(900)
def test_a_job_of_a_script_goes_on_as_the_script_that_trains_longer(run_of, launch):
    """The samples, the schedule and the optimizer of other ranks go on in the middle of an epoch;
    other arguments of the script count from the next step on."""
    first, longer = run_of(2, STOPPED, "--epochs", "1"), run_of(1, STEPS, "--epochs", "3")
    slower = run_of(1, STEPS, "--epochs", "3", "--lr", "0.01", "--amsgrad")
    program = Path(__file__).parents[1] / "runtime" / "ranks_in_turn.py"
    for ranks, words in (
        (2, [first.path]),
        (0, [f"{first.path}:{STOPPED}:{each.path}" for each in (longer, slower)]),
    ):
        done = launch(ranks, program, *words)
        assert done.returncode == 0, done.stderr
    own = own_losses(Command.of(load(longer.job)), STEPS)
    losses = [loss for run in (first, longer) for loss, _ in steps_of(run).values()]
    assert losses == pytest.approx(own, rel=1e-5)
    rates = {step: rate for step, (_, rate) in steps_of(slower).items()}
    assert rates == pytest.approx(
        {step: 0.01 * 0.5 ** ((step - 1) // 6) for step in range(STOPPED + 1, STEPS + 1)}
    )


def test_a_script_imports_what_its_run_has_kept(tmp_path, monkeypatch):
    """No factory of a job of a script is imported, so the script itself must be told."""
    monkeypatch.setattr(SourceFileLoader, "get_code", sources._read_code)
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    beside = tmp_path / "kept_beside.py"
    beside.write_text("WIDTH = 1\n")
    (tmp_path / "train.py").write_text("from kept_beside import WIDTH\n")
    job = tmp_path / "job.yaml"
    job.write_text("script: {file: ./train.py}\ntraining: {steps: 4, batch_size: 8}\n")
    run = RunDirectory.create(tmp_path / "runs", "tiny", 0.0)
    keep(run, Code.of(load(job)), 1, None)
    beside.write_text("WIDTH = 2\n")
    with using_code_of(run), as_main(Command.of(load(job))) as (code, space):
        exec(code, space)
    sys.modules.pop("kept_beside")
    assert space["WIDTH"] == 1
