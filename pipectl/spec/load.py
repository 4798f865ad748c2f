"""Job specs as files: site files and ``PIPECTL_RUNS`` below the job file, ``--set`` above it.

:class:`SpecFile` merges these layers, checks them, and makes the runs of a sweep. Every fault is
reported at the place of the value that causes it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError
from pydantic_core import ErrorDetails

from pipectl.errors import Problem, SpecError, UsageError
from pipectl.files import RUNS_VARIABLE
from pipectl.spec import document as doc
from pipectl.spec.checks import (
    cross_check,
    drop_former_keys,
    fault_of_former_key,
    missing_files,
    missing_names,
)
from pipectl.spec.models import JobSpec, holds_variables
from pipectl.spec.schema import choices, describe_schema, json_schema, properties, schema_at
from pipectl.spec.types import check_version
from pipectl.units import did_you_mean

SITE_KEYS = (
    "version", "resources", "launch", "environment", "checkpoint", "trace", "output", "cluster",
    "slurm", "pbs",
)  # fmt: skip
_INIT = "write a starter spec with: pipectl init"
_USAGE = "write --set KEY=VALUE, such as --set pipeline.stages=4"
_NO_MAPPING = "must be a mapping of keys to values"
_HIDDEN = "(not shown)"
_NUMBERS = ("int_type", "float_type", "bool_type")


@dataclass(frozen=True)
class Origin:
    """One key of a spec.

    Args:
        path: its names from the top, such as ``("training", "steps")``.
        value: what it resolves to, as plain YAML data; of environment variables it is not shown.
        place: where that is written; ``line`` is 0 for ``--set``, and None stands for a default.
    """

    path: doc.KeyPath
    value: Any
    place: doc.Place | None


def load(
    path: Path,
    overrides: Sequence[str] = (),
    *,
    sites: Sequence[Path] | None = None,
    check_files: bool = True,
) -> JobSpec:
    """The job spec in ``path``.

    Args:
        overrides: ``a.b=value`` each, as given to ``--set``; a later one wins.
        sites: files with site defaults, weakest first; by default those of :func:`site_files`.
        check_files: whether the Python and cluster files it names must exist.

    Raises:
        SpecError: with every problem in the spec, the site files and the overrides.
        UsageError: an override that is no ``a.b=value``.
    """
    return SpecFile.read(path, overrides, sites).spec(check_files=check_files)


@dataclass(frozen=True)
class Point:
    """One run of a sweep.

    Args:
        values: that the sweep gives to it, by dotted key, typed as YAML types them. What holds
            environment variables, which may be secrets, has its number instead: ``(value 2)``.
        spec: of the run; it has no sweep.
    """

    values: Mapping[str, Any]
    spec: JobSpec


@dataclass(frozen=True)
class SpecFile:
    """A job file with ``--set`` above it and ``PIPECTL_RUNS`` and the site files below it.

    Args:
        path: of the job file.
        tree: the merged values, which know where they are written.
        problems: faults of the files and of ``--set``.
    """

    path: Path
    tree: doc.YamlMapping
    problems: tuple[Problem, ...]

    @classmethod
    def read(
        cls,
        path: Path,
        overrides: Sequence[str] = (),
        sites: Sequence[Path] | None = None,
        text: str | None = None,
    ) -> SpecFile:
        """The file in ``path``; see :func:`load`.

        Args:
            text: of the file, if it is not to be read.
        """
        tree, problems = doc.read_file(path) if text is None else doc.read_text(text, str(path))
        if not isinstance(tree, doc.YamlMapping):
            fault = "the file is empty" if doc.is_null(tree) else _NO_MAPPING
            raise SpecError([*problems, Problem(str(path), 0, 0, fault)], cure=_INIT)
        for override in overrides:
            tree, faults = _override(tree, override)
            problems += faults
        if runs := os.environ.get(RUNS_VARIABLE):
            place = doc.Place(RUNS_VARIABLE)
            empty, directory = doc.YamlMapping().at(place), doc.YamlText(runs).at(place)
            tree = doc.lay_over(tree, doc.put(empty, ("output", "directory"), directory, place))
        if doc.resolve(doc.locate(tree, ("site_defaults",))[0]) is not False:
            for file in reversed(site_files() if sites is None else sites):
                site, faults = _read_site(file)
                tree = doc.lay_over(tree, site)
                problems += faults
        return cls(path, tree, tuple(problems))

    def spec(self, *, check_files: bool = True, check_names: bool = False) -> JobSpec:
        """The spec, without the values of a sweep.

        Args:
            check_files: see :func:`load`.
            check_names: whether the names in user code must exist, too.

        Raises:
            SpecError: with every problem.
        """
        spec, problems = _validate(
            self.tree, self.path, check_files=check_files, check_names=check_names
        )
        if spec is None or problems or self.problems:
            raise SpecError([*self.problems, *problems])
        return spec

    def origins(self, spec: JobSpec) -> tuple[Origin, ...]:
        """Where every value of the spec comes from.

        They are in the order of the reference, keyword arguments one by one. A list is one value,
        since upper layers replace it whole.
        """
        return tuple(_origins(spec.model_dump(), self.tree, ()))

    def points(self, spec: JobSpec) -> tuple[Point, ...]:
        """The runs of the spec's sweep; none if it has no sweep.

        The runs of the grid come first, the last key changing fastest. Values of the sweep go over
        those of ``--set``.

        Raises:
            SpecError: with every problem, at the place of the value that causes it.
        """
        if spec.sweep is None:
            return ()
        base = doc.put(self.tree, ["sweep"], doc.YamlPlain().at(self.tree.place), self.tree.place)
        points, problems = list[Point](), list[Problem]()
        numbers: dict[str, dict[str, int]] = {}
        for run in spec.sweep.runs():
            tree, values, nodes = base, dict[str, Any](), dict[str, doc.YamlNode]()
            for name, (path, value) in run.items():
                key, _ = doc.locate(self.tree, path if path[1] == "points" else path[:-1])
                node = nodes[name] = doc.locate(self.tree, path)[0]
                tree = set_key(tree, name.split("."), node, key.key_place or key.place)
                if holds_variables(name):
                    number_of = numbers.setdefault(name, {})
                    value = f"(value {number_of.setdefault(repr(value), len(number_of) + 1)})"
                values[name] = value
            run_spec, faults = _validate(tree, self.path, check_files=True)
            problems += (_blame_values(fault, nodes) for fault in faults)
            if run_spec is not None:
                points.append(Point(values, run_spec))
        if problems:
            raise SpecError(problems)
        return tuple(points)


def site_files(environment: Mapping[str, str] = os.environ) -> tuple[Path, ...]:
    """The site files, weakest first: of the machine, of the user (XDG base directories)."""
    configured = Path(environment.get("XDG_CONFIG_HOME", ""))
    home = configured if configured.is_absolute() else Path("~/.config").expanduser()
    return Path("/etc/pipectl/site.yaml"), home / "pipectl" / "site.yaml"


def set_key(
    tree: doc.YamlMapping, keys: Sequence[str], value: doc.YamlNode, place: doc.Place
) -> doc.YamlMapping:
    """``tree`` with ``value`` at ``keys``; a factory in short form gets the key ``factory``."""
    for depth in range(1, len(keys)):
        node, tail = doc.locate(tree, tuple(keys[:depth]))
        if tail or not isinstance(node, doc.YamlText):
            continue
        if "factory" in properties(schema_at(keys[:depth])):
            short = type(node)(node).at(node.place, node.place)
            factory = doc.YamlMapping(factory=short).at(node.place)
            tree = doc.put(tree, keys[:depth], factory, node.place)
    return doc.put(tree, keys, value, place)


def _override(tree: doc.YamlMapping, override: str) -> tuple[doc.YamlMapping, list[Problem]]:
    """``tree`` with one ``a.b=value`` of the command line, and the faults in the value."""
    name, equals, text = override.partition("=")
    keys = name.strip().split(".")
    if not equals:
        raise UsageError(f"--set {doc.escape(override)}: there is no '='", cure=_USAGE)
    if not all(keys):
        raise UsageError(f"--set {doc.escape(override)}: a key is missing before '='", cure=_USAGE)
    if len(keys) > doc.MAX_DEPTH:
        raise UsageError(f"--set {doc.escape(name)}: there is no such key", cure=_USAGE)
    place = doc.Place(f"--set {doc.escape(name.strip())}")
    try:
        value, problems = doc.read_text(text, place.file, lines=False)
    except SpecError as error:
        raise UsageError(error.message, cure="quote the value as YAML does") from None
    return set_key(tree, keys, value, place), problems


def _read_site(path: Path) -> tuple[doc.YamlMapping, list[Problem]]:
    """What a site file sets, and its faults; files that it names are relative to it."""
    site = doc.YamlMapping().at(doc.Place(str(path)))
    if not path.exists():
        return site, []
    try:
        tree, problems = doc.read_file(path)
    except SpecError as error:
        return site, list(error.problems)
    if not (isinstance(tree, doc.YamlMapping) or doc.is_null(tree)):
        problems.append(Problem(str(path), 0, 0, _NO_MAPPING))
    for name, node in tree.items() if isinstance(tree, doc.YamlMapping) else ():
        if name not in SITE_KEYS:
            names = ", ".join(SITE_KEYS)
            message = f"{doc.escape(name)}: a site file cannot set this; known are {names}"
            problems.append(node.key_place.problem(message))
        elif name == "version":
            try:
                check_version(node)
            except ValueError as error:
                problems.append(node.place.problem(f"version: {error}"))
        else:
            site = doc.put(site, [name], node, node.key_place)
    for keys in (("cluster",), ("launch", "template")):
        file, tail = doc.locate(site, keys)
        if not tail and isinstance(file, doc.YamlText) and not doc.is_null(file):
            absolute = doc.YamlText(path.absolute().parent / file).at(file.place)
            site = doc.put(site, keys, absolute, file.key_place or file.place)
    return site, problems


def _origins(value: Any, tree: doc.YamlNode, path: doc.KeyPath) -> Iterator[Origin]:
    """Every key within ``value``, which is at ``path`` of the spec."""
    if isinstance(value, dict) and value:
        for key, item in value.items():
            yield from _origins(item, tree, (*path, str(key)))
        return
    node, tail = doc.locate(tree, path)
    # Only a keyword argument can be null; any other null key has its default.
    has_default = doc.is_null(node) and "kwargs" not in path
    is_written = not tail or (tail == ("factory",) and isinstance(node, doc.YamlText))
    place = node.place if is_written and not has_default else None
    if path == ("sweep", "points"):
        value = [{k: _HIDDEN if holds_variables(k) else v for k, v in x.items()} for x in value]
    elif value and holds_variables(".".join(map(str, path)).removeprefix("sweep.grid.")):
        value = _HIDDEN
    yield Origin(path, value, place)


def _validate(
    tree: doc.YamlMapping, source: Path, *, check_files: bool, check_names: bool = False
) -> tuple[JobSpec | None, list[Problem]]:
    """The spec of a document, and its faults; the spec is None if it has any."""
    data = drop_former_keys(tree)
    if doc.is_null(data.get("name")):
        stem = re.sub(r"[^A-Za-z0-9._-]", "-", source.stem).strip("._-")
        data["name"] = stem[:64] or "job"
    spec, problems = None, list[Problem]()
    try:
        spec = JobSpec.model_validate(data)
    except ValidationError as error:
        details = error.errors(include_url=False)
        problems += (_explain_fault(tree, detail) for detail in details)
        findings = list(cross_check(_read_without(data, {detail["loc"][0] for detail in details})))
    else:
        spec._base = source.absolute().parent
        findings = list(cross_check(dict(spec)))
        if check_files:
            findings += missing_files(spec)
        if check_names:
            findings += missing_names(spec)
    problems += (_problem(tree, *finding) for finding in findings)
    return (None if findings else spec), problems


def _read_without(data: dict[str, Any], wrong: Collection[str | int]) -> dict[str, Any]:
    """The valid sections of a spec: all but those in ``wrong``."""
    right = {name: info for name, info in JobSpec.model_fields.items() if name not in wrong}
    return {
        name: TypeAdapter(info.rebuild_annotation()).validate_python(data[name])
        if not doc.is_null(data.get(name))
        else info.get_default()
        for name, info in right.items()
    }


def _explain_fault(tree: doc.YamlNode, detail: ErrorDetails) -> Problem:
    """The problem for an error of pydantic: where it is, what was expected, and what was found."""
    path, kind, context = detail["loc"], detail["type"], detail.get("ctx", {})
    if path[-1] == "[key]" and kind == "value_error":
        return _problem(tree, path[:-1], str(context["error"]), at_key=True)
    if kind == "extra_forbidden":
        return _problem(tree, path, _unknown_key(path), at_key=True)
    if kind == "missing":
        return _problem(tree, path, "missing", at_key=True)
    if kind == "value_error" and (message := str(context["error"])):
        return _problem(tree, path, message)
    node, tail = doc.locate(tree, path)
    path = path[: len(path) - len(tail)]  # pydantic names alternatives of a type after it
    schema = schema_at(path) or {"title": "something else"}
    allowed = f"at most {context['le']}" if kind == "less_than_equal" else describe_schema(schema)
    value = doc.describe(node)
    in_quotes = isinstance(node, doc.YamlText) and not isinstance(node, doc.YamlPlain)
    if kind in _NUMBERS and in_quotes and not isinstance(doc.parse_scalar(str(node)), str | None):
        value = f"the text {value}; remove the quotes"
    word = str(node)[:100] if isinstance(node, doc.YamlText) else ""
    hint = did_you_mean(word, choices(schema), similarity=0.8)
    return _problem(tree, path, f"must be {allowed}, not {value}{hint}")


def _problem(
    tree: doc.YamlNode, path: doc.KeyPath, message: str, *, at_key: bool = False
) -> Problem:
    node, _ = doc.locate(tree, path)
    place = (at_key and node.key_place) or node.place
    where = doc.path_text(path)
    prefix = "" if place.file == f"--set {where}" else f"{where}: "
    return place.problem(f"{prefix}{message}")


def _unknown_key(path: doc.KeyPath) -> str:
    """What to say about an unknown key: the nearest one here, or where it belongs."""
    key = str(path[-1])
    if fault := fault_of_former_key(path):
        return fault
    names = properties(schema_at(path[:-1]))
    hint = did_you_mean(key[:100], names)
    if not hint:
        sections = properties(json_schema())
        elsewhere = [f"{name}.{key}" for name in sections if key in properties(sections[name])]
        if key in sections or len(elsewhere) == 1:
            hint = f"; did you mean {[key, *elsewhere][-1]!r}?"
    return f"unknown key{hint or '; known are ' + ', '.join(names)}"


def dump(spec: JobSpec) -> str:
    """YAML that means the same anywhere: with absolute paths, and without site defaults."""
    data = spec.model_dump()
    for path, named in (*spec.factories(), *spec.files()):
        section = data
        for key in path[:-1]:
            section = section[key]
        section[path[-1]] = str(named)
    data["environment"]["container"] = spec.container
    data["site_defaults"] = False
    return doc.to_yaml(data)


def _blame_values(problem: Problem, run: Mapping[str, doc.YamlNode]) -> Problem:
    """A fault at its value, or moved from another place to the values that cause it."""
    place = doc.Place(problem.file, problem.line, problem.column)
    if any(place in _places(value) for value in run.values()):
        return problem
    values = (
        f"{doc.escape(name)}: {'(not shown)' if holds_variables(name) else doc.describe(value)}"
        for name, value in run.items()
    )
    first = next(iter(run.values()))
    return first.place.problem(f"with {', '.join(values)}: {problem.message}")


def _places(value: doc.YamlNode) -> list[doc.Place]:
    """The places of a value and its key, and of all that is in it."""
    parts: Iterable[doc.YamlNode] = value.values() if isinstance(value, doc.YamlMapping) else ()
    parts = value if isinstance(value, doc.YamlList) else parts
    own = [value.place, value.key_place or value.place]
    return [*own, *(place for part in parts for place in _places(part))]
