"""What the job file, the site files and ``--set`` say, laid over each other.

Mappings are merged key by key, everything else is replaced.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from pipectl.errors import Problem, UsageError
from pipectl.spec.models import JobSpec
from pipectl.spec.reader import UnreadableError, read_file, read_text
from pipectl.spec.structure import section_at
from pipectl.spec.training import Factory
from pipectl.spec.tree import Entry, Place, Scalar, Table, Tree, is_null, printable
from pipectl.spec.values import VERSION

SITE_KEYS = (
    "version",
    "resources",
    "launch",
    "environment",
    "checkpoint",
    "trace",
    "output",
    "cluster",
    "slurm",
    "pbs",
)
_USAGE = "write --set pipeline.stages=4"


def site_files(environment: Mapping[str, str] = os.environ) -> tuple[Path, ...]:
    """The site files, weakest first: of the machine, of the user (XDG base directories)."""
    configured = Path(environment.get("XDG_CONFIG_HOME", ""))
    home = configured if configured.is_absolute() else Path("~/.config").expanduser()
    return Path("/etc/pipectl/site.yaml"), home / "pipectl" / "site.yaml"


def read_site(path: Path, problems: list[Problem]) -> Table:
    """The defaults of one site file; empty where there is no such file."""
    if not path.exists():
        return Table()
    try:
        tree = read_file(path, problems)
    except UnreadableError as error:
        problems.append(error.problem)
        return Table()
    if tree is None or is_null(tree):
        return Table()
    if not isinstance(tree, Table):
        problems.append(tree.place.problem("must be a mapping of keys to values"))
        return Table()
    return _checked_site(tree, path, problems)


def merge(lower: Table, upper: Table) -> Table:
    """``upper`` laid over ``lower``."""
    entries = dict(lower.entries)
    for key, entry in upper.entries.items():
        below = entries.get(key)
        entries[key] = entry if below is None else Entry(entry.key, _over(below.value, entry.value))
    return Table(entries, upper.place)


def apply_override(tree: Table, override: str, problems: list[Problem]) -> Table:
    """``tree`` with one ``a.b=value`` of the command line.

    Raises:
        UsageError: no ``=``, no key, or a value that is no YAML.
    """
    name, equals, text = override.partition("=")
    keys = name.strip().split(".")
    if not equals:
        raise UsageError(f"--set {printable(override)}: there is no '='", cure=_USAGE)
    if not all(keys):
        raise UsageError(f"--set {printable(override)}: a key is missing before '='", cure=_USAGE)
    place = Place(f"--set {printable(name.strip())}")
    try:
        value = read_text(text, place.file, problems, lines=False)
    except UnreadableError as error:
        raise UsageError(str(error.problem), cure="quote the value as YAML does") from None
    return put(tree, keys, value or Scalar("", plain=True, place=place), place)


def put(
    table: Table, keys: list[str], value: Tree, place: Place, above: tuple[str, ...] = ()
) -> Table:
    """``table`` with the value at ``keys``, making mappings on the way.

    Args:
        place: where the keys are written.
        above: the keys that lead to ``table`` from the top of the spec.
    """
    key, *rest = keys
    path = (*above, key)
    below = table.entries.get(key)
    if rest:
        inner = None if below is None else _expanded(below.value, path)
        inner = inner if isinstance(inner, Table) else Table(place=place)
        value = put(inner, rest, value, place, path)
    name = Scalar(key, plain=True, place=place) if below is None or not rest else below.key
    return Table({**table.entries, key: Entry(name, value)}, table.place)


def _over(lower: Tree, upper: Tree) -> Tree:
    if isinstance(lower, Table) and isinstance(upper, Table):
        return merge(lower, upper)
    return upper


def _expanded(tree: Tree, path: tuple[str, ...]) -> Tree:
    """What is written at ``path``, with the short form of a factory written out."""
    section = section_at(JobSpec, path)
    short = isinstance(tree, Scalar) and not is_null(tree)
    if not short or section is None or not issubclass(section, Factory):
        return tree
    key = Scalar("factory", plain=True, place=tree.place)
    return Table({"factory": Entry(key, tree)}, tree.place)


def _checked_site(tree: Table, path: Path, problems: list[Problem]) -> Table:
    """A site file without what it cannot set; its files are looked up beside it."""
    entries = {}
    for key, entry in tree.entries.items():
        if key not in SITE_KEYS:
            message = (
                f"{printable(key)}: a site file cannot set this; known are {', '.join(SITE_KEYS)}"
            )
            problems.append(entry.key.place.problem(message))
        elif key == "version":
            _check_version(entry.value, problems)
        else:
            entries[key] = entry
    beside = _files_beside(Table(entries, tree.place), ("cluster",), path)
    return _files_beside(beside, ("launch", "template"), path)


def _files_beside(table: Table, keys: tuple[str, ...], path: Path) -> Table:
    """``table`` with the file that is named at ``keys`` looked up beside the site file."""
    entry = table.entries.get(keys[0])
    if entry is None:
        return table
    value = entry.value
    if isinstance(value, Scalar) and not keys[1:]:
        value = _beside(value, path)
    elif isinstance(value, Table) and keys[1:]:
        value = _files_beside(value, keys[1:], path)
    return Table({**table.entries, keys[0]: Entry(entry.key, value)}, table.place)


def _check_version(value: Tree, problems: list[Problem]) -> None:
    if not isinstance(value, Scalar) or value.value != VERSION:
        shown = value if isinstance(value, Scalar) else "no number"
        message = f"version: is {shown}; this pipectl reads version {VERSION}"
        problems.append(value.place.problem(message))


def _beside(name: Scalar, path: Path) -> Scalar:
    if is_null(name):
        return name
    return Scalar(str(path.absolute().parent / name.text), plain=False, place=name.place)
