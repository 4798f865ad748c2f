"""Live bytes of random stages on ranks, against what the profile predicts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from catalogue import entries, spec_of
from cuts import random_cut
from peaks import Peak, peaks_of, plan_of, prepare

from pipectl.capture import CapturedJob
from pipectl.cluster import OffloadTarget
from pipectl.plan import Plan
from pipectl.planner.segments import SegmentPlans
from pipectl.profiler import profile_job
from pipectl.profiler.effort import Effort
from pipectl.runs import RunDirectory

SIZE, MICRO_BATCHES, IN_FLIGHT = 8, 4, 8
MODELS = {"lstm": 2, "unet": 3, "checkpointed": 3}
"""Models of every run, and into how many stages they are cut."""
FURTHER = ("encoder-decoder", "recommender")
OWN_CHECKPOINTS = ("checkpointed",)
"""What torch's checkpoints keep of a forward without a backward waits for the garbage collector."""
LOADED = 64 << 10
"""These models are small: what the loader and the engine hold would hide behind 8 MiB."""


def assert_as_predicted(plan: Plan, peaks: list[Peak]) -> None:
    """Two messages may be under way at another time than predicted."""
    message = max((transfer.size_bytes for transfer in plan.transfers), default=0)
    for peak in peaks:
        near = pytest.approx(peak.measured, rel=0.05, abs=2 * message + LOADED)
        assert peak.predicted == near


class Measured:
    """A model with its profile, and the peaks of its plans."""

    def __init__(self, name: str, folder: Path, launch: Callable[..., Any], count: int) -> None:
        entry = next(entry for entry in entries() if entry.name == name)
        path = folder / "job.yaml"
        spec = spec_of(entry, path, count, micro_batch=SIZE, optimizer="AdamW")
        self.job, self.profile = CapturedJob(spec), profile_job(spec, effort=Effort.FAST)
        self._text, self._count = path.read_text(), count
        self._folder, self._launch = folder, launch

    def plan(self, stages: int, seed: int) -> Plan:
        stage_of = random_cut(self.job.training_graph(SIZE), stages, seed)
        return plan_of(self.profile, stage_of, SIZE, self._count)

    def peaks(self, *plans: Plan) -> list[list[Peak]]:
        runs = [
            prepare(RunDirectory(self._folder / str(number)), self._text, plan)
            for number, plan in enumerate(plans)
        ]
        paths = [run.path for run in runs]
        done = self._launch(plans[0].ranks, Path(__file__).with_name("peaks.py"), *paths)
        assert done.returncode == 0, done.stderr[-4000:]
        return [peaks_of(run) for run in runs]


@pytest.fixture
def measured(tmp_path: Path, launch: Any) -> Callable[..., Measured]:
    def measure(name: str, count: int = MICRO_BATCHES) -> Measured:
        return Measured(name, tmp_path, launch, count)

    return measure


pytestmark = pytest.mark.mpi


@pytest.mark.parametrize(
    ("name", "stages"),
    [
        *MODELS.items(),
        *(pytest.param(name, n, marks=pytest.mark.corpus) for name in FURTHER for n in (2, 3)),
    ],
)
def test_peaks_of_live_bytes_are_as_predicted(name: str, stages: int, measured: Any) -> None:
    model = measured(name)
    plan = model.plan(stages, stages - 2)
    again = [] if name in OWN_CHECKPOINTS else [_with(plan, recompute=True)]
    for peaks in model.peaks(plan, *again):
        assert_as_predicted(plan, peaks)


def test_in_blocks_a_stage_holds_less_than_if_it_recomputes_at_once(measured: Any) -> None:
    model = measured("unet")
    at_once = _with(model.plan(1, 0), recompute=True)
    (blocks,) = SegmentPlans(model.profile).of(at_once)
    in_blocks = replace(at_once, stages=(replace(at_once.stages[0], blocks=blocks),))
    (whole,), (least,) = model.peaks(at_once, in_blocks)
    assert_as_predicted(at_once, [whole, least])
    assert least.measured < 0.85 * whole.measured


def test_what_waits_on_a_disk_takes_no_memory(measured: Any) -> None:
    """With eight micro-batches in flight, a stage keeps two or three of them."""
    model = measured("lstm", IN_FLIGHT)
    plan = replace(model.plan(2, 0), schedule="gpipe")
    ways = plan, _with(plan, offload=True), _with(plan, offload=True, recompute=True)
    kept, left, recomputed = (peaks[0] for peaks in model.peaks(*ways))
    assert_as_predicted(plan, [kept, left, recomputed])
    assert left.measured < 0.6 * kept.measured
    assert recomputed.measured < left.measured


def _with(plan: Plan, **ways: bool) -> Plan:
    stages = tuple(replace(stage, **ways) for stage in plan.stages)
    return replace(plan, stages=stages, offload_to=OffloadTarget.DISK)
