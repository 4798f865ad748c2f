"""Loading a job spec: site files below the job file, ``--set`` above it, one list of problems."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pipectl.errors import Problem, SpecError
from pipectl.spec.layers import apply_override, merge, read_site, site_files
from pipectl.spec.models import JobSpec
from pipectl.spec.origins import Origin, origins
from pipectl.spec.points import Point, points_of
from pipectl.spec.reader import UnreadableError, read_file
from pipectl.spec.tree import Scalar, Table, is_null
from pipectl.spec.validate import validate

_CURE = "write a starter spec with: pipectl init"


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
        SpecError: with every problem found, in the spec, the site files and the overrides.
        UsageError: an override that is no ``a.b=value``.
    """
    return _resolved(path, overrides, sites, check_files=check_files)[0]


def load_with_origins(
    path: Path, overrides: Sequence[str] = (), *, sites: Sequence[Path] | None = None
) -> tuple[JobSpec, tuple[Origin, ...]]:
    """As :func:`load`, with where every value comes from; looks for the names in user code, too."""
    spec, tree = _resolved(path, overrides, sites, check_files=True, check_names=True)
    return spec, origins(spec, tree)


def load_sweep(
    path: Path,
    overrides: Sequence[str] = (),
    *,
    sites: Sequence[Path] | None = None,
    check_files: bool = True,
) -> tuple[JobSpec, tuple[Point, ...]]:
    """As :func:`load`, with the runs of its sweep; none where it has no sweep.

    Values of the sweep go over those of ``--set``.
    """
    spec, tree = _resolved(path, overrides, sites, check_files=check_files)
    if spec.sweep is None:
        return spec, ()
    problems: list[Problem] = []
    points = points_of(tree, path, problems, check_files=check_files)
    if problems:
        raise SpecError(list(dict.fromkeys(problems)))
    return spec, points


def _resolved(
    path: Path,
    overrides: Sequence[str],
    sites: Sequence[Path] | None,
    *,
    check_files: bool,
    check_names: bool = False,
) -> tuple[JobSpec, Table]:
    """The spec, and the merged tree behind it."""
    problems: list[Problem] = []
    tree = _job(path, problems)
    for override in overrides:
        tree = apply_override(tree, override, problems)
    if _wants_site(tree):
        for site in reversed(site_files() if sites is None else sites):
            tree = merge(read_site(site, problems), tree)
    spec = validate(tree, path, problems, check_files=check_files, check_names=check_names)
    if spec is None or problems:
        raise SpecError(list(dict.fromkeys(problems)))
    return spec, tree


def _job(path: Path, problems: list[Problem]) -> Table:
    """The tree of the job file itself."""
    try:
        tree = read_file(path, problems)
    except UnreadableError as error:
        cure = _CURE if error.missing else None
        raise SpecError([*problems, error.problem], cure=cure) from None
    if tree is None or is_null(tree):
        raise SpecError([Problem(str(path), 0, 0, "the file is empty")], cure=_CURE)
    if not isinstance(tree, Table):
        fault = tree.place.problem("must be a mapping of keys to values")
        raise SpecError([*problems, fault], cure=_CURE)
    return tree


def _wants_site(tree: Table) -> bool:
    entry = tree.entries.get("site_defaults")
    return entry is None or not isinstance(entry.value, Scalar) or entry.value.value is not False
