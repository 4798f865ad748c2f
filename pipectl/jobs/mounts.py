"""Directories of the user that the container of a job must see."""

from __future__ import annotations

import os
from pathlib import Path

from pipectl.files import is_there
from pipectl.spec import JobSpec
from pipectl.spec.places import paths_given

_OF_CONTAINERS = frozenset(
    ("bin", "boot", "dev", "etc", "lib", "lib32", "lib64", "opt", "proc", "run", "sbin", "sys",
     "tmp", "usr", "var")
)  # fmt: skip
"""Directories of the root that images have themselves, or that every node has for itself."""
_NOT_IN_MOUNTS = frozenset(",:;$")
"""Characters that runtimes do not take in the name of a directory."""


def mounts_of(spec: JobSpec, runs: Path, output: Path | None) -> tuple[Path, ...]:
    """Directories that a container needs: the runs, all files that the spec names, and what its
    arguments name that is there.

    A job that profiles in its allocation writes the profile beside its run directory.
    """
    if spec.environment.container is None:
        return ()
    code = [reference for _, reference in spec.factories()]
    files = (*(one.file for one in code), spec.model.weights, spec.cluster, spec.schedule_file)
    needed = {Path(path).parent for path in files if path is not None}
    needed |= {one.root for one in code if one.root is not None}
    needed |= _directories_of_arguments(spec, {runs, *needed})
    further = () if output is None else (output,)
    return tuple(dict.fromkeys((runs, *sorted(needed), *further)))


def _directories_of_arguments(spec: JobSpec, known: set[Path]) -> set[Path]:
    """Directories of the paths that a job gives to user code, as far as they are no part of those
    that its container sees anyway.

    A text that begins as a path does may be none, or that of a file which is in the image or only
    on the nodes, so nothing is mounted over the container's own directories.
    """
    container, found = spec.environment.container, set[Path]()
    seen = {Path(text.rpartition(":")[2]) for text in container.mounts} if container else set()
    for text in paths_given(spec.model_dump()):
        path = Path(os.path.normpath(text))
        near = next(place for place in (path, *path.parents) if is_there(place))
        directory = near if near.is_dir() else near.parent
        depth = len(directory.parts)
        is_own = depth < 2 or directory.parts[1] in _OF_CONTAINERS
        if is_own or (depth < 3 and near != path) or set(str(directory)) & _NOT_IN_MOUNTS:
            continue
        if not any(directory.is_relative_to(place) for place in {*known, *seen}):
            found.add(directory)
    return {each for each in found if found.isdisjoint(each.parents)}
