"""The page on the architecture shows the imports there are, and every part of the planner."""

import os
import re

from layers import LAYERS, PACKAGE, layer_picture, stacked
from pages import CHECKOUT

PAGE = CHECKOUT / "docs" / "architecture.md"
BEGIN, END = "<!-- layers: drawn by make golden -->\n", "<!-- end of layers -->\n"


def test_the_page_shows_the_imports_there_are():
    text = PAGE.read_text(encoding="utf-8")
    head, rest = text.split(BEGIN)
    drawn, tail = rest.split(END)
    if os.environ.get("PIPECTL_GOLDEN") == "write":
        drawn = f"\n{layer_picture()}\n\n"
        PAGE.write_text(f"{head}{BEGIN}{drawn}{END}{tail}", encoding="utf-8")
    assert drawn.strip() == layer_picture(), f"{PAGE} differs; if that is intended: make golden"


def test_the_picture_is_a_stack():
    rows = [line for line in layer_picture().split("```text\n")[1].splitlines() if "·" in line]
    assert len(rows) == sum(map(len, LAYERS)) == len(stacked())
    assert not any("■" in row.split("·")[0] for row in rows)


def test_every_part_says_what_it_is():
    rows = layer_picture().split("\n\n")[0].splitlines()[2:]
    assert [row for row in rows if not row.split("|")[3].strip()] == []


def test_the_page_names_every_part_of_the_planner():
    section = PAGE.read_text(encoding="utf-8").split("\n## Planner\n")[1].split("\n## ")[0]
    words = section.replace("`planner/", "`")
    files = {path.name for path in (PACKAGE / "planner").glob("*.py")} - {"__init__.py"}
    folders = {f"{path.parent.name}/" for path in (PACKAGE / "planner").glob("*/__init__.py")}
    assert {name for name in files | folders if f"`{name}`" not in words} == set()
    there = {path.name for path in PACKAGE.rglob("*.py")}
    assert {name for name in re.findall(r"`(\w+\.py)`", words) if name not in there} == set()
