"""``code.json`` and ``code/``: the user's code as it was when a run was submitted.

Sources that a job imports are copied, and the job uses the copies, see :mod:`pipectl.spec.code`. Of
other files that a spec names, and of compiled modules, only a digest is kept: the job reads the
files, and says which of them have changed.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pipectl.errors import DataFileError, UsageError
from pipectl.files import fault_of_owner, make_private_directory, read_limited, replace_file
from pipectl.runs.directory import RunDirectory
from pipectl.runs.kept_code import (
    CURE,
    KeptCode,
    KeptFile,
    Repository,
    digest_of,
    read_code,
    time_of,
)
from pipectl.spec import JobSpec
from pipectl.spec.code import Snapshot, read_source, using
from pipectl.spec.models import factories_in
from pipectl.spec.references import Reference, user_sources

MAX_FILES, MAX_BYTES = 2000, 2**24
"""Of the copies of one run."""


@dataclass(frozen=True)
class Code:
    """The code of a job before it is written to a run.

    Args:
        sources: that are copied.
        others: files that are not copied.
        before: what the run has kept, and keeps; None if it keeps nothing of it.
        read_at: when the sources were read, in seconds since the epoch.
    """

    sources: Snapshot
    others: tuple[Path, ...] = ()
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
        for name, file in (pair for group in groups for pair in user_sources(group).items()):
            path = file.absolute()
            files[path] = None
            names[name] = tuple(dict.fromkeys((*names.get(name, ()), path)))
        contents: dict[Path, bytes] = {}
        others = dict.fromkeys(_other_files(spec))
        room = MAX_BYTES
        for path in files:
            content = _read(path, room) if len(contents) < MAX_FILES else None
            if content is None:
                others[path] = None
            else:
                contents[path] = content
                room -= len(content)
        return cls(Snapshot(contents, names), tuple(others))


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
                files.append(earlier[path])
                continue
            copy = folder / path.relative_to(base)
            make_private_directory(copy.parent)
            replace_file(copy, content, 0o600, durable=False)
            digest, within = hashlib.sha256(content).hexdigest(), str(copy.relative_to(run.code))
            own_names, modified = tuple(names.get(path, ())), time_of(path, digest)
            files.append(KeptFile(str(path), digest, len(content), modified, within, own_names))
    except OSError as error:
        raise UsageError(
            f"{folder}: the code of the job cannot be kept: {error.strerror or error}",
            cure="set output.directory to a directory with room that you may write to",
        ) from error
    for path in code.others:
        if path in earlier:
            files.append(earlier[path])
            continue
        with suppress(OSError):  # using it will report the error
            status = path.stat()  # first: what changes after it is compared by content
            size, modified = status.st_size, status.st_mtime_ns
            files.append(KeptFile(str(path), digest_of(path), size, modified))
    if code.before is None:
        KeptCode(code.read_at, tuple(files), start, repository).save(run.code_file)
    elif tuple(files) != code.before.files:
        replace(code.before, files=tuple(files)).save(run.code_file)


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
                cure="copy the run to a directory that only you can write to",
            )
    contents: dict[Path, bytes] = {}
    names: dict[str, tuple[Path, ...]] = {}
    for file in kept.files:
        if file.copy is None:
            continue
        copy, path = run.code / file.copy, Path(file.path)
        try:
            content = read_limited(copy, MAX_BYTES)
        except OSError as error:
            fault = f"cannot be read: {error.strerror or error}"
            raise DataFileError(f"{copy}: {fault}", cure=CURE) from error
        if hashlib.sha256(content).hexdigest() != file.digest:
            raise DataFileError(f"{copy}: has changed since it was kept", cure=CURE)
        contents[path] = content
        for name in file.names:
            names[name] = (*names.get(name, ()), path)
    return Snapshot(contents, names)


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
