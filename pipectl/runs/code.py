"""``code.json`` and ``code/``: the user's code as it was when a run was submitted.

Sources that a job imports are copied, and the job uses the copies, see :mod:`pipectl.spec.code`. Of
other files that a spec names, and of compiled modules, only a digest is kept: the job reads the
files, and says which of them have changed.
"""

from __future__ import annotations

import hashlib
import os
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from importlib.machinery import ExtensionFileLoader
from itertools import islice
from pathlib import Path
from typing import Any, Literal

from pipectl.errors import DataFileError, UsageError
from pipectl.faults import is_user_code
from pipectl.files import fault_of_owner, make_private_directory, read_limited, replace_file
from pipectl.profile_parts import LoadedFile
from pipectl.runs.directory import RunDirectory
from pipectl.runs.kept_code import (
    HINT,
    KeptCode,
    KeptFile,
    Repository,
    digest_of,
    read_code,
    time_of,
)
from pipectl.runs.project import python_files
from pipectl.spec import JobSpec
from pipectl.spec.code import Snapshot, content_of, loaded_files, read_source, using
from pipectl.spec.places import factories_in
from pipectl.spec.references import Reference, loads_at_will

MAX_FILES, MAX_BYTES = 2000, 2**24
"""Of the copies of one run."""
_MAX_BESIDE = 2**22
"""Bytes of the copies of files that the code may load."""
_MAX_LEVELS = 4
"""Of dotted names."""


@dataclass(frozen=True)
class Code:
    """The code of a job before it is written to a run.

    Args:
        sources: that are copied.
        others: files that are not copied.
        loaded: those of both that are known because the code has loaded them.
        before: what the run has kept, and keeps; None if it keeps nothing of it.
        read_at: when the sources were read, in seconds since the epoch.
    """

    sources: Snapshot
    others: tuple[Path, ...] = ()
    loaded: Mapping[Path, LoadedFile] = field(default_factory=dict)
    before: KeptCode | None = None
    read_at: float = field(default_factory=time.time)

    @property
    def directory(self) -> Path | None:
        """The directory of its first file; None if it has none."""
        return next((path.parent for path in self.sources.contents), None)

    @classmethod
    def of(cls, spec: JobSpec) -> Code:
        """The code that a job needs, read now, or from the snapshot that this process uses."""
        every = [reference for _, reference in spec.factories()]
        files = {each.file: None for each in every if each.file is not None}
        beside: dict[Path, list[Reference]] = {}
        for reference in every:
            place = reference.root or (reference.file and reference.file.parent)
            if place is not None:
                beside.setdefault(place, []).append(reference)
        # Modules that several directories have are each imported by the files beside them.
        groups = [every, *(beside.values() if len(beside) > 1 else ())]
        names: dict[str, tuple[Path, ...]] = {}
        for name, file in (pair for group in groups for pair in spec.sources(group).items()):
            path = file.absolute()
            files[path] = None
            names[name] = tuple(dict.fromkeys((*names.get(name, ()), path)))
        contents: dict[Path, bytes] = {}
        others = dict.fromkeys((*_other_files(spec), *map(Path, sorted(spec.large_packages))))
        room = MAX_BYTES
        for path in files:
            content = _read(path, room) if len(contents) < MAX_FILES else None
            if content is None:
                others[path] = None
            else:
                contents[path] = content
                room -= len(content)
        code = cls(Snapshot(contents, names), tuple(others))
        if any(map(loads_at_will, contents.values())):
            code = code._with_files_beside()
        return code

    def _with_files_beside(self) -> Code:
        """The code, with the Python files of its project, of which it may load some."""
        contents, names, room = dict(self.sources.contents), dict(self.sources.names), _MAX_BESIDE
        for path in islice(python_files(each.parent for each in contents), MAX_FILES):
            is_known = path in contents or path in self.others
            content = None if is_known else _read(path, room)
            if content is not None:
                contents[path] = content
                room -= len(content)
                for name in _names_of(path):
                    names[name] = (*names.get(name, ()), path)
        searched = frozenset(contents.keys() - self.sources.contents.keys())
        return replace(self, sources=Snapshot(contents, names, searched))

    def with_loaded(self, files: Iterable[LoadedFile]) -> Code:
        """The code, with files that the code has loaded besides those that its imports name."""
        sources = self.sources
        known = sources.contents.keys() - sources.searched
        loaded = {Path(f.path): f for f in files if Path(f.path) not in known} | {**self.loaded}
        contents, names = dict(sources.contents), dict(sources.names)
        others, room = dict.fromkeys(self.others), MAX_BYTES - sum(map(len, contents.values()))
        for path, file in loaded.items():
            if path not in contents:
                content = None if file.package else content_of(file) or _read(path, room)
                if content is None or len(content) > room:
                    others[path] = None
                    continue
                contents[path] = content
                others.pop(path, None)
                room -= len(content)
            for name in file.names:
                names[name] = tuple(dict.fromkeys((*names.get(name, ()), path)))
        searched = sources.searched | (loaded.keys() & contents.keys())
        return replace(
            self, sources=Snapshot(contents, names, searched), others=tuple(others), loaded=loaded
        )

    def how_found(self, path: Path) -> Literal["import", "load", "beside"]:
        """See :class:`KeptFile`."""
        if path in self.loaded:
            return "load"
        return "beside" if path in self.sources.searched else "import"


def _names_of(path: Path) -> list[str]:
    """Dotted names under which Python may find a file."""
    place = path.parent if path.name == "__init__.py" else path.with_suffix("")
    names = [place.name]
    while (place := place.parent).name.isidentifier() and len(names) < _MAX_LEVELS:
        names.append(f"{place.name}.{names[-1]}")
    return names


def keep(run: RunDirectory, code: Code, start: int, repository: Repository | None) -> None:
    """Write copies of a job's code to a new directory of a run, and ``code.json``.

    What the run has kept before, and the job still uses, stays as it is.

    Args:
        start: number of the job's next start.
        repository: of code that the run has not kept before.

    Raises:
        UsageError: they cannot be written.
    """
    earlier = {} if code.before is None else {Path(file.path): file for file in code.before.files}
    names: dict[Path, list[str]] = {}
    for name, paths in code.sources.names.items():
        for path in paths:
            names.setdefault(path, []).append(name)
    files, folder = list[KeptFile](), new_copies(run)
    new = [path for path in code.sources.contents if path not in earlier]
    base = Path(os.path.commonpath([path.parent for path in new])) if new else Path("/")
    try:
        for path, content in code.sources.contents.items():
            if path in earlier:
                files.append(_found_again(earlier[path], code))
                continue
            copy = folder / path.relative_to(base)
            make_private_directory(copy.parent)
            replace_file(copy, content, 0o600, durable=False)
            digest, within = hashlib.sha256(content).hexdigest(), str(copy.relative_to(run.code))
            own_names, modified = tuple(names.get(path, ())), time_of(path, digest)
            found = code.how_found(path)
            files.append(
                KeptFile(str(path), digest, len(content), modified, within, own_names, found)
            )
    except OSError as error:
        raise UsageError(
            f"{folder}: the code of the job cannot be kept: {error.strerror or error}",
            hint="set output.directory to a directory with room that you may write to",
        ) from error
    # Of a package, the files that are used may be known.
    known = {file.package for file in code.loaded.values()}
    for path in (each for each in code.others if str(each) not in known):
        if path in earlier:
            files.append(_found_again(earlier[path], code))
            continue
        with suppress(OSError):  # using it will report the error
            files.append(_without_copy(path, code))
    listed = {file.path for file in files}
    # Code that loads files at will may have another one each time.
    files += [
        file for path, file in earlier.items() if file.found != "import" and str(path) not in listed
    ]
    if code.before is None:
        KeptCode(code.read_at, tuple(files), start, repository).save(run.code_file)
    elif tuple(files) != code.before.files:
        replace(code.before, files=tuple(files)).save(run.code_file)


def _without_copy(path: Path, code: Code) -> KeptFile:
    status = path.stat()  # first: what changes after it is compared by content
    size, modified, found = status.st_size, status.st_mtime_ns, code.how_found(path)
    package = str(path) if path.is_dir() else None
    if path in code.loaded:
        package = code.loaded[path].package
    return KeptFile(str(path), digest_of(path), size, modified, found=found, package=package)


def _found_again(file: KeptFile, code: Code) -> KeptFile:
    """A file that a run has kept, which may have been loaded by now."""
    found = code.how_found(Path(file.path))
    if file.found == found or file.found == "import":
        return file
    return replace(file, found="load" if "load" in (file.found, found) else found)


def loaded_of(kept: KeptCode) -> list[LoadedFile]:
    """The files of a run's code that no import names."""
    return [
        LoadedFile(file.path, file.digest, file.names, file.package)
        for file in kept.files
        if file.found == "load"
    ]


def keep_loaded(run: RunDirectory, spec: JobSpec, files: Iterable[LoadedFile]) -> None:
    """Keep files that the code has loaded, and that the run has not kept: no import names them.

    Raises:
        UsageError: they cannot be written.
    """
    if (kept := read_code(run)) is None:
        return
    known = {file.path for file in kept.files if file.found != "beside"}
    if new := [file for file in files if file.path not in known]:
        code = replace(Code.of(spec), before=kept).with_loaded([*loaded_of(kept), *new])
        keep(run, code, kept.start, None)


def loaded_here() -> list[LoadedFile]:
    """The user's files that this process runs, compiled modules included."""
    files = {file.path: file for file in loaded_files()}
    for name, module in list(sys.modules.items()):
        path = getattr(module, "__file__", None)
        loader = getattr(getattr(module, "__spec__", None), "loader", None)
        if isinstance(loader, ExtensionFileLoader) and isinstance(path, str) and is_user_code(path):
            with suppress(OSError):
                files.setdefault(path, LoadedFile(path, digest_of(Path(path)), (name,)))
    return list(files.values())


def is_changed(file: LoadedFile) -> bool:
    """Whether a file that was loaded has another content now, as this process sees it.

    One that is gone has not: the job may be in another directory, or on another machine.
    """
    path = Path(file.path)
    try:
        content = read_source(path) if path.suffix == ".py" else None
        now = digest_of(path) if content is None else hashlib.sha256(content).hexdigest()
    except OSError:
        return False
    return now != file.digest


def new_copies(run: RunDirectory) -> Path:
    """The directory for the next copies of a run: ``code/1``, ``code/2``…"""
    number = 1
    while (run.code / str(number)).exists():
        number += 1
    return run.code / str(number)


def read_snapshot(run: RunDirectory) -> Snapshot | None:
    """The sources that a run has kept, after a check that they are the user's own.

    Raises:
        DataFileError: a copy is missing or damaged, or others could have written it.
    """
    kept = read_code(run)
    if kept is None:
        return None
    for directory in (run.path, run.code):
        if fault := fault_of_owner(directory, root=False):
            raise DataFileError(
                f"{directory}: {fault}, so the code in it is not used",
                hint="copy the run to a directory that only you can write to",
            )
    contents: dict[Path, bytes] = {}
    names: dict[str, tuple[Path, ...]] = {}
    searched = set[Path]()
    for file in kept.files:
        if file.copy is None:
            continue
        copy, path = run.code / file.copy, Path(file.path)
        try:
            content = read_limited(copy, MAX_BYTES)
        except OSError as error:
            fault = f"cannot be read: {error.strerror or error}"
            raise DataFileError(f"{copy}: {fault}", hint=HINT) from error
        if hashlib.sha256(content).hexdigest() != file.digest:
            raise DataFileError(f"{copy}: has changed since it was kept", hint=HINT)
        contents[path] = content
        for name in file.names:
            names[name] = (*names.get(name, ()), path)
        if file.found != "import":
            searched.add(path)
    return Snapshot(contents, names, frozenset(searched))


@contextmanager
def using_code_of(run: RunDirectory) -> Iterator[Snapshot | None]:
    """Within the block, this process sees the code that a run has kept; see :func:`read_snapshot`.

    A run that has kept none sees the files.
    """
    snapshot = read_snapshot(run)
    with using(snapshot):
        yield snapshot


def _other_files(spec: JobSpec) -> Iterator[Path]:
    """Files besides code that a job reads: those in keyword arguments, weights, a schedule."""
    data = spec.model_dump()
    for _, _, kwargs in factories_in(data):
        yield from filter(_is_file, map(Path, _absolute_paths(kwargs)))
    for named in (spec.model.weights, spec.schedule_file):
        if named is not None and _is_file(Path(named)):
            yield Path(named).absolute()


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except (OSError, ValueError):
        return False


def _absolute_paths(value: Any) -> Iterator[str]:
    """All texts within a value that begin with ``/``."""
    if isinstance(value, Mapping):
        value = value.values()
    if isinstance(value, str):
        if value.startswith("/"):
            yield value
    elif isinstance(value, Iterable):
        for item in value:
            yield from _absolute_paths(item)


def _read(path: Path, limit: int) -> bytes | None:
    """The content of a source; None for a compiled module, or if it is too large or unreadable."""
    if path.suffix != ".py":
        return None
    try:
        content = read_source(path)
    except OSError:
        return None
    return content if len(content) <= limit else None
