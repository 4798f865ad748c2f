"""References to user code: ``./file.py:name`` or ``package.module:name``.

A module or package that lies next to the job file is found there first, as a script would find it.
The directory it lies in may also be named: ``/home/me/jobs/package.module:name``.

Files are read as text, and nothing is imported or run. Modules that are imported by name at run
time are not seen, nor is data that the code reads. Where names may come about at run time (``from x
import *``, a module's ``__getattr__``, ``globals()``), they are taken to be there.
"""

from __future__ import annotations

import ast
import re
import sys
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from pipectl.units import did_you_mean

_DOTTED = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*")
_NEVER_USER_CODE = ("pipectl", "torch")
_FORM = "write ./file.py:name or package.module:name"
# As it was before any user code ran, which may change it.
_SEARCH = tuple(Path(entry) for entry in sys.path if entry)
_LIBRARY = ("site-packages", "dist-packages")
_INNER = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)
_UNPARSABLE = (OSError, SyntaxError, ValueError, RecursionError)


@dataclass(frozen=True)
class Reference:
    """A parsed reference.

    Args:
        file: absolute path of the Python file, or None.
        module: dotted name of an importable module, or None; just one of both is given.
        root: directory that holds the module's outermost package, None for an installed one.
        attribute: dotted name after the colon.
    """

    file: Path | None
    module: str | None
    attribute: str
    root: Path | None = None

    def __str__(self) -> str:
        where = self.file or (self.module if self.root is None else f"{self.root}/{self.module}")
        return f"{where}:{self.attribute}"

    @property
    def portable(self) -> str:
        """The reference as a spec in the same directory has it: the same wherever the file lies."""
        where = self.module if self.file is None else f"./{self.file.name}"
        return f"{where}:{self.attribute}"


def parse(text: str, base: Path) -> Reference:
    """The reference in ``text``; a relative file is looked up from ``base``.

    Raises:
        ValueError: the text is no reference; says why.
    """
    if fault := fault_of(text):
        raise ValueError(fault)
    where, _, attribute = text.rpartition(":")
    if where.endswith(".py"):
        return Reference(Path(base, where).resolve(), None, attribute)
    directory, slash, module = where.rpartition("/")
    root = Path(base, directory or slash).resolve() if slash else _root_next_to_job(module, base)
    return Reference(None, module, attribute, root)


def _root_next_to_job(module: str, base: Path) -> Path | None:
    """The directory of the job, if the module is there; nothing there hides Python or pipectl."""
    top = module.partition(".")[0]
    if top in sys.stdlib_module_names or top in _NEVER_USER_CODE:
        return None
    inner = Path(base, *module.split("."))
    files = (Path(base, top, "__init__.py"), inner.with_suffix(".py"), inner / "__init__.py")
    try:
        return base.resolve() if any(file.is_file() for file in files) else None
    except (OSError, ValueError):
        return None


def fault_of(text: str) -> str | None:
    """What is wrong with a reference, or None."""
    where, colon, attribute = text.rpartition(":")
    shown = repr(text[:80])
    if not colon:
        return f"{shown} names no function or class; {_FORM}"
    if not _DOTTED.fullmatch(attribute):
        return f"{shown}: {attribute[:80]!r} is no name of a function or class; {_FORM}"
    if not where.endswith(".py") and not _DOTTED.fullmatch(where.rpartition("/")[2]):
        return f"{shown}: {where[:80]!r} is neither a .py file nor a module; {_FORM}"
    return None


def user_sources(references: Iterable[Reference]) -> dict[str, Path]:
    """Files by the dotted names under which the references' modules import them.

    A module is looked for next to the files of the references, then along ``sys.path``. The
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
    """Why the name of a reference cannot be found; None if it can, or may be."""
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
    return f"no module {top!r} is installed, and there is none next to the job file"


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
