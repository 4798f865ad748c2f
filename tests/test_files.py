"""Whole files: old content or new, never half; and every way in which one cannot be read."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from pipectl.errors import DataFileError, UsageError
from pipectl.files import make_directory, make_directory_of, read_json, write_text


@pytest.mark.parametrize(
    ("around", "private"), [(0o755, 0o644), (0o700, 0o600), (0o750, 0o640), (0o775, 0o664)]
)
def test_a_file_is_replaced_whole_and_is_as_private_as_its_directory(
    tmp_path, monkeypatch, around, private
):
    # Files that another thread makes meanwhile would have another mode.
    monkeypatch.setattr(os, "umask", lambda _: pytest.fail("umask is changed for all threads"))
    tmp_path.chmod(around)
    path, other = tmp_path / "x", tmp_path / "other"
    other.touch()
    write_text(path, "old")
    write_text(path, "new")
    assert path.read_text() == "new"
    assert path.stat().st_mode == other.stat().st_mode & (~0o777 | private)
    assert sorted(tmp_path.iterdir()) == sorted([path, other])


def test_a_file_that_cannot_be_written_stays_and_only_a_durable_one_waits_for_the_disk(
    tmp_path, monkeypatch
):
    def no_space(_handle):
        raise OSError(28, "No space left on device")

    path = tmp_path / "x"
    write_text(path, "old")
    monkeypatch.setattr(os, "fsync", no_space)
    with pytest.raises(UsageError, match="x: cannot be written: No space left"):
        write_text(path, "new")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]
    write_text(path, "new", durable=False)
    assert path.read_text() == "new"


def test_what_a_link_leads_to_is_replaced_and_a_pipe_is_written_to(tmp_path):
    (tmp_path / "far").mkdir()
    (tmp_path / "link").symlink_to("far/x")
    for text in ("old", "new"):
        write_text(tmp_path / "link", text)
        assert (tmp_path / "far/x").read_text() == text
    assert (tmp_path / "link").is_symlink()
    assert list((tmp_path / "far").iterdir()) == [tmp_path / "far/x"]

    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    write_text(tmp_path / "pipe", "new")
    assert os.read(reader, 9) == b"new"
    os.close(reader)
    assert (tmp_path / "pipe").is_fifo()


@pytest.mark.parametrize("name", ["/dev/stdout", "/proc/self/fd/1", "link"])
def test_standard_output_is_written_to_also_where_it_goes_to_a_file(tmp_path, name):
    (tmp_path / "link").symlink_to("/dev/stdout")
    program = (
        "import sys; from pathlib import Path; from pipectl.files import *;"
        "path = Path(sys.argv[1]); make_directory_of(path); print('before');"
        "write_text(path, 'new\\n'); print(is_stream(path))"
    )
    with (tmp_path / "x").open("w") as stream:
        command = [sys.executable, "-c", program, name]
        subprocess.run(command, cwd=tmp_path, stdout=stream, check=True)
    assert (tmp_path / "x").read_text() == "before\nnew\nTrue\n"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link", "x"]


def test_a_place_is_looked_at_before_anything_is_written(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("far/x")
    for path in (tmp_path / "pipe", tmp_path / "link", tmp_path / "new/x", Path("/dev/null")):
        make_directory_of(path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["far", "link", "new", "pipe"]
    with pytest.raises(UsageError, match="new: is a directory"):
        make_directory_of(tmp_path / "new")
    with pytest.raises(UsageError, match="pipe: cannot be created"):
        make_directory_of(tmp_path / "pipe" / "x")
    with pytest.raises(UsageError, match="/dev/fd/999: cannot be written: Bad file descriptor"):
        make_directory_of(Path("/dev/fd/999"))


def test_directories_that_are_made_are_private(tmp_path):
    tmp_path.chmod(0o755)
    for _ in range(2):
        make_directory(tmp_path / "a/b")
    assert [path.stat().st_mode & 0o777 for path in tmp_path.rglob("*")] == [0o700, 0o700]
    assert tmp_path.stat().st_mode & 0o777 == 0o755


def test_a_directory_that_cannot_be_made_or_written_is_named_with_the_reason(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="below: cannot be created: Not a directory"):
        make_directory(tmp_path / "file" / "below")
    (tmp_path / "inner").mkdir()
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(UsageError, match=f"^{tmp_path}: cannot be written: Permission denied"):
        make_directory(tmp_path / "inner" / "..")
    monkeypatch.setattr(os, "statvfs", lambda _: SimpleNamespace(f_flag=os.ST_RDONLY))
    with pytest.raises(UsageError, match="inner: cannot be written: Read-only file system"):
        make_directory(tmp_path / "inner")


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        (None, "x: no such file"),
        (b"{", "x:1:2: not valid JSON"),
        (b"[1]", "contains a list, not an object"),
        (b"\xff", "cannot be read"),
        (b'{"a": "\\ud800"}', "not Unicode"),
        (b'{"a": ' + b"1" * 5000 + b"}", "thousands of digits"),
        (b'{"a": ' + b"[" * 100_000, "nested too deeply"),
    ],
)
def test_a_damaged_or_missing_file_is_named_with_its_fault(tmp_path, content, fault):
    if content is not None:
        (tmp_path / "x").write_bytes(content)
    with pytest.raises(DataFileError, match=fault) as caught:
        read_json(tmp_path / "x", hint="write it anew")
    assert caught.value.hint == "write it anew"


LIMITED = """
import resource, sys
from pipectl.errors import UsageError, limit_of
limit = getattr(resource, sys.argv[1])
resource.setrlimit(limit, (int(sys.argv[2]), resource.getrlimit(limit)[1]))
try:
    try:
        exec(sys.argv[3])
    except Exception as error:
        raise UsageError("it failed") from None
except UsageError as error:
    print(limit_of(error), end="")
"""


@pytest.mark.parametrize(
    ("limit", "value", "code", "said"),
    [
        ("RLIMIT_FSIZE", 64, "open('x', 'wb', 0).write(b'x' * 99); open('x', 'ab', 0).write(b'x')",
         "; 64 bytes of a file are allowed here (`ulimit -f`)"),
        ("RLIMIT_NOFILE", 20, "files = [open('x', 'w') for _ in range(30)]",
         "; 20 open files are allowed here (`ulimit -n`)"),
        ("RLIMIT_AS", 2**30, "bytearray(2**31)",
         "; 1,073,741,824 bytes of address space are allowed here (`ulimit -v`)"),
        ("RLIMIT_AS", 2**30, "open('none')", ""),
        ("RLIMIT_NPROC", 999, "raise OSError(11, 'Resource temporarily unavailable')",
         "; 999 processes and threads are allowed here (`ulimit -u`)"),
        ("RLIMIT_NPROC", 999,  # as HDF5 says it
         "raise OSError('unable to lock file, error message = Resource temporarily unavailable')",
         ""),
        ("RLIMIT_FSIZE", 64, "raise ValueError('the batch is too large')", ""),
        ("RLIMIT_FSIZE", 64,
         "raise OSError('File too large; 64 bytes of a file are allowed here (`ulimit -f`)')", ""),
    ],
)  # fmt: skip
def test_a_limit_that_an_error_has_hit_is_named(tmp_path, limit, value, code, said):
    """Of a cause too."""
    command = [sys.executable, "-c", LIMITED, limit, str(value), code]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == (said, "")
