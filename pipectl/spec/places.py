"""What the data of a spec name, valid or not: files, user code, and dotted keys."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from pipectl.spec import references, types
from pipectl.spec.code_sections import Optimizer


def files_in(data: Any) -> Iterator[tuple[tuple[str, ...], str]]:
    """All files besides user code that the data of a spec name, with the paths of their keys.

    Args:
        data: valid or not.
    """
    keys = "cluster model.weights pipeline.schedule script.file script.directory"
    for path, text in _values_at(data, keys):
        is_name = path[-1] == "schedule" and not str(text).endswith(types.SCHEDULE_SUFFIX)
        if isinstance(text, str) and not is_name:
            yield path, text


def factories_in(data: Any) -> Iterator[tuple[tuple[str, ...], str, Mapping[str, Any]]]:
    """Path of the key, reference and keyword arguments of all user code in the data of a spec.

    Args:
        data: valid or not; what is no reference, or no mapping, is left out.
    """
    keys = "model loss data optimizer lr_scheduler evaluation.data evaluation.metrics.* callbacks.*"
    for path, item in (*_values_at(data, keys), *_values_at(data, "loss.weight")):
        key = () if path == ("loss", "weight") else ("factory",)
        section = item if isinstance(item, Mapping) else {"factory": item}
        text, kwargs = section.get("factory"), section.get("kwargs")
        if path == ("optimizer",) and text is None:
            text = Optimizer.model_fields["factory"].default
        if isinstance(text, str) and not references.fault_of(text):  # as `model`, for the loss
            yield (*path, *key), text, kwargs if isinstance(kwargs, Mapping) else {}


def paths_given(spec: Mapping[str, Any]) -> Iterator[str]:
    """The whole paths that a valid spec gives to user code, to trackers and to its script.

    Args:
        spec: its data, in which paths are absolute.
    """
    script = spec["script"] or {"arguments": (), "directory": None}
    given = [kwargs for _, _, kwargs in factories_in(spec)]
    words = [text.partition("=")[2] or text for text in script["arguments"]]
    for text in _texts_in([*given, spec["tracking"], words, script["directory"]]):
        if text.startswith("/"):
            yield text


def _texts_in(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping | list | tuple):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from _texts_in(item)


def _values_at(data: Any, keys: str) -> Iterator[tuple[tuple[str, ...], Any]]:
    """The values at dotted keys, with their paths; ``*`` stands for every key of a mapping."""
    for key in keys.split():
        values: list[tuple[tuple[str, ...], Any]] = [((), data)]
        for step in key.split("."):
            values = [
                ((*path, name), item)
                for path, value in values
                for name, item in (value.items() if isinstance(value, Mapping) else ())
                if step in ("*", name)
            ]
        yield from values


def holds_variables(key: str) -> bool:
    """Whether environment variables, which may be secrets, are in the value of a dotted key."""
    variables = "environment.variables"
    return is_within(key, variables) or is_within(variables, key)


def is_within(key: str, other: str) -> bool:
    """Whether a dotted key is another one, or a part of it."""
    return f"{key}.".startswith(f"{other}.")
