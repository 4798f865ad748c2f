"""The user's own Python files, read as text: what they import, and which names they define.

Nothing is imported or run. Modules that are imported by name at run time are not seen, nor is data
that the code reads. Where names may come about at run time (``from x import *``, a module's
``__getattr__``, ``globals()``), they are taken to be there.
"""

from __future__ import annotations

import ast
import sys
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path

from pipectl.spec.references import Reference
from pipectl.units import did_you_mean

# As it was before any user code ran, which may change it.
_SEARCH = tuple(Path(entry) for entry in sys.path if entry)
_LIBRARY = ("site-packages", "dist-packages")
_INNER = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)
_UNPARSABLE = (OSError, SyntaxError, ValueError, RecursionError)


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
    sources: dict[str, Path] = {}
    imported = [name for file in files for name in _imports("", file)]
    waiting = [*(name for each in references for name in _levels(each.module or "")), *imported]
    while waiting:
        name = waiting.pop()
        file = None if name in sources else _user_file(name, search)
        if file is not None:
            sources[name] = file
            waiting += _imports(name, file)
    return sources


def source_of(reference: Reference) -> Path | None:
    """The file of a reference, or of its module; None for an installed one, or if there is none."""
    if reference.root is None:
        return reference.file
    return _module_file(reference.root, str(reference.module))


def fault_of_name(reference: Reference) -> str | None:
    """Why what a reference names cannot be found; None if it can, or may be."""
    file = source_of(reference)
    if reference.module is not None and reference.root is None:
        return _fault_of_installed(reference.module)
    if reference.root is not None and file is None:
        return f"there is no module {reference.module} in {reference.root}"
    if file is None or not file.is_file():  # a missing file is reported elsewhere
        return None
    try:
        tree = ast.parse(file.read_bytes())
    except SyntaxError as error:
        return f"{file}:{error.lineno}: {error.msg}"
    except _UNPARSABLE:
        return None
    names = set(_names(tree))
    first = reference.attribute.partition(".")[0]
    if first in names or {"*", "__getattr__", "globals"} & names:
        return None
    inner = file.name == "__init__.py" and _module_file(file.parent, first)
    return None if inner else f"{file} defines no {first!r}{did_you_mean(first, names)}"


def _fault_of_installed(module: str) -> str | None:
    top = module.partition(".")[0]
    try:
        if top in sys.stdlib_module_names or find_spec(top) is not None:
            return None
    except ValueError:  # it is loaded, by other means than a file
        return None
    return f"no module {top!r} is installed, and none lies beside the job file"


def _module_file(root: Path, module: str) -> Path | None:
    """The file of a module; the directory of a package without one."""
    inner = Path(root, *module.split("."))
    candidates = (inner / "__init__.py", inner.with_name(f"{inner.name}.py"), inner)
    return next((path for path in candidates if path.exists()), None)


def _names(tree: ast.Module) -> Iterator[str]:
    """All names that running a module may bind in it, ``*`` for unknown ones, and ``globals``."""
    waiting: list[ast.AST] = list(tree.body)
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Import | ast.ImportFrom):
            yield from (alias.asname or alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.Name):
            yield node.id
        if not isinstance(node, _INNER):
            waiting += ast.iter_child_nodes(node)
    if any(isinstance(node, ast.Global) for node in ast.walk(tree)):
        yield "*"


def _user_file(name: str, search: Sequence[Path]) -> Path | None:
    """The user's file of a module; None for one of a library, and if there is none.

    A package without an ``__init__.py`` is every directory of its name (PEP 420).
    """
    *packages, last = name.split(".")
    top = packages[0] if packages else last
    if top in sys.stdlib_module_names or top == "pipectl":
        return None
    for package in packages:
        file = _first_file(package, search)
        if file is None:
            search = [root / package for root in search]
        else:
            search = [file.parent] if file.name == "__init__.py" else []
    file = _first_file(last, search)
    if file is None or any(part in _LIBRARY for part in file.parts):
        return None
    return None if file.is_relative_to(sysconfig.get_path("stdlib")) else file


def _first_file(name: str, search: Sequence[Path]) -> Path | None:
    """The file that an import runs: of the first directory with such a package or module."""
    files = ((root / name / "__init__.py", root / f"{name}.py") for root in search)
    return next((file for pair in files for file in pair if file.is_file()), None)


def _imports(name: str, path: Path) -> Iterator[str]:
    """Dotted names that a file may import; nothing from one that cannot be read or parsed."""
    try:
        tree = ast.parse(path.read_bytes())
    except _UNPARSABLE:
        return
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield from _levels(alias.name)
        elif isinstance(node, ast.ImportFrom):  # of ``from a import b``, ``a.b`` may be a module
            outer = package.split(".")[: package.count(".") + 2 - node.level] if node.level else []
            base = [*filter(None, outer), *filter(None, [node.module])]
            for alias in node.names:
                yield from _levels(".".join([*base, alias.name]))


def _levels(name: str) -> Iterator[str]:
    """``a``, ``a.b`` and ``a.b.c`` for ``a.b.c``: importing a module runs its packages."""
    parts = name.split(".")
    yield from (".".join(parts[: end + 1]) for end in range(len(parts)) if name)
