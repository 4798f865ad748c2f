"""The Python files around a job's code: what it may load by itself, by names that it computes."""

from __future__ import annotations

import os
import stat
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import suppress
from itertools import islice
from pathlib import Path

from pipectl.files import user_home

_MARKS = (".git", "pyproject.toml", "setup.py", "setup.cfg")
"""What the outermost directory of a project has."""
_NOT_OURS = {"pyvenv.cfg", "conda-meta", "code.json"}
"""What environments and run directories have."""
_SKIPPED = {"__pycache__", "node_modules", "site-packages", "dist-packages"}
_MAX_ENTRIES = 10_000
"""That are looked at: there may be data beside the code."""
_MAX_BYTES = 2**20
"""Of a file; nobody writes a larger one."""


def python_files(directories: Iterable[Path]) -> Iterator[Path]:
    """Yield the Python files of the projects that some directories are in, near ones first.

    Environments, hidden directories and links to directories are left out.
    """
    left, seen = _MAX_ENTRIES, set[Path]()
    home = user_home()
    waiting = deque(dict.fromkeys(map(_project_of, directories)))
    while waiting and left > 0:
        directory = waiting.popleft()
        if directory in seen:
            continue
        seen.add(directory)
        try:
            with os.scandir(directory) as every:
                entries = sorted(islice(every, left), key=lambda entry: entry.name)
        except OSError:
            continue
        left -= len(entries)
        if not _NOT_OURS.isdisjoint(entry.name for entry in entries):
            continue
        for entry in entries:
            if entry.name.startswith(".") or entry.name in _SKIPPED:
                continue
            if entry.is_dir(follow_symlinks=False):
                waiting.extend([Path(entry.path)] if directory != home else [])
            elif entry.name.endswith(".py") and entry.is_file():
                with suppress(OSError):
                    if entry.stat().st_size <= _MAX_BYTES:
                        yield Path(entry.path)


def _project_of(directory: Path) -> Path:
    """The nearest directory around a directory that is marked as a project; else itself."""
    home = user_home()
    for place in (directory, *directory.parents):
        if place in (home, place.parent) or _is_for_all(place):
            break
        if any((place / mark).exists() for mark in _MARKS):
            return place
    return directory


def _is_for_all(directory: Path) -> bool:
    """Whether everybody can write there, as in ``/tmp``: its files are of no project."""
    with suppress(OSError):
        return bool(directory.stat().st_mode & stat.S_IWOTH)
    return False
