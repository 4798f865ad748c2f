"""Parameter groups: which options of the optimizer hold for which parameter, by its name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase

from pipectl.errors import CaptureError
from pipectl.units import did_you_mean

_EXAMPLES = 3


def assign(names: Mapping[str, Sequence[str]], patterns: Sequence[str]) -> dict[str, int]:
    """The index of the first pattern that matches each parameter; the others are left out.

    Args:
        names: all names of each parameter in the user's model (several if it is tied), by the name
            it has here.
        patterns: shell patterns such as ``*.bias``; upper and lower case differ.

    Raises:
        CaptureError: a pattern matches no parameter.
    """
    found: dict[str, int] = {}
    for index, pattern in enumerate(patterns):
        matched = [key for key, own in names.items() if _matches(own, pattern)]
        if not matched:
            raise _unmatched(index, pattern, [name for own in names.values() for name in own])
        for key in matched:
            found.setdefault(key, index)
    return found


def _matches(names: Sequence[str], pattern: str) -> bool:
    return any(fnmatchcase(name, pattern) for name in names)


def _unmatched(index: int, pattern: str, names: Sequence[str]) -> CaptureError:
    wider = (f"*.{pattern}", f"*{pattern}", f"{pattern}.*", f"{pattern}*", f"*{pattern}*")
    better = next((other for other in wider if _matches(names, other)), None)
    hint = f"; did you mean {better!r}?" if better else did_you_mean(pattern, names)
    examples = ", ".join(names[:_EXAMPLES])
    return CaptureError(
        f"optimizer.groups[{index}].match: {pattern!r} matches no parameter{hint}",
        cure=f"the model's parameters have names such as {examples}",
    )
