"""The page on the architecture has the table of layers."""

import os

from layers import layer_table
from pages import CHECKOUT

PAGE = CHECKOUT / "docs" / "architecture.md"
BEGIN, END = "<!-- layers: made by make golden -->\n", "<!-- end of layers -->\n"


def test_the_page_has_the_layers():
    text = PAGE.read_text(encoding="utf-8")
    head, rest = text.split(BEGIN)
    drawn, tail = rest.split(END)
    if os.environ.get("PIPECTL_GOLDEN") == "write":
        drawn = f"\n{layer_table()}\n\n"
        PAGE.write_text(f"{head}{BEGIN}{drawn}{END}{tail}", encoding="utf-8")
    assert drawn.strip() == layer_table(), f"{PAGE} differs; if that is intended: make golden"
