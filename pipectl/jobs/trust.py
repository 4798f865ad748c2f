"""Whether other users could have written the code of a job, which runs as the user."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from pipectl.access import fault_of_owner
from pipectl.errors import UsageError
from pipectl.spec.references import parse

if TYPE_CHECKING:
    from pipectl.spec import JobSpec


def refuse_code_of_others(spec: JobSpec, job: Path) -> None:
    """Raise a UsageError if somebody else could have written the code of a job, or its file."""
    if fault := _code_of_others(spec, job):
        raise UsageError(
            f"{fault}, and its code would run as you",
            cure="read what it does; then add --trust-owner",
        )


def warning_of_code(spec: JobSpec, job: Path) -> str:
    """A warning if somebody else owns the code of a job that is named for the first time."""
    fault = _code_of_others(spec, job, groups=False)
    return f"{fault}; its code runs as you" if fault else ""


def _code_of_others(spec: JobSpec, job: Path, *, groups: bool = True) -> str:
    """Which file of a job's code somebody else could have written; empty if nobody could.

    Modules count with the directories from which they import others; files of a module that do not
    exist are looked at, too.

    Args:
        groups: whether members of a group that may write it count.
    """
    files = [job]
    for _, text in spec.factories():
        reference = parse(text, spec.base)
        if reference.file is not None:
            files += [reference.file, reference.file.parent]
        elif reference.root is not None:
            inner = Path(reference.root, *str(reference.module).split("."))
            files.append(inner.with_name(f"{inner.name}.py"))
            while inner != reference.root:
                files += [inner / "__init__.py", inner]
                inner = inner.parent
            files.append(reference.root)
    if spec.template_file is not None:
        files += [spec.template_file, spec.template_file.parent]
    for path in dict.fromkeys(files):
        if fault := fault_of_owner(path, groups=groups):
            return f"{path} {fault}"
    return ""
