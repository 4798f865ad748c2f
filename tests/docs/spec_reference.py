"""``docs/spec-reference.md``, made from the JSON Schema of the models."""

from collections.abc import Iterator

from pipectl.spec.schema import (
    Schema,
    alternatives,
    describe_schema,
    json_schema,
    properties,
    required_keys,
)

_MARK = "<!-- What follows is made by make golden; edit the models instead. -->"


def reference_markdown(page: str) -> str:
    """The page with its introduction as it is, and new tables after it."""
    return "\n".join([page.partition(_MARK)[0] + _MARK, "", *_parts()])


def _parts() -> Iterator[str]:
    factory = json_schema()["$defs"]["Factory"]
    yield f"## Top level\n\n{_table(json_schema(), '')}"
    yield f"## Factories\n\n{_text(factory)}\n\n{_table(factory, '')}"
    yield from _sections(json_schema(), "")


def _sections(schema: Schema, path: str) -> Iterator[str]:
    """The sections within a section, alone or in lists, and those within them."""
    for name, item in properties(schema).items():
        inner = next((each["items"] for each in alternatives(item) if each.get("items")), item)
        if properties(inner) and not _is_factory(inner):
            title = f"{path}.{name}" if path else name
            more = _text(inner).partition("\n")[2].strip()  # the first line is in the table above
            parts = (f"##{'#' * bool(path)} {title}", more, _table(inner, title))
            yield "\n\n".join(filter(None, parts))
            yield from _sections(inner, title)


def _is_factory(schema: Schema) -> bool:
    return list(properties(schema)) == ["factory", "kwargs"]


def _text(schema: Schema) -> str:
    """The description of a section."""
    return next(
        (str(item["description"]) for item in alternatives(schema) if "properties" in item), ""
    )


def _table(schema: Schema, path: str) -> str:
    rows = ["| key | value | default | meaning |", "| --- | --- | --- | --- |"]
    required = required_keys(schema)
    usual = properties(json_schema()["$defs"]["Factory"]) if path else {}
    for name, item in properties(schema).items():
        if item == usual.get(name):
            rows.append(f"| `{name}` | | | see [factories](#factories) |")
            continue
        default = f"`{item['default']}`" if "default" in item else ""
        default = default.lower() if isinstance(item.get("default"), bool) else default
        if name in required:
            default = "required" if required[name] else "required without `script`"
        meaning = item.get("description") or _text(item).partition("\n")[0]
        anchor = f"{path}{name}".replace(".", "")
        cells = (_value(item, anchor), default, meaning)
        rows.append(
            "| " + " | ".join(cell.replace("|", "\\|") for cell in (f"`{name}`", *cells)) + " |"
        )
    return "\n".join([*rows, ""])


def _value(schema: Schema, anchor: str) -> str:
    """What may be written, with a link to the section that explains it."""
    if properties(schema):
        return "[factory](#factories)" if _is_factory(schema) else f"[mapping](#{anchor})"
    choices = list(alternatives(schema))
    for item in choices if len(choices) == 1 else ():
        values = item.get("additionalProperties")
        if item.get("items"):
            value = _value(item["items"], anchor)
            return f"list; each a {value}" if value.startswith("[") else f"list; each {value}"
        if isinstance(values, dict):
            kind = "[factories](#factories)" if properties(values) else describe_schema(values)
            return f"mapping of names to {kind}"
    return describe_schema(schema)
