"""Whose code a job would run: what its files name is executed as the user who gives the command."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from pipectl.access import fault_of_owner
from pipectl.errors import UsageError
from pipectl.spec.references import Reference, parse

if TYPE_CHECKING:
    from pipectl.spec import JobSpec


def refuse_code_of_others(spec: JobSpec, job: Path) -> None:
    """Refuse a job whose code somebody else could have written.

    Args:
        job: the file of the spec.

    Raises:
        UsageError: naming the file, and who could.
    """
    if fault := _code_of_others(spec, job):
        raise UsageError(
            f"{fault}, and its code would run as you",
            cure="read what it does; then add --trust-owner",
        )


def warning_of_code(spec: JobSpec, job: Path) -> str:
    """What to say of a job that is named for the first time, as any program is; empty for ours."""
    fault = _code_of_others(spec, job, groups=False)
    return f"{fault}; its code runs as you" if fault else ""


def _code_of_others(spec: JobSpec, job: Path, *, groups: bool = True) -> str:
    """Which file of a job's code somebody else could have written; empty if nobody could.

    Args:
        groups: whether members of a group that may write it count.
    """
    template = spec.template_file
    named = [path for _, text in spec.factories() for path in _sources(parse(text, spec.base))]
    named += [template, template.parent] if template is not None else []
    for path in dict.fromkeys((job, *named)):
        if fault := fault_of_owner(path, groups=groups):
            return f"{path} {fault}"
    return ""


def _sources(reference: Reference) -> Iterator[Path]:
    """The files that a reference runs, then the directories from which those import others.

    Files of a module that do not exist are among them.
    """
    if reference.file is not None:
        yield from (reference.file, reference.file.parent)
    elif reference.root is not None:
        inner = Path(reference.root, *str(reference.module).split("."))
        yield inner.with_name(f"{inner.name}.py")
        while inner != reference.root:
            yield from (inner / "__init__.py", inner)
            inner = inner.parent
        yield reference.root
