"""From a merged tree to a JobSpec, or every problem with its place, in words for people."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError
from pydantic_core import ErrorDetails

from pipectl.errors import Problem
from pipectl.spec.checks import cross_check, missing_files, missing_names
from pipectl.spec.kinds import describe
from pipectl.spec.models import JobSpec
from pipectl.spec.structure import all_paths, section_at
from pipectl.spec.tree import Path as KeyPath
from pipectl.spec.tree import Table, is_null, locate, path_text, to_data
from pipectl.units import did_you_mean

_STRUCTURES = {
    "missing": "missing",
    "model_type": "must be a mapping",
    "dict_type": "must be a mapping",
    "tuple_type": "must be a list",
}
_LONGEST_SHOWN = 100


def validate(
    tree: Table,
    source: Path,
    problems: list[Problem],
    *,
    check_files: bool = True,
    check_names: bool = False,
) -> JobSpec | None:
    """The spec a tree describes; None, and more ``problems``, where it describes none."""
    data = to_data(tree)
    try:
        spec = JobSpec.model_validate(data)
    except ValidationError as error:
        problems += (_problem(tree, detail) for detail in error.errors(include_url=False))
        problems += (_placed(tree, *item) for item in cross_check(_right_sections(data)))
        return None
    spec._source = source.absolute()
    findings = list(cross_check(dict(spec)))
    if check_files:
        findings += missing_files(spec)
    if check_names:
        findings += missing_names(spec)
    problems += (_placed(tree, *item) for item in findings)
    return None if findings else spec


def _right_sections(data: Any) -> dict[str, Any]:
    """Sections that are right on their own, where others are not."""
    right = {}
    for name, info in JobSpec.model_fields.items():
        if name not in data or is_null(data[name]):
            if not info.is_required():
                right[name] = info.get_default(call_default_factory=True)
            continue
        try:
            right[name] = TypeAdapter(info.rebuild_annotation()).validate_python(data[name])
        except ValidationError:
            continue
    return right


def _problem(tree: Table, detail: ErrorDetails) -> Problem:
    """A fault that pydantic or a kind of scalar found."""
    path = detail["loc"]
    if path[-1:] == ("[key]",):
        return _placed(tree, path[:-1], _message(detail), key=True)
    unknown = detail["type"] == "extra_forbidden"
    message = _unknown_key(path) if unknown else _message(detail)
    return _placed(tree, path, message, key=unknown or detail["type"] == "missing")


def _placed(tree: Table, path: KeyPath, message: str, *, key: bool = False) -> Problem:
    place = locate(tree, path, key=key)
    where = path_text(path)
    prefix = "" if place.file == f"--set {where}" else f"{where}: "
    return place.problem(f"{prefix}{message}")


def _message(detail: ErrorDetails) -> str:
    if detail["type"] == "value_error":
        return str(detail["ctx"]["error"])
    expected = _STRUCTURES.get(detail["type"], "is not valid")
    if detail["type"] == "missing":
        return expected
    return f"{expected}, not {describe(detail['input'])}"


def _unknown_key(path: KeyPath) -> str:
    """What to say of a key that does not exist: the nearest one here, or where it belongs."""
    key = str(path[-1])
    section = section_at(JobSpec, path[:-1])
    known = [] if section is None else list(section.model_fields)
    shown = key[:_LONGEST_SHOWN]
    elsewhere = [".".join(other) for other in all_paths(JobSpec) if other[-1] == key]
    hint = did_you_mean(shown, known)
    if not hint and len(elsewhere) == 1:
        hint = f"; did you mean {elsewhere[0]!r}?"
    return f"unknown key{hint or '; known are ' + ', '.join(known)}"
