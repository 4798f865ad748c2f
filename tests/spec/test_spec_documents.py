"""The JSON Schema and the reference are made from the models, and the checked-in copies agree."""

import json
import re
from pathlib import Path

import pytest
from spec_reference import reference_markdown

from pipectl.spec.schema import json_schema, properties

CHECKOUT = Path(__file__).parents[2]
REFERENCE = CHECKOUT / "docs" / "spec-reference.md"
SCHEMA = CHECKOUT / "configs" / "job.schema.json"
PAGE = REFERENCE.read_text("utf-8")


@pytest.mark.parametrize("path", [REFERENCE, SCHEMA], ids=lambda path: path.name)
def test_the_checked_in_copies_are_current(snapshot, path):
    text = reference_markdown(PAGE)
    if path == SCHEMA:
        text = json.dumps(json_schema(), indent=1, ensure_ascii=False) + "\n"
    snapshot(path, text)


def test_every_key_is_explained():
    for schema in (json_schema(), *json_schema()["$defs"].values()):
        for name in properties(schema):
            rows = re.findall(rf"^\| `{name}` \| (.+) \| (.*) \| (.*) \|$", PAGE, re.MULTILINE)
            assert rows, f"{name} is not in the reference"
            assert all(meaning for _, _, meaning in rows), f"{name} has no meaning"
