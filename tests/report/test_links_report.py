"""Measured links as text and as a picture."""

import xml.etree.ElementTree as ElementTree
from dataclasses import replace

import pytest

from pipectl.cluster import ASSUMED_BETWEEN, Cluster, Device, Node
from pipectl.link import Link
from pipectl.report.links import bandwidth_plot, links_svg, measured_links, whole_bytes

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
ALONE = replace(CLUSTER, between_nodes=ASSUMED_BETWEEN, allreduce=())


def columns_of(lines: list[str], mark: str) -> set[int]:
    rows = [line.partition("|")[2] for line in lines if "|" in line]
    return {index for row in rows for index, letter in enumerate(row) if letter == mark}


def test_each_link_has_a_curve_and_the_faster_one_is_above() -> None:
    lines = bandwidth_plot(measured_links(CLUSTER), 60)
    assert all(line.isascii() and len(line) <= 60 for line in lines)
    curve, below = (columns_of(lines, mark) for mark in "wb")
    assert len(curve) == len(below) == 60 - 14
    rows = lines[1:11]
    first, second = (next(i for i, row in enumerate(rows) if mark in row) for mark in "wb")
    assert first == 0 < second
    assert rows[0].split("|")[0].strip() == "953 MiB/s"
    assert "1 KiB" in lines[-2]
    assert "w within a node, b between nodes" in lines[-1]


@pytest.mark.parametrize("width", [1, 30, 500])
def test_the_plot_fits_any_width(width: int) -> None:
    lines = bandwidth_plot(measured_links(CLUSTER), width)[:12]
    assert max(map(len, lines)) <= max(34, min(width, 72))


def test_links_that_were_not_measured_are_not_drawn() -> None:
    lines = bandwidth_plot(measured_links(ALONE), 60)
    assert columns_of(lines, "b") == set()
    assert "between" not in lines[-1]
    assert bandwidth_plot({}, 60) == []


def test_equal_links_share_their_curve() -> None:
    lines = bandwidth_plot(measured_links(replace(CLUSTER, between_nodes=FAST)), 60)
    assert len(columns_of(lines, "*")) == 46


def test_the_picture_is_well_formed_and_shows_every_measurement() -> None:
    root = ElementTree.fromstring(links_svg(CLUSTER))
    names = [item.tag.rpartition("}")[2] for item in root.iter()]
    assert names.count("polyline") == 2 + 2
    assert names.count("circle") == 11 + 9 + 3
    texts = [item.text for item in root.iter() if item.tag.endswith("text")]
    assert {"Links of a <b> & c", "within a node", "between nodes", "2 ranks", "4 ranks"} <= {
        *texts
    }
    width, height = (float(root.attrib[key]) for key in ("width", "height"))
    for item in root.iter():
        if item.tag.endswith("circle"):
            assert 0 < float(item.attrib["cx"]) < width
            assert 0 < float(item.attrib["cy"]) < height


def test_a_picture_without_measurements_is_well_formed() -> None:
    root = ElementTree.fromstring(links_svg(replace(ALONE, within_node=Link(1e-6, 1e9))))
    assert not [item for item in root.iter() if item.tag.endswith("polyline")]


@pytest.mark.parametrize(
    ("size", "text"), [(1, "1 B"), (16 * 2**10, "16 KiB"), (100, "100 B"), (1536, "1.50 KiB")]
)
def test_sizes_have_no_superfluous_digits(size: int, text: str) -> None:
    assert whole_bytes(size) == text
