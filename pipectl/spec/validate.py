"""From a document to a JobSpec, or every problem with its place, in words for people."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError
from pydantic_core import ErrorDetails

from pipectl.errors import Problem
from pipectl.spec.checks import cross_check, missing_files, missing_names
from pipectl.spec.document import KeyPath, Plain, Table, locate, parse_scalar, path_text, show
from pipectl.spec.models import JobSpec
from pipectl.spec.schema import json_schema, properties, schema_at, words
from pipectl.units import did_you_mean

_MAX_SHOWN = 100
_NUMBERS = ("int_type", "float_type", "bool_type")


def validate(
    tree: Table,
    source: Path,
    problems: list[Problem],
    *,
    check_files: bool = True,
    check_names: bool = False,
) -> JobSpec | None:
    """The spec that a document describes; None, and more ``problems``, if it describes none."""
    data: dict[str, Any] = {**tree}
    if data.get("name") is None:
        stem = re.sub(r"[^A-Za-z0-9._-]", "-", source.stem).strip("._-")
        data["name"] = stem[:64] or "job"
    spec = None
    try:
        spec = JobSpec.model_validate(data)
    except ValidationError as error:
        problems += (_problem(tree, detail) for detail in error.errors(include_url=False))
        findings = list(cross_check(_valid_sections(data)))
    else:
        spec._source = source.absolute()
        findings = list(cross_check(dict(spec)))
        if check_files:
            findings += missing_files(spec)
        if check_names:
            findings += missing_names(spec)
    problems += (_place_problem(tree, *finding) for finding in findings)
    return None if findings else spec


def _valid_sections(data: dict[str, Any]) -> dict[str, Any]:
    """The sections that are valid on their own, although others are not."""
    valid = {}
    for name, info in JobSpec.model_fields.items():
        if data.get(name) is None:
            if not info.is_required():
                valid[name] = info.get_default()
            continue
        try:
            valid[name] = TypeAdapter(info.rebuild_annotation()).validate_python(data[name])
        except ValidationError:
            continue
    return valid


def _problem(tree: Table, detail: ErrorDetails) -> Problem:
    """A fault that pydantic or a validator found."""
    path, kind = detail["loc"], detail["type"]
    if path[-1] == "[key]":
        return _place_problem(tree, path[:-1], str(detail["ctx"]["error"]), key=True)
    if kind == "extra_forbidden":
        return _place_problem(tree, path, _unknown_key(path), key=True)
    if kind == "missing":
        return _place_problem(tree, path, "missing", key=True)
    context = detail.get("ctx", {})
    if kind == "value_error" and (message := str(context["error"])):
        return _place_problem(tree, path, message)
    if kind in ("greater_than_equal", "less_than_equal"):
        allowed = f"at least {context['ge']}" if "ge" in context else f"at most {context['le']}"
    else:
        schema = schema_at(path)
        allowed = "something else" if schema is None else words(schema)
    value = locate(tree, path)[1]
    shown = show(value)
    quoted = isinstance(value, str) and not isinstance(value, Plain)
    if kind in _NUMBERS and quoted and not isinstance(parse_scalar(value), str | None):
        shown = f"the text {shown}; remove the quotes"
    return _place_problem(tree, path, f"must be {allowed}, not {shown}")


def _place_problem(tree: Table, path: KeyPath, message: str, *, key: bool = False) -> Problem:
    place, _ = locate(tree, path, key=key)
    where = path_text(path)
    prefix = "" if place.file == f"--set {where}" else f"{where}: "
    return place.problem(f"{prefix}{message}")


def fault_of_former_key(path: KeyPath) -> str:
    """What to say of a key that was there once; empty of any other."""
    section = JobSpec.model_fields.get(str(path[0]))
    former = getattr(section and section.annotation, "former_keys", {}) if len(path) == 2 else {}
    if path[-1] not in former:
        return ""
    advice = former[path[-1]].advice.replace("options:", f"{path[0]}.options:")
    return f"is no longer a key; {advice}"


def _unknown_key(path: KeyPath) -> str:
    """What to say of a key that does not exist: the nearest one here, or where it belongs."""
    key = str(path[-1])
    if fault := fault_of_former_key(path):
        return fault
    known = properties(schema_at(path[:-1]))
    hint = did_you_mean(key[:_MAX_SHOWN], known)
    if not hint:
        sections = properties(json_schema())
        elsewhere = [f"{name}.{key}" for name in sections if key in properties(sections[name])]
        if key in sections or len(elsewhere) == 1:
            hint = f"; did you mean {[key, *elsewhere][-1]!r}?"
    return f"unknown key{hint or '; known are ' + ', '.join(known)}"
