"""Short of memory: keep activations, recompute, or offload.

Offload is hidden if ``saved bytes / bandwidth <= forward time``.

A GPT trains on two ranks under 1F1B with a deep warm-up; steps for a slow disk are predicted.
Accelerators, PipeDream and PipeFB are on [the page of claims](claims.md#offload-and-pipefb).

    python tests/benchmarks/offload.py [--rounds COUNT]
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml
from in_turns import WORKER, Job, cluster_of, gpt, peak_of, profiled, run_worker
from tables import print_table

from pipectl.cluster import Cluster, OffloadTarget
from pipectl.jobs.job import TIGHT_HEAP
from pipectl.link import Link
from pipectl.plan import Plan
from pipectl.planner import PlanRequest, make_plan
from pipectl.profile import Profile
from pipectl.runs import RunDirectory, read_metrics
from pipectl.runtime.offload import DiskStore, Pages
from pipectl.units import format_bytes

RANKS, MICRO_BATCHES, SAMPLES = 2, 16, 4
"""Of the trained job; samples of a micro-batch."""
JOB: Job = gpt(layers=4, width=768, batch=MICRO_BATCHES * SAMPLES)
TOO_SLOW = 4
JOB_RANKS, JOB_MICRO_BATCHES = 4, 8
FIRST_STEPS, JOB_STEPS = 2, 5
"""Of a job: those that do not count, and those that do."""


@dataclass
class Way:
    """A way to save memory: its plan, and its measured steps and peaks."""

    plan: Plan
    steps_s: list[float] = field(default_factory=list)
    peaks: list[int] = field(default_factory=list)

    def train(self, profile: Profile, folder: Path, name: str) -> None:
        """Add what the metrics and the heartbeat of a job say that trains the plan."""
        run = RunDirectory.create(folder / "runs", name, 0.0)
        document = yaml.safe_load((folder / "job.yaml").read_text())
        batches = document["training"]["batch_size"] // self.plan.batch_size
        document["training"]["steps"] = FIRST_STEPS + JOB_STEPS * batches
        document["training"]["batch_size"] = self.plan.batch_size
        run.job.write_text(yaml.safe_dump(document))
        profile.save(run.profile)
        self.plan.save(run.plan)
        tight = TIGHT_HEAP if any(stage.offload for stage in self.plan.stages) else {}
        run_worker(WORKER, run, self.plan.ranks, tight)
        steps_s = [line.step_time_s for line in read_metrics(run) if line.step_time_s is not None]
        self.steps_s += steps_s[FIRST_STEPS:]
        ranks = json.loads(run.heartbeat.read_text())["ranks"]
        self.peaks.append(max(rank["peak_bytes"] for rank in ranks))

    def rate(self, step_s: float) -> float:
        """Samples per second."""
        return self.plan.batch_size / step_s


def disk_link(folder: Path, size: int = 256 << 20) -> Link:
    """What one writer and reader gets, the slower direction."""
    store, piece = DiskStore(folder, 0), Pages().take(size).fill_(1)
    times = []
    for _ in range(5):
        start = time.perf_counter()
        place = store.write([piece])
        middle = time.perf_counter()
        store.read(place, [piece])
        times.append(max(middle - start, time.perf_counter() - middle))
    store.close()
    return Link(latency_s=100e-6, bandwidth_bytes_per_s=size / statistics.median(times))


def with_disk(disk: Link) -> Cluster:
    cluster = cluster_of(RANKS)
    device = replace(cluster.nodes[0].device, disk_link=disk)
    return replace(cluster, nodes=tuple(replace(node, device=device) for node in cluster.nodes))


def on_two_ranks(profile: Profile, disk: Link) -> dict[str, Way]:
    """Plans with everything in flight."""
    request = PlanRequest(
        "gpt",
        JOB.batch,
        micro_batches=MICRO_BATCHES,
        stages=RANKS,
        schedule="1f1b",
        warm_up=(MICRO_BATCHES,) * RANKS,
        offload_to=OffloadTarget.DISK,
    )
    ways = {
        "keep": request,
        "recompute": replace(request, recompute=True),
        "offload to disk": replace(request, offload=True),
    }
    cluster = with_disk(disk)
    return {way: Way(make_plan(profile, cluster, wanted)) for way, wanted in ways.items()}


def comparison(ways: Mapping[str, Way]) -> tuple[list[str], list[list[str]]]:
    """Columns and rows of a table: peaks and throughput of all ways against the first."""
    columns = ["", "ranks", "predicted peak", "", "predicted samples/s", ""]
    if any(way.peaks for way in ways.values()):
        columns += ["measured peak", "", "measured samples/s", ""]
    first, rows = next(iter(ways.values())), []
    for way, one in ways.items():
        cells = [way, str(one.plan.ranks)]
        cells += _against(format_bytes, peak_of(one.plan), peak_of(first.plan))
        predicted = (each.rate(each.plan.predicted_step_s) for each in (one, first))
        cells += _against("{:.4g}".format, *predicted)
        if one.peaks:
            peaks = (round(statistics.median(each.peaks)) for each in (one, first))
            cells += _against(format_bytes, *peaks)
            found = (each.rate(statistics.median(each.steps_s)) for each in (one, first))
            cells += _against("{:.4g}".format, *found)
        rows.append(cells)
    return columns, rows


def _against(form: Callable[[Any], str], value: float, first: float) -> tuple[str, str]:
    return form(value), f"{value / first - 1:+.1%}"


def thesis(request: PlanRequest) -> dict[str, PlanRequest]:
    """1F1B and PipeDream on so many stages, PipeFB with PipeDream's schedule on half of them.

    A step of PipeDream is one micro-batch, of the same size as for 1F1B.
    """
    assert request.stages is not None
    assert request.micro_batches is not None
    size = request.batch_size // request.micro_batches
    pipedream = replace(request, schedule="pipedream", batch_size=size, micro_batches=1)
    apart = replace(pipedream, stages=request.stages // 2, backward_apart=True)
    return {
        "1F1B": replace(request, schedule="1f1b"),
        "PipeDream": pipedream,
        "PipeDream, offloaded": replace(pipedream, offload=True),
        "PipeFB": apart,
        "PipeFB, offloaded": replace(apart, offload=True),
    }


def trained_jobs() -> dict[str, Way]:
    """1F1B, PipeDream and PipeFB on as many ranks."""
    job = gpt(layers=4, width=256)
    request = PlanRequest("gpt", job.batch, micro_batches=JOB_MICRO_BATCHES, stages=JOB_RANKS)
    ways = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        job.write(folder, JOB_RANKS)
        profile = profiled(folder, JOB_MICRO_BATCHES)
        for way, each in thesis(replace(request, offload_to=OffloadTarget.DISK)).items():
            ways[way] = Way(make_plan(profile, cluster_of(JOB_RANKS), each))
            ways[way].train(profile, folder, way.replace(", ", "-").lower())
    return ways


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    rounds = parser.parse_args().rounds
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        JOB.write(folder, RANKS)
        disk, profile = disk_link(folder), profiled(folder, MICRO_BATCHES)
        found = on_two_ranks(profile, disk)
        for _ in range(rounds):
            for way, one in found.items():
                one.train(profile, folder, way.replace(" ", "-"))
    costs = [stage.cost for stage in found["keep"].plan.stages]
    saved = max(cost.saved_bytes for cost in costs)
    enough = max(cost.saved_bytes / cost.forward_s for cost in costs)
    print(f"### Offload to disk: {RANKS} ranks, {MICRO_BATCHES} micro-batches in flight, "
          f"{rounds} rounds\n\n"
          f"A forward saves {format_bytes(saved)}: hidden from {enough / 1e9:.2f} GB/s on; "
          f"the disk gives {disk.bandwidth_bytes_per_s / 1e9:.2f} GB/s.\n")  # fmt: skip
    print_table(*comparison(found))
    slow = Link(disk.latency_s, enough / TOO_SLOW)
    print(f"\nWith a disk of {slow.bandwidth_bytes_per_s / 1e9:.2f} GB/s, predicted:\n")
    print_table(*comparison(on_two_ranks(profile, slow)))


if __name__ == "__main__":
    main()
