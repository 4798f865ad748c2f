"""Measured links as a picture."""

import xml.etree.ElementTree as ElementTree
from dataclasses import replace

import pytest

from pipectl.cluster import ASSUMED_BETWEEN, Cluster, Device, Node
from pipectl.link import Link
from pipectl.report.links import links_svg, whole_bytes

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
