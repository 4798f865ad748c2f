"""Every kind of wrong spec, with the whole message; and files that are no spec at all."""

# ruff: noqa: E501 (a message is one line)

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from pipectl.errors import SpecError
from pipectl.spec import load

WRONG_SPECS = Path(__file__).with_name("wrong_specs.txt")
"""Blocks of lines: what is added to the minimal spec (``~``: in place of the line of that key;
``--set``: as an override), and the problems, after ``=>``."""
BOMB = "\n".join(
    ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    + [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 12)]
)


def test_the_problems_of_wrong_specs(read_points, minimal: str) -> None:
    blocks = []
    for block in WRONG_SPECS.read_text("utf-8").rstrip("\n").split("\n\n"):
        lines = [line for line in block.split("\n") if not line.startswith("=> ")]
        text, overrides = minimal, []
        for line in lines:
            name, _, rest = line.partition(" ")
            if name == "~":
                key = rest.partition(":")[0]
                text = re.sub(rf"^{key}:.*", lambda _, rest=rest: rest, text, flags=re.MULTILINE)
            elif name == "--set":
                overrides.append(rest)
            else:
                text += f"{line}\n"
        with pytest.raises(SpecError) as caught:
            read_points(text, *overrides)
        problems = str(caught.value.message).replace(str(Path.cwd()), "/home/me").split("\n")
        blocks.append("\n".join([*lines, *(f"=> {each}" for each in problems)]))
    snapshot = "\n\n".join(blocks) + "\n"
    if os.environ.get("PIPECTL_GOLDEN") == "write":
        WRONG_SPECS.write_text(snapshot, "utf-8")
    assert snapshot == WRONG_SPECS.read_text("utf-8"), "if that is intended: make golden"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("pipeline:\n\tstages: 2", "8:1: not valid YAML: a tab cannot indent or start a value; use spaces"),
        ("output: {directory: a\x01}", "7:22: contains the unprintable character U+0001; remove it"),
        ("sweep: {points: [{? a" + ".a" * 5000 + " : 1}]}", f"7:10025: sweep.points[0].a{'.a' * 48}...: must be a key such as training.seed"),
    ],
)  # fmt: skip
def test_messages_are_printable_and_short(read_points, minimal, text: str, message: str) -> None:
    with pytest.raises(SpecError) as caught:
        read_points(minimal + text)
    assert caught.value.message == f"job.yaml:{message}"


def test_missing_files_are_named_with_their_place(complaints, minimal, tmp_path) -> None:
    text = minimal.replace("torch.nn:Linear", "./gone.py:build") + (
        "cluster: gone.json\n"
        "evaluation: {data: ./gone.py:held_out, metrics: {m: ./gone.py:f}}\n"
        "optimizer: ../none/gone.py:f\n"
    )
    gone = tmp_path / "gone.py"
    assert complaints(text) == [
        f"job.yaml:3:18: model.factory: no such file: {gone}",
        f"job.yaml:7:10: cluster: no such file: {tmp_path / 'gone.json'}",
        f"job.yaml:8:20: evaluation.data.factory: no such file: {gone}",
        f"job.yaml:8:53: evaluation.metrics.m.factory: no such file: {gone}",
        f"job.yaml:9:12: optimizer.factory: no such file: {tmp_path.parent / 'none' / 'gone.py'}",
    ]


def test_all_required_keys_are_named(complaints) -> None:
    required = ("data", "loss", "model", "training")
    assert complaints("{}") == [f"job.yaml:1:1: {key}: missing" for key in required]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", ": the file is empty"),
        (b"# nothing but a comment\n", ": the file is empty"),
        (b"[a]", ": must be a mapping of keys to values"),
        (b"name: \xe4", ":1:7: not UTF-8 text (byte 0xe4)"),
        (b"\x7fELF\x00\x01", ": a binary file; a job spec is YAML text"),
        (b"a: " + b"x" * 2**20, ": larger than 1 MiB, too large for a job spec"),
        (b"[" * 1000, ":1:41: nested more than 40 levels deep"),
        (b"? " * 1000, ":1:81: nested more than 40 levels deep"),
        (BOMB.encode(), ":1:34: more than 20000 values, counting aliases where they are used"),
    ],
)  # fmt: skip
def test_what_is_no_spec(complaints, content: bytes, message: str) -> None:
    assert complaints(content) == [f"job.yaml{message}"]


@pytest.mark.parametrize(
    ("name", "message", "cure"),
    [
        ("gone.yaml", "no such file", "write a starter spec with: pipectl init"),
        (".", "a directory, not a file", None),
        ("x" * 300, "cannot be read: File name too long", None),
    ],
)
def test_files_that_cannot_be_read(tmp_path, monkeypatch, name, message, cure) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SpecError) as caught:
        load(Path(name), sites=())
    assert caught.value.message == f"{name}: {message}"
    assert caught.value.cure == cure


def test_an_endless_file_is_not_read_to_its_end() -> None:
    with pytest.raises(SpecError, match="larger than 1 MiB"):
        load(Path("/dev/zero"), sites=())


def test_large_mappings_of_unknown_keys_are_reported_quickly(complaints) -> None:
    assert len(complaints("\n".join(f"key{n}: {n}" for n in range(300)))) == 304
