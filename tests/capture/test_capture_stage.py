"""Any convex cut computes the bits of the whole graph: losses, gradients, strides and buffers.

The stages run one after another in this process; every value between two stages passes through
the form it would have in a message.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from cuts import random_cut
from trial import Trial

from pipectl.capture import CapturedGraph, CapturedJob, Cut, Slot, build_stage
from pipectl.capture.batch import by_name
from pipectl.capture.slices import Rows
from pipectl.errors import CaptureError, MismatchError
from pipectl.runtime.device import CpuDevice
from pipectl.runtime.evaluation import Metrics
from pipectl.runtime.offload import Mover
from pipectl.runtime.saved_tensors import SavedTensors
from pipectl.runtime.stage import MicroBatch, Stage

MODELS = Path(__file__).with_name("models.py")
TRIED = [
    *("mlp", "Inplace", "SharedNorm", "Tied", "Tuples", "Dropping", "Sizes", "OwnBackward"),
    *("RunningScale", "Filled", "Assigning", "WritingInput", "gpt", "tied", "cnn", "dense"),
]
"""Those of ``tests/corpus`` are cut once each; these at every place, and computed again."""


def whole(graph: CapturedGraph) -> dict[str, int]:
    return dict.fromkeys(graph.position, 0)


@pytest.fixture(scope="module", params=TRIED)
def trial(job_of: Any, request: pytest.FixtureRequest) -> Trial:
    return Trial(job_of(request.param))


def test_random_convex_cuts_change_no_bit(trial: Trial) -> None:
    """Nor does a cut at any position that divides no group."""
    assert any("gradient of" in name for name in trial.reference)
    tried = 0
    for position in range(1, len(trial.graph.position)):
        stage_of = {name: int(at >= position) for name, at in trial.graph.position.items()}
        with suppress(MismatchError):
            assert trial.differences(stage_of) == [], stage_of
            tried += 1
    assert tried
    for stage_of in map(trial.cut, range(8)):
        assert trial.differences(stage_of) == [], stage_of


def test_forwards_that_are_computed_again_change_no_bit(trial: Trial) -> None:
    """Neither gradients nor buffers, which are seen as they were and count once."""
    for stage_of in (whole(trial.graph), *map(trial.cut, range(3))):
        assert trial.differences(stage_of, recompute=True) == [], stage_of


def test_random_cuts_include_gradients_that_return_use_by_use(job_of: Any) -> None:
    """Else the tests above would say nothing about them."""
    graph = job_of("dense").training_graph(4)
    cuts = [Cut(graph, random_cut(graph, 2 + s % 5, s), training=True) for s in range(8)]
    assert sum(bool(cut.split_uses) for cut in cuts) >= 2


def test_a_stage_reads_only_what_it_needs(graph_of: Any) -> None:
    graph = graph_of("mlp")
    cut = Cut(graph, {"linear": 0, "relu": 0, "linear_1": 1, "cross_entropy_loss": 1}, True)
    first, second = (build_stage(cut, stage, 4) for stage in (0, 1))
    names = [[graph.states[slot.value].name for slot in code.states] for code in (first, second)]
    assert names == [
        ["model.0.weight", "model.0.bias"],
        ["model.2.weight", "model.2.bias"],
    ]
    assert (first.inputs, first.received, first.results) == (("inputs",), (), (Slot("relu"),))
    assert second.received == (Slot("relu"),)
    assert second.results == (Slot("cross_entropy_loss"),)
    assert len(second.inputs) == 1


@pytest.mark.parametrize("size", [1, 3, 9])
def test_a_free_graph_serves_other_batch_sizes(job_of: Any, run_whole: Any, size: int) -> None:
    job = job_of("Sizes")
    assert torch.equal(run_whole(job, size), job.step(*job.loader.example(size)))


def test_a_fixed_graph_refuses_other_batch_sizes(graph_of: Any) -> None:
    graph = graph_of("FixedBatch")
    with pytest.raises(CaptureError) as raised:
        build_stage(Cut(graph, whole(graph), training=True), 0, 3)
    assert raised.value.message == "model: captured for 4 samples, not for 3"


@pytest.mark.parametrize("name", ["Positions", "BranchPositions"])
def test_tensors_that_a_stage_and_its_branches_make_are_on_its_device(
    job_of: Any, name: str
) -> None:
    job, device = job_of(name), torch.device("meta")
    graph = job.training_graph(4)
    module: Any = build_stage(Cut(graph, whole(graph), training=True), 0, 4, device).module
    graphs = [each.graph for each in module.modules() if hasattr(each, "graph")]
    makers = [node for inner in graphs for node in inner.nodes if "arange" in str(node.target)]
    assert [node.kwargs["device"] for node in makers] == [device]


def evaluated(make_job: Any, what: str) -> CapturedJob:
    """A job with a metric, whose model returns something besides its result."""
    held_out = {"factory": f"{MODELS}:Vectors"}
    metrics = {"right": {"factory": f"{MODELS}:count_of_outputs"}}
    found: CapturedJob = make_job(
        "ReturnsMore",
        kwargs={"what": what},
        loss="loss_of_y",
        evaluation={"data": held_out, "metrics": metrics},
    )
    return found


@pytest.mark.parametrize("size", [4, 7])
def test_a_number_of_samples_among_what_a_model_returns(make_job: Any, size: int) -> None:
    job = evaluated(make_job, "size")
    graph = job.evaluation_graph(4)
    code = build_stage(Cut(graph, whole(graph), training=False), 0, size)
    states = [job.states[graph.states[slot.value].name] for slot in code.states]
    inputs, targets = job.loader.example(size)
    batch = by_name(graph, (inputs, targets))
    results = code.module(0, *states, *(batch[name] for name in code.inputs))
    metrics = Metrics(job.metrics(), lambda *_: graph)
    metrics.add(Rows.of(size), dict(zip(code.results, results, strict=True)), targets)
    assert metrics.result()["right"] == 1.0


def test_a_parameter_that_is_returned_but_not_used_is_refused(make_job: Any) -> None:
    graph = evaluated(make_job, "parameter").evaluation_graph(4)
    with pytest.raises(CaptureError, match=r"^model: returns 'model\.extra'"):
        build_stage(Cut(graph, whole(graph), training=False), 0, 4)


@pytest.mark.parametrize("kind", ["keeping", "recomputing", "in blocks"])
def test_saved_tensors_may_leave_the_device_and_messages_advance_between_operators(
    job_of: Any, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That changes no bit, so that other tests would not miss it."""
    rows = Rows.of(4)
    monkeypatch.setattr(SavedTensors, "min_bytes", 0)
    job, mover, calls = job_of("deeper"), Mover(None, torch.device("cpu")), list[str]()
    graph = job.training_graph(4)
    cuts = {(True, rows): Cut(graph, whole(graph), training=True)}
    firsts = [graph.operators[-4].name] if kind == "in blocks" else []  # the last four are a block
    recompute = kind == "recomputing"
    options = {"firsts": firsts, "recompute": recompute, "mover": mover}
    stage = Stage(0, cuts, job.states, CpuDevice(), **options)
    stage.let_advance(lambda: calls.append("call"))
    known = by_name(graph, job.loader.example(4))
    stage.forward(MicroBatch(0, rows), {name: known[name] for name in stage.inputs(True, rows)}, {})
    assert stage.saved[0].blocks
    assert calls
    mover.close()
