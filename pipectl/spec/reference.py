"""``docs/spec-reference.md``, made from the JSON Schema of the models.

``python -m pipectl.spec.reference DIRECTORY`` writes it and ``configs/job.schema.json`` into a
checkout.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

from pipectl.files import write_json, write_text
from pipectl.spec.schema import Schema, json_schema, options, properties, words

REFERENCE = Path("docs/spec-reference.md")
SCHEMA = Path("configs/job.schema.json")

_MARK = (
    "<!-- What follows is made by python -m pipectl.spec.reference; edit the models instead. -->"
)


def reference_markdown(page: str) -> str:
    """The page with its introduction as it is, and new tables after it."""
    return "\n".join([page.partition(_MARK)[0] + _MARK, "", *_parts()])


def write(checkout: Path) -> None:
    """Write the reference and the schema into a checkout."""
    page = checkout / REFERENCE
    write_text(page, reference_markdown(page.read_text(encoding="utf-8")))
    write_json(checkout / SCHEMA, json_schema())


def _parts() -> Iterator[str]:
    factory = json_schema()["$defs"]["Factory"]
    yield f"## Top level\n\n{_table(json_schema(), '')}"
    yield f"## Factories\n\n{_text(factory)}\n\n{_table(factory, '')}"
    for name, schema in properties(json_schema()).items():
        if _section(schema) is not None and not _is_factory(schema):
            yield f"## {name}\n\n{_text(schema)}\n\n{_table(schema, name)}"
            yield from _inner_parts(schema, name)


def _inner_parts(schema: Schema, path: str) -> Iterator[str]:
    """The sections within a section, alone or in lists."""
    for name, item in properties(schema).items():
        inner = next((each["items"] for each in options(item) if each.get("items")), item)
        if _section(inner) is not None and not _is_factory(inner):
            place = f"{path}.{name}"
            yield f"### {place}\n\n{_text(inner)}\n\n{_table(inner, place)}"
            yield from _inner_parts(inner, place)


def _section(schema: Schema | None) -> Schema | None:
    """The schema of a mapping with known keys."""
    found = () if schema is None else options(schema)
    return next((item for item in found if "properties" in item), None)


def _is_factory(schema: Schema) -> bool:
    return list(properties(schema)) == ["factory", "kwargs"]


def _text(schema: Schema) -> str:
    section = _section(schema)
    return str(section["description"]) if section else ""


def _table(schema: Schema, path: str) -> str:
    rows = ["| key | value | default | meaning |", "| --- | --- | --- | --- |"]
    section = _section(schema)
    assert section is not None
    for name, item in section["properties"].items():
        default = f"`{item['default']}`" if "default" in item else ""
        default = default.lower() if isinstance(item.get("default"), bool) else default
        required = "required" if name in section.get("required", ()) else default
        meaning = item.get("description") or _text(item).partition("\n")[0]
        cells = (f"`{name}`", _value(item, f"{path}{name}".replace(".", "")), required, meaning)
        rows.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join([*rows, ""])


def _value(schema: Schema, anchor: str) -> str:
    """What may be written, with a link to the section that explains it."""
    if _section(schema) is not None:
        return "[factory](#factories)" if _is_factory(schema) else f"[mapping](#{anchor})"
    choices = list(options(schema))
    for item in choices if len(choices) == 1 else ():
        values = item.get("additionalProperties")
        if item.get("items"):
            value = _value(item["items"], anchor)
            return f"list; each a {value}" if value.startswith("[") else f"list; each {value}"
        if isinstance(values, dict) and _section(values) is not None:
            return "mapping of names to [factories](#factories)"
        if isinstance(values, dict):
            return f"mapping of names to {words(values)}"
    return words(schema)


if __name__ == "__main__":
    write(Path(sys.argv[1]))
