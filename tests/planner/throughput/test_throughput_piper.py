"""Piper's own workload: its objective recomputed from its plans, and its plans matched.

Needs the directory of published profiles that ``PIPECTL_WORKLOADS`` names.
"""

import json
import os
from pathlib import Path

import pytest

from pipectl.planner.throughput import ThroughputRequest, plan_throughput
from pipectl.planner.throughput.cost import stage_memory_bytes, stage_time_s
from pipectl.planner.throughput.model import workload_of
from pipectl.profile import Profile

DIRECTORY = os.environ.get("PIPECTL_WORKLOADS")
PRECISION = 1e-11
"""The published values are printed with twelve digits."""

pytestmark = pytest.mark.skipif(
    DIRECTORY is None, reason="PIPECTL_WORKLOADS names no directory of published profiles"
)


@pytest.fixture(scope="module")
def path():
    return Path(DIRECTORY) / "piper-bert32a100.json"


@pytest.fixture(scope="module")
def profile(path):
    return Profile.load(path)


@pytest.fixture(scope="module")
def work(profile):
    return workload_of(profile)


@pytest.fixture(scope="module")
def known(path):
    return json.loads(path.read_text())["best_known"]


def request_of(entry):
    return ThroughputRequest(
        devices=entry["devices"],
        memory_limit_bytes=entry["memory_limit_bytes"],
        bandwidth_bytes_per_s=entry["bandwidth_bytes_per_s"],
        micro_batches=entry.get("microbatches_in_batch", 1920),
    )


def by_ratio(table, blocks, tensor, in_flight, limit_bytes):
    """Piper's rule: recompute by rising time per byte until the stage fits."""
    ways = {block: table[block][tensor][0] for block in blocks}

    def ratio(block):
        plain, again = table[block][tensor]
        saved = stage_memory_bytes([plain], in_flight) - stage_memory_bytes([again], in_flight)
        return (again.time_s - plain.time_s) / saved if saved > 0 else float("inf")

    for block in sorted(blocks, key=ratio):
        if stage_memory_bytes(ways.values(), in_flight) <= limit_bytes:
            break
        ways[block] = table[block][tensor][1]
    return ways


def times(work, request, stages, ways_of):
    """Time of every stage, given as (blocks, replicas, t); and how many blocks recompute."""
    behind, found = 0, []
    for blocks, replicas, tensor in reversed(stages):
        behind += replicas
        in_flight = -(-behind // replicas)
        ways = ways_of(blocks, tensor, in_flight)
        if stage_memory_bytes(ways.values(), in_flight) > request.memory_limit_bytes:
            return None
        time_s = stage_time_s(work, request, ways, tensor, replicas)
        found.insert(0, (time_s, sum(way.recompute for way in ways.values())))
    return found


def test_values_of_its_plans_are_reproduced(work, known) -> None:
    block_of = {names[0]: block for block, names in enumerate(work.names)}
    solved = [entry for entry in known if "stages" in entry]
    assert len(solved) == 11
    for entry in solved:
        request = request_of(entry)
        blocks = [[block_of[node] for node in stage["nodes"]] for stage in entry["stages"]]
        stages = list(zip(blocks, entry["data_parallel"], entry["tensor_parallel"], strict=True))

        def ways_of(blocks, tensor, in_flight, limit=request.memory_limit_bytes):
            return by_ratio(work.ways, blocks, tensor, in_flight, limit)

        found = times(work, request, stages, ways_of)
        assert max(time for time, _ in found) == pytest.approx(entry["value"], rel=PRECISION)
        assert [count for _, count in found] == entry["recompute_nodes"]


def equal_splits(work, profile, request):
    """Layers split evenly, equal replicas, recomputation everywhere or nowhere (no t)."""
    block_of = {names[0]: block for block, names in enumerate(work.names)}
    layers = [o.id for o in profile.operators if o.name == "ParallelTransformerLayer"]
    place = profile.operators.index
    start = place(profile.by_id[layers[0]])
    others = [o.id for o in profile.operators if o.id not in layers]
    early = [node for node in others if place(profile.by_id[node]) < start]
    late = [node for node in others if node not in early]
    for count in range(1, min(request.devices, len(layers)) + 1):
        size, larger = divmod(len(layers), count)
        sizes = [size + (stage >= count - larger) for stage in range(count)]
        starts = [sum(sizes[:stage]) for stage in range(count)]
        nodes = [layers[i : i + n] for i, n in zip(starts, sizes, strict=True)]
        nodes = [early + nodes[0], *nodes[1:]] if count > 1 else [early + nodes[0]]
        nodes[-1] = nodes[-1] + late
        blocks = [[block_of[node] for node in stage] for stage in nodes]
        for replicas in request.degrees:
            if count * replicas <= min(request.devices, request.micro_batches):
                yield [(stage, replicas, 1) for stage in blocks]


def test_values_of_the_equal_splits_are_reproduced(work, profile, known) -> None:
    baselines = [entry for entry in known if entry["value"] and "stages" not in entry]
    assert len(baselines) == 11
    for entry in baselines:
        request = request_of(entry)
        values = []
        for stages in equal_splits(work, profile, request):
            for column in (0, 1):

                def ways_of(blocks, tensor, _, column=column):
                    return {block: work.ways[block][tensor][column] for block in blocks}

                found = times(work, request, stages, ways_of)
                values += [max(time for time, _ in found)] if found else []
        assert min(values) == pytest.approx(entry["value"], rel=PRECISION)


def test_its_plans_are_matched_and_proven_best(profile, known) -> None:
    for entry in known:
        if "stages" in entry or entry["value"] is None:
            plan = plan_throughput(profile, request_of(entry))
            assert plan.exact
            assert plan.devices <= entry["devices"]
            limit = entry["memory_limit_bytes"]
            assert all(stage.memory_bytes <= limit for stage in plan.stages)
            if entry["value"] is not None:
                assert plan.value_s <= entry["value"] * (1 + PRECISION)


def test_the_same_question_has_the_same_answer(profile) -> None:
    request = ThroughputRequest(96, 12 << 30, 1e10, 480)
    assert plan_throughput(profile, request) == plan_throughput(profile, request)
