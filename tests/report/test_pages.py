"""Pages of HTML: what is in them, and that no text of a user becomes a part of them."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path

from pipectl.report.page import (
    bars,
    curve,
    heading,
    page,
    paragraph,
    safe_json,
    table,
    thinned,
    timelines_html,
)
from pipectl.timeline import Event, Timeline

DATA = Path(__file__).parents[1] / "data" / "scheduler" / "nasty.json"
HOSTILE = [
    "<script>alert(1)</script>",
    "</script><img src=x onerror=alert(1)>",
    "\"'><svg onload=alert(1)>",
    "<!--",
    "]]>",
    "&lt;",
    "\u2028\u2029",
    *filter(str.strip, json.loads(DATA.read_text())),
]


class Reader(HTMLParser):
    """Tags, attributes and text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[str] = []
        self.text = ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [name for name, _ in attrs]

    def handle_data(self, data: str) -> None:
        self.text += data


def parts_with(text: str) -> list[str]:
    return [
        heading(text),
        paragraph(text),
        table([text, "b"], [[text, 1]], [text]),
        bars([(text, [("predicted", 0.5, text)])]),
        curve(text, [(1, 2.0), (2, 3.0)]),
    ]


def test_text_stays_text() -> None:
    plain = Reader(page("x", parts_with("x")))
    for text in HOSTILE:
        found = Reader(page(text, parts_with(text)))
        assert (found.tags, found.attributes) == (plain.tags, plain.attributes), text
        assert found.text.count(text) >= 9, text


def test_no_text_ends_a_script() -> None:
    for text in HOSTILE:
        shown = timelines_html({text: Timeline((Event(0, 0.0, 1.0, "forward", 0, 0),), 1)})
        assert Reader(shown).tags.count("script") == shown.count("</script>") == 1
        assert json.loads(safe_json([text])) == [text]
        assert "<" not in safe_json(text)


def test_it_asks_nothing_of_the_network() -> None:
    text = page("x", [timelines_html({"a": Timeline((), 2)}), curve("b", [(1, 1.0)])])
    assert "default-src 'none'" in text
    assert not re.search(r"https?://(?!www\.w3\.org)|src=|href=|@import|url\(", text)


def test_columns_that_are_empty_are_left_out() -> None:
    text = table(["a", "b", "c"], [[0, "", 1], [2, "", ""]], ["c"])
    assert Reader(text).text == "ac012"
    assert text.count('class="figure"') == 3


def test_a_curve() -> None:
    assert curve("loss", []) == ""
    text = curve("loss", [(1, 4.0), (2, 2.0), (3, 1.0)])
    places = re.search('points="([^"]+)"', text)
    assert places is not None
    xs, ys = zip(*(map(float, place.split(",")) for place in places[1].split()), strict=True)
    assert list(xs) == sorted(xs)
    assert list(ys) == sorted(ys), "downwards on a screen is up"
    assert ">4<" in text
    assert "NaN" not in curve("flat", [(1, 2.0)]) + curve("flat", [(1, 2.0), (2, 2.0)])


def test_a_long_curve_is_drawn_by_means() -> None:
    points = [(float(step), float(step % 2)) for step in range(100_000)]
    found = thinned(points, 1000)
    assert len(found) == 1000
    assert {y for _, y in found} == {0.5}
    assert len(curve("loss", points)) < 30_000


def test_of_very_many_ranks_some_are_drawn() -> None:
    events = tuple(Event(rank, 0.0, 1.0, "forward", 0, 0) for rank in range(1000))
    assert len(timelines_html({"a": Timeline(events, 1000)})) < 20_000
