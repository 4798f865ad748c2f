"""Charts of measured links and of figures over steps."""

import re
import xml.etree.ElementTree as ElementTree
from dataclasses import replace

from pipectl.cluster import ASSUMED_BETWEEN, Cluster, Device, Node
from pipectl.link import Link
from pipectl.report.charts import average_points, links_svg, steps_svg

FREE = Link(1e-6, 1e9)
FAST = Link(1e-6, 1e9, timings=tuple((4**p, 1e-6 + 4**p / 1e9) for p in range(11)))
SLOW = Link(1e-5, 1e8, timings=tuple((4**p, 1e-5 + 4**p / 1e8) for p in range(9)))
CLUSTER = Cluster(
    name="a <b> & c",
    source="test",
    nodes=(Node("n0", 2, 2, Device("cpu")), Node("n1", 2, 2, Device("cpu"))),
    within_node=FAST,
    between_nodes=SLOW,
    allreduce=((2, 4096, 1e-4), (2, 2**20, 2e-3), (4, 4096, 3e-4)),
)


def test_the_picture_of_links_is_well_formed_and_shows_every_measurement():
    root = ElementTree.fromstring(links_svg(CLUSTER))
    names = [item.tag.rpartition("}")[2] for item in root.iter()]
    assert names.count("polyline") == 2 + 2
    assert names.count("circle") == 11 + 9 + 3
    texts = [item.text for item in root.iter() if item.tag.endswith("text")]
    assert {"Links of a <b> & c", "within a node", "between nodes", "2 ranks", "4 ranks"} <= {
        *texts
    }
    assert {"16 KiB", "64 KiB", "1 MiB"} & {*texts}, "without superfluous digits"
    for item in root.iter():
        if item.tag.endswith("circle"):
            assert 0 <= float(item.attrib["cx"]) <= 440
            assert 0 <= float(item.attrib["cy"]) <= 220
    nothing = replace(CLUSTER, within_node=FREE, between_nodes=ASSUMED_BETWEEN, allreduce=())
    root = ElementTree.fromstring(links_svg(nothing))
    assert not [item for item in root.iter() if item.tag.endswith("polyline")]


def test_figures_by_step():
    assert steps_svg({"loss": {"training": []}}) == ""
    text = steps_svg({"loss": {"training": [(1, 4.0), (2, 2.0), (3, 1.0)]}, "speed": {}})
    places = re.search('points="([^"]+)"', text)
    assert places is not None
    xs, ys = zip(*(map(float, place.split(",")) for place in places[1].split()), strict=True)
    assert list(xs) == sorted(xs)
    assert list(ys) == sorted(ys), "downwards on a screen is up"
    assert ">4<" in text
    assert ">1.5<" in text
    assert text.count("<polyline") == 1
    for points in ([(1, 2.0)], [(1, 2.0), (2, 2.0)], [(1, -1e308), (2, 1e308), (3, 5e-324)]):
        assert "nan" not in steps_svg({"flat": {"": points}})
    both = steps_svg({"loss": {"training": [(1, 4.0), (9, 1.0)], "evaluation": [(5, 2.0)]}})
    assert both.count("<polyline") == 2
    assert {">training<", ">evaluation<", ">step<"} <= set(re.findall(">[a-z]+<", both))


def test_an_outlier_does_not_flatten_a_curve_and_a_steep_beginning_is_whole():
    points = [(step, 2.0 + step % 3 / 10) for step in range(100)]
    text = steps_svg({"loss": {"training": [*points[:50], (50, 1e6), *points[51:]]}})
    assert "loss (at the border: 1 point beyond it)" in text
    places = re.search('points="([^"]+)"', text)
    assert places is not None
    ys = [float(place.split(",")[1]) for place in places[1].split()]
    assert max(ys) - sorted(ys)[1] > 30, "the others fill a part of the height"
    steep = [(step, 2.0 + 8 * 0.5**step) for step in range(30)]
    assert "border" not in steps_svg({"loss": {"training": steep}})


def test_a_long_curve_is_drawn_by_means():
    points = [(float(step), float(step % 2)) for step in range(100_000)]
    found = average_points(points, 1000)
    assert len(found) == 1000
    assert {y for _, y in found} == {0.5}
    assert len(steps_svg({"loss": {"": points}})) < 30_000
