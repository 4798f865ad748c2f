"""``~`` and variables of the environment in the paths of a spec, and in what shells are given.

They are expanded once, when a spec is read, by the process that reads it: a job that runs later, or
elsewhere, uses the same paths.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from pipectl.files import escape_path, escape_words, expand_path, expand_words, names_in
from pipectl.spec import argument_paths
from pipectl.spec.places import factories_in, files_in

Finding = tuple[tuple[str | int, ...], str]
_MAY_EXPAND = re.compile("[$~]")
_VARIABLES, _ARGUMENTS = ("environment", "variables"), ("script", "arguments")


def expand_paths(data: Mapping[str, Any]) -> tuple[dict[str, Any], list[Finding]]:
    """The data of a spec with expanded paths, and what is wrong with those that are not.

    Args:
        data: valid or not.
    """
    faults: list[Finding] = []

    def expand(path: tuple[str | int, ...], text: str) -> str:
        try:
            if path[:2] == _VARIABLES:
                return _value_of(str(path[2]), text)
            return expand_words(text) if path[:2] == _ARGUMENTS else expand_path(text)
        except ValueError as error:
            faults.append((path, str(error)))
            return text

    return _with_paths(data, expand), faults


def _value_of(name: str, text: str) -> str:
    """The value of an environment variable of the job.

    Raises:
        ValueError: see :func:`pipectl.files.expand_words`; or it is to contain itself, which it
            would as this process has it, not as the job's modules make it.
    """
    if name in names_in(text):
        raise ValueError(
            f"${name} would be that of this shell, not of the job; write a line for the job into "
            f"environment.setup in place of it: export {name}=...${name}"
        )
    try:
        return expand_words(text, ":" if name.endswith("PATH") else None)
    except ValueError as error:
        raise ValueError(f"{error}, or a line into environment.setup: export {name}=...") from None


def escape_paths(data: Mapping[str, Any]) -> dict[str, Any]:
    """The inverse: data whose paths :func:`expand_paths` leaves as they are here."""

    def escape(path: tuple[str | int, ...], text: str) -> str:
        return escape_words(text) if path[:2] in (_VARIABLES, _ARGUMENTS) else escape_path(text)

    escaped = _with_paths(data, escape)
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
    yield from _words_in(data.get("environment"), data.get("script"))
    trackers = data.get("tracking")
    for tracker, arguments in trackers.items() if isinstance(trackers, Mapping) else ():
        for name, value in arguments.items() if isinstance(arguments, Mapping) else ():
            if argument_paths.is_path(value):
                yield ("tracking", tracker, name), value


def _words_in(environment: Any, script: Any) -> Iterator[tuple[tuple[str | int, ...], str]]:
    """Values of environment variables, and arguments of a script, that a shell would expand."""
    variables = environment.get("variables") if isinstance(environment, Mapping) else None
    arguments = script.get("arguments") if isinstance(script, Mapping) else None
    words: list[tuple[tuple[str | int, ...], Any]] = []
    if isinstance(variables, Mapping):
        words += [((*_VARIABLES, name), value) for name, value in variables.items()]
    if isinstance(arguments, list | tuple):
        words += [((*_ARGUMENTS, index), value) for index, value in enumerate(arguments)]
    for path, value in words:
        if isinstance(value, str) and _MAY_EXPAND.search(value):  # others keep their YAML types
            yield path, value


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
