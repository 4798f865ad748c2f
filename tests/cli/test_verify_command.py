"""`pipectl lab verify` with real MPI ranks and a real plain process."""

import json
import os
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from pipectl.jobs.cancel import cancel
from pipectl.profiler import neighbours
from pipectl.runs import Record

pytestmark = [pytest.mark.mpi, pytest.mark.usefixtures("warm")]
PATH = os.environ["PATH"]
"""With the compiler on it; tests of commands have a shorter one."""
MODEL = """\
import torch
from torch import nn
from torch.utils.data import TensorDataset

def build():
    return nn.Sequential(
        nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.0), nn.Linear(8, 2)
    )

def dropping():
    return nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.ReLU(), nn.Linear(8, 2))

class Deceiving(nn.Module):
    '''Another model for whoever captures it.'''

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 2)

    def forward(self, x):
        x = self.first(x)
        return self.second(x * 1.5 if torch.compiler.is_exporting() else x)

def data():
    return TensorDataset(torch.randn(20, 4), torch.randn(20, 2))

def tagger():
    return nn.Sequential(nn.Embedding(9, 6), nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 9))

def sequences():
    return [(torch.arange(n) % 9, torch.arange(n) % 7) for n in range(1, 9)] * 3

def tags(outputs, targets):
    return nn.functional.cross_entropy(outputs.flatten(0, 1), targets.flatten(), ignore_index=-100)
"""


@pytest.fixture
def verify(cli, job, place, monkeypatch):
    """``verify("--set", ...)``; checks that nothing is left behind."""
    Path("model.py").write_text(MODEL)
    temporary = place / "temporary"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))

    def run(*arguments):
        result = cli("lab", "verify", "job.yaml", *arguments)
        assert list(temporary.glob("pipectl*")) == []
        assert not Path("runs").exists()
        return result

    return run


def answer_of(verify, *arguments: str) -> dict[str, Any]:
    """Of a verification after which everything is equal."""
    result = verify("--json", *arguments)
    assert (result.code, result.out[:1]) == (0, "{"), result.err
    answer: dict[str, Any] = json.loads(result.out)
    assert answer["equal"]
    return answer


@pytest.fixture
def warm(monkeypatch, warm_python):
    """Ranks that begin sooner, and no neighbours while measuring: results depend on neither."""
    monkeypatch.setattr(sys, "executable", warm_python)
    monkeypatch.setattr(neighbours, "neighbour_count", lambda *_: 0)
    monkeypatch.setenv("TORCHINDUCTOR_COMPILE_THREADS", "1")  # else it starts a pool of processes


SCHEDULE = "lr_scheduler={factory: 'torch.optim.lr_scheduler:StepLR', kwargs: {step_size: 1}}"
BUCKETS = "buckets: [4, 8], pad: {inputs: 0, targets: -100}"
SEQUENCES = f"data={{factory: './model.py:sequences', {BUCKETS}}}"
SCALING = "training.loss_scale={initial: 1048576, growth_interval: 2}"


@pytest.mark.parametrize(
    ("ranks", "steps", "changes"),
    [
        (3, 4, ["pipeline.stages=3", SCHEDULE, "training.clip_grad_norm=0.1"]),
        (2, 5, ["model=./model.py:tagger", "loss=./model.py:tags", SEQUENCES]),
        (2, 8, ["training.precision=float16", SCALING]),
    ],
    ids=["clipped", "several lengths", "float16 with torch's own scaler"],
)
def test_a_pipeline_equals_a_plain_loop_to_the_bit(verify, ranks, steps, changes):
    options = [word for change in changes for word in ("--set", change)]
    answer = answer_of(verify, "--ranks", str(ranks), "--steps", str(steps), *options)
    assert (answer["max_abs_difference"], answer["tolerance"]) == (0.0, 0.0)
    assert answer["first_difference"] is None
    assert answer["compared"] == "a plan and one process"
    assert answer["reference"] == "one plain PyTorch process"
    assert (answer["ranks"], answer["stages"]) == (ranks, ranks)
    assert (answer["micro_batches"], answer["micro_batch_size"]) == (4, 2)
    assert len({loss for loss, _ in answer["losses"]}) > 1
    assert len(answer["losses"]) == steps


def test_an_interrupt_leaves_no_ranks_behind(verify, monkeypatch):
    """Its files go too, though it is asked twice."""
    runs: list[psutil.Process] = []

    def interrupted(run):
        script = psutil.Process(int((Record.load(run.record).job_id or "").partition(".")[0]))
        while not run.heartbeat.exists():
            assert script.is_running()
            time.sleep(0.01)
        runs.extend([script, *script.children(recursive=True)])
        signal.raise_signal(signal.SIGTERM)

    def cancel_slowly(run, now):
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGHUP)
        return cancel(run, now)

    monkeypatch.setattr("pipectl.jobs.verify.poll", interrupted)
    monkeypatch.setattr("pipectl.jobs.verify.cancel", cancel_slowly)
    result = verify("--steps", "1000000")
    assert (result.code, result.out) == (130, "")
    assert len(runs) > 3
    assert psutil.wait_procs(runs, timeout=10)[1] == []


def test_random_operators_are_compared_with_one_rank(verify):
    result = verify("--steps", "2", "--set", "model.factory=./model.py:dropping")
    lines = result.out.splitlines()
    assert result.code == 0
    assert lines[0].startswith("pipeline: 2 ranks, 2 stages, 1f1b, ")
    assert lines[1] == "reference: one rank"
    assert lines[2].startswith("note: dropout: random numbers")
    assert lines[-1] == "equal: every loss and every weight, to the bit"


@pytest.mark.skipif(not shutil.which("g++"), reason="needs a C++ compiler")
def test_compiled_stages_agree_within_rounding(verify, monkeypatch):
    monkeypatch.setenv("PATH", PATH)
    answer = answer_of(verify, "--steps", "2", "--set", "training.compile=true")
    assert answer["tolerance"] == 1e-4
    assert answer["notes"][0] == "training.compile: fused operators round differently"


def test_two_plans_are_compared_if_one_asks(verify):
    clipped = ("--set", "training.clip_grad_norm=0.1")
    answer = answer_of(verify, "--steps", "2", "--between-plans", *clipped)
    assert (answer["compared"], answer["tolerance"]) == ("two plans", 0.0)
    assert answer["max_abs_difference"] == 0.0
    assert answer["first_difference"] is None
    assert answer["reference"] == "another plan: 3 ranks, 3 stages"
    assert (answer["ranks"], answer["stages"]) == (2, 2)
    assert answer["notes"][0].startswith("--between-plans: compared with another plan")
    assert all(one == other for one, other in answer["losses"])


def test_a_difference_is_found_and_where_it_began(verify):
    result = verify("--steps", "2", "--set", "model.factory=./model.py:Deceiving")
    lines = result.out.splitlines()
    assert result.code == 1
    assert lines[-2].startswith("different: by ")
    assert lines[-1].startswith("first at step 1, in loss: by ")


def test_a_failure_of_the_ranks_is_told_and_leaves_nothing(verify, monkeypatch):
    """Here it is that of a compiler that does not exist."""
    monkeypatch.setenv("CXX", "no-such-compiler")
    result = verify("--steps", "2", "--set", "training.compile=true")
    assert (result.code, result.out) == (3, "")
    (error,) = (line for line in result.err.splitlines() if line.startswith("error: "))
    assert error.startswith("error: rank ")
    assert "training.compile: torch.compile fails" in error
    assert "set training.compile: false" in result.err
