"""Commands whose output nobody reads to its end, or that have none."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from conftest import Command


def run(*arguments: str, **streams: Any) -> tuple[int, str]:
    """The exit code, and what the command complained about."""
    command = [sys.executable, "-m", "pipectl", *arguments]
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    options = {"stderr": subprocess.PIPE, "env": buffered, **streams}
    done = subprocess.run(command, text=True, check=False, **options)
    return done.returncode, done.stderr or ""


@pytest.mark.parametrize(
    "arguments",
    [
        *(("logs",), ("logs", "-f"), ("status",), ("status", "last", "--json")),
        *(
            ("check", "--schema"),
            ("check", "--schema", "-o", "/dev/stdout"),
            ("--help",),
            ("--version",),
        ),
    ],
)
def test_a_reader_that_is_gone_ends_a_command_without_a_word(
    finished: Path, arguments: tuple[str, ...]
) -> None:
    (finished / "logs/job.log").write_text("line\n" * 100_000)
    reading, writing = os.pipe()
    os.close(reading)
    try:
        assert run(*arguments, stdout=writing) == (141, "")
    finally:
        os.close(writing)


def test_a_reader_of_complaints_that_is_gone(finished: Path) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    try:
        assert run("status", "nothing", stderr=writing) == (141, "")
    finally:
        os.close(writing)


@pytest.mark.parametrize("arguments", [("logs",), ("status",), ("--version",)])
def test_no_standard_output_at_all(finished: Path, arguments: tuple[str, ...]) -> None:
    assert run(*arguments, preexec_fn=lambda: os.close(1)) == (0, "")


def test_a_quota_is_no_fault_of_ours(cli: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    def print_too_much(*_: object, **__: object) -> None:
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    monkeypatch.setattr("pipectl.cli.commands.status.get_statuses", print_too_much)
    result = cli("status")
    message = "error: the output cannot be written: Disk quota exceeded\n  free some space\n"
    assert (result.code, result.err) == (1, message)


@pytest.mark.parametrize("arguments", [("logs",), ("status",), ("check", "--schema")])
def test_a_full_disk_is_no_fault_of_ours(finished: Path, arguments: tuple[str, ...]) -> None:
    with Path("/dev/full").open("w") as full:
        code, said = run(*arguments, stdout=full)
    message = "error: the output cannot be written: No space left on device\n  free some space\n"
    assert (code, said) == (1, message)
