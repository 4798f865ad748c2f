"""Timelines as text and pictures, also with more blocks than columns and more ranks than rows."""

import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Iterable

import pytest

from pipectl.report.gantt import LOOKS, gantt_svg, legend
from pipectl.report.gantt import gantt as rows_of
from pipectl.timeline import Event, Timeline, shown_ranks

SPACE = {"svg": "http://www.w3.org/2000/svg"}
STEP = Timeline(
    (
        Event(0, 0.0, 2.0, "forward", 0, 0),
        Event(0, 2.0, 4.0, "forward", 0, 1),
        Event(0, 6.0, 9.0, "backward", 0, 0),
        Event(0, 9.0, 10.0, "update", 0),
        Event(0, 4.0, 6.0, "receive_wait", 0, 0),
        Event(1, 2.0, 4.0, "forward", 1, 0),
        Event(1, 4.0, 6.0, "backward", 1, 0),
    ),
    ranks=2,
)


def alternating(count: int, forward_s: float, backward_s: float, idle_s: float = 0.0) -> Timeline:
    events = []
    for index in range(count):
        start = index * (forward_s + backward_s + idle_s)
        end = start + forward_s + backward_s
        events.append(Event(0, start, start + forward_s, "forward", 0, index))
        events.append(Event(0, start + forward_s, end, "backward", 0, index))
    return Timeline(tuple(events), 1)


def at_once(ranks: Iterable[int], of: int) -> Timeline:
    return Timeline(tuple(Event(rank, 0.0, 1.0, "forward", 0, 0) for rank in ranks), of)


def gantt(timeline: Timeline, width: int) -> list[str]:
    return ["".join(text for text, _ in row) for row in rows_of(timeline, width)]


def texts(picture: str) -> list[str | None]:
    return [text.text for text in ElementTree.fromstring(picture).findall(".//svg:text", SPACE)]


def test_rows_show_blocks_micro_batches_and_idle_time():
    assert gantt(STEP, 27) == ["rank 0 0░░░1░░░    0█████UU", "rank 1     0░░░0███        "]
    # a narrow block keeps its kind and loses its number
    row = rows_of(STEP, 17)[0]
    assert [text for text, _ in row] == ["rank 0 ", "0░", "1░", "  ", "0██", "U"]
    assert gantt(Timeline((), 4), 80) == []
    for width in range(17, 90):
        assert set(map(len, gantt(STEP, width))) == {width}


def test_an_event_too_short_for_a_column_is_still_drawn():
    short = Timeline((Event(0, 0.0, 100.0, "forward", 0, 0), Event(0, 100.0, 100.1, "update")), 1)
    assert gantt(short, 20)[0] == "rank 0 0" + "░" * 12
    early = Timeline((Event(0, 0.0, 0.1, "update"), Event(0, 50.0, 100.0, "forward", 0, 0)), 1)
    assert gantt(early, 20)[0].startswith("rank 0 U ")


@pytest.mark.parametrize(("forward_s", "backward_s", "idle_s"), [(1, 2, 0), (1, 1, 2), (3, 5, 2)])
def test_the_shares_of_the_characters_are_those_of_the_time(forward_s, backward_s, idle_s):
    (row,) = gantt(alternating(1000, forward_s, backward_s, idle_s), 107)
    text = row.removeprefix("rank 0 ")
    counted, period = Counter(text), forward_s + backward_s + idle_s
    assert len(text) == 100
    for fill, time_s in (("░", forward_s), ("█", backward_s), (" ", idle_s)):
        assert counted[fill] == pytest.approx(100 * time_s / period, abs=2)


def test_waiting_stays_where_it_is():
    """Many short blocks in the first tenth do not spread over the rest."""
    busy = alternating(500, 1, 1).events
    (row,) = gantt(Timeline((*busy, Event(0, 9999.0, 10000.0, "update")), 1), 107)
    text = row.removeprefix("rank 0 ")
    assert " " not in text[:10]
    assert text[11:99].strip() == ""


def test_the_legend_names_what_occurs_and_how_many_ranks_are_left_out():
    kinds = [Event(0, 0.0, 1.0, kind) for kind in ("forward", "recompute", "reduce_wait")]
    assert legend(Timeline(tuple(kinds), 1)) == (
        "░ forward  ▒ forward again  R sum of gradients  (digits: micro-batch, blank: idle)"
    )
    many = legend(at_once(range(1024), 1024))
    assert many.endswith("blank: idle, 32 of 1,024 ranks are shown)")
    found = texts(gantt_svg(STEP, "a plan"))
    assert {"forward", "backward", "optimizer step"} <= set(found)
    assert not {"backward (weights)", "evaluation"} & set(found)


def test_the_svg_shows_title_notes_ranks_and_round_times():
    timeline = Timeline((Event(0, 0.0, 0.306, "forward", 0, 0), Event(1, 0.0, 0.1, "update")), 2)
    found = texts(gantt_svg(timeline, "a plan", "it is fast"))
    assert found[:2] == ["a plan", "it is fast"]
    assert found[5:] == [
        *("rank 0", "rank 1"),
        *("0", "50.0 ms", "100 ms", "150 ms", "200 ms", "250 ms", "306 ms"),
        "0",
    ]
    assert "<title>rank 0: forward, stage 0, micro-batch 0, from 0.00 us on, 306 ms</title>" in (
        gantt_svg(timeline, "a plan")
    )
    assert "rank 0" in texts(gantt_svg(Timeline((), 1), "nothing"))


def test_timelines_stand_above_each_other_on_one_axis():
    events = (e._replace(start_s=2 * e.start_s, end_s=2 * e.end_s) for e in STEP.events)
    picture = gantt_svg({"predicted": STEP, "measured": Timeline((*events,), 2)}, "both")
    found = texts(picture)
    assert found.index("predicted") < found.index("measured")
    assert (found.count("rank 0"), found.count("2.00 s")) == (2, 1)
    rects = ElementTree.fromstring(picture).findall(".//svg:rect[@height='24']", SPACE)
    rows = [rect for rect in rects if rect.get("class") == "idle"]
    assert [rect.get("width") for rect in rows] == ["436.0", "436.0", "872.0", "872.0"]
    tops = [int(rect.attrib["y"]) for rect in rows]
    assert tops == sorted(set(tops))
    first, second = (float(rect.attrib["x"]) for rect in rects if rect.get("class") == "update")
    assert second == pytest.approx(2 * first, abs=0.1)


@pytest.mark.parametrize("kind", LOOKS)
def test_every_kind_has_a_bar_and_a_name(kind):
    title = "a <title> & more"
    timeline = Timeline((Event(0, 0.0, 1.0, kind, 0, 3),), 1)
    root = ElementTree.fromstring(gantt_svg(timeline, title))
    assert root.findtext("svg:title", namespaces=SPACE) == title
    assert "3" in [text.text for text in root.findall(".//svg:text", SPACE)]
    assert LOOKS[kind].fill in legend(timeline)


def test_of_many_ranks_some_are_shown_and_the_picture_says_so():
    assert shown_ranks(1000, 5) == [0, 250, 500, 749, 999]
    picture = gantt_svg(at_once(range(1024), 1024), "many", "a note")
    assert "64 of 1,024 ranks are shown" in picture
    assert {"rank 0", "rank 1023"} <= set(texts(picture))
    assert picture.count('<rect class="forward"') == 64 + 1  # and the legend's
    times = [(rank, index) for rank in range(32) for index in range(5000)]
    events = tuple(Event(rank, time, time + 1.0, "forward", 0, time) for rank, time in times)
    assert gantt_svg(Timeline(events, 32), "many").count("<rect class") < 25_000


def test_ranks_that_were_not_recorded_have_no_rows():
    measured, predicted = at_once(shown_ranks(100, 70), 100), at_once(range(100), 100)
    rows = gantt(measured, 80)
    assert len(rows) == 32
    assert all("░" in row for row in rows)
    assert "32 of 100 ranks are shown" in legend(measured)
    both = {"predicted": predicted, "measured": measured}
    picture = gantt_svg(both, "both")
    assert "64 of 100 ranks are shown" in picture
    assert picture.count('<rect class="forward"') == 2 * 64 + 1  # and the legend's
