"""Times by size, of links and of rows of programs, and the cluster descriptions that hold them."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipectl.cluster import ASSUMED_BETWEEN, MAX_RANKS, Cluster, Device, Node, assumed_cluster
from pipectl.errors import DataFileError
from pipectl.fields import read_value, write_value
from pipectl.jobs.output import UNKNOWN_ROWS, complete_cluster
from pipectl.link import BySize, Link, Observed, RowTimes, measured_link, seconds_of
from pipectl.profile import Profile
from pipectl.profile_parts import MeasuredOn
from pipectl.spec import JobSpec
from pipectl.spec.load import SpecFile

LINK = Link(1e-5, 1e9, timings=((1, 1e-5), (1024, 3e-5), (4096, 3e-5), (10000, 9e-5)))
CLUSTER = Cluster(
    name="measured",
    source="measured with MPICH 5.0: 4 ranks on 2 hosts",
    nodes=tuple(Node(f"n{i}", 2, 2, Device("cpu", memory_bytes=2**30)) for i in range(2)),
    within_node=replace(LINK, duplex=False, observed=Observed(both_ways=1.9)),
    between_nodes=replace(
        LINK, shared=False, observed=Observed(1.1, 2, 1.2, ((2**20, 0.25, 0.75),))
    ),
    allreduce=((2, 4096, 1e-4), (4, 4096, 2e-4)),
    key="abc",
)


@pytest.mark.parametrize(
    ("size", "time_s"),
    [
        (0, 1e-5),  # no faster than the smallest
        (1, 1e-5),
        (512.5, 2e-5),  # halfway
        (1024, 3e-5),
        (2000, 3e-5),  # flat
        (10000, 9e-5),
        (11000, 9e-5 + 1e-6),  # the rest at full bandwidth
    ],
)
def test_times_between_and_beyond_measured_sizes(size: float, time_s: float) -> None:
    assert LINK.transfer_s(size) == pytest.approx(time_s)
    assert LINK.hold_s(size) == pytest.approx(time_s - 1e-5)


def test_a_measured_link_falls_nowhere_and_keeps_the_faster_time() -> None:
    link = measured_link([(1, 5e-6), (4, 2e-6), (16, 3e-6), (64, 3e-6), (1024, 1e-5)])
    assert link.timings == ((1, 2e-6), (4, 2e-6), (16, 3e-6), (64, 3e-6), (1024, 1e-5))
    assert link.latency_s == 2e-6
    assert link.bandwidth_bytes_per_s == pytest.approx(1023 / 8e-6)
    equally_fast = measured_link([(1, 4e-6), (4, 2e-6)])
    assert equally_fast.bandwidth_bytes_per_s == pytest.approx(4 / 2e-6)


@given(
    times=st.lists(st.floats(1e-7, 1.0), min_size=1, max_size=14),
    sizes=st.lists(st.floats(0, 1e9), min_size=2, max_size=20),
)
def test_larger_messages_never_take_less(times: list[float], sizes: list[float]) -> None:
    link = measured_link([(4**power, time_s) for power, time_s in enumerate(times)])
    found = [link.transfer_s(size) for size in sorted(sizes)]
    assert all(a <= b * (1 + 1e-12) for a, b in pairwise(found))
    assert read_value(Link, write_value(link)) == link


def test_a_cluster_survives_the_file_with_all_that_was_measured(tmp_path: Path) -> None:
    device = replace(CLUSTER.nodes[0].device, host_link=Link(1e-5, 2e10))
    nodes = tuple(
        replace(node, device=device, switch=name)
        for node, name in zip(CLUSTER.nodes, "ab", strict=True)
    )
    between = replace(CLUSTER.between_nodes, interface=True)
    cluster = replace(CLUSTER, nodes=nodes, between_nodes=between, between_switches=LINK)
    cluster.save(tmp_path / "cluster.json")
    assert Cluster.load(tmp_path / "cluster.json") == cluster


def test_a_file_without_the_new_fields_is_read_as_before() -> None:
    document = assumed_cluster("old", [2, 2], 2, None).to_json()
    for link in document["links"].values():
        link.pop("assumed")
    found = Cluster.from_json(document)
    assert found.between_nodes == Link(50e-6, 1.1e9, duplex=True, shared=True)
    assert (found.allreduce, found.key, found.between_switches) == ((), None, None)
    assert {(node.switch, node.device.host_link) for node in found.nodes} == {(None, None)}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"timings": [[1, 1e-6], [1, 2e-6]]}, "timings: must be of rising sizes"),
        ({"timings": [[1, 2e-6], [4, 1e-6]]}, "and times that do not fall"),
        ({"timings": [[1, 1e-6, 3]]}, "timings[0]: must be a list of 2 values"),
        ({"timings": [[1, -1e-6]]}, "timings[0][1]: must be a finite number of at least 0"),
        ({"timings": [[1, True]]}, "timings[0][1]: must be a number"),
        ({"timings": {"1": 1e-6}}, "timings: must be a list"),
        ({"bandwidth_bytes_per_s": 0}, "bandwidth_bytes_per_s: must be above 0"),
        ({"bandwidth_bytes_per_s": None}, "bandwidth_bytes_per_s: missing"),
        ({"shared": "yes"}, "shared: must be true or false"),
        ({"observed": {"pairs": 1.5}}, "observed.pairs: must be a whole number"),
        ({"ranks": 8_000_000_000}, "c.json: nodes: 8,000,000,002 ranks; "),
        ({"ranks": MAX_RANKS - 1}, "131,073 ranks; "),
        ({"ranks": 2, "shares": [0.5]}, "c.json: nodes[0].shares: 1 for 2 ranks"),
    ],
)
def test_a_bad_link_and_too_many_ranks_are_named(change: dict[str, Any], message: str) -> None:
    document = CLUSTER.to_json()
    document["nodes"][0]["ranks"] = MAX_RANKS - 2
    assert Cluster.from_json(document).ranks == MAX_RANKS
    place = document["nodes"][0] if "ranks" in change else document["links"]["between_nodes"]
    place.update(change)
    with pytest.raises(DataFileError) as caught:
        Cluster.from_json(document, file="c.json")
    assert message in caught.value.message
    assert ("links.between_nodes." in caught.value.message) is ("ranks" not in change)


def test_only_links_that_are_used_and_assumed_are_assumptions() -> None:
    assumed = replace(CLUSTER, between_nodes=ASSUMED_BETWEEN)
    assert CLUSTER.assumptions == ()
    assert assumed.assumptions == ("the link between nodes is assumed, not measured",)
    assert replace(assumed, nodes=CLUSTER.nodes[:1]).assumptions == ()
    within = replace(CLUSTER, within_node=replace(LINK, assumed=True))
    assert within.assumptions == ("the link within a node is assumed, not measured",)
    assert len(assumed_cluster("a", [2, 2], 2, None).assumptions) == 1
    nodes = (replace(CLUSTER.nodes[0], switch="a"), replace(CLUSTER.nodes[1], switch="b"))
    switched = replace(CLUSTER, nodes=nodes, between_switches=ASSUMED_BETWEEN)
    assert switched.assumptions == ("the link between switches is assumed, not measured",)
    assert replace(switched, nodes=CLUSTER.nodes).assumptions == ()


ROWS = RowTimes(
    send_start=((100, 1e-5), (300, 3e-5)),
    send_wait=((100, 1e-6),),
    compute=2e-5,
    begin=1e-4,
    end=2e-4,
    agree=3e-4,
)


@pytest.mark.parametrize(
    ("rows", "size", "seconds"),
    [
        (ROWS.send_start, 0, 1e-5),
        (ROWS.send_start, 200, 2e-5),
        (ROWS.send_start, 500, 5e-5),
        (ROWS.send_wait, 10**6, 1e-6),
        (ROWS.receive_wait, 10**6, 0.0),
        (((1, 3e-5), (2, 1e-5)), 100, 0.0),  # they fall, but not below 0
    ],
)
def test_times_of_rows_are_linear_between_sizes_and_beyond_the_largest(
    rows: BySize, size: float, seconds: float
) -> None:
    assert seconds_of(rows, size) == pytest.approx(seconds)


def test_a_cluster_keeps_the_rows_of_its_devices_and_takes_others_from_a_profile() -> None:
    """Rows that are known end what a profile assumes of them."""
    unknown = assumed_cluster("c", [2, 2], 2, None)
    assert unknown.with_rows(None) is unknown
    known = unknown.with_rows(ROWS)
    assert [node.device.rows for node in known.nodes] == [ROWS, ROWS]
    assert Cluster.from_json(known.to_json()) == known
    assert known.with_rows(replace(ROWS, compute=1.0)) is known
    profile = Profile("p", "test", 1, (), (), assumptions=(f"{UNKNOWN_ROWS} (why)", "other"))
    spec = parse("training: {steps: 1, batch_size: 1}")
    assert complete_cluster(spec, profile, unknown) == (profile, unknown)
    assert complete_cluster(spec, profile, known) == (
        replace(profile, assumptions=("other",)),
        known,
    )


@pytest.mark.parametrize(
    ("kind", "training", "resources", "stated", "peak"),
    [
        ("NVIDIA H200", "precision: bf16-weights", "gpus_per_node: 2", None, 989e12),
        ("NVIDIA H200", "precision: bf16", "gpus_per_node: 1", None, 989e12 / 2),
        ("NVIDIA A100-SXM4-80GB", "seed: 1", "gpus_per_node: 2", None, 19.5e12),
        (
            "NVIDIA A100-SXM4-80GB",
            "float32_matmul_precision: high",
            "gpus_per_node: 2",
            None,
            156e12,
        ),
        ("AMD Instinct MI250X", "precision: float16", "gpus_per_node: 4", None, 191.5e12),
        ("Tesla V100-SXM2-16GB", "precision: bf16", "gpus_per_node: 2", None, None),
        ("Tesla V100-SXM2-16GB", "precision: float16", "gpus_per_node: 2", 9e12, 9e12),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", "precision: bf16", "gpus_per_node: 2", None, None),
        ("NVIDIA RTX A4000", "precision: bf16", "gpus_per_node: 2", None, None),
        ("pretended", "precision: bf16", "gpus_per_node: 2", None, None),
        ("cpu", "precision: bf16", "gpus_per_node: 0", None, None),
    ],
)
def test_peak_and_memory_of_a_rank_follow_from_accelerator_and_precision(
    kind: str, training: str, resources: str, stated: float | None, peak: float | None
) -> None:
    """Ranks share accelerators; what the cluster file says counts more."""
    spec = parse(
        f"training: {{steps: 1, batch_size: 1, {training}}}\n"
        f"resources: {{tasks_per_node: 2, {resources}}}"
    )
    device = MeasuredOn(kind, memory_bytes=2**30)
    profile = Profile("p", "test", 1, (), (), device=device)
    cluster = assumed_cluster("c", [2], 2, None).with_figures(stated, None)
    _, found = complete_cluster(spec, profile, cluster)
    assert found.peak_flops_per_s([0, 0]) == (None if peak is None else 2 * peak)
    share = min(1.0, spec.resources.gpus_per_node / 2)
    assert found.memory_of(0, None) == (2**30 * share if share else math.inf)
    assert found.with_figures(None, 7).memory_of(0, None) == (2**30 * share or 7)


def parse(text: str) -> JobSpec:
    """A job with some sections of its own."""
    text = "model: m:f\nloss: m:f\ndata: m:f\n" + text
    return SpecFile.read(Path("job"), (), (), text).spec(check_files=False)
