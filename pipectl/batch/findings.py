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
        cure: what to do; empty if nothing is wrong.
    """

    what: str
    level: Level
    text: str
    cure: str = ""


def assess(what: str, text: str, cure: str = "") -> Finding:
    """Return the finding of a check that did not fail; with a cure it is a warning."""
    return Finding(what, "warn" if cure else "ok", text, cure)
