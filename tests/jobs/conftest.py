"""Programs that tests pretend, and the job that most of them are about."""

from __future__ import annotations

import stat
from collections.abc import Callable
from pathlib import Path

import pytest

Program = Callable[[str, str], None]
JOB = """\
version: 1
name: tiny
model: {factory: "m:build"}
loss: {factory: "model"}
data: {factory: "m:data"}
training: {steps: 4, batch_size: 8}
site_defaults: false
"""


@pytest.fixture
def write_job(tmp_path: Path) -> Callable[..., Path]:
    """``write_job("resources: {nodes: 2}")`` writes ``job.yaml`` with these further lines."""

    def write(*lines: str, folder: Path = tmp_path) -> Path:
        path = folder / "job.yaml"
        path.write_text(JOB + "".join(f"{line}\n" for line in lines))
        return path

    return write


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Program:
    """Puts a bash script on a PATH that has nothing else but the system's basic commands."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in ("bash", "cat", "sleep"):
        (folder / name).symlink_to(f"/bin/{name}")
    monkeypatch.setenv("PATH", str(folder))

    def write(name: str, text: str) -> None:
        path = folder / name
        path.write_text(f"#!/bin/bash\n{text}\n")
        path.chmod(path.stat().st_mode | stat.S_IXUSR)

    return write
