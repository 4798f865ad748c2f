"""What Python loads of the user's code: from the snapshot that this process uses, and noted.

A module has the content of the snapshot and the path of the file: ``__file__``, and data and
modules beside it, are where they were. Byte code that Python keeps beside the file is neither read
nor written, because it may be of another content.

Files are found in many ways: by imports, which `_Finder` looks up in the snapshot first, so that a
file may be gone by now; and by their paths (``spec_from_file_location``, ``runpy``), or where user
code lets Python search. All of them are read by `SourceFileLoader` or `io.open_code`. These take
the content from the snapshot, and note what this process runs of the user's code.

What that code reads by itself stays as it is. Small files of settings (YAML, JSON...), from which
models are often built, are noted, too, so that a later change of them is not missed; not those
that it writes itself, such as a counter of its runs.
"""

from __future__ import annotations

import builtins
import io
import linecache
import pathlib
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import wraps
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from importlib.util import decode_source, spec_from_file_location
from math import inf
from os import PathLike, fspath
from pathlib import Path
from stat import S_ISREG
from types import CodeType, FrameType, ModuleType
from typing import Any

from pipectl.faults import is_user_code
from pipectl.libraries import large_package
from pipectl.spec.code import (
    Snapshot,
    active,
    directory_of,
    note_loaded,
    note_opened,
    note_written,
    plain_path,
)

_began_s: float | None = None
"""When user code began to run here. What is written later is code that it makes."""
_read_code = SourceFileLoader.get_code
_open_code = io.open_code
_open_file = io.open
_SETTINGS = (".json", ".yaml", ".yml", ".toml", ".ini", ".cfg")
_MAX_SETTINGS_BYTES = 2**20
_PACKAGE = str(Path(__file__).parents[1])


def _source_of(name: str, location: str) -> tuple[bytes | None, bool]:
    """The content with which a file is to be loaded, and whether it is that of a snapshot; None if
    Python loads it as it does without pipectl.
    """
    path, snapshot = Path(plain_path(location)), active() or Snapshot()
    kept = snapshot.contents.get(path)
    package = large_package(location) if kept is None else None
    if kept is None and package is None and not is_user_code(location):
        return None, False
    try:
        may_be_new = kept is None or (path in snapshot.searched and path.exists())
        if may_be_new and path.stat().st_mtime >= (_began_s or inf):
            return None, False
        content = path.read_bytes() if kept is None else kept
    except OSError:  # loading it reports the error
        return None, False
    note_loaded(path, content, name, package)
    return (None if package else content), kept is not None


def _get_code(loader: SourceFileLoader, fullname: str) -> CodeType | None:
    """The compiled module."""
    content, is_kept = _source_of(fullname, loader.path)
    if content is None:
        return _read_code(loader, fullname)
    if is_kept:
        # Tracebacks, and what reads the source of a function, show the lines that run. Without a
        # time, Python takes this entry for that of no file, and keeps it.
        with suppress(SyntaxError, UnicodeDecodeError):  # compiling it reports the error
            lines = decode_source(content).splitlines(keepends=True)
            linecache.cache[loader.path] = (len(content), None, lines, loader.path)
    code: CodeType = loader.source_to_code(content, loader.path)
    return code


def _open(path: str) -> Any:
    """A file that Python opens to run it: ``runpy.run_path``."""
    content = None
    if isinstance(path, str) and path.endswith(".py"):
        content, _ = _source_of("", path)
    return _open_code(path) if content is None else io.BytesIO(content)


@wraps(io.open)
def _open_noted(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
    """A file as :func:`open` gives it, noted if it has settings that user code reads or writes."""
    opened = _open_file(file, mode, *args, **kwargs)
    if isinstance(file, str | PathLike):
        name = fspath(file)
        if isinstance(name, str) and name.endswith(_SETTINGS) and _is_of_user(sys._getframe(1)):
            note = note_written if {*mode} & {*"wax+"} else _note_settings
            note(Path(plain_path(name)))
    return opened


def _is_of_user(frame: FrameType | None) -> bool:
    """Whether user code that pipectl runs asks for something, by itself or through a library.

    What calls pipectl, such as a notebook, is no code of the job.
    """
    is_of_user = False
    while frame is not None and not (name := frame.f_code.co_filename).startswith(_PACKAGE):
        is_of_user, frame = is_of_user or is_user_code(name), frame.f_back
    return is_of_user and frame is not None


def _note_settings(path: Path) -> None:
    """Note a file, unless it is a library's, hidden (a cache), large, or made by this process."""
    if any(part.startswith(".") for part in path.parts) or not is_user_code(str(path)):
        return
    with suppress(OSError):
        status = path.stat()
        is_earlier = status.st_mtime < (_began_s or inf)
        if S_ISREG(status.st_mode) and status.st_size <= _MAX_SETTINGS_BYTES and is_earlier:
            with _open_file(path, "rb") as opened:
                note_opened(path, opened.read())


class _Finder(MetaPathFinder):
    """Finds the modules of the snapshot that this process uses, if it uses one."""

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None,
        target: ModuleType | None = None,  # noqa: ARG002
    ) -> ModuleSpec | None:
        snapshot = active()
        if snapshot is None:
            return None
        search = [*(sys.path if path is None else path)]
        file = snapshot.find(fullname, search)
        if file is None or _is_hidden(snapshot, fullname, file, search):
            return None
        inner = [str(file.parent)] if file.name == "__init__.py" else None
        return spec_from_file_location(fullname, file, submodule_search_locations=inner)


def _is_hidden(snapshot: Snapshot, name: str, file: Path, search: list[str]) -> bool:
    """Whether Python finds another module before a file that no import names."""
    if file not in snapshot.searched:
        return False
    before = search[: [*map(plain_path, search)].index(directory_of(file))]
    found = PathFinder.find_spec(name, before) if before else None
    return found is not None and found.origin is not None


_FINDER = _Finder()


def follow_imports() -> None:
    """Let Python load user code from a snapshot, before all other places, and note what it loads.

    Directories of user code come first on ``sys.path``, too.
    """
    global _began_s
    if _began_s is None:
        _began_s = time.time()
    if SourceFileLoader.get_code is not _get_code:
        SourceFileLoader.get_code = _get_code  # type: ignore[method-assign,assignment]
        io.open_code = _open
        vars(builtins)["open"] = vars(io)["open"] = _open_noted
        if accessor := vars(pathlib).get("_NormalAccessor"):  # of Python 3.10
            accessor.open = staticmethod(_open_noted)
    if active() is not None and _FINDER not in sys.meta_path:
        sys.meta_path.insert(0, _FINDER)
