"""``~`` and variables of the environment in the paths of a spec.

They are expanded once, when a spec is read, by the process that reads it: a job that runs later, or
elsewhere, uses the same paths.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from pipectl.files import escape_path, expand_path
from pipectl.spec import argument_paths
from pipectl.spec.places import factories_in, files_in

Finding = tuple[tuple[str | int, ...], str]


def expand_paths(data: Mapping[str, Any]) -> tuple[dict[str, Any], list[Finding]]:
    """The data of a spec with expanded paths, and what is wrong with those that are not.

    Args:
        data: valid or not.
    """
    faults: list[Finding] = []

    def expand(path: tuple[str | int, ...], text: str) -> str:
        try:
            return expand_path(text)
        except ValueError as error:
            faults.append((path, str(error)))
            return text

    return _with_paths(data, expand), faults


def escape_paths(data: Mapping[str, Any]) -> dict[str, Any]:
    """The inverse: data whose paths :func:`expand_paths` leaves as they are here."""
    escaped = _with_paths(data, lambda _, text: escape_path(text))
    for path, _, kwargs in factories_in(data):
        if kwargs:  # the long form, then
            _replace(escaped, (*path[:-1], "kwargs"), argument_paths.escape(kwargs))
    return escaped


def _with_paths(
    data: Mapping[str, Any], change: Callable[[tuple[str | int, ...], str], str]
) -> dict[str, Any]:
    changed = dict(data)
    for path, text in _paths_in(data):
        _replace(changed, path, change(path, text))
    return changed


def _paths_in(data: Mapping[str, Any]) -> Iterator[tuple[tuple[str | int, ...], str]]:
    """All paths: a reference to user code is one if a directory is named in it."""
    yield from files_in(data)
    for path, text, _ in factories_in(data):
        if "/" in text:
            yield path, text
    output = data.get("output")
    directory = output.get("directory") if isinstance(output, Mapping) else None
    if isinstance(directory, str):
        yield ("output", "directory"), directory
    yield from _paths_of_container(data.get("environment"))
    trackers = data.get("tracking")
    for tracker, arguments in trackers.items() if isinstance(trackers, Mapping) else ():
        for name, value in arguments.items() if isinstance(arguments, Mapping) else ():
            if argument_paths.is_path(value):
                yield ("tracking", tracker, name), value


def _paths_of_container(environment: Any) -> Iterator[tuple[tuple[str | int, ...], str]]:
    container = environment.get("container") if isinstance(environment, Mapping) else None
    if not isinstance(container, Mapping):
        return
    image, mounts = container.get("image"), container.get("mounts")
    if isinstance(image, str) and "://" not in image:
        yield ("environment", "container", "image"), image
    for index, mount in enumerate(mounts if isinstance(mounts, list | tuple) else ()):
        if isinstance(mount, str):
            yield ("environment", "container", "mounts", index), mount


def _replace(data: Any, path: tuple[str | int, ...], text: Any) -> None:
    """Put a value at a path; the mappings and lists on the way are copied."""
    first, *rest = path
    inner = data.get(first) if isinstance(data, dict) else data[first]
    if rest and isinstance(inner, Mapping | list | tuple):
        data[first] = dict(inner) if isinstance(inner, Mapping) else list(inner)
        _replace(data[first], tuple(rest), text)
    else:  # also a factory in short form, whose value is its reference
        data[first] = text
