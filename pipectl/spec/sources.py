"""The user's own Python files behind a factory: its file, and what that imports, statically.

Nothing is imported or run. What counts is what an ``import`` statement says, in functions too;
modules that are imported by name at run time are not seen, nor is data that the code reads.
"""

from __future__ import annotations

import ast
import sys
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from pipectl.spec.references import Reference

# As it was before any user code ran, which may change it.
_SEARCH = tuple(Path(entry) for entry in sys.path if entry)
_LIBRARY = ("site-packages", "dist-packages")


def user_sources(references: Iterable[Reference]) -> dict[str, Path]:
    """Files by the dotted names under which the references' modules import them.

    A module is looked for beside the files of the references, then along ``sys.path``. The
    standard library, installed packages and pipectl itself are left out.

    Args:
        references: of one spec, since each puts the directory of its file, or of its package, on
            ``sys.path``.
    """
    references = list(references)
    files = [reference.file for reference in references if reference.file is not None]
    roots = [reference.root for reference in references if reference.root is not None]
    search = tuple(dict.fromkeys([*roots, *(file.parent for file in files), *_SEARCH]))
    found: dict[str, Path] = {}
    waiting = [("", file) for file in files]
    named = (name for reference in references for name in _levels(reference.module or ""))
    waiting += _modules(named, search)
    while waiting:
        name, path = waiting.pop()
        if name in found:
            continue
        if name:
            found[name] = path
        waiting += _modules(_imports(name, path), search)
    return found


def _modules(names: Iterable[str], search: Sequence[Path]) -> list[tuple[str, Path]]:
    found = ((name, _file(name, search)) for name in names)
    return [(name, path) for name, path in found if path is not None]


def _file(name: str, search: Sequence[Path]) -> Path | None:
    """The user's file of a module; None for one of a library, and where there is none."""
    *packages, last = name.split(".")
    top = packages[0] if packages else last
    if top in sys.stdlib_module_names or top == "pipectl":
        return None
    for package in packages:
        search = _within(package, search)
    found = _imported(last, search)
    return None if found is None or _is_library(found) else found


def _within(package: str, search: Sequence[Path]) -> Sequence[Path]:
    """Where the modules of a package are looked for.

    Without an ``__init__.py`` that is every directory of its name, whatever lies in it (PEP 420).
    """
    found = _imported(package, search)
    if found is None:
        return [root / package for root in search]
    return [found.parent] if found.name == "__init__.py" else []


def _imported(name: str, search: Sequence[Path]) -> Path | None:
    """The file that an import runs: of the first directory with such a package or module."""
    files = ((root / name / "__init__.py", root / f"{name}.py") for root in search)
    return next((file for pair in files for file in pair if file.is_file()), None)


def _is_library(file: Path) -> bool:
    return any(part in _LIBRARY for part in file.parts) or file.is_relative_to(
        sysconfig.get_path("stdlib")
    )


def _imports(name: str, path: Path) -> Iterator[str]:
    """Dotted names that a file may import; nothing from one that cannot be read or parsed."""
    try:
        tree = ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError, RecursionError):
        return
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield from _levels(alias.name)
        elif isinstance(node, ast.ImportFrom):
            yield from _imported_from(node, package)


def _imported_from(node: ast.ImportFrom, package: str) -> Iterator[str]:
    """``from a import b``: the module ``a``, and ``a.b``, which may be one."""
    outer = package.split(".")[: package.count(".") + 2 - node.level] if node.level else []
    base = ".".join([*filter(None, outer), *filter(None, [node.module])])
    for alias in node.names:
        yield from _levels(f"{base}.{alias.name}" if base else alias.name)


def _levels(name: str) -> Iterator[str]:
    """``a``, ``a.b`` and ``a.b.c`` for ``a.b.c``: importing a module runs its packages."""
    parts = name.split(".")
    yield from (".".join(parts[: end + 1]) for end in range(len(parts)) if name)
