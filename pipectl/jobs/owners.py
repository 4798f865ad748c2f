"""Whose code a job runs: what another user could have written would run as this user."""

from __future__ import annotations

from pathlib import Path

from pipectl.errors import UsageError
from pipectl.files import fault_of_owner
from pipectl.spec import JobSpec


def refuse_code_of_others(spec: JobSpec, job: Path) -> None:
    """Raise a UsageError if another user could have written a job's code or its file."""
    if fault := _code_of_others(spec, job):
        raise UsageError(
            f"{fault}, and its code would run as you",
            hint="read what it does; then add --trust-owner",
        )


def warning_of_code(spec: JobSpec, job: Path) -> str:
    """A warning if another user owns the code of a job; empty if not."""
    fault = _code_of_others(spec, job, groups=False)
    return f"{fault}; its code runs as you" if fault else ""


def _code_of_others(spec: JobSpec, job: Path, *, groups: bool = True) -> str:
    """The first file of a job's code that another user can write, and why; empty if none.

    For a module, this includes the directories that it imports from, and its missing files. With
    ``groups``, write permission of a group counts.
    """
    files = [job]
    for _, reference in spec.factories():
        if reference.file is not None:
            files += [reference.file, reference.file.parent]
        elif reference.root is not None:
            inner = Path(reference.root, *str(reference.module).split("."))
            files.append(inner.with_name(f"{inner.name}.py"))
            while inner != reference.root:
                files += [inner / "__init__.py", inner]
                inner = inner.parent
            files.append(reference.root)
    for path in dict.fromkeys(files):
        if fault := fault_of_owner(path, groups=groups):
            return f"{path} {fault}"
    return ""
