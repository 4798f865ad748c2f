"""What a job wrote, without what it cannot have meant.

A damaged file must not keep ``status`` from telling the rest: fields that are not of their type are
left out, as if they had not been written.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any

_LARGEST = 2**53
Check = Callable[[Any], Any]
"""The value, or None where it is not of its type."""


def sound(document: Mapping[str, Any]) -> dict[str, Any]:
    """The fields that are of their type, or not known here, or null."""
    return _kept(document, lambda key: _FIELDS.get(key, _any))


def _kept(document: Mapping[str, Any], check_of: Callable[[str], Check]) -> dict[str, Any]:
    """What the checks of fields let through, and what is null."""
    return {
        key: value
        for key, given in document.items()
        if (value := check_of(key)(given)) is not None or given is None
    }


def _any(value: Any) -> Any:
    return value


def _text(value: Any) -> str | None:
    return value.encode(errors="replace").decode() if isinstance(value, str) else None


def _whole(value: Any) -> int | None:
    number = isinstance(value, int) and not isinstance(value, bool)
    return value if number and -_LARGEST <= value <= _LARGEST else None


def _finite(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return value if abs(value) <= sys.float_info.max else None


def _share(value: Any) -> float | None:
    number = _finite(value)
    return None if number is None or not 0 <= number <= 1 else number


def _figures(value: Any) -> dict[str, float | None] | None:
    return _kept(value, lambda _: _finite) if isinstance(value, dict) else None


def _object(value: Any) -> dict[str, Any] | None:
    return sound(value) if isinstance(value, dict) else None


def _wholes(value: Any) -> list[int] | None:
    known = isinstance(value, list) and all(_whole(item) is not None for item in value)
    return value if known else None


def _ranks(value: Any) -> list[dict[str, Any]] | None:
    if not isinstance(value, list):
        return None
    found = [sound(item) for item in value if isinstance(item, dict)]
    return [item for item in found if _whole(item.get("rank")) is not None]


_FIELDS: dict[str, Check] = {
    **dict.fromkeys(("step", "steps", "attempt", "rank", "stage", "pid", "exit_code"), _whole),
    **dict.fromkeys(("rss_bytes", "peak_bytes", "loss_of_micro_batch", "earlier"), _whole),
    **dict.fromkeys(("time", "loss", "step_time_s", "samples_per_s", "learning_rate"), _finite),
    **dict.fromkeys(("gradient_norm", "loss_scale", "busy_s"), _finite),
    **dict.fromkeys(("state", "host", "node", "type", "message", "cure", "traceback"), _text),
    **dict.fromkeys(("action", "gradient_of"), _text),
    "stages": _wholes,
    "waiting": _share,
    "evaluation": _figures,
    "not_finite": _object,
    "ranks": _ranks,
    "messages": _object,
}
