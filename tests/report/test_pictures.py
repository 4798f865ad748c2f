"""Timelines as text, and pictures of timelines, measured links and figures over steps.

What is drawn is in ``gantts.txt`` and in the pictures beside it; ``make golden`` accepts changes.
"""

import re
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from pathlib import Path

import pytest

from pipectl.cluster import ASSUMED_BETWEEN, Cluster, Device, Node
from pipectl.link import Link
from pipectl.report.charts import average_points, chart_svgs, links_svg
from pipectl.report.gantt import LOOKS, gantt, gantt_svg, legend
from pipectl.timeline import Event, Timeline, shown_ranks

HERE = Path(__file__).parent
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
ALL_KINDS = Timeline(
    tuple(
        Event(place % 2, place * 0.1, 0.1 + place * 0.1, kind, 0, place)
        for place, kind in enumerate(LOOKS)
    ),
    ranks=2,
)
LAST = Event(0, 999.0, 1000.0, "update")


def one_rank(*events):
    """Start, end and kind of each event."""
    return Timeline(tuple(Event(0, start, end, kind, 0, 0) for start, end, kind in events), 1)


def alternating(count, forward_s, backward_s, idle_s=0.0, *more):
    events = []
    for index in range(count):
        start = index * (forward_s + backward_s + idle_s)
        end = start + forward_s + backward_s
        events.append(Event(0, start, start + forward_s, "forward", 0, index))
        events.append(Event(0, start + forward_s, end, "backward", 0, index))
    return Timeline((*events, *more), 1)


def at_once(ranks, of):
    return Timeline(tuple(Event(rank, 0.0, 1.0, "forward", 0, 0) for rank in ranks), of)


def test_timelines_as_text(snapshot):
    """Each with the width of its rows."""
    short_at_the_end = one_rank((0.0, 100.0, "forward"), (100.0, 100.1, "update"))
    short_at_the_begin = one_rank((0.0, 0.1, "update"), (50.0, 100.0, "forward"))
    timelines = {
        "blocks, micro-batches and idle time": (27, STEP),
        "a narrow block keeps its kind and loses its number": (17, STEP),
        "every kind": (80, ALL_KINDS),
        "an event too short for a column": (20, short_at_the_end),
        "such an event at the beginning": (20, short_at_the_begin),
        "more blocks than columns, in proportion to their time, 1 to 2": (
            57,
            alternating(999, 1, 2),
        ),
        "as well, 1 to 1, and half of the time idle": (57, alternating(999, 1, 1, 2)),
        "as well, 3 to 5 to 2": (57, alternating(999, 3, 5, 2)),
        "many blocks in the first tenth": (57, alternating(50, 1, 1, 0.0, LAST)),
        "nothing": (27, Timeline((), 4)),
    }
    lines = []
    for name, (width, timeline) in timelines.items():
        rows = ["".join(text for text, _ in row) for row in gantt(timeline, width)]
        lines += [f"# {name}", *rows, *([legend(timeline)] if rows else []), ""]
    snapshot(HERE / "gantts.txt", "\n".join(lines))
    for width in range(17, 90):
        assert {sum(len(text) for text, _ in row) for row in gantt(STEP, width)} == {width}


def test_timelines_as_a_picture(snapshot):
    """One above the other on one axis, with round times on it."""
    slower = [e._replace(start_s=2 * e.start_s, end_s=2 * e.end_s) for e in ALL_KINDS.events]
    timelines = {"predicted": ALL_KINDS, "measured": Timeline(tuple(slower), 2)}
    picture = gantt_svg(timelines, "a <title> & more", "it is <fast>")
    snapshot(HERE / "gantt.svg", picture + "\n")
    ElementTree.fromstring(picture)
    assert ">rank 0<" in gantt_svg(Timeline((), 1), "nothing")


def test_of_many_ranks_and_actions_some_are_drawn_and_the_picture_says_so():
    assert shown_ranks(1000, 5) == [0, 250, 500, 749, 999]
    every = at_once(range(1024), 1024)
    picture = gantt_svg(every, "many", "a note")
    assert "64 of 1,024 ranks are shown" in picture
    assert {">rank 0<", ">rank 1023<"} <= set(re.findall(">rank .*?<", picture))
    assert picture.count('<rect class="forward"') == 64 + 1  # and the legend's
    assert legend(every).endswith("blank: idle, 32 of 1,024 ranks are shown)")
    times = [(rank, index) for rank in range(32) for index in range(5000)]
    events = tuple(Event(rank, time, time + 1.0, "forward", 0, time) for rank, time in times)
    assert gantt_svg(Timeline(events, 32), "many").count("<rect class") < 25_000
    measured = at_once(shown_ranks(1024, 70), 1024)
    assert len(gantt(measured, 80)) == 32
    recorded = {"predicted": every, "measured": measured}
    assert gantt_svg(recorded, "both").count('<rect class="forward"') == 2 * 64 + 1


@pytest.fixture
def cluster():
    return Cluster(
        name="a <b> & c",
        source="test",
        nodes=(Node("n0", 2, 2, Device("cpu")), Node("n1", 2, 2, Device("cpu"))),
        within_node=Link(1e-6, 1e9, timings=tuple((4**p, 1e-6 + 4**p / 1e9) for p in range(11))),
        between_nodes=Link(1e-5, 1e8, timings=tuple((4**p, 1e-5 + 4**p / 1e8) for p in range(9))),
        allreduce=((2, 4096, 1e-4), (2, 2**20, 2e-3), (4, 4096, 3e-4)),
    )


def test_measured_links_and_figures_by_step_as_pictures(cluster, snapshot):
    losses = {"training": [(1, 4.0), (2, 2.0), (3, 1.0), (9, 0.5)], "evaluation": [(5, 2.0)]}
    figures = {"loss": losses, "speed": {"": [(1, 2.0), (2, 3.0)]}, "none": {"": []}}
    loss, speed = chart_svgs(figures)
    for name, picture in (("links", links_svg(cluster)), ("steps", loss), ("speed", speed)):
        snapshot(HERE / f"{name}.svg", picture + "\n")
        ElementTree.fromstring(picture)
    free = Link(1e-6, 1e9)
    nothing = replace(cluster, within_node=free, between_nodes=ASSUMED_BETWEEN, allreduce=())
    assert "<polyline" not in links_svg(nothing)
    assert chart_svgs({"loss": {"training": []}}) == []
    for points in ([(1, 2.0)], [(1, 2.0), (2, 2.0)], [(1, -1e308), (2, 1e308), (3, 5e-324)]):
        assert "nan" not in chart_svgs({"flat": {"": points}})[0]


def test_an_outlier_does_not_flatten_a_curve_and_a_steep_beginning_is_whole():
    points = [(step, 2.0 + step % 3 / 10) for step in range(100)]
    (text,) = chart_svgs({"loss": {"training": [*points[:50], (50, 1e6), *points[51:]]}})
    assert "loss (at the border: 1 point beyond it)" in text
    (places,) = re.findall('points="([^"]+)"', text)
    ys = [float(place.split(",")[1]) for place in places.split()]
    assert max(ys) - sorted(ys)[1] > 30, "the others fill a part of the height"
    steep = [(step, 2.0 + 8 * 0.5**step) for step in range(30)]
    assert "border" not in chart_svgs({"loss": {"training": steep}})[0]


def test_a_long_curve_is_drawn_by_means():
    points = [(float(step), float(step % 2)) for step in range(100_000)]
    found = average_points(points, 1000)
    assert len(found) == 1000
    assert {y for _, y in found} == {0.5}
    assert len(chart_svgs({"loss": {"": points}})[0]) < 30_000
