"""References to user code: ``./file.py:name`` or ``package.module:name``. Nothing is imported.

A module or package that lies beside the job file is found there first, as a script would find it.
The directory it lies in may also be named: ``/home/me/jobs/package.module:name``.
"""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from pathlib import Path

_DOTTED = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*")
_NEVER_BESIDE = ("pipectl", "torch")
_FORM = "write ./file.py:name or package.module:name"


@dataclass(frozen=True)
class Reference:
    """A parsed reference.

    Args:
        file: absolute path of the Python file, or None.
        module: dotted name of an importable module, or None; just one of both is given.
        root: directory that holds the module's outermost package, None for an installed one.
        attribute: dotted name behind the colon.
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
        """The reference as a spec beside the file has it: the same wherever the file lies."""
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
    root = Path(base, directory or slash).resolve() if slash else _root_beside(module, base)
    return Reference(None, module, attribute, root)


def _root_beside(module: str, base: Path) -> Path | None:
    """The directory of the job, if the module lies there; nothing there hides Python or pipectl."""
    top = module.partition(".")[0]
    if top in sys.stdlib_module_names or top in _NEVER_BESIDE:
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
