"""What a job asks of the planner, and how sure a prediction is."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from pipectl.cluster import OffloadTarget, assumed_cluster
from pipectl.jobs.planning import make_plan_request
from pipectl.link import Link
from pipectl.planner import PlanRequest
from pipectl.planner.explain.what_if import MAX_SLOWER, step_range, with_slower_links
from pipectl.profile import Operator, Profile
from pipectl.simulate import simulate
from pipectl.spec import load

HOST, DISK = OffloadTarget
LINKS = ("within_node", "between_nodes")
PROFILE = Profile("tiny", "test", 1, (Operator("a", "a", 0.1, 0.2, 0, 0, 0),), (), None)
WriteJob = Callable[..., Path]


def asked(
    write_job: WriteJob,
    pipeline: str,
    accelerators: int = 0,
    disk: Link | None = None,
    overrides: tuple[str, ...] = (),
) -> PlanRequest:
    resources = f"resources: {{nodes: 2, gpus_per_node: {accelerators}}}"
    job = write_job(f"pipeline: {pipeline}", resources)
    cluster = assumed_cluster("here", [1], 1, None)
    device = replace(cluster.nodes[0].device, disk_link=disk)
    cluster = replace(cluster, nodes=(replace(cluster.nodes[0], device=device),))
    spec = load(job, overrides, check_files=False)
    return make_plan_request(spec, PROFILE, cluster)


@pytest.mark.parametrize(
    ("word", "wanted"),
    [
        ("auto", (None, None)),
        ("none", (False, False)),
        ("all", (True, False)),
        ("blocks", (True, True)),
    ],
)
def test_recomputation(write_job, word, wanted):
    request = asked(write_job, f"{{recompute: {word}}}")
    assert (request.recompute, request.blocks) == wanted


@pytest.mark.parametrize(
    ("word", "accelerators", "disk", "wanted"),
    [
        ("none", 0, Link(1e-4, 1e9), (False, DISK)),
        ("disk", 0, None, (True, DISK)),
        ("disk", 1, None, (True, DISK)),
        ("host", 1, None, (True, HOST)),
        ("auto", 1, None, (None, HOST)),
        ("auto", 0, Link(1e-4, 1e9), (None, DISK)),
        ("auto", 0, None, (False, DISK)),  # nobody knows how fast the disk is
    ],
)
def test_offload(write_job, word, accelerators, disk, wanted):
    request = asked(write_job, f"{{offload: {word}}}", accelerators, disk)
    assert (request.offload, request.offload_to) == wanted


@pytest.mark.parametrize(("word", "wanted"), [("auto", None), ("together", False), ("apart", True)])
def test_backwards_of_their_own(write_job, word, wanted):
    request = asked(write_job, f"{{backward: {word}, recompute: all}}")
    assert request.backward_apart is wanted


@pytest.mark.parametrize(
    ("memory_limit", "per_node", "limit", "key"),
    [
        ("auto", None, None, "pipeline.memory_limit"),
        ("3GiB", None, 3, "pipeline.memory_limit"),
        ("3GiB", "8GiB", 3, "pipeline.memory_limit"),
        ("auto", "8GiB", 4, "resources.memory_per_node"),
        ("5GiB", "8GiB", 4, "resources.memory_per_node"),
        ("auto", "1B", 0, "resources.memory_per_node"),
    ],
)
def test_the_smaller_limit_of_memory_counts_and_its_key_is_known(
    write_job, memory_limit, per_node, limit, key
):
    overrides = ["resources.tasks_per_node=2", f"resources.memory_per_node={per_node or 'null'}"]
    if memory_limit != "auto":
        overrides.append(f"pipeline.memory_limit={memory_limit}")
    request = asked(write_job, "{}", overrides=tuple(overrides))
    assert request.memory_limit_bytes == (None if limit is None else limit * 2**30)
    assert request.memory_key == key


def test_no_backward_leaves_a_rank_that_compiles(write_job):
    compiled = ("training.compile=true",)
    request = asked(write_job, "{backward: auto}", overrides=compiled)
    assert request.backward_apart is False
    request = asked(write_job, "{backward: auto, recompute: all}", overrides=compiled)
    assert request.backward_apart is None


def test_assumed_links_make_a_range_and_measured_ones_a_point(pipeline):
    plan = pipeline(2, 4, node_of_rank=[0, 1], size_bytes=10**9)
    assumed = assumed_cluster("assumed", [1, 1], 1, None)
    fast_s, slow_s = step_range(plan, assumed)
    free_s = simulate(plan, with_slower_links(assumed, 0.0)).step_time_s
    assert fast_s == pytest.approx(free_s)
    assert slow_s == simulate(plan, with_slower_links(assumed, MAX_SLOWER[1])).step_time_s
    links = {name: replace(getattr(assumed, name), assumed=False) for name in LINKS}
    assert step_range(plan, replace(assumed, assumed=False, **links)) is None


def test_a_range_that_is_narrow_is_a_point(pipeline):
    plan = pipeline(2, 4, node_of_rank=[0, 1], size_bytes=1000)
    assert step_range(plan, assumed_cluster("assumed", [1, 1], 1, None)) is None
