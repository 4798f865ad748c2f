"""Live bytes of random stages on the engine, against what the profile predicts."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))

import cuts
from catalogue import entries, spec_of
from replay import peak_of_stage, plan_of, record

from pipectl.capture import CapturedJob
from pipectl.plan import Plan
from pipectl.profiler import profile_job

SIZE, MICRO_BATCHES = 8, 4
MODELS = ("lstm", "encoder-decoder", "recommender", "unet", "siamese", "checkpointed", "experts")
OWN_CHECKPOINTS = ("checkpointed",)
"""What torch's checkpoints keep of a forward without a backward waits for the garbage collector."""
SMALL = 64 << 10
"""These models are small: what the loader and the engine hold would hide behind 8 MiB."""


@pytest.mark.parametrize("entry", [e for e in entries() if e.name in MODELS], ids=str)
def test_peaks_of_live_bytes_are_as_predicted(entry: Any, tmp_path: Path) -> None:
    spec = spec_of(entry, tmp_path / "job.yaml", MICRO_BATCHES, micro_batch=SIZE, optimizer="AdamW")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    profile, job = profile_job(spec), CapturedJob(spec)
    graph = job.training_graph(SIZE)
    for seed in (0, 1):
        stage_of = cuts.random_cut(graph, 2 + seed, seed)
        cut, messages = record(job, SIZE, stage_of)
        plan = plan_of(profile, stage_of, SIZE, MICRO_BATCHES)
        for tried in (plan, *([] if entry.name in OWN_CHECKPOINTS else [_recomputed(plan)])):
            for stage in range(len(plan.stages)):
                peak = peak_of_stage(job, cut, tried, stage, messages)
                assert peak.predicted == pytest.approx(peak.measured, rel=0.05, abs=SMALL)
    torch.set_num_threads(threads)


def _recomputed(plan: Plan) -> Plan:
    return replace(plan, stages=tuple(replace(stage, recompute=True) for stage in plan.stages))
