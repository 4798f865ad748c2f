"""Live bytes of random stages on the engine, against what the profile predicts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from catalogue import entries, spec_of
from cuts import random_cut
from replay import peak_of_stage, plan_of, record

from pipectl.capture import CapturedJob
from pipectl.cluster import OffloadTarget
from pipectl.plan import Plan
from pipectl.planner.activations.blocks import BlockPlans
from pipectl.profiler import profile_job
from pipectl.profiler.effort import Effort
from pipectl.runtime.offload import Pages
from pipectl.runtime.saved_tensors import SavedTensors

SIZE, MICRO_BATCHES, IN_FLIGHT = 8, 4, 8
MODELS = ("lstm", "encoder-decoder", "unet", "checkpointed", "experts")
OWN_CHECKPOINTS = ("checkpointed",)
"""What torch's checkpoints keep of a forward without a backward waits for the garbage collector."""
SMALL = 64 << 10
"""These models are small: what the loader and the engine hold would hide behind 8 MiB."""


@pytest.mark.parametrize("entry", [e for e in entries() if e.name in MODELS], ids=str)
def test_peaks_of_live_bytes_are_as_predicted(entry: Any, tmp_path: Path) -> None:
    spec = spec_of(entry, tmp_path / "job.yaml", MICRO_BATCHES, micro_batch=SIZE, optimizer="AdamW")
    profile, job = profile_job(spec, effort=Effort.FAST), CapturedJob(spec)
    graph = job.training_graph(SIZE)
    for seed in (0, 1):
        stage_of = random_cut(graph, 2 + seed, seed)
        cut, messages = record(job, SIZE, stage_of)
        plan = plan_of(profile, stage_of, SIZE, MICRO_BATCHES)
        again = [] if entry.name in OWN_CHECKPOINTS else [_with(plan, recompute=True)]
        for tried in (plan, *again):
            for stage in range(len(plan.stages)):
                peak = peak_of_stage(job, cut, tried, stage, messages, tmp_path)
                assert peak.predicted == pytest.approx(peak.measured, rel=0.05, abs=SMALL)


def test_in_blocks_a_stage_holds_less_than_if_it_recomputes_at_once(tmp_path: Path) -> None:
    entry = next(e for e in entries() if e.name == "unet")
    spec = spec_of(entry, tmp_path / "job.yaml", MICRO_BATCHES, micro_batch=SIZE, optimizer="AdamW")
    profile, job = profile_job(spec, effort=Effort.FAST), CapturedJob(spec)
    stage_of = {node.name: 0 for node in job.training_graph(SIZE).operators}
    cut, messages = record(job, SIZE, stage_of)
    at_once = _with(plan_of(profile, stage_of, SIZE, MICRO_BATCHES), recompute=True)
    (blocks,) = BlockPlans(profile).of(at_once)
    in_blocks = replace(at_once, stages=(replace(at_once.stages[0], blocks=blocks),))
    peaks = [peak_of_stage(job, cut, plan, 0, messages, tmp_path) for plan in (at_once, in_blocks)]
    for peak in peaks:
        assert peak.predicted == pytest.approx(peak.measured, rel=0.05, abs=SMALL)
    assert peaks[1].measured < 0.85 * peaks[0].measured


def test_what_waits_on_a_disk_takes_no_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With eight micro-batches in flight, a stage keeps two or three of them.

    Its pages are taken from torch here, which knows how much of its memory is in use.
    """
    monkeypatch.setattr(SavedTensors, "min_bytes", 0)
    monkeypatch.setattr(Pages, "take", lambda _, size: torch.empty(size, dtype=torch.uint8))
    entry = next(e for e in entries() if e.name == "lstm")
    spec = spec_of(entry, tmp_path / "job.yaml", IN_FLIGHT, micro_batch=SIZE, optimizer="AdamW")
    profile, job = profile_job(spec, effort=Effort.FAST), CapturedJob(spec)
    stage_of = random_cut(job.training_graph(SIZE), 2, 0)
    cut, messages = record(job, SIZE, stage_of)
    plan = replace(plan_of(profile, stage_of, SIZE, IN_FLIGHT), schedule="gpipe")
    peaks = [
        peak_of_stage(job, cut, tried, 0, messages, tmp_path)
        for tried in (plan, _with(plan, offload=True), _with(plan, offload=True, recompute=True))
    ]
    for peak in peaks:
        assert peak.predicted == pytest.approx(peak.measured, rel=0.05)
    assert peaks[1].measured < 0.6 * peaks[0].measured
    assert peaks[2].measured < peaks[1].measured


def _with(plan: Plan, **ways: bool) -> Plan:
    stages = tuple(replace(stage, **ways) for stage in plan.stages)
    return replace(plan, stages=stages, offload_to=OffloadTarget.DISK)
