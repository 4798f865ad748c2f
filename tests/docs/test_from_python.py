"""The page on Python runs as a notebook, and its recipes as programs.

Without nbclient its cells run here, one after the other, without being shown.
"""

import os
import re
import subprocess
import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

import pipectl
from tests.docs.pages import CHECKOUT

PAGE = (CHECKOUT / "docs" / "from-python.md").read_text("utf-8")
BLOCKS = re.findall(r"^```python (\S+)\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
FILES = {name: text for name, text in BLOCKS if name != "run"}
CELLS = [text for name, text in BLOCKS if name == "run"]
RECIPES = {
    "search.py": ("optuna",),
    "sweep.py": ("hydra", "--multirun", "optimizer.kwargs.lr=1e-2,1e-3"),
}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def run_notebook(folder: Path, python: str) -> list[Any]:
    """Run the cells; what each of them has shown."""
    nbformat, nbclient = map(import_module, ("nbformat", "nbclient"))
    begin = f"import sys; sys.executable = {python!r}"
    cells = [nbformat.v4.new_code_cell(text) for text in (begin, *CELLS)]
    notebook = nbformat.v4.new_notebook(cells=cells)
    resources = {"metadata": {"path": str(folder)}}
    settings = {"kernel_name": "python3", "resources": resources, "timeout": 500}
    nbclient.NotebookClient(notebook, **settings).execute()
    if "PIPECTL_NOTEBOOK" in os.environ:
        nbformat.write(notebook, os.environ["PIPECTL_NOTEBOOK"])
    return [cell.outputs for cell in notebook.cells[1:]]


@pytest.mark.mpi
def test_the_page_runs_as_a_notebook(folder, warm_python, monkeypatch):
    """It plans, submits, follows, loads the best weights, and compares two runs."""
    if not all(map(find_spec, ("nbclient", "ipykernel"))):
        monkeypatch.setattr(sys, "executable", warm_python)
        names: dict[str, Any] = {}
        for cell in CELLS:
            exec(compile(cell, "from-python.md", "exec"), names)
        sys.modules.pop("net", None)
        return
    planned, followed, *_ = run_notebook(folder, warm_python)
    pages = [out["data"].get("text/html", "") for out in (planned[-1], followed[-1])]
    plan, run = (re.findall(r'<img alt="([^"]*)"', page) for page in pages)
    assert plan == ["the predicted step"]
    assert run == ["figures 1", "figures 2", "figures 3", "a step"]
    assert "COMPLETED" in pages[1]
    told = "".join(str(out) for out in followed[:-1])
    assert "RUNNING" in told


@pytest.mark.mpi
@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_runs(folder, warm_python, name, monkeypatch):
    package, *arguments = RECIPES[name]
    pytest.importorskip(package)
    monkeypatch.setattr(sys, "executable", warm_python)
    names: dict[str, Any] = {}
    exec(CELLS[0].partition("job.check()")[0], names)
    Path("job.yaml").write_text(names["job"].to_yaml())
    names["job"].profile("fast")
    begin = f"import sys; sys.executable = {warm_python!r}; sys.argv = {[name, *arguments]!r}\n"
    Path(name).write_text(begin + FILES[name])
    monkeypatch.undo()
    done = subprocess.run(
        [sys.executable, name], cwd=folder, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert len(pipectl.runs(folder / "runs")) == (3 if package == "optuna" else 2)
