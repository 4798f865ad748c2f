"""Imports of user code from the snapshot that this process uses, see :mod:`pipectl.spec.code`.

A module has the content of the snapshot and the path of the file: ``__file__``, and data and
modules beside it, are where they were. Byte code that Python keeps beside the file is neither read
nor written, because it may be of another content.
"""

from __future__ import annotations

import linecache
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, SourceFileLoader
from importlib.util import decode_source, spec_from_file_location
from pathlib import Path
from types import CodeType, ModuleType

from pipectl.spec.code import active


class KeptLoader(SourceFileLoader):
    """Loads one module from the content that a snapshot has of its file."""

    content: bytes

    @classmethod
    def of(cls, name: str, path: Path) -> KeptLoader | None:
        """The loader of a file; None if no snapshot has the file, which Python then reads."""
        snapshot = active()
        content = None if snapshot is None else snapshot.contents.get(path)
        if content is None:
            return None
        loader = cls(name, str(path))
        loader.content = content
        return loader

    def get_data(self, path: str) -> bytes:
        """The content of the module, or of a data file beside it."""
        return self.content if path == self.path else super().get_data(path)

    def get_code(self, fullname: str) -> CodeType:  # noqa: ARG002
        """The compiled module."""
        # Tracebacks, and what reads the source of a function, show the lines that run. Without a
        # time, Python takes this entry for that of no file, and keeps it.
        try:
            lines = decode_source(self.content).splitlines(keepends=True)
            linecache.cache[self.path] = (len(self.content), None, lines, self.path)
        except (SyntaxError, UnicodeDecodeError):  # compiling it reports the error
            pass
        code: CodeType = self.source_to_code(self.content, self.path)
        return code


class _Finder(MetaPathFinder):
    """Finds the modules of the snapshot that this process uses, if it uses one."""

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None,
        target: ModuleType | None = None,  # noqa: ARG002
    ) -> ModuleSpec | None:
        snapshot = active()
        if snapshot is None:
            return None
        file = snapshot.find(fullname, [*(sys.path if path is None else path)])
        if file is None:
            return None
        loader = KeptLoader.of(fullname, file)
        inner = [str(file.parent)] if file.name == "__init__.py" else None
        return spec_from_file_location(
            fullname, file, loader=loader, submodule_search_locations=inner
        )


_FINDER = _Finder()


def import_from_snapshot() -> None:
    """Let Python's imports find the modules of a snapshot before all others, as directories of user
    code come first on ``sys.path``."""
    if active() is not None and _FINDER not in sys.meta_path:
        sys.meta_path.insert(0, _FINDER)
