"""Tables of keys in the documentation, made from the types of the documents.

A comment ``<!-- keys of MODULE:CLASS -->`` stands before each such table: a row per field of the
class, with its description under "Args:" in the docstring (``make golden``).
"""

import inspect
import re
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from enum import Enum
from importlib import import_module
from math import inf
from typing import Any, get_type_hints

_TABLE = re.compile(
    r"(<!-- keys of (?P<type>[\w.]+:\w+) -->\n\n\|.*\n\|[-|]+\n)(?:\|.*\n)*", re.MULTILINE
)


def with_tables(page: str) -> str:
    """The page with its tables of keys as the types have them; heads stay as they are."""

    def rows(table: re.Match[str]) -> str:
        return table[1] + "".join(f"| {names} | {text} |\n" for names, text in _rows(table["type"]))

    return _TABLE.sub(rows, page)


def _rows(name: str) -> Iterator[tuple[str, str]]:
    module, _, kind_name = name.partition(":")
    kind: Any = getattr(import_module(module), kind_name)
    texts, defaults = _descriptions(kind), {}
    names = {each: each for each in get_type_hints(kind)}
    if is_dataclass(kind):
        names = {each.name: each.metadata.get("key", each.name) for each in fields(kind)}
        defaults = {each.name: each.default for each in fields(kind)}
    missing = names.keys() - {each for several in texts for each in several}
    assert not missing, f"{name}: Args has no {', '.join(sorted(missing))}"
    for several, description in texts.items():
        text = re.sub("``(.*?)``", r"`\1`", description).rstrip(".").replace("|", "\\|")
        if is_dataclass(kind):
            text = text.replace("None", "absent")
        yield ", ".join(f"`{names[each]}`" for each in several), text + _default(defaults, several)


def _default(defaults: dict[str, Any], names: tuple[str, ...]) -> str:
    """The default of a switch, choice or factor; other absent fields are empty, 0 or unknown."""
    value = defaults.get(names[0])
    if not (isinstance(value, bool | Enum) or (isinstance(value, float) and 0 < value < inf)):
        return ""
    value = value.value if isinstance(value, Enum) else value
    return f" (default: `{str(value).lower()}`)"


def _descriptions(kind: type) -> dict[tuple[str, ...], str]:
    """The texts under "Args:" by the names before them."""
    text = inspect.cleandoc(kind.__doc__ or "").partition("\nArgs:\n")[2].partition("\n\n")[0]
    entries = re.findall(r"^    (\w+(?:, \w+)*): (.*(?:\n {8}.*)*)", text, re.MULTILINE)
    return {tuple(names.split(", ")): " ".join(said.split()) for names, said in entries}
