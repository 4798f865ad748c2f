"""Live bytes of random stages on the engine, against what the profile predicts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from catalogue import entries, spec_of
from cuts import random_cut
from replay import peak_of_stage, plan_of, record

from pipectl.capture import CapturedJob
from pipectl.cluster import OffloadTarget
from pipectl.plan import Plan
from pipectl.planner.segments import SegmentPlans
from pipectl.profile import Profile
from pipectl.profiler import profile_job
from pipectl.profiler.effort import Effort
from pipectl.runtime.offload import Pages
from pipectl.runtime.saved_tensors import SavedTensors

SIZE, MICRO_BATCHES, IN_FLIGHT = 8, 4, 8
MODELS = {"lstm": 2, "unet": 3, "checkpointed": 3}
"""Models of every run, and into how many stages they are cut."""
FURTHER = ("encoder-decoder", "experts")
OWN_CHECKPOINTS = ("checkpointed",)
"""What torch's checkpoints keep of a forward without a backward waits for the garbage collector."""
SMALL = 64 << 10
"""These models are small: what the loader and the engine hold would hide behind 8 MiB."""
Measured = Callable[[str], tuple[Profile, CapturedJob]]


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Measured:
    """``measured(name)``: the profile of a model, and its graph; once per model."""

    @cache
    def measure(name: str) -> tuple[Profile, CapturedJob]:
        path = tmp_path_factory.mktemp("memory") / "job.yaml"
        entry = next(entry for entry in entries() if entry.name == name)
        spec = spec_of(entry, path, MICRO_BATCHES, micro_batch=SIZE, optimizer="AdamW")
        return profile_job(spec, effort=Effort.FAST), CapturedJob(spec)

    return measure


@pytest.mark.parametrize(
    ("name", "stages"),
    [
        *MODELS.items(),
        *(pytest.param(name, n, marks=pytest.mark.corpus) for name in FURTHER for n in (2, 3)),
    ],
)
def test_peaks_of_live_bytes_are_as_predicted(
    name: str, stages: int, measured: Measured, tmp_path: Path
) -> None:
    profile, job = measured(name)
    stage_of = random_cut(job.training_graph(SIZE), stages, stages - 2)
    cut, messages = record(job, SIZE, stage_of)
    plan = plan_of(profile, stage_of, SIZE, MICRO_BATCHES)
    again = [] if name in OWN_CHECKPOINTS else [_with(plan, recompute=True)]
    for tried in (plan, *again):
        for stage in range(len(plan.stages)):
            peak = peak_of_stage(job, cut, tried, stage, messages, tmp_path)
            assert peak.predicted == pytest.approx(peak.measured, rel=0.05, abs=SMALL)


def test_in_blocks_a_stage_holds_less_than_if_it_recomputes_at_once(
    measured: Measured, tmp_path: Path
) -> None:
    profile, job = measured("unet")
    stage_of = {node.name: 0 for node in job.training_graph(SIZE).operators}
    cut, messages = record(job, SIZE, stage_of)
    at_once = _with(plan_of(profile, stage_of, SIZE, MICRO_BATCHES), recompute=True)
    (blocks,) = SegmentPlans(profile).of(at_once)
    in_blocks = replace(at_once, stages=(replace(at_once.stages[0], blocks=blocks),))
    peaks = [peak_of_stage(job, cut, plan, 0, messages, tmp_path) for plan in (at_once, in_blocks)]
    for peak in peaks:
        assert peak.predicted == pytest.approx(peak.measured, rel=0.05, abs=SMALL)
    assert peaks[1].measured < 0.85 * peaks[0].measured


def test_what_waits_on_a_disk_takes_no_memory(
    measured: Measured, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With eight micro-batches in flight, a stage keeps two or three of them.

    Its pages are taken from torch here, which knows how much of its memory is in use.
    """
    monkeypatch.setattr(SavedTensors, "min_bytes", 0)
    monkeypatch.setattr(Pages, "take", lambda _, size: torch.empty(size, dtype=torch.uint8))
    profile, job = measured("lstm")
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
