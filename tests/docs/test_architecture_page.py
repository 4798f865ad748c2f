"""The page on the architecture shows the imports there are."""

import os

from layers import layer_picture
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
