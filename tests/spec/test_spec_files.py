"""Files that are no YAML, no text, too large, too deep, or not there."""

# ruff: noqa: E501 (a message is one line)

from __future__ import annotations

from pathlib import Path

import pytest

from pipectl.errors import SpecError
from pipectl.spec import load

BOMB = "\n".join(
    ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    + [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 12)]
)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("pipeline:\n\tstages: 2", "8:1: not valid YAML: a tab cannot indent or start a value; use spaces"),
        ("pipeline:\n  stages: 2\n   schedule: gpipe", "9:12: not valid YAML: a ':' is out of place; check the indentation, or put the text in quotes"),
        ("a: b: c", "7:5: not valid YAML: a ':' is out of place; check the indentation, or put the text in quotes"),
        ("pipeline: {stages: 2", "7:21: not valid YAML: a bracket is not closed, or a comma is missing"),
        ("pipeline: {stages: 2\nslurm: {}", "8:6: not valid YAML: a bracket is not closed, or a comma is missing (opened on line 7)"),
        ("pipeline: {stages: 2,", "7:22: not valid YAML: it ends inside a bracket that is not closed"),
        ("pipeline: {stages: [}", "7:21: not valid YAML: a value is missing, or has to be in quotes"),
        ("output: {directory: 'abc}", "7:26: not valid YAML: a quote is not closed"),
        ("output: {directory: 'abc}\nslurm: {}\n", "9:1: not valid YAML: a quote is not closed (opened on line 7)"),
        ("pipeline\nresources: {}", "8:1: not valid YAML: a key without ':'; check this line and the one above"),
        ("- a", "7:1: not valid YAML: does not fit the lines above; check the indentation, quotes and brackets"),
        ("---\nname: x", "7:1: not valid YAML: a second document ('---'); a file holds one"),
        ("output: {directory: *x}", "7:21: not valid YAML: an alias (*) without an anchor (&); put the text in quotes"),
        ("output: {directory: @x}", "7:21: not valid YAML: a character that cannot start a value; put the text in quotes"),
        ("output: {directory: * x}", "7:22: not valid YAML: text that starts with * or & must be in quotes"),
        ('output: {directory: "\\q"}', "7:23: not valid YAML: an unknown escape; in double quotes write \\\\ for \\"),
        ('output: {directory: "\\UFFFFFFFF"}', "7:24: not valid YAML: number out of range"),
        ("output: {directory: a\x01}", "7:22: contains the unprintable character U+0001; remove it"),
        ("x: &x [*x]", "7:4: nested more than 40 levels deep"),
    ],
)  # fmt: skip
def test_what_is_no_yaml(added, text: str, message: str) -> None:
    assert added(text) == [f"job.yaml:{message}"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", ": the file is empty"),
        (b"# nothing but a comment\n", ": the file is empty"),
        (b"null", ": the file is empty"),
        (b"[a]", ": must be a mapping of keys to values"),
        (b"text", ": must be a mapping of keys to values"),
        (b"name: \xe4", ":1:7: not UTF-8 text (byte 0xe4)"),
        (b"a: 1\nname: \xff\xfe", ":2:7: not UTF-8 text (byte 0xff)"),
        (b"\x7fELF\x00\x01", ": a binary file; a job spec is YAML text"),
        (b"a: " + b"x" * 2**20, ": larger than 1 MiB; this is no job spec"),
        (b"[" * 1000, ":1:41: nested more than 40 levels deep"),
        (b"- " * 1000, ":1:81: nested more than 40 levels deep"),
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


def test_large_mappings_of_unknown_keys_are_told_quickly(complaints) -> None:
    assert len(complaints("\n".join(f"key{n}: {n}" for n in range(300)))) == 304
