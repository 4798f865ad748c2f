"""References to user code: ``./file.py:name`` or ``package.module:name``. Nothing is imported."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

_DOTTED = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*")
_FORM = "write ./file.py:name or package.module:name"


@dataclass(frozen=True)
class Reference:
    """A parsed reference.

    Args:
        file: absolute path of the Python file, or None.
        module: dotted name of an importable module, or None; just one of both is given.
        attribute: dotted name behind the colon.
    """

    file: Path | None
    module: str | None
    attribute: str

    def __str__(self) -> str:
        return f"{self.file or self.module}:{self.attribute}"

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
    return Reference(None, where, attribute)


def fault_of(text: str) -> str | None:
    """What is wrong with a reference, or None."""
    where, colon, attribute = text.rpartition(":")
    shown = repr(text[:80])
    if not colon:
        return f"{shown} names no function or class; {_FORM}"
    if not _DOTTED.fullmatch(attribute):
        return f"{shown}: {attribute[:80]!r} is no name of a function or class; {_FORM}"
    if not where.endswith(".py") and not _DOTTED.fullmatch(where):
        return f"{shown}: {where[:80]!r} is neither a .py file nor a module; {_FORM}"
    return None
