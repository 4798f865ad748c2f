"""The file system of the run directories."""

from __future__ import annotations

import fcntl
import shutil
import tempfile
import time
from pathlib import Path

from pipectl.jobs.doctor.finding import Finding, Findings, Level
from pipectl.units import format_bytes

_FREE = 1 << 30
_SKEW_S = 2.0


def file_system(directory: Path) -> Findings:
    """The file system of the runs: whole files by renaming, locks, space, and its clock."""
    place = next(path for path in (directory, *directory.absolute().parents) if path.is_dir())
    try:
        with tempfile.TemporaryDirectory(prefix=".pipectl-", dir=place) as name:
            yield from _tried_in(place, Path(name))
    except OSError as error:
        text = f"{place}: {error.strerror or error}"
        yield Finding("files", Level.FAIL, text, "set output.directory to where you may write")


def _tried_in(place: Path, folder: Path) -> Findings:
    one, other = folder / "one", folder / "other"
    one.write_text("new")
    other.write_text("old")
    skew_s = one.stat().st_mtime - time.time()
    one.replace(other)
    free = shutil.disk_usage(folder).free
    enough = free >= _FREE
    yield Finding(
        "files",
        Level.OK if enough else Level.WARN,
        f"{place}: {format_bytes(free)} free",
        "" if enough else "checkpoints may find no room; free some space",
    )
    if not _locks(other):
        text = "the file system knows no locks"
        cure = "do not run two commands that change a run at the same time"
        yield Finding("locks", Level.WARN, text, cure)
    near = abs(skew_s) < _SKEW_S
    yield Finding(
        "clock",
        Level.OK if near else Level.WARN,
        f"{abs(skew_s):.1f} s from that of the file system",
        ""
        if near
        else "have the clocks of all nodes set by NTP; `status` may take silence for age",
    )


def _locks(path: Path) -> bool:
    with path.open("r+b") as first, path.open("r+b") as second:
        try:
            fcntl.flock(first, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return False
        try:
            fcntl.flock(second, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return True
        return False
