"""A package that is next to the job file: found from any directory, by commands and by ranks."""

from __future__ import annotations

import subprocess
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from pipectl.capture import CapturedJob
from pipectl.errors import SpecError
from pipectl.spec import SpecFile, dump, load, profile_key

JOB = """\
version: 1
name: tiny
model: {factory: "ownnet.net:Model"}
loss: {factory: "torch.nn:MSELoss"}
data: {factory: "ownnet.data:samples"}
training: {steps: 1, batch_size: 8}
site_defaults: false
"""


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A job beside its package; neither is in the current directory."""
    package = tmp_path / "jobs" / "ownnet"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "layers.py").write_text("from torch import nn\nLayer = nn.Linear\n")
    (package / "net.py").write_text(
        "from .layers import Layer\n\nclass Model(Layer):\n"
        "    def __init__(self):\n        super().__init__(4, 2)\n"
    )
    (package / "data.py").write_text(
        "import torch\nfrom torch.utils.data import TensorDataset\n\n"
        "def samples():\n    return TensorDataset(torch.zeros(16, 4), torch.zeros(16, 2))\n"
    )
    path = tmp_path / "jobs" / "job.yaml"
    path.write_text(JOB)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield path
    for name in [name for name in sys.modules if name.partition(".")[0] == "ownnet"]:
        del sys.modules[name]


def test_a_package_beside_the_job_is_imported(job: Path) -> None:
    assert type(CapturedJob(load(job)).model).__name__ == "Model"


def test_ranks_find_it_by_the_job_of_their_run_directory(job: Path, tmp_path: Path) -> None:
    spec = load(job)
    run = tmp_path / "run"
    run.mkdir()
    (run / "job.yaml").write_text(dump(spec))
    kept = load(run / "job.yaml")
    assert kept.model.factory == f"{job.parent}/ownnet.net:Model"
    assert type(CapturedJob(kept).model).__name__ == "Model"
    assert kept.model.reference == spec.model.reference
    assert profile_key(kept) == profile_key(spec)


def test_a_change_in_the_package_is_another_model(job: Path) -> None:
    before = profile_key(load(job))
    with (job.parent / "ownnet" / "layers.py").open("a") as file:
        file.write("# changed\n")
    assert profile_key(load(job)) != before


def test_a_file_with_relative_imports_is_to_be_named_as_a_module(job: Path) -> None:
    spec = load(job, ["model.factory=./ownnet/net.py:Model"])
    with pytest.raises(Exception, match="attempted relative import") as caught:
        CapturedJob(spec)
    assert "package.module:name" in str(getattr(caught.value, "cure", ""))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("model.factory=ownnet.net:Modle", "net.py defines no 'Modle'; did you mean 'Model'?"),
        ("model.factory=ownnet.nets:Model", "there is no module ownnet.nets in "),
        ("model.factory=not_installed.net:Model", "no module 'not_installed' is installed"),
        ("model.factory=./ownnet/net.py:build", "net.py defines no 'build'"),
    ],
)
def test_check_says_which_name_cannot_be_found(job: Path, change: str, message: str) -> None:
    with pytest.raises(SpecError) as caught:
        SpecFile.read(job, [change]).spec(check_names=True)
    assert message in caught.value.message
    assert "model.factory" in caught.value.message


def test_a_package_that_a_finder_of_an_editable_install_knows_is_installed(
    job: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Finder:
        @staticmethod
        def find_spec(name: str, _path: object = None, _target: object = None) -> ModuleSpec | None:
            return ModuleSpec(name, None) if name == "editable" else None

    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path, Finder])
    SpecFile.read(job, ["model.factory=editable.net:Model"]).spec(check_names=True)
    monkeypatch.setitem(sys.modules, "made_at_run_time", ModuleType("made_at_run_time"))
    SpecFile.read(job, ["model.factory=made_at_run_time.net:Model"]).spec(check_names=True)


@pytest.mark.parametrize(
    "text",
    [
        "from os.path import *",
        "def __getattr__(name): ...",
        "globals()['build'] = 1",
        "try:\n    import quick as build\nexcept ImportError:\n    build = None",
        "if True:\n    def build(): ...",
        "def make():\n    global build\n    build = 1",
        "one, (build, two) = 1, (2, 3)",
    ],
)
def test_names_that_may_come_about_at_run_time_pass(job: Path, text: str) -> None:
    (job.parent / "own.py").write_text(text)
    SpecFile.read(job, ["model.factory=./own.py:build"]).spec(check_names=True)


def test_check_loads_neither_torch_nor_the_users_code(job: Path) -> None:
    with (job.parent / "ownnet" / "net.py").open("a") as file:
        file.write("raise SystemExit('imported')\n")
    code = (
        "import sys; from pipectl.cli import main; code = main(sys.argv[1:]); "
        "assert 'torch' not in sys.modules and 'ownnet' not in sys.modules; sys.exit(code)"
    )
    command: list[Any] = [sys.executable, "-c", code, "check", job]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
