"""What `pipectl doctor` finds."""

from __future__ import annotations

from typing import Literal, NamedTuple

Level = Literal["ok", "warn", "fail"]


class Finding(NamedTuple):
    """The result of a check.

    Args:
        what: what was checked.
        level: ``ok``, ``warn`` or ``fail``; with ``fail``, jobs cannot run.
        text: what was found.
        hint: what to do; empty if nothing is wrong.
    """

    what: str
    level: Level
    text: str
    hint: str = ""


def assess(what: str, text: str, hint: str = "") -> Finding:
    """Return the finding of a check that did not fail; with a hint it is a warning."""
    return Finding(what, "warn" if hint else "ok", text, hint)
