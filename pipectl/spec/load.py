"""Loading a job spec: site files and ``PIPECTL_RUNS`` below the job file, ``--set`` above it."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipectl.errors import Problem, SpecError, UsageError
from pipectl.files import RUNS_VARIABLE
from pipectl.spec.document import KeyPath, Place, Table, escape, merge, to_python
from pipectl.spec.models import JobSpec
from pipectl.spec.reader import MAX_DEPTH, UnreadableError, read_file, read_text
from pipectl.spec.schema import properties, schema_at
from pipectl.spec.types import check_version
from pipectl.spec.validate import validate

SITE_KEYS = (
    "version", "resources", "launch", "environment", "checkpoint", "trace", "output", "cluster",
    "slurm", "pbs",
)  # fmt: skip
_INIT = "write a starter spec with: pipectl init"
_USAGE = "write --set pipeline.stages=4"
_NO_MAPPING = "must be a mapping of keys to values"
_VARIABLES = ("environment", "variables")


@dataclass(frozen=True)
class Origin:
    """One key of a spec.

    Args:
        path: its names from the top, such as ``("training", "steps")``.
        value: what it resolves to, as plain YAML data; of environment variables it is not shown.
        place: where that is written; ``line`` is 0 for ``--set``, and None stands for a default.
    """

    path: KeyPath
    value: Any
    place: Place | None


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
    return load_document(path, overrides, sites, check_files=check_files)[0]


def load_with_origins(
    path: Path, overrides: Sequence[str] = (), *, sites: Sequence[Path] | None = None
) -> tuple[JobSpec, tuple[Origin, ...]]:
    """As :func:`load`, with where every value comes from; looks for the names in user code, too.

    Origins are in the order of the reference, keyword arguments one by one. A list is one value,
    since upper layers replace it whole.
    """
    spec, tree = load_document(path, overrides, sites, check_files=True, check_names=True)
    return spec, tuple(_origins(spec.model_dump(), tree, None, ()))


def site_files(environment: Mapping[str, str] = os.environ) -> tuple[Path, ...]:
    """The site files, weakest first: of the machine, of the user (XDG base directories)."""
    configured = Path(environment.get("XDG_CONFIG_HOME", ""))
    home = configured if configured.is_absolute() else Path("~/.config").expanduser()
    return Path("/etc/pipectl/site.yaml"), home / "pipectl" / "site.yaml"


def load_document(
    path: Path,
    overrides: Sequence[str],
    sites: Sequence[Path] | None,
    *,
    check_files: bool,
    check_names: bool = False,
) -> tuple[JobSpec, Table]:
    """The spec, and the document of all layers that it was made from."""
    problems: list[Problem] = []
    try:
        tree = read_file(path, problems)
    except UnreadableError as error:
        cure = _INIT if error.missing else None
        raise SpecError([*problems, error.problem], cure=cure) from None
    if not isinstance(tree, Table):
        fault = "the file is empty" if tree is None else _NO_MAPPING
        raise SpecError([*problems, Problem(str(path), 0, 0, fault)], cure=_INIT)
    for override in overrides:
        tree = _override(tree, override, problems)
    if runs := os.environ.get(RUNS_VARIABLE):
        place = Place(RUNS_VARIABLE, 0, 0)
        below = put_at(Table(place), ("output", "directory"), runs, place, place)
        tree = merge(below, tree)
    if to_python(tree.get("site_defaults")) is not False:
        for site in reversed(site_files() if sites is None else sites):
            tree = merge(_read_site(site, problems), tree)
    spec = validate(tree, path, problems, check_files=check_files, check_names=check_names)
    if spec is None or problems:
        raise SpecError(list(dict.fromkeys(problems)))
    return spec, tree


def put_at(
    tree: Table,
    keys: Sequence[str],
    value: Any,
    key_place: Place,
    value_place: Place,
    above: tuple[str, ...] = (),
) -> Table:
    """A copy of ``tree`` with the value at ``keys``, making mappings on the way.

    Args:
        above: the keys that lead to ``tree`` from the top of the spec.
    """
    key, *rest = keys
    copy = tree.copy()
    if not rest:
        copy.put(key, value, key_place, value_place)
        return copy
    path, below = (*above, key), tree.get(key)
    if isinstance(below, str) and "factory" in properties(schema_at(path)):
        place = tree.value_places[key]
        factory = Table(place)
        factory.put("factory", below, place, place)
        below = factory
    inner = below if isinstance(below, Table) else Table(key_place)
    inner = put_at(inner, rest, value, key_place, value_place, path)
    copy.put(key, inner, tree.key_places.get(key, key_place), inner.place)
    return copy


def hide_variables(path: KeyPath, value: Any, hidden: str) -> Any:
    """``value`` of a key with ``hidden`` for the values of environment variables in it."""
    if path[:2] == ("sweep", "grid") and len(path) == 3:
        return hide_variables(tuple(str(path[2]).split(".")), value, hidden)
    if path == ("sweep", "points"):
        return [
            {key: hide_variables(tuple(key.split(".")), each[key], hidden) for key in each}
            for each in value
        ]
    if _VARIABLES[: len(path)] != path[:2]:
        return value
    if len(path) > 2:
        return hidden if not isinstance(value, list | tuple) else [hidden] * len(value)
    if isinstance(value, list | tuple):  # the values of a grid
        return [hide_variables(path, item, hidden) for item in value]
    if isinstance(value, dict):
        return {key: hide_variables((*path, key), item, hidden) for key, item in value.items()}
    return value


def _override(tree: Table, override: str, problems: list[Problem]) -> Table:
    """``tree`` with one ``a.b=value`` of the command line."""
    name, equals, text = override.partition("=")
    keys = name.strip().split(".")
    if not equals:
        raise UsageError(f"--set {escape(override)}: there is no '='", cure=_USAGE)
    if not all(keys):
        raise UsageError(f"--set {escape(override)}: a key is missing before '='", cure=_USAGE)
    if len(keys) > MAX_DEPTH:
        raise UsageError(f"--set {escape(name)}: there is no such key", cure=_USAGE)
    place = Place(f"--set {escape(name.strip())}")
    try:
        value = read_text(text, place.file, problems, lines=False)
    except UnreadableError as error:
        raise UsageError(str(error.problem), cure="quote the value as YAML does") from None
    return put_at(tree, keys, value, place, place)


def _read_site(path: Path, problems: list[Problem]) -> Table:
    """The defaults of one site file; empty if there is no such file."""
    tree = None
    if path.exists():
        try:
            tree = read_file(path, problems)
        except UnreadableError as error:
            problems.append(error.problem)
    if isinstance(tree, Table):
        return _check_site(tree, path, problems)
    if tree is not None:
        problems.append(Problem(str(path), 0, 0, _NO_MAPPING))
    return Table(Place(str(path)))


def _check_site(tree: Table, path: Path, problems: list[Problem]) -> Table:
    """What a site file may set; the files it names are looked up beside it."""
    site = Table(tree.place)
    for key, value in tree.items():
        if key not in SITE_KEYS:
            known = ", ".join(SITE_KEYS)
            message = f"{escape(key)}: a site file cannot set this; known are {known}"
            problems.append(tree.key_places[key].problem(message))
        elif key == "version":
            try:
                check_version(value)
            except ValueError as error:
                problems.append(tree.value_places[key].problem(f"version: {error}"))
        else:
            site.put(key, value, tree.key_places[key], tree.value_places[key])
    for section, key in ((site, "cluster"), (site.get("launch"), "template")):
        if isinstance(section, Table) and isinstance(section.get(key), str):
            section[key] = str(path.absolute().parent / section[key])
    return site


def _origins(value: Any, tree: Any, place: Place | None, path: KeyPath) -> Iterator[Origin]:
    """Every key within ``value``, which was made from ``tree`` at ``place``."""
    if not isinstance(value, dict) or not value:
        # Only a keyword argument can be null; any other null key has its default.
        given = tree is not None or "kwargs" in path
        shown = hide_variables(path, value, "(not shown)")
        yield Origin(path, shown, place if given else None)
        return
    names = {to_python(name): name for name in tree} if isinstance(tree, Table) else {}
    for key, item in value.items():
        below, written = None, None
        if isinstance(tree, Table) and (name := names.get(key, str(key))) in tree:
            below, written = tree[name], tree.value_places[name]
        elif isinstance(tree, str) and key == "factory":
            below, written = tree, place
        yield from _origins(item, below, written, (*path, str(key)))
