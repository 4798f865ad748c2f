"""Stages that keep what backwards need, that recompute it, and that do so in blocks.

None of this changes a bit, so other tests would not miss it.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pipectl.capture import Cut
from pipectl.capture.batch import by_name
from pipectl.capture.slices import Rows
from pipectl.runtime.device import CpuDevice
from pipectl.runtime.offload import Mover
from pipectl.runtime.saved_tensors import SavedTensors
from pipectl.runtime.stage import MicroBatch, Stage

KINDS = ("keeping", "recomputing", "in blocks")
ROWS = Rows.of(4)


@pytest.mark.parametrize("kind", KINDS)
def test_saved_tensors_may_leave_the_device_and_messages_advance_between_operators(
    job_of: Any, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SavedTensors, "min_bytes", 0)
    job, mover, calls = job_of("deeper"), Mover(None, torch.device("cpu")), list[str]()
    graph = job.training_graph(4)
    cuts = {(True, ROWS): Cut(graph, {node.name: 0 for node in graph.operators}, training=True)}
    firsts = [graph.operators[-4].name] if kind == "in blocks" else []  # the last four are a block
    recompute = kind == "recomputing"
    options = {"firsts": firsts, "recompute": recompute, "mover": mover}
    stage = Stage(0, cuts, job.states, CpuDevice(), **options)
    stage.let_advance(lambda: calls.append("call"))
    known = by_name(graph, job.loader.example(4))
    stage.forward(MicroBatch(0, ROWS), {name: known[name] for name in stage.inputs(True, ROWS)}, {})
    assert stage.saved[0].blocks
    assert calls
    mover.close()
