"""What torch's description of an operator says about the arguments of a call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def arguments_by_name(
    schema: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    """The arguments that are given, by the names they have in the schema."""
    names = (argument.name for argument in schema.arguments)
    return {**dict(zip(names, args, strict=False)), **kwargs}


def written_arguments(schema: Any) -> list[str]:
    """Names of the arguments whose memory the operator says it writes."""
    return [a.name for a in schema.arguments if a.alias_info and a.alias_info.is_write]


def gives_views(operator: Any) -> bool:
    """Whether what an operator gives may lie in the memory of what it does not write."""
    returns = getattr(getattr(operator, "_schema", None), "returns", ())
    return any(each.alias_info and not each.alias_info.is_write for each in returns)
