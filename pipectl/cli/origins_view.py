"""What `pipectl check --origins` shows: key, value and origin, by section."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from rich.table import Table

from pipectl.cli.console import plain, short
from pipectl.spec import Origin
from pipectl.spec.document import Place, path_text, resolve


def origins_table(origins: Sequence[Origin]) -> Table:
    """One line a key, those of a section below its name; long values are folded."""
    table = Table(box=None, pad_edge=False, show_header=False, expand=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    table.add_column(no_wrap=True)
    for section, group in groupby(origins, key=lambda origin: origin.path[0]):
        keys = list(group)
        if keys[0].path[1:]:
            table.add_row(plain(section, "bold"))
        for origin in keys:
            _add(table, origin)
    return table


def origins_json(origins: Sequence[Origin]) -> list[dict[str, Any]]:
    """The same for programs; ``file`` and ``line`` are null where there is none."""
    return [
        {
            "key": path_text(origin.path),
            "value": _public(origin),
            "origin": _kind(origin.place),
            "file": origin.place.file if origin.place and origin.place.line else None,
            "line": (origin.place.line or None) if origin.place else None,
        }
        for origin in origins
    ]


def _add(table: Table, origin: Origin) -> None:
    inner = origin.path[1:]
    key = f"  {path_text(inner)}" if inner else path_text(origin.path)
    style = "dim" if origin.place is None else ""
    value = plain(_written(_public(origin)), style)
    table.add_row(plain(key, style), value, plain(_where(origin.place), style))


def _public(origin: Origin) -> Any:
    """The value, unless it may be a key or token."""
    return "(not shown)" if origin.path[:2] == ("environment", "variables") else origin.value


def _kind(place: Place | None) -> str:
    if place is None:
        return "default"
    return "file" if place.line else "--set"


def _where(place: Place | None) -> str:
    """``job.yaml:12``, ``~/.config/pipectl/site.yaml:3``, ``--set``, ``default``."""
    if place is None or not place.line:
        return _kind(place)
    name, home = short(Path(place.file)), str(Path.home())
    if name.startswith(f"{home}/"):
        name = f"~{name.removeprefix(home)}"
    return f"{name}:{place.line}"


def _written(value: Any) -> str:
    """A value as YAML in one line."""
    if isinstance(value, str) and value.isprintable() and resolve(value) == value:
        return value
    return json.dumps(value, ensure_ascii=False)
