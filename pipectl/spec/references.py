"""References to user code: ``./file.py:name`` or ``package.module:name``.

A module or package next to the job file takes precedence, as for a script. Its directory may also
be given: ``/home/me/jobs/package.module:name``.

Files are read as text; nothing is imported or run. Modules imported by name at run time, and data
that the code reads, are not detected; :func:`loads_at_will` says that there may be such modules. If
a module may define names at run time (``from x import *``, ``__getattr__``, ``globals()``), every
name is taken to exist.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import decode_source, find_spec
from pathlib import Path
from symtable import symtable

from pipectl.libraries import is_library, large_package
from pipectl.spec.code import active, read_source
from pipectl.units import did_you_mean

_DOTTED = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*")
_FORM = "write ./file.py:name or package.module:name"
# Saved before user code runs, which may change it.
_SEARCH = tuple(entry for entry in sys.path if entry)
_BINDERS = {"__getattr__", "globals", "locals", "vars", "exec", "setattr"}
"""Names by which a module may define further names at run time."""
_INIT = ["__init__"]
_LOADERS = {"importlib", "runpy", "pkgutil", "pydoc", "hydra", "__import__"}
"""Names of what loads modules whose names are only known at run time."""
_ALSO_TEXTS = {"str", "Any", "object", "Literal", "Path", "PathLike", "bytes"}
"""Words of an annotation that allow a text."""
_MAX_DEPTH = 10
"""Length of the chains of imports that are followed."""
_UNPARSABLE = (OSError, SyntaxError, ValueError, RecursionError)


@dataclass(frozen=True)
class Reference:
    """A parsed reference.

    Args:
        file: absolute path of the Python file, or None.
        module: dotted name of an importable module, or None; exactly one of the two is set.
        root: directory of the module's outermost package; None for an installed one.
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
        """The reference for a spec in the directory of the file; it holds wherever that is."""
        where = self.module if self.file is None else f"./{self.file.name}"
        return f"{where}:{self.attribute}"

    @property
    def is_installed(self) -> bool:
        """Whether it names an installed module, or one of the standard library."""
        return self.module is not None and self.root is None

    @property
    def search(self) -> tuple[str, ...]:
        """Directories that the module and what it imports are looked up in."""
        directory = self.root or (self.file and self.file.parent)
        return _SEARCH if directory is None else (str(directory), *_SEARCH)

    @property
    def source(self) -> Path | None:
        """The file, or that of the module; None if there is none."""
        if self.module is None:
            return self.file
        search = _SEARCH if self.root is None else (str(self.root),)
        return _file_of(_find(self.module, [*search]))


def parse(text: str, base: Path | None = None) -> Reference:
    """The reference in ``text``.

    Args:
        base: directory that relative files, and modules, are looked up in; None if the text is that
            of a :class:`Reference`, whose files are absolute.

    Raises:
        ValueError: the text is not a reference; says why.
    """
    if fault := fault_of(text):
        raise ValueError(fault)
    where, _, attribute = text.rpartition(":")
    if where.endswith(".py"):
        return Reference(Path(base or "", where).resolve(), None, attribute)
    directory, slash, module = where.rpartition("/")
    if slash:
        return Reference(None, module, attribute, Path(base or "", directory or slash).resolve())
    top = module.partition(".")[0]
    if base is None or top in sys.stdlib_module_names or top in ("pipectl", "torch"):
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


def user_sources(references: Iterable[Reference], more: Iterable[str] = ()) -> dict[str, Path]:
    """Files by the dotted names under which the references' modules import them.

    Modules are searched next to the files of the references, then on ``sys.path``. The standard
    library, installed packages and pipectl itself are excluded.

    Args:
        references: all of one spec, because each adds the directory of its file or package to
            ``sys.path``.
        more: directories that ``PYTHONPATH`` of the job adds.
    """
    return _search_sources(references, more)[0]


def large_packages(references: Iterable[Reference], more: Iterable[str] = ()) -> set[str]:
    """Directories of packages that these files import, and that only their size makes libraries.

    Args:
        references, more: see :func:`user_sources`.
    """
    return _search_sources(references, more)[1]


def _search_sources(
    references: Iterable[Reference], more: Iterable[str]
) -> tuple[dict[str, Path], set[str]]:
    references = list(references)
    files = [reference.file for reference in references if reference.file is not None]
    roots = [reference.root for reference in references if reference.root is not None]
    own = {str(place) for place in (*roots, *(file.parent for file in files))}
    search = list(
        dict.fromkeys([*map(str, roots), *(str(file.parent) for file in files), *more, *_SEARCH])
    )
    waiting = [name for each in references for name in _levels(each.module or "")]
    waiting += [name for file in files for name in _imports("", file)]
    sources: dict[str, Path] = {}
    large = set[str]()
    while waiting:
        name = waiting.pop()
        if name in sources or not _may_be_users(name):
            continue
        file = _kept(name, search) or _file_of(_find(name, search))
        if file is not None and _is_users(name, file, search, own):
            sources[name] = file
            waiting += _imports(name, file)
        elif file is not None and _may_be_users(name):
            large.update(filter(None, [large_package(file, search, own)]))
    return sources, large


def _kept(name: str, search: list[str]) -> Path | None:
    """The file of a module in the snapshot that this process uses."""
    snapshot = active()
    return None if snapshot is None else snapshot.find(name, search)


def _is_users(name: str, file: Path, search: Collection[str], own: Collection[str]) -> bool:
    """Whether a module's file is the user's, not one of a library, nor a directory.

    Args:
        search: directories that modules are found in.
        own: those of the files and packages that the job names.
    """
    is_code = _may_be_users(name) and not file.is_dir()
    return is_code and not is_library(file, search, own)


def _may_be_users(name: str) -> bool:
    top = name.partition(".")[0]
    return top not in sys.stdlib_module_names and top != "pipectl"


def _is_known(top: str) -> bool:
    """Whether this Python has a module, or says elsewhere that it has not."""
    if top in sys.stdlib_module_names or top in ("pipectl", "torch"):
        return True
    try:
        return find_spec(top) is not None
    except (ImportError, ValueError):  # loaded, but not from a file
        return True


def _certain_imports(body: list[ast.stmt]) -> Iterator[ast.Import | ast.ImportFrom]:
    """Imports that run, and must succeed, whenever the statements run."""
    for node in body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield node
        elif isinstance(node, ast.ClassDef):
            yield from _certain_imports(node.body)
        elif isinstance(node, ast.Try) and not node.handlers:
            yield from _certain_imports([*node.body, *node.finalbody])


def _changes_search(node: ast.AST) -> bool:
    """Whether a node may change where modules are found."""
    if isinstance(node, ast.ImportFrom):
        return node.module in ("sys", "site") and not node.level
    names = ("sys.path", "sys.meta_path", "sys.path_hooks", "site.addsitedir")
    if isinstance(node, ast.Attribute) and ast.unparse(node) in names:
        return True
    return isinstance(node, ast.alias) and node.name in ("sys", "site") and bool(node.asname)


def loads_at_will(source: bytes) -> bool:
    """Whether a module may load code that no import names, or changes where modules are found."""
    try:
        tree = ast.parse(source)
    except _UNPARSABLE:
        return False
    for node in ast.walk(tree):
        names = [each.name for each in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom):
            names = [] if node.level else [node.module or ""]
        elif isinstance(node, ast.Name):
            names = [node.id] if node.id == "__import__" else []
        if _changes_search(node) or any(name.partition(".")[0] in _LOADERS for name in names):
            return True
    return False


def missing_imports(references: Iterable[Reference]) -> Iterator[tuple[Reference, Path, int, str]]:
    """Modules that loading the user's code of one spec imports for certain, and that nobody has.

    Imports within functions, conditions and ``try`` statements with handlers are left out, and all
    of them if any of the code changes how modules are found. Runs nothing.

    Yields:
        (reference, file, line, name of the outermost package), each name once.
    """
    references = list(references)
    places = [*dict.fromkeys(each.search[0] for each in references if not each.is_installed)]
    search = [*places, *_SEARCH]
    seen, names, found = set[Path](), set[str](), list[tuple[Reference, Path, int, str]]()
    for reference in references:
        waiting = [(reference.module or "", reference.source)]
        while waiting:
            own_name, file = waiting.pop()
            if file is None or file in seen or not _is_users(own_name, file, search, places):
                continue
            seen.add(file)
            try:
                tree = ast.parse(read_source(file))
            except _UNPARSABLE:
                continue
            if any(_is_modules(node) or _changes_search(node) for node in ast.walk(tree)):
                return
            for node in _certain_imports(tree.body):
                for name in _names_imported(own_name, file, node):
                    spec = _find(name, search)
                    waiting.append((name, _kept(name, search) or _file_of(spec)))
                    is_absolute = "." not in name and not getattr(node, "level", 0)
                    if is_absolute and spec is None and name not in names:
                        names.add(name)
                        if not (_kept(name, search) or _is_known(name)):
                            found.append((reference, file, node.lineno, name))
    yield from found


def faults_of_use(
    reference: Reference, kwargs: Collection[str], *, is_complete: bool, positional: int
) -> Iterator[tuple[str | None, str]]:
    """Faults of a reference and of the keyword arguments of its call.

    Args:
        kwargs: names of the keyword arguments.
        is_complete: whether there are no other arguments than these and the positional ones.
        positional: number of arguments that pipectl gives by position; kwargs cannot name them.

    Yields:
        (name of a wrong argument or None, fault), for faults that show without running the code.
    """
    if fault := _fault_of_module(reference):
        yield None, fault
        return
    try:
        module = _Module.read(reference.source, reference.search)
    except SyntaxError as error:
        yield None, f"{error.filename}:{error.lineno or 1}: {error.msg}"
        return
    if module is None:
        return
    first, dot, _ = reference.attribute.partition(".")
    names = module.names()
    if names is not None and first not in names:
        package = module.file.name == "__init__.py"
        if not (package and _find(first, [str(module.file.parent)])):
            where = reference.module if reference.is_installed else module.file
            yield None, f"{where} defines no {first!r}{did_you_mean(first, names)}"
        return
    parameters = None if dot else module.parameters(first, positional)
    if parameters is None:
        return
    for name in kwargs:
        if name not in parameters:
            meant = did_you_mean(name, parameters) or f"; it takes {', '.join(parameters)}"
            yield name, f"{first} takes no argument {name!r}{meant if parameters else ''}"
    required = [name for name, is_required in parameters.items() if is_required]
    if is_complete and (missing := [name for name in required if name not in kwargs]):
        yield None, f"{first} needs the argument {missing[0]!r}; write it under kwargs"


def types_taken(reference: Reference, positional: int) -> dict[str, type]:
    """Keyword arguments that take only numbers (``float``), or only true and false (``bool``).

    This is known from the annotation of an argument, and from its default; an argument that may
    also be a text is left out. Runs nothing.

    Args:
        positional: number of arguments that pipectl gives by position.
    """
    try:
        module = _Module.read(reference.source, reference.search)
    except SyntaxError:
        return {}
    first, dot, _ = reference.attribute.partition(".")
    found = None if module is None or dot else module.signature(first, positional)
    taken = {} if found is None else {arg.arg: _wanted(arg, d) for arg, d in _keywords(*found)}
    return {name: kind for name, kind in taken.items() if kind is not None}


def _keywords(arguments: ast.arguments, skipped: int) -> Iterator[tuple[ast.arg, ast.expr | None]]:
    """Arguments that are given by name, after ``skipped`` ones, with their defaults."""
    every = [*arguments.posonlyargs, *arguments.args]
    defaults = [*[None] * (len(every) - len(arguments.defaults)), *arguments.defaults]
    first = max(skipped, len(arguments.posonlyargs))
    yield from zip(every[first:], defaults[first:], strict=True)
    yield from zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)


def _wanted(argument: ast.arg, default: ast.expr | None) -> type | None:
    """``bool`` or ``float`` if an argument takes nothing else; None if that is not known."""
    annotation, words = argument.annotation, set[str]()
    if isinstance(annotation, ast.Constant) and isinstance(annotation.value, str):
        with suppress(SyntaxError):
            annotation = ast.parse(annotation.value, mode="eval").body
    if annotation is not None:
        words = {ast.unparse(node).rpartition(".")[2] for node in ast.walk(annotation)}
    if words & _ALSO_TEXTS:
        return None
    items = default.elts if isinstance(default, ast.Tuple | ast.List) else [default]
    kinds = set[type]()
    with suppress(ValueError):
        kinds = {type(ast.literal_eval(each)) for each in items if each is not None}
    kinds -= {type(None)}
    if not kinds:
        return float if words & {"int", "float"} else bool if "bool" in words else None
    return bool if kinds == {bool} else float if kinds <= {int, float} else None


def _fault_of_module(reference: Reference) -> str:
    """Why the module of a reference cannot be found; empty if it can, or may be."""
    if not reference.is_installed:
        is_missing = reference.root is not None and reference.source is None
        return f"there is no module {reference.module} in {reference.root}" if is_missing else ""
    top = str(reference.module).partition(".")[0]
    try:
        if top in sys.stdlib_module_names or find_spec(top) is not None:
            return ""
    except ValueError:  # loaded, but not from a file
        return ""
    return f"no module {top!r} is installed, and there is none next to the job file"


_Maker = tuple[ast.arguments, int]
"""Arguments of a function or constructor, and how many of them Python gives."""


@dataclass(frozen=True)
class _Text:
    """What the text of a module says of its names.

    Args:
        names: those that it may define itself; None if this is only known at run time.
        bound: for each name, and for ``*``, the import, function or class that binds it; None if
            there are several, or something else does.
        stars: its ``from ... import *``.
    """

    names: frozenset[str] | None
    bound: Mapping[str, ast.ImportFrom | _Maker | None]
    stars: tuple[ast.ImportFrom, ...]

    @staticmethod
    @lru_cache(maxsize=64)  # those of torch have thousands of lines, and most jobs name several
    def of(content: bytes, file: str) -> _Text:
        """Parse the content of a file. Raises a SyntaxError or a ValueError if it is not Python."""
        code = decode_source(content)
        tree = ast.parse(code, file)
        names = frozenset(symtable(code, file, "exec").get_identifiers())
        at_run_time = not names.isdisjoint(_BINDERS)
        binders: dict[str, list[ast.AST]] = {}
        for node in ast.walk(tree):
            at_run_time = at_run_time or isinstance(node, ast.Global) or _is_modules(node)
            for name in {*_bound_by(node)}:
                binders.setdefault(name, []).append(node)
        top = {id(node) for node in tree.body}
        bound = {
            name: _binder(nodes[0]) if len(nodes) == 1 and id(nodes[0]) in top else None
            for name, nodes in binders.items()
        }
        stars = [node for node in binders.get("*", ()) if isinstance(node, ast.ImportFrom)]
        return _Text(None if at_run_time else names, bound, tuple(stars))


def _binder(node: ast.AST) -> ast.ImportFrom | _Maker | None:
    """A statement as :class:`_Text` keeps it, which has no bodies of functions."""
    if isinstance(node, ast.ImportFrom):
        return node
    given = 0
    if isinstance(node, ast.ClassDef):
        functions = [each for each in node.body if isinstance(each, ast.FunctionDef)]
        makers = [each for each in functions if each.name in ("__init__", "__new__")]
        if node.decorator_list or node.keywords or [each.name for each in makers] != _INIT:
            return None
        node, given = makers[0], 1
    if not isinstance(node, ast.FunctionDef) or node.decorator_list:
        return None
    return node.args, given


@dataclass(frozen=True)
class _Module:
    """The source of a module.

    Args:
        search: path on which its imports are searched.
        depth: number of imports that led to it.
    """

    file: Path
    text: _Text
    search: tuple[str, ...]
    depth: int = 0

    @classmethod
    def read(cls, file: Path | None, search: tuple[str, ...], depth: int = 0) -> _Module | None:
        """The module in a file; None if it is not Python's text. Raises a SyntaxError."""
        if file is None or file.suffix != ".py" or depth > _MAX_DEPTH:
            return None
        try:
            return cls(file, _Text.of(read_source(file), str(file)), search, depth)
        except SyntaxError:
            raise
        except _UNPARSABLE:
            return None

    def names(self) -> set[str] | None:
        """The names that it may define; None if this is only known at run time."""
        if self.text.names is None:
            return None
        names = {*self.text.names}
        for node in self.text.stars:
            module = self._imported(node)
            more = None if module is None else module.names()
            if more is None:
                return None
            names |= more
        return names

    def parameters(self, name: str, positional: int) -> dict[str, bool] | None:
        """The keyword arguments of a function or constructor after ``positional`` arguments, and
        whether each is required; None if any are accepted, or if this is only known at run time."""
        found = self.signature(name, positional)
        if found is None or found[0].kwarg:
            return None
        return {arg.arg: default is None for arg, default in _keywords(*found)}

    def signature(self, name: str, positional: int) -> tuple[ast.arguments, int] | None:
        """The arguments of a function or constructor, and how many of them are not given by name;
        None if this is only known at run time."""
        bound = self.text.bound
        found = bound[name] if name in bound else bound.get("*")
        if isinstance(found, ast.ImportFrom):
            module = self._imported(found)
            aliases = found.names
            alias = next(each for each in aliases if (each.asname or each.name) in (name, "*"))
            inner = name if alias.name == "*" else alias.name
            return None if module is None else module.signature(inner, positional)
        return None if found is None else (found[0], found[1] + positional)

    def _imported(self, node: ast.ImportFrom) -> _Module | None:
        """The module that a statement imports from; None if it cannot be read."""
        if node.level:
            folder = self.file.parents[min(node.level, len(self.file.parents)) - 1]
            spec = _find(node.module, [str(folder)]) if node.module else None
            file = _file_of(spec) if node.module else folder / "__init__.py"
        else:
            file = _file_of(_find(node.module or "", list(self.search)))
        try:
            return _Module.read(file, self.search, self.depth + 1)
        except SyntaxError:
            return None


def _bound_by(node: ast.AST) -> Collection[str]:
    """The names that a node of a syntax tree binds."""
    if isinstance(node, ast.Import | ast.ImportFrom):
        return [each.asname or each.name.partition(".")[0] for each in node.names]
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return (node.name,)
    if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
        return (node.id,)
    return ()


def _is_modules(node: ast.AST) -> bool:
    """Whether a node is ``sys.modules``, through which a module may replace itself."""
    return isinstance(node, ast.Attribute) and ast.unparse(node) == "sys.modules"


def _find(module: str, search: list[str]) -> ModuleSpec | None:
    """The spec of a module on a path; runs nothing, not even the packages of the module."""
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


def _imports(name: str, path: Path) -> tuple[str, ...]:
    """Dotted names that a file may import; none if it cannot be read or parsed."""
    try:
        return _imports_of(read_source(path), name, path)
    except _UNPARSABLE:
        return ()


@lru_cache(maxsize=256)  # a command asks several times for what the same files import
def _imports_of(content: bytes, name: str, path: Path) -> tuple[str, ...]:
    """Dotted names that the content of a file may import."""
    nodes = ast.walk(ast.parse(content))
    imports = [node for node in nodes if isinstance(node, ast.Import | ast.ImportFrom)]
    return tuple(each for node in imports for each in _names_imported(name, path, node))


def _names_imported(name: str, path: Path, node: ast.Import | ast.ImportFrom) -> Iterator[str]:
    """Dotted names that a statement in the file of a module may import."""
    if isinstance(node, ast.Import):
        for alias in node.names:
            yield from _levels(alias.name)
        return
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    outer = package.split(".")[: package.count(".") + 2 - node.level] if node.level else []
    base = [*filter(None, outer), *filter(None, [node.module])]
    for alias in node.names:  # of ``from a import b``, ``a.b`` may be a module
        yield from _levels(".".join([*base, alias.name]))


def _levels(name: str) -> Iterator[str]:
    """``a``, ``a.b`` and ``a.b.c`` for ``a.b.c``: importing a module runs its packages."""
    parts = name.split(".")
    yield from (".".join(parts[: end + 1]) for end in range(len(parts)) if name)
