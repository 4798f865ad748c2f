"""Job specs as files: site files and ``PIPECTL_RUNS`` below the job file, ``--set`` above it.

:class:`SpecFile` merges these layers, checks them, and makes the runs of a sweep. Every fault is
reported at the place of the value that causes it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from pipectl.errors import Problem, SpecError, UsageError
from pipectl.files import RUNS_VARIABLE, escape_path, expand_path, user_place
from pipectl.spec.checks import check_code, cross_check
from pipectl.spec.document import (
    IN_PYTHON,
    MAX_DEPTH,
    KeyPath,
    Node,
    Place,
    describe,
    escape,
    read_file,
    read_text,
    resolve,
    to_yaml,
)
from pipectl.spec.models import JobSpec
from pipectl.spec.paths import escape_paths, expand_paths
from pipectl.spec.places import holds_variables
from pipectl.spec.types import WITH_UNITS, check_version

SITE_KEYS = (
    "version", "resources", "launch", "environment", "checkpoint", "trace", "output", "cluster",
    "slurm", "pbs",
)  # fmt: skip
_INIT = "write a starter spec with: pipectl init"
_USAGE = "write --set KEY=VALUE, such as --set pipeline.stages=4"
_IN_PYTHON_USAGE = 'write keys such as training={"steps": 10}, or **{"training.steps": 10}'
_NO_MAPPING = "must be a mapping of keys to values"
_HIDDEN = "(not shown)"


@dataclass(frozen=True)
class Origin:
    """One key of a spec.

    Args:
        path: its names from the top, such as ``("training", "steps")``.
        value: as plain YAML data; those of environment variables are not shown.
        place: of the value; ``line`` is 0 for ``--set``; None for a default.
    """

    path: KeyPath
    value: Any
    place: Place | None


@dataclass(frozen=True)
class Point:
    """One run of a sweep.

    Args:
        values: that the sweep sets, by dotted key, with their YAML types. Values with environment
            variables, which may be secrets, are replaced by their number: ``(value 2)``.
        spec: of the run; it has no sweep.
    """

    values: Mapping[str, Any]
    spec: JobSpec


def load(
    path: Path,
    overrides: Sequence[str] = (),
    *,
    sites: Sequence[Path] | None = None,
    check_files: bool = True,
    check_names: bool = False,
) -> JobSpec:
    """The job spec in ``path``.

    Args:
        overrides: each ``a.b=value``, as for ``--set``; a later one wins.
        sites: files with site defaults, weakest first; by default those of :func:`site_files`.
        check_files: whether the Python and cluster files of the spec must exist.
        check_names: see :meth:`SpecFile.spec`.

    Raises:
        SpecError: with every problem in the spec, the site files and the overrides.
        UsageError: an override is not ``a.b=value``.
    """
    file = SpecFile.read(path, overrides, sites)
    return file.spec(check_files=check_files, check_names=check_names)


def dump(spec: JobSpec) -> str:
    """YAML that means the same anywhere: with absolute paths, and without site defaults.

    Only ``output.directory`` stays relative, to the working directory of a command.
    """
    return to_yaml({**escape_paths(spec.model_dump(context=WITH_UNITS)), "site_defaults": False})


@dataclass(frozen=True)
class SpecFile:
    """A job file with ``--set`` above it and ``PIPECTL_RUNS`` and the site files below it.

    Args:
        path: of the job file.
        root: the merged layers.
        problems: faults of their text.
    """

    path: Path
    root: Node
    problems: tuple[Problem, ...] = ()

    @classmethod
    def read(
        cls,
        path: Path | None,
        overrides: Sequence[str] = (),
        sites: Sequence[Path] | None = None,
        text: str | None = None,
        *,
        in_python: bool = False,
        directory: Path | None = None,
    ) -> SpecFile:
        """The file in ``path``; see :func:`load`.

        Args:
            path: None for a spec of the overrides alone.
            text: of the file; if given, the file is not read.
            in_python: whether the overrides are values given in Python, not options ``--set``.
            directory: that paths are relative to if there is no file.
        """
        problems: list[Problem] = []
        if path is None:
            root = Node({}, Place(IN_PYTHON), Place(IN_PYTHON))
            path = Path(directory or Path.cwd(), "job")
        elif text is None:
            root = read_file(path, problems)
        else:
            root = read_text(text, str(path), problems)
        if not isinstance(root.value, dict):
            fault = "the file is empty" if root.value is None else _NO_MAPPING
            raise SpecError([*problems, Place(str(path)).problem(fault)], hint=_INIT)
        for override in overrides:
            root = _override(root, override, problems, in_python=in_python)
        if runs := os.environ.get(RUNS_VARIABLE):
            place = Place(RUNS_VARIABLE)
            value = Node(runs, place, place)
            root = root.merge(Node({}, place).put(("output", "directory"), value))
        if resolve(root.data.get("site_defaults")) is not False:
            for site in reversed(site_files() if sites is None else sites):
                root = root.merge(_read_site(site, problems))
        return cls(path, root, tuple(problems))

    def spec(self, *, check_files: bool = True, check_names: bool = False) -> JobSpec:
        """The spec, without the values of a sweep.

        Args:
            check_files: see :func:`load`.
            check_names: whether functions and classes must also exist, and accept their keyword
                arguments, if this shows without running code.

        Raises:
            SpecError: with every problem.
        """
        spec, problems = _validate(
            self.root, self.path, check_files=check_files, check_names=check_names
        )
        if spec is None or self.problems:
            raise SpecError([*self.problems, *problems])
        return spec

    def origins(self, spec: JobSpec) -> tuple[Origin, ...]:
        """The origin of every value of the spec.

        In the order of the reference, with keyword arguments one by one. A list is one value,
        because upper layers replace it as a whole.
        """
        return tuple(_origins(spec.model_dump(mode="json"), self.root, ()))

    def points(self, spec: JobSpec) -> tuple[Point, ...]:
        """The runs of the spec's sweep; none if it has no sweep.

        The runs of the grid come first; the last key changes fastest. Values of the sweep override
        those of ``--set``.

        Raises:
            SpecError: with every problem, at the place of the value that causes it.
        """
        if spec.sweep is None:
            return ()
        job = replace(self.root, value={k: v for k, v in self.root.value.items() if k != "sweep"})
        points, problems = list[Point](), list[Problem]()
        numbers: dict[str, dict[str, int]] = {}
        for run in spec.sweep.runs():
            root, values = job, dict[str, Any]()
            places, causes = set[Place](), list[str]()
            for name, (path, value) in run.items():
                *_, outer, node = self.root.nodes(path)
                node = replace(node, key_place=node.key_place or outer.key_place)
                root = _set_key(root, name.split("."), node)
                places |= set(node.places())
                text = describe(node.data)
                if holds_variables(name):
                    number_of, text = numbers.setdefault(name, {}), _HIDDEN
                    value = f"(value {number_of.setdefault(repr(value), len(number_of) + 1)})"
                values[name] = value
                causes.append(f"{escape(name)}: {text}")
            run_spec, faults = _validate(root, self.path, check_files=True)
            if run_spec is not None:
                points.append(Point(values, run_spec))
            # A fault is reported at its value, or at those of the run that cause it elsewhere.
            first = self.root.nodes(next(iter(run.values()))[0])[-1] if run else job
            for fault in faults:
                at_value = Place(fault.file, fault.line, fault.column) in places
                message = f"with {', '.join(causes)}: {fault.message}"
                problems.append(fault if at_value else first.place.problem(message))
        if problems:
            raise SpecError(problems)
        return tuple(points)


def site_files() -> tuple[Path, ...]:
    """The site files, weakest first: of the machine, of the user (XDG base directories)."""
    own = user_place("XDG_CONFIG_HOME", ".config")
    places = (Path("/etc"), *(() if own is None else (own,)))
    return tuple(place / "pipectl" / "site.yaml" for place in places)


def _override(root: Node, override: str, problems: list[Problem], *, in_python: bool) -> Node:
    """The root with one ``a.b=value`` of the command line, or one given in Python."""
    name, equals, text = override.partition("=")
    keys = name.strip().split(".")
    giver, hint = (IN_PYTHON, _IN_PYTHON_USAGE) if in_python else ("--set", _USAGE)
    if not equals:
        raise UsageError(f"{giver} {escape(override)}: there is no '='", hint=hint)
    if not all(keys):
        raise UsageError(f"{giver} {escape(override)}: a key is missing before '='", hint=hint)
    if len(keys) > MAX_DEPTH:
        raise UsageError(f"{giver} {escape(name)}: there is no such key", hint=hint)
    place = Place(IN_PYTHON if in_python else f"--set {escape(name.strip())}")
    try:
        value = read_text(text, place.file, problems, lines=False)
    except SpecError as error:
        raise UsageError(error.message, hint="quote the value as YAML does") from None
    return _set_key(root, keys, replace(value, key_place=place))


def _set_key(root: Node, keys: Sequence[str], value: Node) -> Node:
    """The root with a value at ``keys``; what a text in the place of a mapping is short for stays:
    a factory, or a key of the mapping.
    """
    for depth in range(1, len(keys)):
        nodes = root.nodes(keys[:depth])
        text = nodes[-1].value if len(nodes) > depth else None
        if isinstance(text, str):
            from pipectl.spec.schema import properties, schema_at

            known = properties(schema_at(keys[:depth]))
            short = replace(nodes[-1], key_place=nodes[-1].place)
            if "factory" in known:
                root = root.put([*keys[:depth], "factory"], short)
            elif text in known:
                root = root.put([*keys[:depth], str(text)], replace(short, value={}))
    return root.put(keys, value)


def _read_site(path: Path, problems: list[Problem]) -> Node:
    """The values of a site file; its file names are relative to it."""
    nothing = Node({}, Place(str(path)))
    if not path.exists():
        return nothing
    try:
        site = read_file(path, problems)
    except SpecError as error:
        problems += error.problems
        return nothing
    if not isinstance(site.value, dict):
        problems += [] if site.value is None else [nothing.place.problem(_NO_MAPPING)]
        return nothing
    values = dict(site.value)
    for name in values.keys() - set(SITE_KEYS):
        message = f"a site file cannot set this; known are {', '.join(SITE_KEYS)}"
        problems.append(site.problem((name,), message, at_key=True))
        del values[name]
    if (version := values.pop("version", None)) is not None:
        try:
            check_version(version.data)
        except ValueError as error:
            problems.append(site.problem(("version",), str(error)))
    site = replace(site, value=values)
    *outer, node = site.nodes(("cluster",))
    if outer and isinstance(node.value, str):
        with suppress(ValueError):  # said where the layers are checked
            absolute = str(path.absolute().parent / expand_path(node.value))
            site = site.put(("cluster",), replace(node, value=escape_path(absolute)))
    return site


def _origins(value: Any, root: Node, path: KeyPath) -> Iterator[Origin]:
    """Every key within ``value``, which is at ``path`` of the spec."""
    if isinstance(value, dict) and value:
        for key, item in value.items():
            yield from _origins(item, root, (*path, str(key)))
        return
    nodes = root.nodes(path)
    there, written = path[: len(nodes) - 1], nodes[-1].value
    # Only a keyword argument can be null; any other null key has its default.
    is_short = path[-1] == "factory" and there == path[:-1] and isinstance(written, str)
    is_written = "kwargs" in there or is_short or (there == path and written is not None)
    if path == ("sweep", "points"):
        value = [{k: _HIDDEN if holds_variables(k) else v for k, v in x.items()} for x in value]
    elif value and holds_variables(".".join(map(str, path)).removeprefix("sweep.grid.")):
        value = _HIDDEN
    yield Origin(path, value, nodes[-1].place if is_written else None)


def _validate(
    root: Node, source: Path, *, check_files: bool, check_names: bool = False
) -> tuple[JobSpec | None, list[Problem]]:
    """The spec, and its faults; the spec is None if it has any."""
    data, unknown = expand_paths(root.data)
    if data.get("name") is None:
        stem = re.sub(r"[^A-Za-z0-9._-]", "-", source.stem).strip("._-")
        data["name"] = stem[:64] or "job"
    base = source.absolute().parent
    sections = dict[str, Any]()
    # JobSpec._collect adds each section that is valid, also if others are not.
    context = {"base": base, "sections": sections}
    spec, details = None, list[ErrorDetails]()
    try:
        spec = JobSpec.model_validate(data, context=context)
    except ValidationError as error:
        details = error.errors(include_url=False)
    wrong = {detail["loc"][0] for detail in details}
    for name, field in JobSpec.model_fields.items():
        if name not in wrong:
            sections.setdefault(name, field.get_default())
    faults = [*unknown, *cross_check(sections)]
    if check_files:
        faults += check_code(data, base, sections.get("environment"), names=check_names)
    problems = []
    if details:
        from pipectl.spec.schema import explain_fault  # not for a valid spec

        problems += [explain_fault(root, detail) for detail in details]
    problems += [root.problem(*fault) for fault in faults]
    return None if problems else spec, problems
