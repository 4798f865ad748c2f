"""Which arguments of user code are paths, and what becomes of these."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pipectl.files import escape_path, expand_path

_PATH = re.compile(
    r"\.{0,2}/|~[\w.-]*/|\$\w+/|\$\{[^}]*\}/|\$\$[A-Z_{]|\$[A-Z_][A-Z0-9_]*$|\$\{[A-Z_]\w*\}$"
)
"""How a text begins that is a path."""


def is_path(value: Any) -> bool:
    """Whether an argument is a text that begins as a path does."""
    return isinstance(value, str) and _PATH.match(value) is not None


def make_absolute(value: Any, base: Path) -> Any:
    """Arguments whose paths are expanded; those that begin with a dot count from ``base``.

    Raises:
        ValueError: see :func:`pipectl.files.expand_path`.
    """

    def absolute(path: str) -> str:
        path = expand_path(path)
        return os.path.normpath(base / path) if path.startswith(("./", "../")) else path

    return _with_paths(value, absolute)


def escape(value: Any) -> Any:
    """The inverse: arguments whose paths :func:`make_absolute` leaves as they are here."""
    return _with_paths(value, escape_path)


def _with_paths(value: Any, change: Callable[[str], str]) -> Any:
    """A value of any YAML type in which every path is changed."""
    if isinstance(value, dict):
        return {key: _with_paths(item, change) for key, item in value.items()}
    if isinstance(value, list):
        return [_with_paths(item, change) for item in value]
    return change(value) if is_path(value) else value
