"""Predicted against measured time of random stages over the corpus.

Each model of the corpus is profiled as ``pipectl profile`` does it. Then random convex stages, and
the whole model, run one forward and one backward at a time, and the time of both is compared with
the planner's prediction. Half of the measurements come before the profile and half after it, so
that drift of the machine cancels. Stages are runs of neighbouring operators, or parts of a random
topological order (*any order*). Stages below 1 ms, which no plan has, are shown separately. The
figures of each model go to standard error.

    python tests/benchmarks/stage_times.py [MODEL ...]
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

import psutil
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "corpus"))
sys.path.insert(0, str(Path(__file__).parents[1] / "equality"))

import packages
from catalogue import Entry, entries, spec_of
from cuts import random_cut

from pipectl.capture import CapturedJob
from pipectl.planner.costs.footprint import Footprints
from pipectl.planner.costs.stage_costs import operator_times, stage_times
from pipectl.profile import Profile
from pipectl.profiler import profile_job
from pipectl.profiler.bench import Bench, Subject, random_stages
from pipectl.runtime.device import CpuDevice, settle_process

CUTS_PER_KIND, ROUNDS, FIRST_SEED = 4, 6, 100
BUDGET_S = 4.0
SHORT_S = 1e-3
SAMPLES, SAMPLES_OF_IMAGES = 64, 2
"""Of a micro-batch: the corpus' own and language models are tiny, its vision models are not."""


@dataclass
class Stage:
    """A stage under test and the times of its runs."""

    model: str
    kind: str
    stages: Bench
    index: int
    seconds: list[float]
    predicted_s: float = 0.0

    def run(self) -> None:
        self.stages.run(self.index)
        self.seconds.append(sum(self.stages.run(self.index)))

    @property
    def measured_s(self) -> float:
        """Median of the runs."""
        return statistics.median(self.seconds)

    @property
    def error(self) -> float:
        """Share by which the prediction is above the measurement."""
        return self.predicted_s / self.measured_s - 1


def stages_of(entry: Entry, job: CapturedJob, size: int) -> list[Stage]:
    subject = Subject.of(job, size, CpuDevice())
    graph = subject.graph
    seeds = range(FIRST_SEED, FIRST_SEED + CUTS_PER_KIND)
    partitions = [("neighbours", random_stages(graph, seed)) for seed in seeds]
    partitions += [("any order", random_cut(graph, 2 + seed % 5, seed)) for seed in seeds]
    partitions.append(("neighbours", random_cut(graph, 1, 0)))
    made = []
    for kind, cut in partitions:
        stages = Bench(subject, cut)
        made += [Stage(entry.name, kind, stages, index, []) for index in range(len(stages))]
    return made


def measure(stages: list[Stage]) -> None:
    start = time.perf_counter()
    for done in range(ROUNDS):
        for stage in stages:
            stage.run()
        if done and time.perf_counter() - start > BUDGET_S:
            return


def predict(stages: list[Stage], profile: Profile) -> None:
    footprints = Footprints(profile)
    times = operator_times(profile, profile.micro_batch_size)
    position = {operator.id: index for index, operator in enumerate(profile.operators)}
    for stage in stages:
        cut = stage.stages.cut
        inside = [[position[n] for n in cut.operators(i)] for i in range(len(stage.stages))]
        parts = footprints.of(inside)
        times_s = stage_times(parts.sums, times, 1.0, profile.stage)
        stage.predicted_s = float(times_s[:, 0, stage.index].sum())


def compare(entry: Entry) -> list[Stage]:
    with tempfile.TemporaryDirectory() as folder:
        samples = SAMPLES_OF_IMAGES if entry.package == "torchvision" else SAMPLES
        spec = spec_of(entry, Path(folder) / "job.yaml", micro_batch=samples)
        # Stages do not load data here, so that it is not part of the profile either.
        data = spec.data.model_copy(update={"workers": 1})
        spec = spec.model_copy(update={"data": data})
        settle_process(1)
        job = CapturedJob(spec)
        size = spec.training.batch_size // (spec.pipeline.micro_batches or 1)
        stages = stages_of(entry, job, size)
        measure(stages)
        profile = profile_job(spec)
        measure(stages)
    predict(stages, profile)
    return stages


def show(name: str, stages: list[Stage], out: TextIO = sys.stdout) -> tuple[float, float]:
    errors = sorted(abs(stage.error) for stage in stages)
    middle, ninth = statistics.median(errors), errors[int(0.9 * (len(errors) - 1))]
    bias = statistics.median(stage.error for stage in stages)
    out.write(
        f"{name:28} {len(stages):5}  {middle:7.1%}  {ninth:7.1%}  {errors[-1]:7.1%}  {bias:+7.1%}\n"
    )
    out.flush()
    return middle, ninth


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*")
    names = parser.parse_args().models
    if unknown := {*names}.difference(entry.name for entry in entries()):
        parser.error(f"no model of the corpus: {', '.join(sorted(unknown))}")
    all_stages: list[Stage] = []
    print(f"{psutil.cpu_count()} cores, torch {torch.__version__}; errors of forward and backward")
    print(f"{'model':28} {'stages':>5}   median      9/10    worst     bias")
    for entry in entries():
        missing = entry.package and not packages.installed(entry.package)
        if missing or (names and entry.name not in names):
            continue
        stages = compare(entry)
        show(entry.name, stages, sys.stderr)
        for stage in stages:
            del stage.stages
        all_stages += stages
    short = [stage for stage in all_stages if stage.measured_s < SHORT_S]
    all_stages = [stage for stage in all_stages if stage.measured_s >= SHORT_S]
    if short:
        show("all below 1 ms", short)
    for kind in ("neighbours", "any order"):
        show(f"all: {kind}", [stage for stage in all_stages if stage.kind == kind])
    show("all", all_stages)


if __name__ == "__main__":
    main()
