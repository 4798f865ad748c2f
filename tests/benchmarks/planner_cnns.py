"""Ten convolutional networks on 4 and 8 devices

    python tests/benchmarks/planner_cnns.py [NAME ...]

Batch 128, images of 32 pixels (AlexNet 64, Inception-v3 75 without its auxiliary classifier);
operators measured on one core; one device per node, links of 100 Gbit/s. The planner chooses
stages, micro-batches, schedule and warm-up, and *with replicas* the devices per stage. The speed-up
is that of the simulated step over one device with its best micro-batch size. *Attainable* is a
bound of it. A pipeline of p stages and m micro-batches gains at most min(total / largest operator,
m p / (m + p - 1)), and a sample takes longer in a small micro-batch: so over all sizes b, it is the
step of one device over m T(b), times that bound at size b (with replicas, times the smaller of p
and m, without sums of gradients and optimizer steps). *Paper* is the planning time in Table 1 of
the antichain paper.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from math import ceil
from pathlib import Path

from pipectl.cluster import Cluster
from pipectl.link import Link
from pipectl.plan import Plan
from pipectl.planner import PlanRequest, make_plan
from pipectl.planner.costs.stage_costs import OperatorTimes
from pipectl.profile import Profile
from tests.benchmarks.jobs import cluster_of, pipectl, print_table, vision, write_job

BATCH = 128
SGD = {"factory": "torch.optim:SGD", "kwargs": {"lr": 0.01, "momentum": 0.9}}
FOLDER = Path("build/planner-profiles").absolute()
LARGER = {"alexnet": 64, "inception_v3": 75}
"""Pixels of the images of networks that take none of 32."""
KWARGS = {"inception_v3": {"aux_logits": False, "init_weights": False}}
DEVICES = (4, 8)
PAPER_S = {
    "vgg16": (0.01, 0.03),
    "resnet18": (0.07, 0.21),
    "resnet50": (0.38, 1.17),
    "resnet101": (1.20, 3.69),
    "alexnet": (0.02, 0.01),
    "resnext50_32x4d": (0.41, 1.17),
    "resnext101_32x8d": (1.21, 3.58),
    "inception_v3": (2.64, 3.76),
    "densenet121": (1.28, 3.73),
    "squeezenet1_0": (0.06, 0.20),
}
"""Planning seconds in the antichain paper's Table 1, at 4 and 8 devices: its best column."""
REPEATS = 9
LINK = Link(latency_s=2e-6, bandwidth_bytes_per_s=12e9)
"""Of 100 Gbit/s."""
COLUMNS = (
    *("network", "devices", "operators", "paper s", "planning s", "with replicas s", "speed-up"),
    *("attainable", "with replicas", "attainable with replicas"),
    *("stages x micro-batches", "replicas x micro-batches"),
)


def profile_of(name: str) -> Profile:
    """The profile of one network of torchvision, unchanged; measured once."""
    file = FOLDER / f"{name}.json"
    if not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        parts = vision(name, pixels=LARGER.get(name, 32), **KWARGS.get(name, {}))
        write_job(FOLDER, {**parts, "optimizer": SGD}, BATCH, 1)
        pipectl(FOLDER, "profile", "job.yaml", "--scheduler", "local", "-o", str(file))
    return Profile.load(file)


def timed_plan(profile: Profile, cluster: Cluster, request: PlanRequest) -> tuple[Plan, float]:
    """The plan, and the median of a few planning times."""
    times = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        plan = make_plan(profile, cluster, request)
        times.append(time.perf_counter() - start)
    return plan, sorted(times)[REPEATS // 2]


def attainable(profile: Profile, alone_s: float, devices: int) -> tuple[float, float]:
    """What no plan exceeds with the measured times: one device a stage, and with replicas.

    Over all sizes b, with m = 128 / b of them and T(b) what one takes at least: the gain of one
    device at its best size over size b, times the bound of a pipeline, or the smaller of the
    devices' share and what is left of the step if everything but one slice takes no time.
    """
    times, found = OperatorTimes(profile), [(0.0, 0.0)]
    for size in range(1, BATCH + 1):
        one = times.at(size).cached.sum(axis=0)
        m, slices = ceil(BATCH / size), BATCH / size
        gain = alone_s / (slices * one.sum())
        pipeline = min(one.sum() / one.max(), m * devices / (m + devices - 1))
        found.append((gain * pipeline, gain * min(devices, slices)))
    return max(first for first, _ in found), max(second for _, second in found)


def row(name: str, profile: Profile, devices: int) -> tuple[object, ...]:
    request = PlanRequest(name, BATCH)
    alone_s = make_plan(profile, cluster_of(1, LINK), request).predicted_step_s
    straight, straight_s = timed_plan(
        profile, cluster_of(devices, LINK), replace(request, replicas=1)
    )
    both = replace(request, replicas=None, replication=None)
    hybrid, hybrid_s = timed_plan(profile, cluster_of(devices, LINK), both)
    paper_s = PAPER_S[name][DEVICES.index(devices)]
    most = attainable(profile, alone_s, devices)
    return (
        *(name, devices, len(profile.operators), f"{paper_s:g}"),
        *(f"{straight_s:.4f}", f"{hybrid_s:.3f}"),
        *(f"{alone_s / straight.predicted_step_s:.2f}", f"{most[0]:.2f}"),
        *(f"{alone_s / hybrid.predicted_step_s:.2f}", f"{most[1]:.2f}"),
        f"{len(straight.stages)} x {straight.micro_batches}",
        f"{' '.join(str(len(stage.ranks)) for stage in hybrid.stages)} x {hybrid.micro_batches}",
    )


def main(names: Sequence[str]) -> None:
    profiles = {name: profile_of(name) for name in names}
    for name, profile in profiles.items():
        make_plan(profile, cluster_of(2, LINK), PlanRequest(name, BATCH))
    pairs = product(profiles.items(), DEVICES)
    print_table(COLUMNS, (row(*network, devices) for network, devices in pairs))


if __name__ == "__main__":
    main(sys.argv[1:] or list(PAPER_S))
