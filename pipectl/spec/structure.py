"""Looking into the models: what section or kind of scalar a field holds."""

from __future__ import annotations

import types
from collections.abc import Iterator
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from pipectl.spec.kinds import Kind
from pipectl.spec.section import Section


def kind_of(info: FieldInfo) -> Kind | None:
    """The kind of a scalar field; None for sections, lists and mappings."""
    for item in info.metadata:
        if isinstance(item, Kind):
            return item
    inner = without_none(info.annotation)
    if get_origin(inner) is Annotated:
        return next((item for item in get_args(inner) if isinstance(item, Kind)), None)
    return None


def section_of(info: FieldInfo) -> type[Section] | None:
    """The model of a section field, or of the values of a mapping or list."""
    inner = without_none(info.annotation)
    if get_origin(inner) in (dict, tuple):
        inner = get_args(inner)[0 if get_origin(inner) is tuple else 1]
    return inner if isinstance(inner, type) and issubclass(inner, Section) else None


def is_mapping_of_sections(info: FieldInfo) -> bool:
    """Whether the field maps names of the user's choice to sections."""
    return section_of(info) is not None and get_origin(without_none(info.annotation)) is dict


def is_list_of_sections(info: FieldInfo) -> bool:
    """Whether the field is a list of sections."""
    return section_of(info) is not None and get_origin(without_none(info.annotation)) is tuple


def without_none(annotation: Any) -> Any:
    """``X`` of ``X | None``."""
    if get_origin(annotation) in (Union, types.UnionType):
        return next(item for item in get_args(annotation) if item is not type(None))
    return annotation


def section_at(model: type[Section], path: tuple[str | int, ...]) -> type[Section] | None:
    """The model of the section at ``path``, seen from ``model``; None where there is no section."""
    steps = iter(path)
    for step in steps:
        info = model.model_fields.get(str(step))
        inner = None if info is None else section_of(info)
        if info is None or inner is None:
            return None
        several = is_mapping_of_sections(info) or is_list_of_sections(info)
        if several and next(steps, None) is None:
            return None
        model = inner
    return model


def all_paths(model: type[Section]) -> Iterator[tuple[str, ...]]:
    """Paths of all keys of two levels: sections, and the keys in them."""
    for name, info in model.model_fields.items():
        yield (name,)
        inner = section_of(info)
        if inner is not None:
            yield from ((name, key) for key in inner.model_fields)


def sections(model: type[Section]) -> tuple[type[Section], ...]:
    """The model and all models of sections in it, each once, in the order of their fields."""
    found = {model: None}
    for info in model.model_fields.values():
        if (inner := section_of(info)) is not None:
            found |= dict.fromkeys(sections(inner))
    return tuple(found)
