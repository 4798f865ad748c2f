"""Two kinds of devices

    PIPECTL_WORKLOADS=DIRECTORY python tests/benchmarks/planner_heterogeneous.py

Two nodes of two slow devices (speed 1, 32 GiB), two of two fast ones (speed 3, 16 GiB); links
25 GB/s within and 10 GB/s between nodes. *Equal*: the best plan for eight equal devices, executed
by the simulator on these.
"""

import os
import time
from dataclasses import replace
from pathlib import Path

from tables import print_table

from pipectl.cluster import Cluster, Device, Node
from pipectl.link import Link
from pipectl.planner import PlanRequest, make_plan
from pipectl.planner.graph.imported import prepared
from pipectl.profile import Profile
from pipectl.simulate import simulate

MODELS = ["pipedream-vgg16", "pipedream-resnet50", "pipedream-gnmt", "dapple-bert-24-pbs-6"]
SLOW = Device("slow", 1.0, 32 * 2**30)
FAST = Device("fast", 3.0, 16 * 2**30)
WITHIN, BETWEEN = Link(1e-5, 2.5e10), Link(3e-5, 1e10)
MICRO_BATCHES = 32
COLUMNS = ("model", "equal s", "step s", "shorter by", "stages on", "gap", "planning s")


def cluster_of(*devices: Device) -> Cluster:
    """A node of two ranks for each device."""
    nodes = tuple(Node(f"n{i}", 2, 2, device) for i, device in enumerate(devices))
    return Cluster("mixed", "assumed", nodes, WITHIN, BETWEEN)


def row(name: str, directory: Path) -> tuple[str, ...]:
    """One model, on two nodes of each kind."""
    profile = prepared(Profile.load(directory / f"{name}.json"))
    request = PlanRequest(name, MICRO_BATCHES * profile.micro_batch_size, MICRO_BATCHES)
    mixed = cluster_of(SLOW, SLOW, FAST, FAST)
    smallest = min(SLOW.memory_bytes, FAST.memory_bytes)
    same = replace(SLOW, memory_bytes=smallest)
    equal = make_plan(profile, cluster_of(same, same, same, same), request)
    equal_s = simulate(equal, mixed).step_time_s
    started = time.perf_counter()
    plan = make_plan(profile, mixed, request)
    seconds = time.perf_counter() - started
    step_s = plan.prediction.step_time_s
    shown = " ".join(mixed.device(stage.ranks[0]).kind[0] for stage in plan.stages)
    return (
        *(name, f"{equal_s:.3f}", f"{step_s:.3f}", f"{1 - step_s / equal_s:.0%}"),
        *(shown, f"{plan.search.gap:.0%}", f"{seconds:.1f}"),
    )


def main() -> None:
    directory = Path(os.environ["PIPECTL_WORKLOADS"])
    print_table(COLUMNS, (row(name, directory) for name in MODELS))


if __name__ == "__main__":
    main()
