"""The lab's own scripts."""

import os
import shutil
import subprocess
from pathlib import Path

import psutil
import pytest

LAB = Path(__file__).parents[2] / "slurm" / "lab"


def up(**environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [LAB / "up"],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.mark.parametrize("name", ["up", "down", "env", "common"])
def test_scripts_are_valid(name):
    subprocess.run(["bash", "-n", LAB / name], check=True)
    if shutil.which("shellcheck"):
        subprocess.run(["shellcheck", "-x", f"slurm/lab/{name}"], check=True, cwd=LAB.parents[1])
    assert name not in ("up", "down") or os.access(LAB / name, os.X_OK)


def test_up_is_repeatable(lab):
    pids = {path.name: path.read_text() for path in lab.glob("*.pid")}
    assert len(pids) == 6
    done = up()
    assert (done.returncode, done.stdout) == (0, f"export SLURM_CONF={lab}/slurm.conf\n")
    assert {path.name: path.read_text() for path in lab.glob("*.pid")} == pids


def test_a_second_lab_on_the_same_ports_is_refused(lab, tmp_path):
    done = up(PIPECTL_LAB=str(tmp_path))
    assert done.returncode == 1
    assert "PIPECTL_LAB_PORT" in done.stderr


@pytest.mark.parametrize("directory", ["relative", "/tmp/with space", "/tmp/" + "x" * 100])
def test_unusable_directories_are_refused(lab, directory):
    done = up(PIPECTL_LAB=directory)
    assert done.returncode == 1
    assert "PIPECTL_LAB" in done.stderr


def test_a_killed_node_comes_back(lab):
    pid_file = lab / "slurmd.node4.pid"
    slurmd = psutil.Process(int(pid_file.read_text()))
    slurmd.kill()
    slurmd.wait(10)
    assert up().returncode == 0
    command = Path(f"/proc/{int(pid_file.read_text())}/cmdline").read_text()
    assert "node4" in command


def test_down_stops_no_stranger(tmp_path):
    stranger = subprocess.Popen(["sleep", "60"])
    (tmp_path / "munged.pid").write_text(f"{stranger.pid}\n")
    environment = {**os.environ, "PIPECTL_LAB": str(tmp_path)}
    subprocess.run([LAB / "down"], env=environment, check=True, timeout=60)
    assert stranger.poll() is None
    stranger.kill()
    stranger.wait()
