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
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import decode_source, find_spec
from pathlib import Path
from symtable import symtable

from pipectl.units import did_you_mean

_DOTTED = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*")
_FORM = "write ./file.py:name or package.module:name"
# As it was before any user code ran, which may change it.
_SEARCH = tuple(entry for entry in sys.path if entry)
_LIBRARY = ("site-packages", "dist-packages")
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

    @property
    def source(self) -> Path | None:
        """The file, or that of the module; None for an installed module, or if there is none."""
        if self.root is None or self.module is None:
            return self.file
        return _file_of(_find(self.module, [str(self.root)]))


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
    if slash:
        return Reference(None, module, attribute, Path(base, directory or slash).resolve())
    top = module.partition(".")[0]
    if top in sys.stdlib_module_names or top in ("pipectl", "torch"):
        return Reference(None, module, attribute)
    job = base.resolve()
    top_spec, module_spec = (_find(name, [str(job)]) for name in (top, module))
    beside = any(spec is not None and spec.origin for spec in (top_spec, module_spec))
    return Reference(None, module, attribute, job if beside else None)


def fault_of(text: str) -> str | None:
    """What is wrong with a reference, or None."""
    where, colon, attribute = text.rpartition(":")
    quoted = repr(text[:80])
    if not colon:
        return f"{quoted} names no function or class; {_FORM}"
    if not _DOTTED.fullmatch(attribute):
        return f"{quoted}: {attribute[:80]!r} is no name of a function or class; {_FORM}"
    if not where.endswith(".py") and not _DOTTED.fullmatch(where.rpartition("/")[2]):
        return f"{quoted}: {where[:80]!r} is neither a .py file nor a module; {_FORM}"
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
    places = [*roots, *(file.parent for file in files)]
    search = list(dict.fromkeys([*map(str, places), *_SEARCH]))
    waiting = [name for each in references for name in _levels(each.module or "")]
    waiting += [name for file in files for name in _imports("", file)]
    sources: dict[str, Path] = {}
    while waiting:
        name = waiting.pop()
        top = name.partition(".")[0]
        if name in sources or top in sys.stdlib_module_names or top == "pipectl":
            continue
        file = _file_of(_find(name, search))
        if file is None or file.is_dir() or any(part in _LIBRARY for part in file.parts):
            continue
        if not file.is_relative_to(sysconfig.get_path("stdlib")):
            sources[name] = file
            waiting += _imports(name, file)
    return sources


def fault_of_name(reference: Reference) -> str | None:
    """Why the name of a reference cannot be found; None if it can, or may be."""
    file = reference.source
    if reference.module is not None and reference.root is None:
        top = reference.module.partition(".")[0]
        try:
            if top in sys.stdlib_module_names or find_spec(top) is not None:
                return None
        except ValueError:  # it is loaded, by other means than a file
            return None
        return f"no module {top!r} is installed, and there is none next to the job file"
    if reference.root is not None and file is None:
        return f"there is no module {reference.module} in {reference.root}"
    if file is None or not file.is_file():  # a missing file is reported elsewhere
        return None
    try:
        code = decode_source(file.read_bytes())
        names = set(symtable(code, str(file), "exec").get_identifiers())
    except SyntaxError as error:
        return f"{file}:{error.lineno or 1}: {error.msg}"
    except _UNPARSABLE:
        return None
    first = reference.attribute.partition(".")[0]
    if not names.isdisjoint({first, "__getattr__", "globals"}) or _may_bind_more(code):
        return None
    inner = file.name == "__init__.py" and _find(first, [str(file.parent)])
    return None if inner else f"{file} defines no {first!r}{did_you_mean(first, names)}"


def _find(module: str, search: list[str]) -> ModuleSpec | None:
    """What an import finds along a path; nothing is run, not even the packages of the module."""
    spec = None
    for name in module.split("."):
        spec = PathFinder.find_spec(name, search) if search else None
        search = list(spec.submodule_search_locations or ()) if spec else []
    return spec


def _file_of(spec: ModuleSpec | None) -> Path | None:
    """The file of a module; the directory of a package without one."""
    if spec is None:
        return None
    return Path(spec.origin or next(iter(spec.submodule_search_locations or ())))


def _may_bind_more(code: str) -> bool:
    """Whether a module may have names that only running it tells."""
    return any(
        isinstance(node, ast.Global)
        or (isinstance(node, ast.ImportFrom) and node.names[0].name == "*")
        for node in ast.walk(ast.parse(code))
    )


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
