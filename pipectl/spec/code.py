"""The user's code as this process sees it: the files themselves, or a snapshot of them.

A run keeps the code it was submitted with. Its processes, and the commands that continue it, read,
hash and import that code under :func:`using`, whatever the files say by then. Everything else about
a file stays true: its path, and thereby ``__file__``, and the data beside it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class Snapshot:
    """Contents of source files.

    Args:
        contents: by absolute path.
        names: the files that a module may be imported from, by its dotted name. It is more than one
            if directories of several references have a module of that name.
    """

    contents: Mapping[Path, bytes] = field(default_factory=dict)
    names: Mapping[str, tuple[Path, ...]] = field(default_factory=dict)

    def __or__(self, other: Snapshot) -> Snapshot:
        """Both, with the contents of this one for files of both."""
        names = {
            name: tuple(dict.fromkeys((*self.names.get(name, ()), *other.names.get(name, ()))))
            for name in (*self.names, *other.names)
        }
        return Snapshot({**other.contents, **self.contents}, names)

    def find(self, name: str, search: list[str]) -> Path | None:
        """The file of a module on a search path; None if the module is not in the snapshot."""
        files = [file for file in self.names.get(name, ()) if file in self.contents]
        for entry in search if len(files) > 1 else ():
            for file in files:
                package = file.parent if file.name == "__init__.py" else file
                if str(package.parent) == entry:
                    return file
        return files[0] if files else None


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
