"""What a job asks of the planner, and how sure a prediction is."""

from dataclasses import replace

import pytest

from pipectl.cluster import OffloadTarget, assumed_cluster
from pipectl.jobs.planning import make_plan_request
from pipectl.link import Link
from pipectl.planner.explain.what_if import MAX_SLOWER, step_range, with_slower_links
from pipectl.simulate import simulate
from pipectl.spec import load

HOST, DISK = OffloadTarget
LINKS = ("within_node", "between_nodes")
GPU, COMPILED = ("resources.gpus_per_node=1",), ("training.compile=true",)
NODE = ("resources.tasks_per_node=2", "resources.memory_per_node=8GiB")
LIMIT, MEMORY = "pipeline.memory_limit", "resources.memory_per_node"
KNOWN = Link(1e-4, 1e9)


def asked(job, profile, pipeline, overrides, disk_link=None):
    cluster = assumed_cluster("here", [1], 1, None)
    device = replace(cluster.nodes[0].device, disk_link=disk_link)
    cluster = replace(cluster, nodes=(replace(cluster.nodes[0], device=device),))
    spec = load(job, [f"pipeline={{{pipeline}}}", *overrides], check_files=False)
    return make_plan_request(spec, profile, cluster)


@pytest.mark.parametrize(
    ("pipeline", "overrides", "wanted"),
    [
        ("recompute: auto", (), {"recompute": None, "blocks": None}),
        ("recompute: none", (), {"recompute": False, "blocks": False}),
        ("recompute: all", (), {"recompute": True, "blocks": False}),
        ("recompute: blocks", (), {"recompute": True, "blocks": True}),
        ("backward: auto, recompute: all", (), {"backward_apart": None}),
        ("backward: together, recompute: all", (), {"backward_apart": False}),
        ("backward: apart, recompute: all", (), {"backward_apart": True}),
        # No backward leaves a rank that compiles.
        ("backward: auto", COMPILED, {"backward_apart": False}),
        ("backward: auto, recompute: all", COMPILED, {"backward_apart": None}),
        ("offload: disk", GPU, {"offload": True, "offload_to": DISK}),
        ("offload: host", GPU, {"offload": True, "offload_to": HOST}),
        ("offload: auto", GPU, {"offload": None, "offload_to": HOST}),
        ("offload: disk", (), {"offload": True, "offload_to": DISK}),
        ("offload: auto", (), {"offload": False}),  # nobody knows how fast the disk is
        # The smaller limit of memory counts, and its key is known.
        ("", (), {"memory_limit_bytes": None, "memory_key": LIMIT}),
        ("memory_limit: 3GiB", (), {"memory_limit_bytes": 3 << 30, "memory_key": LIMIT}),
        ("memory_limit: 3GiB", NODE, {"memory_limit_bytes": 3 << 30, "memory_key": LIMIT}),
        ("", NODE, {"memory_limit_bytes": 4 << 30, "memory_key": MEMORY}),
        ("memory_limit: 5GiB", NODE, {"memory_limit_bytes": 4 << 30, "memory_key": MEMORY}),
        ("", (*NODE, f"{MEMORY}=1B"), {"memory_limit_bytes": 0, "memory_key": MEMORY}),
    ],
)
def test_what_a_job_asks_of_the_planner(write_job, profile, pipeline, overrides, wanted):
    request = asked(write_job("resources: {nodes: 2}"), profile, pipeline, overrides)
    assert {name: getattr(request, name) for name in wanted} == wanted


def test_offloading_to_a_disk_pays_where_its_speed_is_known(write_job, profile):
    for word, offload in {"auto": None, "none": False}.items():
        request = asked(write_job(), profile, f"offload: {word}", (), KNOWN)
        assert (request.offload, request.offload_to) == (offload, DISK)


def test_assumed_links_make_a_range_and_measured_ones_a_point(pipeline):
    plan = pipeline(2, 4, node_of_rank=[0, 1], size_bytes=10**9)
    assumed = assumed_cluster("assumed", [1, 1], 1, None)
    fast_s, slow_s = step_range(plan, assumed)
    free_s = simulate(plan, with_slower_links(assumed, 0.0)).step_time_s
    assert fast_s == pytest.approx(free_s)
    assert slow_s == simulate(plan, with_slower_links(assumed, MAX_SLOWER[1])).step_time_s
    links = {name: replace(getattr(assumed, name), assumed=False) for name in LINKS}
    assert step_range(plan, replace(assumed, assumed=False, **links)) is None
    narrow = pipeline(2, 4, node_of_rank=[0, 1], size_bytes=1000)
    assert step_range(narrow, assumed) is None
