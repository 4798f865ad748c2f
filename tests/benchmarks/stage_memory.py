"""Predicted against measured peak of live bytes, over random stages of the corpus.

Every stage runs alone in the engine, in a 1F1B schedule of four micro-batches with AdamW; messages
of other stages are replayed. A prediction holds if it is within 5% or 8 MiB, whichever is larger.
The figures of each model go to standard error.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "corpus"))
sys.path.insert(0, str(Path(__file__).parents[1] / "equality"))

from catalogue import Entry, entries, spec_of
from cuts import random_cut
from packages import declare_torchvision, installed
from replay import Peak, peak_of_stage, plan_of, record

from pipectl.capture import CapturedJob
from pipectl.profiler import profile_job
from pipectl.runtime.device import CpuDevice

MIB = 2**20
MICRO_BATCHES, SHARE, BYTES = 4, 0.05, 8 * MIB


def peaks_of(entry: Entry, size: int, seeds: int, folder: Path) -> Iterator[Peak]:
    path = folder / f"{entry.name}.yaml"
    spec = spec_of(entry, path, MICRO_BATCHES, micro_batch=size, optimizer="AdamW")
    profile, job = profile_job(spec), CapturedJob(spec)
    for seed in range(seeds):
        stage_of = random_cut(job.training_graph(size), 2 + seed, seed)
        cut, messages = record(job, size, stage_of)
        plan = plan_of(profile, stage_of, size, MICRO_BATCHES)
        for stage in range(len(plan.stages)):
            yield peak_of_stage(job, cut, plan, stage, messages, folder)


def holds(peak: Peak) -> bool:
    return abs(peak.predicted - peak.measured) <= max(SHARE * peak.measured, BYTES)


def describe(peak: Peak) -> str:
    pair = f"{peak.predicted / MIB:8.1f} {peak.measured / MIB:8.1f} MiB"
    return f"{pair} ({peak.predicted / peak.measured - 1:+.1%})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", type=int, default=4, help="samples of a micro-batch")
    parser.add_argument("--seeds", type=int, default=2, help="random cuts of each model")
    parser.add_argument("models", nargs="*", help="all by default")
    arguments = parser.parse_args()
    declare_torchvision()
    torch.set_num_threads(1)
    all_peaks: list[Peak] = []
    head = "model               stages  within  worst: predicted, measured       resident so far"
    print(head, file=sys.stderr)
    with tempfile.TemporaryDirectory() as folder:
        for entry in entries():
            known = entry.package is None or installed(entry.package)
            if not known or (arguments.models and entry.name not in arguments.models):
                continue
            peaks = list(peaks_of(entry, arguments.size, arguments.seeds, Path(folder)))
            worst = max(peaks, key=lambda peak: abs(peak.predicted - peak.measured))
            resident = CpuDevice().peak_bytes() / MIB
            count = f"{len(peaks):6}  {sum(map(holds, peaks)):6}"
            line = f"{entry.name:19} {count}  {describe(worst):34} {resident:8.0f} MiB"
            print(line, file=sys.stderr, flush=True)
            all_peaks += peaks
    errors = sorted(abs(peak.predicted / peak.measured - 1) for peak in all_peaks)
    large = [peak for peak in all_peaks if peak.measured > 20 * BYTES]
    within = sum(abs(peak.predicted / peak.measured - 1) <= SHARE for peak in large)
    print(f"{sum(map(holds, all_peaks))} of {len(all_peaks)} stages within 5% or 8 MiB")
    print(f"median error {errors[len(errors) // 2]:.1%}")
    print(f"{within} of {len(large)} stages above 160 MiB within 5%" if large else
          "no stage above 160 MiB: this says only that no prediction is far off")  # fmt: skip


if __name__ == "__main__":
    main()
