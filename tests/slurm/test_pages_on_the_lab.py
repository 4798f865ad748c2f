"""The commands of both READMEs that need a Slurm, on a lab of their own."""

import shutil
import subprocess
from pathlib import Path

import pytest
from pages import CHECKOUT, PAGES, script
from reader import bash, directory_of_a_reader, shortened

TO_RUN = [page for page in PAGES if page.name == "README.md" and script(page, "lab")]
LAB = CHECKOUT / "slurm" / "lab"


@pytest.fixture
def reader(lab, free_ports, tmp_path, warm_commands, monkeypatch):
    """A checkout, as far as a reader uses it, and settings for another lab."""
    state = Path(f"{lab}-2")
    monkeypatch.setenv("PIPECTL_LAB", str(state))
    monkeypatch.setenv("PIPECTL_LAB_PORT", str(free_ports))
    directory_of_a_reader(tmp_path, warm_commands)
    (tmp_path / "slurm").symlink_to(CHECKOUT / "slurm")
    bash("pipectl init . --yes --scheduler local", tmp_path)
    shortened(tmp_path / "job.yaml", tmp_path / "job.yaml", launch={"scheduler": "slurm"})
    yield tmp_path
    subprocess.run([LAB / "down"], check=True, timeout=180)
    shutil.rmtree(state, ignore_errors=True)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("page", TO_RUN, ids=lambda page: page.name)
def test_commands_run(page, reader):
    bash(script(page, "lab"), reader, "/usr/sbin", "/usr/bin", "/bin")
