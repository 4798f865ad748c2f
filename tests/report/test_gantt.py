import xml.etree.ElementTree as ElementTree

import pytest

from pipectl.report.gantt import FILLS, gantt
from pipectl.report.gantt_svg import gantt_svg, gantts_svg
from pipectl.timeline import Event, Timeline

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


def test_rows_show_blocks_micro_batches_and_idle_time() -> None:
    assert [str(row) for row in gantt(STEP, 27)] == [
        "rank 0 0░░░1░░░    0█████UU",
        "rank 1     0░░░0███",
    ]


def test_a_narrow_block_keeps_its_kind_and_loses_its_number() -> None:
    row = gantt(STEP, 17)[0]
    assert [segment.text for segment in row.segments] == ["0░", "1░", "  ", "0██", "U"]


def test_every_row_has_the_same_width() -> None:
    for width in range(17, 90):
        widths = {
            len(row.label) + sum(len(segment.text) for segment in row.segments)
            for row in gantt(STEP, width)
        }
        assert widths == {width}


def test_an_event_too_short_for_a_column_is_still_drawn() -> None:
    short = Timeline((Event(0, 0.0, 100.0, "forward", 0, 0), Event(0, 100.0, 100.1, "update")), 1)
    assert str(gantt(short, 20)[0]) == "rank 0 0" + "░" * 12
    early = Timeline((Event(0, 0.0, 0.1, "update"), Event(0, 50.0, 100.0, "forward", 0, 0)), 1)
    assert str(gantt(early, 20)[0]).startswith("rank 0 U ")


def test_many_ranks_are_thinned_out_to_the_first_and_the_last() -> None:
    events = tuple(Event(rank, 0.0, 1.0, "forward", 0, 0) for rank in range(1000))
    labels = [row.label for row in gantt(Timeline(events, 1000), 80, max_ranks=5)]
    assert labels == ["rank   0 ", "rank 250 ", "rank 500 ", "rank 749 ", "rank 999 "]


def test_an_empty_timeline_has_no_rows() -> None:
    assert gantt(Timeline((), 4), 80) == []


def _texts(picture: str) -> list[str | None]:
    return [text.text for text in ElementTree.fromstring(picture).findall("svg:text", SPACE)]


def test_the_svg_shows_title_notes_ranks_and_round_times() -> None:
    timeline = Timeline((Event(0, 0.0, 0.306, "forward", 0, 0), Event(1, 0.0, 0.1, "update")), 2)
    texts = _texts(gantt_svg(timeline, "a plan", "it is fast"))
    assert texts[:2] == ["a plan", "it is fast"]
    assert texts[5:] == [
        *("rank 0", "rank 1"),
        *("0", "50.0 ms", "100 ms", "150 ms", "200 ms", "250 ms", "306 ms"),
        "0",
    ]


def test_timelines_stand_above_each_other_on_one_axis() -> None:
    events = (e._replace(start_s=2 * e.start_s, end_s=2 * e.end_s) for e in STEP.events)
    picture = gantts_svg({"predicted": STEP, "measured": Timeline((*events,), 2)}, "both")
    texts = _texts(picture)
    assert texts.index("predicted: 10.0 s") < texts.index("measured: 20.0 s")
    assert (texts.count("rank 0"), texts.count("2.00 s")) == (2, 1)
    rects = ElementTree.fromstring(picture).findall("svg:rect[@height='24']", SPACE)
    rows = [rect for rect in rects if rect.get("class") == "idle"]
    assert [rect.get("width") for rect in rows] == ["436", "436", "872", "872"]
    tops = [int(rect.attrib["y"]) for rect in rows]
    assert tops == sorted(set(tops))
    first, second = (float(rect.attrib["x"]) for rect in rects if rect.get("class") == "update")
    assert second - 64 == pytest.approx(2 * (first - 64), abs=0.1)


def test_the_legend_of_the_svg_names_only_what_occurs() -> None:
    texts = _texts(gantt_svg(STEP, "a plan"))
    assert {"forward", "backward", "optimizer step"} <= set(texts)
    assert not {"backward (weights)", "evaluation"} & set(texts)


def test_an_empty_timeline_can_be_drawn() -> None:
    assert "rank 0" in _texts(gantt_svg(Timeline((), 1), "nothing"))


@pytest.mark.parametrize("kind", sorted(FILLS))
def test_the_svg_is_well_formed_and_has_a_bar_for_every_kind(kind: str) -> None:
    title = "a <title> & more"
    picture = gantt_svg(Timeline((Event(0, 0.0, 1.0, kind, 0, 3),), 1), title)
    root = ElementTree.fromstring(picture)
    assert root.findtext("svg:title", namespaces=SPACE) == title
    assert "3" in [text.text for text in root.findall("svg:text", SPACE)]
