"""What a reader of the documentation has: jobs in a directory, and a shell."""

import os
import subprocess
import sys
from pathlib import Path

import yaml
from pages import CHECKOUT

BASICS = "bash sh env cat ls cp mv rm ln mkdir mktemp sleep sed grep head tail tr date id hostname"
"""Commands that are everywhere; a batch system is not."""
STEPS = 6
"""Of every training: the same job, ended early."""
SMALLER = {"layers": 2, "megabytes": 0.3, "windows": 16}
"""What models and data of jobs are made with, where they have such an argument."""


def shortened(source: Path, target: Path, **keys: object) -> None:
    job = yaml.safe_load(source.read_text())
    job["training"].update(steps=STEPS)
    for made in (job["model"], job["data"], (job.get("evaluation") or {}).get("data", {})):
        given = made.get("kwargs") or {}
        given.update({name: value for name, value in SMALLER.items() if name in given})
    job["checkpoint"] = {**(job.get("checkpoint") or {}), "every": 3}
    target.write_text(yaml.safe_dump({**job, **keys}))


def basic_commands(folder: Path) -> None:
    """Put them into ``folder / "bin"``."""
    (folder / "bin").mkdir(parents=True)
    for name in BASICS.split():
        (folder / "bin" / name).symlink_to(f"/bin/{name}")


def directory_of_a_reader(folder: Path, python: str) -> None:
    """Make it: with pipectl on PATH, and the jobs of the checkout.

    Args:
        python: what runs pipectl.
    """
    basic_commands(folder)
    program = folder / "bin" / "pipectl"
    program.write_text(f'#!/bin/sh\nexec {python} -m pipectl "$@"\n')
    program.chmod(0o755)
    (folder / "configs").mkdir()
    (folder / "configs" / "models").symlink_to(CHECKOUT / "configs" / "models")
    for source in sorted((CHECKOUT / "configs").glob("*.yaml")):
        shortened(source, folder / "configs" / source.name)


def bash(text: str, folder: Path, *elsewhere: str) -> list[str]:
    """Run it in ``folder``; the lines that it printed.

    Args:
        elsewhere: directories at the end of PATH.
    """
    environment = {key: value for key, value in os.environ.items() if key != "SLURM_CONF"}
    path = ":".join([str(folder / "bin"), str(Path(sys.executable).parent), *elsewhere])
    done = subprocess.run(
        ["bash", "-c", text],
        cwd=folder,
        env={**environment, "PATH": path, "COLUMNS": "100"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=800,
    )
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return f"{done.stdout}\n{done.stderr}".splitlines()
