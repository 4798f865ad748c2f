"""Code that is edited while a job waits, before a requeue, and before `resume`: what is trained."""

import os
import sys
from math import inf
from pathlib import Path

import pytest

from pipectl.profile import Profile
from pipectl.profiler import neighbours
from pipectl.runs import list_runs, read_exit_code, read_metrics, sources
from tests.batch.job_requests import wait_until

PATH = os.environ["PATH"]
FILES = {
    "model.py": """\
import sys
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import TensorDataset

from nets.layers import Layer
from targets import scale


def build():
    return nn.Sequential(Layer(4, 8), nn.ReLU(), nn.Linear(8, 1))


def data():
    sys.path.insert(0, str(Path(__file__).parent / "lib"))
    from noise import level

    shift = level + float((Path(__file__).parent / "shift.txt").read_text())
    x = torch.rand(16, 4, generator=torch.Generator().manual_seed(0))
    return TensorDataset(x, x.sum(1, keepdim=True) * scale() + shift)


def loss(outputs, targets):
    return ((outputs - targets) ** 2).mean()
""",
    "targets.py": "def scale():\n    return 1.0\n",
    "nets/__init__.py": "",
    "nets/layers.py": "from torch.nn import Linear as Layer\n",
    "lib/noise.py": "level = 0.0\n",
    "shift.txt": "0.5",
}
EDITS = [
    ("model.py", ".mean()", ".mean() * 1000"),
    ("targets.py", "1.0", "30.0"),
    ("nets/layers.py", "Linear", "Bilinear"),
    ("lib/noise.py", "0.0", "40.0"),
]
JOB = """\
version: 1
name: tiny
model: ./model.py:build
loss: ./model.py:loss
data: ./model.py:data
optimizer: {factory: "torch.optim:SGD", kwargs: {lr: 0.0}}
training: {steps: 2, batch_size: 16}
pipeline: {stages: 2, micro_batches: 2}
resources: {tasks_per_node: 2}
environment: {setup: ["until [[ -e $PIPECTL_RUN_DIRECTORY/go ]]; do sleep 0.1; done"]}
site_defaults: false
"""


def edit(*, back=False):
    for name, old, new in EDITS:
        old, new = (new, old) if back else (old, new)
        Path(name).write_text(Path(name).read_text().replace(old, new))


def loss_after(run, steps):
    """The first loss after the run has ended."""
    (run.path / "go").touch()
    wait_until(lambda: read_exit_code(run.start) is not None, 300)
    assert read_exit_code(run.start) == 0, run.job_log.read_text()
    lines = read_metrics(run)
    assert lines[-1].step == steps
    return lines[-1].loss


@pytest.mark.mpi
@pytest.mark.timeout(900)
def test_a_job_trains_the_code_it_was_submitted_with(cli, place, monkeypatch, warm_python):
    monkeypatch.setenv("PATH", PATH)
    monkeypatch.setattr(sys, "executable", warm_python)
    monkeypatch.setattr(sources, "_began_s", inf)  # its files are not made by this process
    monkeypatch.setattr(neighbours, "neighbour_count", lambda *_: 0)
    for name, text in FILES.items():
        (place / name).parent.mkdir(exist_ok=True)
        (place / name).write_text(text)
    Path("job.yaml").write_text(JOB)
    submitted = cli("submit", "job.yaml", "--scheduler", "local")
    assert submitted.code == 0, submitted.err
    edit()  # while it waits
    (run,) = list_runs(Path("runs"))
    assert [file.path for file in Profile.load(run.profile).code] == [str(place / "lib/noise.py")]
    expected = loss_after(run, 2)
    assert expected < 10
    log = run.job_log.read_text()
    for name, _, _ in EDITS:
        assert f"{place / name} has changed since the submission; the job uses its copy" in log
    # A later start of the job script, as a batch system starts it again.
    resumed = cli("resume", "last", "--set", "training.steps=4", "--json")
    assert resumed.json["has_own_code"]
    assert {Path(name) for name in resumed.json["changed_files"]} == {
        place / name for name, _, _ in EDITS
    }
    assert loss_after(run, 4) == pytest.approx(expected, abs=1e-6)
    assert not run.start.changed_code.exists()
    edit(back=True)
    Path("targets.py").write_text("def scale():\n    return 30.0\n")
    resumed = cli("resume", "last", "--set", "training.steps=6", "--with-changed-code", "--json")
    assert not resumed.json["has_own_code"]
    assert loss_after(run, 6) > 50 * expected
    assert (run.code / "2/targets.py").exists()
