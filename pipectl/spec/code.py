"""The user's code as this process sees it: the files themselves, or a snapshot of them.

A run keeps the code it was submitted with. Its processes, and the commands that continue it, read,
hash and import that code under :func:`using`, whatever the files say by then. Everything else about
a file stays true: its path, and thereby ``__file__``, and the data beside it.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path

from pipectl.profile_parts import LoadedFile


@dataclass(frozen=True)
class Snapshot:
    """Contents of source files.

    Args:
        contents: by absolute path.
        names: the files that a module may be imported from, by its dotted name. It is more than one
            if directories of several references have a module of that name.
        searched: files that no import names: a name means one of these only where its directory is
            searched.
    """

    contents: Mapping[Path, bytes] = field(default_factory=dict)
    names: Mapping[str, tuple[Path, ...]] = field(default_factory=dict)
    searched: frozenset[Path] = frozenset()

    def __or__(self, other: Snapshot) -> Snapshot:
        """Both, with the contents of this one for files of both."""
        names = {
            name: tuple(dict.fromkeys((*self.names.get(name, ()), *other.names.get(name, ()))))
            for name in (*self.names, *other.names)
        }
        contents = {**other.contents, **self.contents}
        certain = {file for each in (self, other) for file in each.contents.keys() - each.searched}
        return Snapshot(contents, names, (self.searched | other.searched) - certain)

    def find(self, name: str, search: list[str]) -> Path | None:
        """The file of a module on a search path; None if the module is not in the snapshot."""
        files = [file for file in self.names.get(name, ()) if file in self.contents]
        certain = [file for file in files if file not in self.searched]
        for entry in search if files and len(certain) != 1 else ():
            for file in files:
                if directory_of(file) == plain_path(entry):
                    return file
        return certain[0] if certain else None


def plain_path(text: str) -> str:
    """An absolute path without ``..``, through the same links."""
    return os.path.normpath(Path(text).absolute())


def directory_of(file: Path) -> str:
    """The directory that must be searched to find a module or package by its own name."""
    return str((file.parent if file.name == "__init__.py" else file).parent)


_active: list[Snapshot] = []


@contextmanager
def using(snapshot: Snapshot | None) -> Iterator[None]:
    """Within the block, this process sees the code of a snapshot; None changes nothing."""
    if snapshot is None:
        yield
        return
    _active.append(snapshot)
    try:
        yield
    finally:
        _active.remove(snapshot)


def active() -> Snapshot | None:
    """The snapshot that this process uses, or None."""
    return _active[-1] if _active else None


def read_source(path: Path) -> bytes:
    """The content of a source file.

    Raises:
        OSError: it is not in the snapshot, and cannot be read.
    """
    content = _active[-1].contents.get(path) if _active else None
    return path.read_bytes() if content is None else content


def is_source(path: Path) -> bool:
    """Whether a source file exists, or did when the snapshot was taken."""
    return (bool(_active) and path in _active[-1].contents) or path.is_file()


_loaded: dict[Path, tuple[LoadedFile, bytes]] = {}


def note_loaded(path: Path, content: bytes, name: str, package: str | None) -> None:
    """Note that this process runs a source file.

    Args:
        path: absolute.
        name: dotted name under which it is loaded.
        package: see :class:`~pipectl.profile_parts.LoadedFile`.
    """
    own_name = path.parent.name if path.name == "__init__.py" else path.stem
    names = (name,) if name.rpartition(".")[2] == own_name else ()
    digest = hashlib.sha256(content).hexdigest()
    if path in _loaded and _loaded[path][0].digest == digest:
        names = tuple(dict.fromkeys((*_loaded[path][0].names, *names)))
    file = LoadedFile(str(path), digest, names, package)
    _loaded[path] = file, b"" if package else content


_opened: dict[Path, dict[Path, LoadedFile | None]] = {}
"""By directory; None for one that user code has written since."""
_MAX_OPENED = 16
"""Of a directory; one with more such files has data."""
_MAX_DIRECTORIES = 64


def note_opened(path: Path, content: bytes) -> None:
    """Note that the user's code in this process reads a file of settings.

    Args:
        path: absolute.
    """
    beside = _opened.get(path.parent, {})
    if len(_opened) < _MAX_DIRECTORIES:
        _opened[path.parent] = beside
    if path in beside or len(beside) <= _MAX_OPENED:
        beside[path] = LoadedFile(str(path), hashlib.sha256(content).hexdigest())


def note_written(path: Path) -> None:
    """Note that the user's code in this process writes a file: what it has read are no settings.

    Args:
        path: absolute.
    """
    if path in (beside := _opened.get(path.parent, {})):
        beside[path] = None


def loaded_files() -> list[LoadedFile]:
    """The source files that this process runs, apart from those of installed packages, and the
    files of settings that they read.
    """
    few = [files.values() for files in _opened.values() if len(files) <= _MAX_OPENED]
    opened = [filter(None, files) for files in few]
    return [*(file for file, _ in _loaded.values()), *chain.from_iterable(opened)]


def content_of(file: LoadedFile) -> bytes | None:
    """The content with which this process has loaded a file; None if it has not."""
    found = _loaded.get(Path(file.path))
    return found[1] if found is not None and found[0].digest == file.digest else None
