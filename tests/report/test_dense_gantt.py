"""More blocks than columns, more ranks than rows, and the kinds that not every plan has."""

import json
import re
from collections import Counter
from collections.abc import Iterable

import pytest

from pipectl.report.gantt import FILLS, gantt, legend, shown_ranks
from pipectl.report.gantt_svg import gantt_svg, gantts_svg
from pipectl.report.page import timelines_html
from pipectl.timeline import Event, Timeline


def alternating(count: int, forward_s: float, backward_s: float, idle_s: float = 0.0) -> Timeline:
    period = forward_s + backward_s + idle_s
    events = []
    for index in range(count):
        start = index * period
        events.append(Event(0, start, start + forward_s, "forward", 0, index))
        end = start + forward_s + backward_s
        events.append(Event(0, start + forward_s, end, "backward", 0, index))
    return Timeline(tuple(events), 1)


def at_once(ranks: Iterable[int], of: int) -> Timeline:
    return Timeline(tuple(Event(rank, 0.0, 1.0, "forward", 0, 0) for rank in ranks), of)


@pytest.mark.parametrize(("forward_s", "backward_s", "idle_s"), [(1, 2, 0), (1, 1, 2), (3, 5, 2)])
def test_the_shares_of_the_characters_are_those_of_the_time(forward_s, backward_s, idle_s):
    (row,) = gantt(alternating(1000, forward_s, backward_s, idle_s), 107)
    text = "".join(segment.text for segment in row.segments)
    counted, period = Counter(text), forward_s + backward_s + idle_s
    assert len(text) == 100
    for fill, time_s in (("░", forward_s), ("█", backward_s), (" ", idle_s)):
        assert counted[fill] == pytest.approx(100 * time_s / period, abs=2)


def test_waiting_stays_where_it_is():
    """Many short blocks in the first tenth do not spread over the rest."""
    busy = alternating(500, 1, 1).events
    (row,) = gantt(Timeline((*busy, Event(0, 9999.0, 10000.0, "update")), 1), 107)
    text = "".join(segment.text for segment in row.segments)
    assert " " not in text[:10]
    assert text[11:99].strip() == ""


def test_the_legend_names_what_occurs_and_what_is_left_out():
    kinds = [Event(0, 0.0, 1.0, kind) for kind in ("forward", "recompute", "reduce_wait")]
    assert legend(Timeline(tuple(kinds), 1)) == (
        "░ forward  ▒ forward again  R sum of gradients  (digits: micro-batch, blank: idle)"
    )
    many = legend(at_once(range(1024), 1024))
    assert many.endswith("blank: idle, 32 of 1,024 ranks are shown)")


def test_every_kind_that_is_drawn_has_a_name():
    for kind in FILLS:
        assert FILLS[kind] in legend(Timeline((Event(0, 0.0, 1.0, kind),), 1))


def test_a_picture_of_many_ranks_shows_some_and_says_so():
    picture = gantt_svg(at_once(range(1024), 1024), "many", "a note")
    assert "64 of 1,024 ranks are shown" in picture
    assert ">rank 0<" in picture
    assert ">rank 1023<" in picture
    assert picture.count('<rect class="forward"') == 64 + 1  # and the legend's


def test_a_picture_of_many_events_stays_small():
    events = tuple(
        Event(rank, index * 1.0, index + 1.0, "forward", 0, index)
        for rank in range(32)
        for index in range(5000)
    )
    assert gantt_svg(Timeline(events, 32), "many").count("<rect class") < 25_000


def test_ranks_that_were_not_recorded_have_no_rows():
    measured, predicted = at_once(shown_ranks(100, 70), 100), at_once(range(100), 100)
    rows = gantt(measured, 80)
    assert len(rows) == 32
    assert all("░" in str(row) for row in rows)
    assert "32 of 100 ranks are shown" in legend(measured)
    both = {"predicted": predicted, "measured": measured}
    picture = gantts_svg(both, "both")
    assert "64 of 100 ranks are shown" in picture
    assert picture.count('<rect class="forward"') == 2 * 64 + 1  # and the legend's
    (drawn,) = re.findall(r"const timelines = (.*);", timelines_html(both))
    for timeline in json.loads(drawn):
        assert len(timeline["events"]) == 32
        assert all(timeline["events"].values())
