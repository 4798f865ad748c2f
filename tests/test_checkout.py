"""What is in the repository: no path of one machine."""

import subprocess
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).parents[1]

# Written in two parts, so that this file does not contain them.
MACHINE_PATHS = ("/wo" "rk/", "/tmp/" "dev", "/opt/" "wheels", "/ro" "ot/")  # fmt: skip


def tracked_files() -> list[Path]:
    """The files git knows, staged ones included."""
    if not (CHECKOUT / ".git").exists():
        pytest.skip("not a git checkout")
    listed = subprocess.run(
        ["git", "-C", str(CHECKOUT), "ls-files", "-z"], capture_output=True, text=True, check=True
    )
    paths = [CHECKOUT / name for name in listed.stdout.split("\0") if name]
    return [path for path in paths if path.is_file()]


def test_no_file_mentions_a_path_of_one_machine():
    found = [
        f"{path.relative_to(CHECKOUT)}:{number}: {line.strip()}"
        for path in tracked_files()
        for number, line in enumerate(
            path.read_text(encoding="utf-8", errors="replace").split("\n"), 1
        )
        if any(machine_path in line for machine_path in MACHINE_PATHS)
    ]
    assert found == []
