"""Where every value of a resolved spec comes from: a line of a file, ``--set``, or its default."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from pipectl.spec.models import JobSpec
from pipectl.spec.tree import Path, Place, Scalar, Table, Tree, is_null


@dataclass(frozen=True)
class Origin:
    """One key of a spec.

    Args:
        path: its names from the top, such as ``("training", "steps")``.
        value: what it resolves to, as plain YAML data.
        place: where that is written; ``line`` is 0 for ``--set``, and None stands for a default.
    """

    path: Path
    value: Any
    place: Place | None


def origins(spec: JobSpec, tree: Table) -> tuple[Origin, ...]:
    """Every key of a spec, in the order of the reference; keyword arguments one by one.

    A list is one value, since upper layers replace it whole. A key that is null has its default.

    Args:
        tree: the merged document that the spec was made from.
    """
    return tuple(_walk(spec.model_dump(), tree, ()))


def _walk(value: Any, tree: Tree | None, path: Path) -> Iterator[Origin]:
    if isinstance(value, dict) and value:
        for key, item in value.items():
            yield from _walk(item, _child(tree, key), (*path, str(key)))
    else:
        yield Origin(path, value, _place(tree, path))


def _child(tree: Tree | None, key: Any) -> Tree | None:
    """What is written for a key; the short form of a factory is a text alone."""
    if isinstance(tree, Scalar):
        return tree if key == "factory" and not is_null(tree) else None
    if not isinstance(tree, Table):
        return None
    found = (entry.value for entry in tree.entries.values() if entry.key.value == key)
    entry = tree.entries.get(str(key))
    return next(found, None) if entry is None else entry.value


def _place(tree: Tree | None, path: Path) -> Place | None:
    """None of a key that is null: only a keyword argument can have that value."""
    if tree is None or (is_null(tree) and "kwargs" not in path):
        return None
    return tree.place
