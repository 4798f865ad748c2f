"""Lines of a rank on their way to the log: whole, labelled, and none of them lost."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipectl.watch.relay import batches, label_of, lines_of

LABEL = label_of("3")


def relayed(text: list[bytes], tmp_path: Path) -> bytes:
    """What comes out of the process, if it is given pieces one after the other."""
    source, ours = os.pipe()
    argv = [sys.executable, "-m", "pipectl.watch.relay", "3", str(tmp_path / "late")]
    with subprocess.Popen(argv, stdin=source, stdout=subprocess.PIPE) as process:
        os.close(source)
        for piece in text:
            os.write(ours, piece)
        os.close(ours)
        assert process.stdout is not None
        return process.stdout.read()


@pytest.mark.parametrize(
    ("text", "lines", "rest"),
    [
        (b"", [], b""),
        (b"one\ntwo\nthr", [b"one", b"two"], b"thr"),
        (b"\n\n", [b"", b""], b""),
        (b"a" * 4000, [], b"a" * 4000),
        (b"a" * 4001, [b"a" * 4000], b"a"),
        (b"a" * 8001 + b"\nb", [b"a" * 4000, b"a" * 4000, b"a"], b"b"),
    ],
)
def test_lines_of_a_text(text: bytes, lines: list[bytes], rest: bytes) -> None:
    assert lines_of(text) == (lines, rest)


@given(st.text(alphabet="aé€😀", min_size=1000, max_size=3000))
def test_long_lines_are_broken_between_letters(text: str) -> None:
    lines, rest = lines_of(text.encode())
    assert "".join(piece.decode() for piece in [*lines, rest]) == text


@given(st.lists(st.binary(max_size=4000)))
def test_what_is_written_at_once_are_whole_lines_that_a_pipe_keeps_together(
    lines: list[bytes],
) -> None:
    lines = [line.replace(b"\n", b" ").replace(b"\r", b" ") for line in lines]
    found = list(batches(lines, LABEL))
    assert all(0 < len(batch) <= 4096 and batch.endswith(b"\n") for batch in found)
    assert b"".join(found) == b"".join(LABEL + line + b"\n" for line in lines)


def test_pieces_of_lines_come_out_whole(tmp_path: Path) -> None:
    text = [b"one", b"", b" and", b" all\ncaf\xe9 \xff\n", b"[1] fooled?\r\n", b"last words"]
    expected = b"[3] one and all\n[3] caf\xe9 \xff\n[3] [1] fooled?\n[3] last words\n"
    assert relayed(text, tmp_path) == expected
    assert not (tmp_path / "late").exists()


def test_what_nobody_reads_any_more_is_kept(tmp_path: Path) -> None:
    late = tmp_path / "late"
    reader, sink = os.pipe()
    argv = [sys.executable, "-m", "pipectl.watch.relay", "3", str(late)]
    os.close(reader)
    subprocess.run(argv, input=b"one\ntwo", stdout=sink, check=True)
    os.close(sink)
    assert late.read_bytes() == b"[3] one\n[3] two\n"


def test_what_a_launcher_leaves_unread_is_kept(tmp_path: Path) -> None:
    """It ends with text in its pipe; nothing was wrong when that was written."""
    late = tmp_path / "late"
    reader, sink = os.pipe()
    source, ours = os.pipe()
    argv = [sys.executable, "-m", "pipectl.watch.relay", "3", str(late)]
    process = subprocess.Popen(argv, stdin=source, stdout=sink)
    os.close(source)
    os.close(sink)
    os.set_blocking(reader, True)
    os.write(ours, b"first\n")
    assert os.read(reader, 100) == b"[3] first\n"
    os.close(reader)
    os.write(ours, b"second\n")
    os.close(ours)
    assert process.wait() == 0
    assert late.read_bytes() == b"[3] second\n"
