"""``docs/spec-reference.md``, made from the models.

``python -m pipectl.spec.reference DIRECTORY`` writes it and ``configs/job.schema.json`` into a
checkout.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin

from pydantic.fields import FieldInfo

from pipectl.files import write_json, write_text
from pipectl.spec.kinds import Kind
from pipectl.spec.layers import SITE_KEYS
from pipectl.spec.models import JobSpec
from pipectl.spec.schema import json_schema
from pipectl.spec.section import Section
from pipectl.spec.structure import (
    is_list_of_sections,
    is_mapping_of_sections,
    kind_of,
    section_of,
    without_none,
)
from pipectl.spec.training import Factory

REFERENCE = Path("docs/spec-reference.md")
SCHEMA = Path("configs/job.schema.json")

_INTRODUCTION = f"""\
# The job spec

<!-- Made by python -m pipectl.spec.reference; edit the models in pipectl/spec instead. -->

A job spec is one YAML file. `pipectl check JOB.yaml` lists every mistake with its line and column;
`pipectl schema` prints the JSON Schema, with which editors complete and check as you type.

## Where values come from

From the weakest to the strongest:

1. the defaults below,
2. `/etc/pipectl/site.yaml`,
3. `~/.config/pipectl/site.yaml` (under `XDG_CONFIG_HOME` where that is set),
4. the job file,
5. `--set key.key=value` on the command line, in order; the value is YAML, such as
   `--set launch.args='[--label, --kill-on-bad-exit]'`.

Mappings are merged key by key and everything else is replaced; `--set` replaces exactly the key it
names. A key that is `null`, or empty, has its default, whatever a weaker source says. Environment
variables set no key: a job means the same in every shell, and what differs between users stands in
their site files.
`pipectl check JOB.yaml --origins` shows every key with its value and where that comes from.

A site file describes the site. It may set
{", ".join(f"`{key}`" for key in SITE_KEYS)}.
With `site_defaults: false` a job takes nothing from site files.

## How values are read

The type of a key decides how its value is read, so `walltime: 1:30:00` is one and a half hours.
Sizes are bytes or have a unit: `512MiB`, `4GiB`, or decimal `8GB`. Durations are `HH:MM:SS`,
`D-HH:MM:SS`, or have units: `90s`, `45m`, `1h30m`; a bare number is seconds. In `kwargs`, values
have the types of YAML 1.2: `3e-4` is a number, `yes` and `1:30` are text. Keys given twice, unknown
keys, control characters, tags (`!!`) and merge keys (`<<`) are refused, and so are files of more
than 1 MiB.
"""


def reference_markdown() -> str:
    """The whole reference."""
    return "\n".join([_INTRODUCTION, *_parts()])


def _parts() -> Iterator[str]:
    yield "## Top level\n"
    yield _table(JobSpec)
    yield f"## Factories\n\n{_paragraphs(Factory)}\n"
    yield _table(Factory)
    for name, info in JobSpec.model_fields.items():
        model = section_of(info)
        if model not in (None, Factory):
            assert model is not None
            yield f"## {name}\n\n{_paragraphs(model)}\n"
            yield _table(model, name)
            yield from _lists(name, model)


def _lists(name: str, model: type[Section]) -> Iterator[str]:
    """The sections that stand in a section, alone or in lists."""
    for key, info in model.model_fields.items():
        inner = section_of(info)
        if inner is not None and not issubclass(inner, Factory):
            place = f"{name}.{key}"
            yield f"### {place}\n\n{_paragraphs(inner)}\n"
            yield _table(inner, place.replace(".", ""))
            yield from _lists(place, inner)


def _paragraphs(model: type[Section]) -> str:
    return "\n".join(line.strip() for line in (model.__doc__ or "").strip().splitlines())


def _table(model: type[Section], place: str = "") -> str:
    rows = ["| key | value | default | meaning |", "| --- | --- | --- | --- |"]
    for name, info in model.model_fields.items():
        cells = (f"`{name}`", _words(info, name, place), _default(info), _meaning(info))
        rows.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join([*rows, ""])


def _meaning(info: FieldInfo) -> str:
    model = section_of(info)
    if info.description is not None or model is None:
        return info.description or ""
    return _paragraphs(model).splitlines()[0]


def _words(info: FieldInfo, name: str, around: str) -> str:
    """What may stand there."""
    if is_list_of_sections(info):
        return f"list of [mappings](#{around}{name})"
    if (model := section_of(info)) is not None:
        what, place = ("factory", "factories") if model is Factory else ("mapping", around + name)
        link = f"[{what}](#{place})"
        return (
            f"mapping of names to [factories](#{place})" if is_mapping_of_sections(info) else link
        )
    if (kind := kind_of(info)) is not None:
        return kind.words
    inner: Any = without_none(info.annotation)
    if get_origin(inner) is tuple and get_origin(get_args(inner)[0]) is dict:
        return "list of mappings"
    if get_origin(inner) is tuple:
        return f"list; each {_item_words(get_args(inner)[0])}"
    values = get_args(inner)[1]
    if get_origin(values) is tuple:
        return "mapping of keys to lists"
    return "mapping" if values is Any else f"mapping of names to {_item_words(values)}"


def _item_words(annotation: Any) -> str:
    assert get_origin(annotation) is Annotated
    return next(item.words for item in get_args(annotation) if isinstance(item, Kind))


def _default(info: FieldInfo) -> str:
    if info.is_required():
        return "required"
    default = info.get_default(call_default_factory=True)
    if isinstance(default, Section):
        return ""
    kind = kind_of(info)
    shown = default if kind is None else kind.dump(default)
    return f"`{_yaml(shown)}`"


def _yaml(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if value is None or isinstance(value, int | float | str):
        return "null" if value is None else str(value)
    return "{}" if isinstance(value, dict) else str(list(value))


def write(checkout: Path) -> None:
    """Write the reference and the schema into a checkout."""
    write_text(checkout / REFERENCE, reference_markdown())
    write_json(checkout / SCHEMA, json_schema())


if __name__ == "__main__":
    write(Path(sys.argv[1]))
