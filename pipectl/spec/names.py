"""Whether the functions and classes that a spec names can be found. Nothing is imported or run.

What a file defines is read from its text. Where names may come about at run time (``from x import
*``, a module's ``__getattr__``, ``globals()``), they are taken to be there.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from pipectl.spec.references import Reference
from pipectl.units import did_you_mean

_INNER = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)


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
    except (OSError, ValueError, RecursionError):
        return None
    names = set(_names(tree))
    first = reference.attribute.partition(".")[0]
    if first in names or "*" in names or {"__getattr__", "globals"} & names:
        return None
    inner = file.name == "__init__.py" and _file_of(file.parent, first)
    return None if inner else f"{file} defines no {first!r}{did_you_mean(first, names)}"


def source_of(reference: Reference) -> Path | None:
    """The file of a reference, or of its module; None for an installed one, or if there is none."""
    if reference.root is None:
        return reference.file
    return _file_of(reference.root, str(reference.module))


def _fault_of_installed(module: str) -> str | None:
    top = module.partition(".")[0]
    try:
        if top in sys.stdlib_module_names or find_spec(top) is not None:
            return None
    except ValueError:  # it is loaded, by other means than a file
        return None
    return f"no module {top!r} is installed, and none lies beside the job file"


def _file_of(root: Path, module: str) -> Path | None:
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
            for alias in node.names:
                yield alias.asname or alias.name.partition(".")[0]
        elif isinstance(node, ast.Name):
            yield node.id
        if not isinstance(node, _INNER):
            waiting += ast.iter_child_nodes(node)
    if any(isinstance(node, ast.Global) for node in ast.walk(tree)):
        yield "*"
