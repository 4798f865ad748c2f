"""``code.json``: which code a run keeps, where it was, and what has changed since."""

from __future__ import annotations

import hashlib
import math
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from pipectl.errors import PipectlError
from pipectl.faults import is_user_code
from pipectl.fields import Count, DataFile, Rule
from pipectl.files import is_there, read_limited
from pipectl.runs.directory import RunDirectory, StartDirectory
from pipectl.units import plural, printable

_MAX_HASHED_BYTES = 2**24
"""A larger file is known by its size and time."""
_LOOK_AGAIN_S = 10.0
HINT = (
    "submit the job again, or let the run take the files as they are now: "
    "pipectl resume --with-changed-code"
)


def _is_inside(name: str) -> bool:
    path = Path(name)
    return not path.is_absolute() and ".." not in path.parts and bool(path.parts)


_INSIDE = Rule(_is_inside, "a path within the directory of the run's code")
_ABSOLUTE = Rule(lambda name: name.startswith("/"), "an absolute path")


@dataclass(frozen=True)
class KeptFile:
    """A file that a job needs, or a large package, until it is known which of its files are used.

    Args:
        path: of the file at submission.
        digest: SHA-256 of its content; of a large file that is not copied, its size and time; of a
            package, SHA-256 of the sizes and times of its Python files.
        size: in bytes.
        modified: its time, in nanoseconds since the epoch.
        copy: path of the copy, relative to ``code/``; null if there is none.
        names: dotted names under which it is imported.
        found: how it came to be known: an ``import`` names it, or the job; the code has loaded it
            in another way (``load``), or opened it, so that names mean it only where its directory
            is searched; or it is ``beside`` code that loads files in other ways, and none has
            loaded it so far.
        package: see :class:`pipectl.profile_parts.LoadedFile`.
    """

    path: Annotated[str, _ABSOLUTE]
    digest: str
    size: int
    modified: int
    copy: Annotated[str, _INSIDE] | None = None
    names: tuple[str, ...] = ()
    found: Literal["import", "load", "beside"] = "import"
    package: str | None = None

    def has_changed(self, *, thorough: bool) -> bool:
        """Whether the file has another content now, or is gone.

        Args:
            thorough: whether to read it even if its size and time are the same.
        """
        path = Path(self.path)
        try:
            status = path.stat()
            is_same = (status.st_size, status.st_mtime_ns) == (self.size, self.modified)
            return not (is_same and not thorough) and digest_of(path) != self.digest
        except OSError:
            return self.found == "import"  # else nobody may want it now


@dataclass(frozen=True)
class Repository:
    """The git repository of the user's code at submission.

    Args:
        directory: its top.
        commit: its commit; null before the first one.
        changed: files that differed from the commit, or were not in it.
    """

    directory: str
    commit: str | None = None
    changed: tuple[str, ...] = ()


@dataclass(frozen=True)
class KeptCode(DataFile):
    """``code.json``.

    Args:
        kept_at: when the files were read, in seconds since the epoch.
        files: that the job needs.
        start: number of the first start of the job that uses them.
        repository: of the code; null if it is in none, or git did not answer.
    """

    hint: ClassVar[str] = HINT
    kept_at: float
    files: tuple[KeptFile, ...]
    start: Count = 1
    repository: Repository | None = None

    def changed(self, *, thorough: bool = True) -> list[KeptFile]:
        """The files that the job uses and that have changed; see :meth:`KeptFile.has_changed`."""
        used = (file for file in self.files if file.found != "beside")
        return [file for file in used if file.has_changed(thorough=thorough)]


class CodeWatch:
    """The code that a run keeps, and the files of it that have changed, for who looks repeatedly:
    the files may be many, and on a network file system.

    Args:
        clock: clock in seconds, with any origin.
    """

    def __init__(self, run: RunDirectory, clock: Callable[[], float] = time.monotonic) -> None:
        self._run, self._clock = run, clock
        self._due_s = -math.inf

    @property
    def code(self) -> KeptCode | None:
        """The code that the run keeps; None if it keeps none."""
        self._look()
        return self._code

    @property
    def changed(self) -> list[KeptFile]:
        """The files that have changed by their size or time, as of at most 10 s ago."""
        self._look()
        return self._changed

    def _look(self) -> None:
        if self._clock() < self._due_s:
            return
        self._code = None
        with suppress(PipectlError, OSError):
            self._code = read_code(self._run)
        self._changed = self._code.changed(thorough=False) if self._code else []
        self._due_s = self._clock() + _LOOK_AGAIN_S


def read_code(run: RunDirectory) -> KeptCode | None:
    """``code.json`` of a run; None for a run of a version that kept no code.

    Raises:
        DataFileError: it is damaged.
    """
    return KeptCode.load(run.code_file) if is_there(run.code_file) else None


def without_copies(files: Iterable[KeptFile]) -> list[str]:
    """What to call the files that have no copies: their paths, and those of large packages once."""
    names: dict[str, list[KeptFile]] = {}
    for file in files:
        if file.copy is None:
            names.setdefault(file.package or file.path, []).append(file)
    whole = {file.path for files in names.values() for file in files}
    return [
        name if name in whole else f"{name} ({plural(len(files), 'file')})"
        for name, files in names.items()
    ]


def read_changed_code(start: StartDirectory) -> list[str]:
    """Files that a start of a run used though they had changed since the submission."""
    try:
        text = read_limited(start.changed_code, _MAX_HASHED_BYTES).decode("utf-8", "replace")
    except OSError:
        return []
    return [printable(line) for line in text.splitlines()]


def changed_modules(kept: KeptCode, began: float) -> list[str]:
    """Files of modules that this process has imported, that the run has not kept, and that are
    newer than the submission: they were imported by a name that is known only at run time.

    Args:
        began: when this process began, in seconds since the epoch. What is newer was written by the
            job itself.
    """
    known, changed = {file.path for file in kept.files}, set[str]()
    for module in list(sys.modules.values()):
        spec = getattr(module, "__spec__", None)
        file = getattr(module, "__file__", None)
        if spec is None or not isinstance(file, str) or file in known or not is_user_code(file):
            continue
        with suppress(OSError):
            if kept.kept_at < Path(file).stat().st_mtime < began:
                changed.add(file)
    return sorted(changed)


def time_of(path: Path, digest: str) -> int:
    """The time of a file if it has this content now, else 0."""
    try:
        modified = path.stat().st_mtime_ns
        return modified if digest_of(path) == digest else 0
    except OSError:
        return 0


def digest_of(path: Path) -> str:
    """See :class:`KeptFile`."""
    if path.is_dir():
        files = ((file, file.stat()) for file in sorted(path.rglob("*.py")))
        lines = (f"{file} {each.st_size} {each.st_mtime_ns}\n" for file, each in files)
        return hashlib.sha256("".join(lines).encode("utf-8", "surrogateescape")).hexdigest()
    status = path.stat()
    if status.st_size > _MAX_HASHED_BYTES:
        return f"{status.st_size} bytes of {status.st_mtime_ns}"
    return hashlib.sha256(read_limited(path, _MAX_HASHED_BYTES)).hexdigest()
