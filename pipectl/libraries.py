"""Which files belong to libraries: to Python, or to packages that others than the user wrote.

Packages also lie outside of ``site-packages``: where ``pip install --target`` has put them, or in a
checkout that ``PYTHONPATH`` names.
"""

from __future__ import annotations

import os
import sys
import sysconfig
from collections.abc import Collection, Iterator
from contextlib import suppress
from functools import cache
from importlib.util import find_spec
from pathlib import Path

_FOLDERS = tuple(f"{os.sep}{name}{os.sep}" for name in ("site-packages", "dist-packages"))
_PYTHON = tuple(
    f"{folder}{os.sep}"
    for folder in {
        str(Path(os.__file__).parent),
        sysconfig.get_path("stdlib"),
        sysconfig.get_path("platstdlib"),
    }
)
_MAX_FILES = 1000
"""Nobody writes a package with more files of Python for one model."""


def is_library(
    file: str | Path, search: Collection[str] | None = None, own: Collection[str] = ()
) -> bool:
    """Return whether a file belongs to Python, to torch, or to another package that is installed.

    These are the packages in ``site-packages``, those that a ``*.dist-info`` beside them lists, and
    very large ones. A checkout that is installed to be edited is none of these: it is the user's.

    Args:
        file: absolute path.
        search: directories that modules are found in; by default ``sys.path``.
        own: those of ``search`` that have the user's own packages, of any size.
    """
    name, places = str(file), sys.path if search is None else search
    return _is_installed(name, places) or large_package(name, places, own) is not None


def large_package(
    file: str | Path, search: Collection[str] | None = None, own: Collection[str] = ()
) -> str | None:
    """Return the directory of the package of a file that only its size makes a library; else None.

    Args:
        file, search, own: see :func:`is_library`.
    """
    name, places = str(file), sys.path if search is None else search
    if _is_installed(name, places):
        return None
    tops = (top for entry, top in _tops(name, places) if entry not in own)
    return next(filter(_is_large, tops), None)


def _is_installed(name: str, search: Collection[str]) -> bool:
    if name.startswith(_PYTHON) or any(folder in name for folder in _FOLDERS):
        return True
    if name.startswith(_torch_folders()):
        return True
    return any(Path(top).name in _installed_in(entry) for entry, top in _tops(name, search))


def _tops(name: str, search: Collection[str]) -> Iterator[tuple[str, str]]:
    """Yield the directories of a search that contain a file, with its outermost package there."""
    for entry in search:
        folder = entry.rstrip(os.sep) + os.sep
        if entry and name.startswith(folder):
            yield entry, folder + name.removeprefix(folder).partition(os.sep)[0]


@cache
def _torch_folders() -> tuple[str, ...]:
    """Return where torch is, which may be a build in a checkout. Imports nothing."""
    spec = None
    with suppress(ImportError, ValueError):  # it is loaded, but not from a file
        spec = find_spec("torch")
    return tuple(f"{place}{os.sep}" for place in (spec and spec.submodule_search_locations) or ())


@cache
def _installed_in(directory: str) -> frozenset[str]:
    """Return the packages and modules that installers have written to a directory."""
    names: set[str] = set()
    with suppress(OSError):
        for record in Path(directory).glob("*.dist-info/RECORD"):
            lines = record.read_text(encoding="utf-8", errors="replace").splitlines()
            names.update(line.partition(",")[0].partition("/")[0] for line in lines)
    return frozenset(names - {"bin", ".."})


@cache
def _is_large(package: str) -> bool:
    """Return whether a directory is a package of very many files."""
    files = _python_files(package)
    return next((True for count, _ in enumerate(files, 1) if count > _MAX_FILES), False)


def _python_files(package: str) -> Iterator[str]:
    """Yield the files of a package and its subpackages; directories of data are not read."""
    try:
        entries = list(os.scandir(package)) if Path(package, "__init__.py").is_file() else []
    except OSError:
        return
    for entry in entries:
        if entry.name.endswith(".py"):
            yield entry.path
        elif "." not in entry.name and entry.is_dir():
            yield from _python_files(entry.path)
