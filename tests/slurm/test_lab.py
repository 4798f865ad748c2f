"""The lab's own scripts, and the commands of its README."""

import os
import shutil
import subprocess
from pathlib import Path

import psutil
import pytest

from tests.docs.pages import CHECKOUT, bash, directory_of_a_reader, script, shortened

LAB = CHECKOUT / "slurm" / "lab"
README = CHECKOUT / "slurm" / "README.md"


def up(**environment: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, **environment}
    return subprocess.run(
        [LAB / "up"], env=environment, capture_output=True, text=True, timeout=300
    )


@pytest.mark.parametrize("name", ["up", "down", "env", "common"])
def test_scripts_are_valid(name):
    subprocess.run(["bash", "-n", LAB / name], check=True)
    if shutil.which("shellcheck"):
        subprocess.run(["shellcheck", "-x", f"slurm/lab/{name}"], check=True, cwd=CHECKOUT)
    assert name not in ("up", "down") or os.access(LAB / name, os.X_OK)


def test_up_changes_nothing_that_runs_and_starts_what_does_not(lab):
    pids = {path.name: path.read_text() for path in lab.glob("*.pid")}
    assert len(pids) == 6
    done = up()
    assert (done.returncode, done.stdout) == (0, f"export SLURM_CONF={lab}/slurm.conf\n")
    assert {path.name: path.read_text() for path in lab.glob("*.pid")} == pids
    killed = psutil.Process(int(pids["slurmd.node4.pid"]))
    killed.kill()
    killed.wait(10)
    assert up().returncode == 0
    again = psutil.Process(int((lab / "slurmd.node4.pid").read_text()))
    assert "node4" in again.cmdline()


@pytest.mark.parametrize("directory", ["", "relative", "/tmp/with space", "/tmp/" + "x" * 100])
def test_unusable_directories_and_ports_of_another_lab_are_refused(lab, tmp_path, directory):
    done = up(PIPECTL_LAB=directory or str(tmp_path))
    assert done.returncode == 1
    assert ("PIPECTL_LAB=" if directory else "PIPECTL_LAB_PORT") in done.stderr


def test_down_stops_no_stranger(tmp_path):
    stranger = subprocess.Popen(["sleep", "60"])
    (tmp_path / "munged.pid").write_text(f"{stranger.pid}\n")
    environment = {**os.environ, "PIPECTL_LAB": str(tmp_path)}
    subprocess.run([LAB / "down"], env=environment, check=True, timeout=300)
    assert stranger.poll() is None
    stranger.kill()
    stranger.wait()


@pytest.mark.torture
@pytest.mark.timeout(900)
def test_commands_of_the_readme_run(lab, free_ports, tmp_path, warm_python, monkeypatch):
    """In a checkout, as far as a reader uses it, with another lab."""
    state = Path(f"{lab}-2")
    monkeypatch.setenv("PIPECTL_LAB", str(state))
    monkeypatch.setenv("PIPECTL_LAB_PORT", str(free_ports))
    directory_of_a_reader(tmp_path, warm_python)
    (tmp_path / "slurm").symlink_to(CHECKOUT / "slurm")
    bash("pipectl init . --scheduler local", tmp_path)
    shortened(tmp_path / "job.yaml", tmp_path / "job.yaml", launch={"scheduler": "slurm"})
    try:
        bash(script(README, "lab"), tmp_path, "/usr/sbin", "/usr/bin", "/bin")
    finally:
        subprocess.run([LAB / "down"], check=True, timeout=180)
        shutil.rmtree(state, ignore_errors=True)
