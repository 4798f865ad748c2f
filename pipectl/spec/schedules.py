"""How a schedule is named: built in, a file of the user, or what an installed package offers."""

from __future__ import annotations

from dataclasses import replace
from importlib.metadata import entry_points

from pipectl.spec.kinds import Kind
from pipectl.spec.tree import Scalar

ROUND, V_SHAPED = ("interleaved", "looped-bfs"), ("zb-v", "dualpipev")
"""Schedules with several stages a rank."""
ONE_STAGE = ("gpipe", "1f1b", "zb-h1")
"""Schedules with one, and a flush behind every step."""
UNFLUSHED = ("pipedream", "pipedream-2bw")
"""Schedules whose steps overlap."""
BUILT_IN = ("gpipe", "1f1b", *ROUND, "zb-h1", *V_SHAPED, *UNFLUSHED)
"""All others are the user's own, and say which rank has which stage."""
APART = ("gpipe", "1f1b", *UNFLUSHED)
"""Schedules that leave backwards to other ranks."""
GROUP = "pipectl.schedules"
"""Of entry points; see :mod:`pipectl.jobs.schedules`."""
SUFFIX = ".csv"
"""Of files."""


def schedule(built_in: Kind) -> Kind:
    """A name of ``built_in``, a file, or an entry point."""
    words = f"{built_in.words}, a {SUFFIX} file, or a schedule that a package offers"

    def read(scalar: Scalar) -> str | None:
        try:
            name: str | None = built_in.read(scalar)
        except ValueError as error:
            if not _is_known(scalar.text):
                raise ValueError(str(error).replace(built_in.words, words)) from None
            name = scalar.text
        return name

    schema = {"anyOf": [built_in.schema, {"type": "string", "pattern": r"\.csv$"}]}
    return replace(built_in, words=words, schema=schema, read=read)


def _is_known(name: str) -> bool:
    return name.endswith(SUFFIX) or name in entry_points(group=GROUP).names
