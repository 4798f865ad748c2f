"""Stages that keep what backwards need, that recompute it, and that do so in blocks.

None of this changes a bit, so other tests would not miss it.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pipectl.capture import CapturedJob, Cut
from pipectl.capture.batch import by_name
from pipectl.capture.slices import Rows
from pipectl.runtime.device import CpuDevice
from pipectl.runtime.offload import Mover
from pipectl.runtime.saved_tensors import SavedTensors
from pipectl.runtime.stage import MicroBatch, Stage

KINDS = ("keeping", "recomputing", "in blocks")
ROWS = Rows.of(4)
CPU = torch.device("cpu")


@pytest.fixture
def job(job_of: Any) -> Any:
    """Of five operators, the last four of which are a block."""
    return job_of("deeper")


def stage_of(job: CapturedJob, kind: str, mover: Mover | None = None) -> Stage:
    """All of a model."""
    graph = job.training_graph(4)
    cuts = {(True, ROWS): Cut(graph, {node.name: 0 for node in graph.operators}, training=True)}
    if kind == "in blocks":
        firsts = [graph.operators[-4].name]
        return Stage(0, cuts, job.states, CpuDevice(), firsts=firsts, mover=mover)
    recompute = kind == "recomputing"
    return Stage(0, cuts, job.states, CpuDevice(), recompute=recompute, mover=mover)


def forward(job: CapturedJob, stage: Stage) -> None:
    known = by_name(job.training_graph(4), job.loader.example(4))
    inputs = {name: known[name] for name in stage.inputs(True, ROWS)}
    stage.forward(MicroBatch(0, ROWS), inputs, {})


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_forward_leaves_behind_may_leave_the_device(
    job: CapturedJob, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SavedTensors, "min_bytes", 0)
    mover = Mover(None, CPU)
    stage = stage_of(job, kind, mover)
    forward(job, stage)
    assert stage.saved[0].blocks
    mover.close()


@pytest.mark.parametrize("kind", KINDS)
def test_messages_advance_between_operators(job: CapturedJob, kind: str) -> None:
    calls: list[str] = []
    stage = stage_of(job, kind)
    stage.let_advance(lambda: calls.append("call"))
    forward(job, stage)
    assert calls
