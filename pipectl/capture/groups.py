"""The groups of ``optimizer.groups``, to which parameters belong by their names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase

from pipectl.errors import CaptureError
from pipectl.units import did_you_mean


def assign_groups(names: Mapping[str, Sequence[str]], patterns: Sequence[str]) -> dict[str, int]:
    """Return the index of the first pattern that matches each parameter, without the others.

    Args:
        names: all names of each parameter in the user's model (several if it is tied), by its name
            here.
        patterns: shell patterns such as ``*.bias``, case-sensitive.

    Raises:
        CaptureError: a pattern matches no parameter.
    """
    groups: dict[str, int] = {}
    for index, pattern in enumerate(patterns):
        matches = [key for key, own in names.items() if _matches(own, pattern)]
        for key in matches:
            groups.setdefault(key, index)
        if matches:
            continue
        own = [name for several in names.values() for name in several]
        wider = (f"*.{pattern}", f"*{pattern}", f"{pattern}.*", f"{pattern}*", f"*{pattern}*")
        better = next((other for other in wider if _matches(own, other)), None)
        meant = f"; did you mean {better!r}?" if better else did_you_mean(pattern, own)
        raise CaptureError(
            f"optimizer.groups[{index}].match: {pattern!r} matches no parameter{meant}",
            hint=f"the model's parameters have names such as {', '.join(own[:3])}",
        )
    return groups


def _matches(names: Sequence[str], pattern: str) -> bool:
    return any(fnmatchcase(name, pattern) for name in names)
