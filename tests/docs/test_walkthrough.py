"""The walk-through, from its first command to its last, with pipectl as its wheel installs it."""

import re
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest
from distribution import wheel
from pages import CHECKOUT, script, shown
from reader import bash, basic_commands

PAGE = CHECKOUT / "docs" / "walkthrough.md"
_CONTROL = re.compile(r"\x1b\[[^A-Za-z]*[A-Za-z]|\^C")  # of what draws on a terminal
_DEPENDS_ON_TIMES = (
    *("bottleneck:", "it waits:", "faster:", "sum gradients", "search:", "per step"),
    *("waiting", "stage "),
)
_SHORTER = "pipectl submit job.yaml --set training.steps=20 --set evaluation.every=20"
pytestmark = pytest.mark.mpi


@pytest.fixture
def python(tmp_path):
    """Of an environment with pipectl from its wheel; all else is that of the tests."""
    folder = tmp_path / "venv"
    venv.create(folder, symlinks=True)
    for kind in ("bin", "lib"):  # of the extra that brings an MPI along
        for path in (Path(sys.prefix) / kind).glob("*mpi*"):
            (folder / kind / path.name).symlink_to(path)
    for path in (Path(sys.prefix) / "bin").glob("hydra*"):
        (folder / "bin" / path.name).symlink_to(path)
    python = folder / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--quiet", "--python", str(python)]
    subprocess.run(
        [*pip, "install", "--no-compile", "--no-deps", "--no-index", wheel(tmp_path)], check=True
    )
    where = [str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
    site = Path(subprocess.run(where, capture_output=True, text=True, check=True).stdout.strip())
    (site / "of_the_tests.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return python


@pytest.fixture
def reader(tmp_path, python):
    """An empty directory outside of the checkout, and on PATH what the page has installed."""
    folder = tmp_path / "reader"
    basic_commands(folder)
    for command in (python, python.with_name("pipectl")):
        program = folder / "bin" / command.name
        program.write_text(f'#!/bin/sh\nexec {command} "$@"\n')
        program.chmod(0o755)
    return folder


def test_the_walk(reader, python):
    files = re.findall(r"^```python (\S+\.py)\n(.*?)^```", PAGE.read_text("utf-8"), re.M | re.S)
    for name, body in files:
        (reader / name).write_text(body)
    text = script(PAGE, "walk").replace(f"{sys.executable} -m pipectl", "pipectl")
    text = text.replace("pipectl submit job.yaml", _SHORTER)
    printed = [_CONTROL.sub("", line) for line in bash(text, reader)]

    (run,) = (reader / "runs").glob("2*")
    assert str(python) in (run / "job.sh").read_text(), "the ranks have another Python"
    where = "import pipectl.runtime; print(pipectl.runtime.__file__)"
    found = subprocess.run([python, "-c", where], cwd=reader, capture_output=True, text=True)
    assert Path(found.stdout).is_relative_to(python.parents[1]), found

    gists = [_gist(line) for line in printed]
    missing = [line for line in shown(PAGE, "walk") if _gist(line) not in gists]
    assert [line for line in missing if not line.strip().startswith(_DEPENDS_ON_TIMES)] == []
    shown_losses = re.findall(r"evaluation .* loss ([\d.]+)$", "\n".join(printed), re.MULTILINE)
    (evaluated,) = set(shown_losses)  # by logs and by status
    (plain,) = re.findall(r"in plain PyTorch: ([\d.]+)", "\n".join(printed))
    assert float(plain) == pytest.approx(float(evaluated), rel=1e-3)


def _gist(line: str) -> list[str]:
    """Its first words, whatever the figures."""
    return re.sub(r"\d+([.,:]\d+)*", "0", line).split()[:2]
