"""Programs that tests pretend."""

from __future__ import annotations

import stat
from collections.abc import Callable
from pathlib import Path

import pytest

Program = Callable[[str, str], None]


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
