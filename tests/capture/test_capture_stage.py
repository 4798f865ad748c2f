"""Any convex cut computes the bits of the whole graph: losses, gradients, strides and buffers.

The stages run one after another in this process; every value between two stages passes through
the form it would have in a message.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from cuts import random_cut
from stages import Stages
from torch import Tensor

from pipectl.capture import CapturedGraph, CapturedJob, Cut, Slot, build_stage
from pipectl.capture.batch import by_name
from pipectl.capture.data import Loader, Samples
from pipectl.capture.slices import Rows
from pipectl.errors import CaptureError
from pipectl.runtime.evaluation import Metrics

MODELS = Path(__file__).with_name("models.py")

SMALL = [
    *("mlp", "Inplace", "SharedNorm", "Tied", "Tuples", "Dropping", "Sizes", "Crossing"),
    *("OwnBackward", "RunningScale", "Filled"),
]
REAL = ["gpt", "tied", "cnn", "dense"]


def trained(
    job: CapturedJob, stage_of: Mapping[str, int], *, step: int = 0, recompute: bool = False
) -> dict[str, Tensor]:
    """All that a step of two micro-batches leaves behind: losses, gradients, weights, buffers."""
    batches = Loader(job.loader._dataset, seed=7).micro_batches([Samples(0, range(8))], 4)
    stages = Stages(job, 4, stage_of, recompute=recompute, evaluates=False)
    return {**stages.step(step, list(batches)), **stages.states()}


def differences(expected: dict[str, Tensor], found: dict[str, Tensor]) -> list[str]:
    """Names of what has other values or strides."""
    assert found.keys() == expected.keys()
    return [
        name
        for name, tensor in expected.items()
        if not torch.equal(tensor, found[name]) or tensor.stride() != found[name].stride()
    ]


def whole(graph: CapturedGraph) -> dict[str, int]:
    return {node.name: 0 for node in graph.operators}


def prefix_cuts(graph: CapturedGraph) -> Iterator[dict[str, int]]:
    """Two stages, cut at every position of the graph order that splits no group."""
    names = [node.name for node in graph.operators]
    for position in range(1, len(names)):
        stage_of = {name: int(index >= position) for index, name in enumerate(names)}
        sides = {(group, stage_of[name]) for name, group in graph.groups.items()}
        if len(sides) == len({group for group, _ in sides}):
            yield stage_of


@pytest.fixture
def job_named(job_of: Any, real_job: Any) -> Any:
    return lambda name: real_job(name) if name in REAL else job_of(name)


@pytest.mark.parametrize("name", [*SMALL, "Running", "Assigning", *REAL])
def test_random_convex_cuts_change_no_bit(job_named: Any, name: str) -> None:
    """Nor does a cut at any position."""
    job = job_named(name)
    graph = job.training_graph(4)
    expected = trained(job, whole(graph))
    assert any("gradient of" in name for name in expected)
    in_order = list(prefix_cuts(graph))
    assert in_order
    for stage_of in (*in_order, *(random_cut(graph, 2 + seed % 2, seed) for seed in range(12))):
        assert differences(expected, trained(job, stage_of)) == [], stage_of


@pytest.mark.parametrize("name", [*SMALL, "Running", "Assigning", "WritingInput", *REAL])
def test_forwards_that_are_computed_again_change_no_bit(job_named: Any, name: str) -> None:
    """Neither gradients nor buffers, which are seen as they were and count once."""
    job = job_named(name)
    graph = job.training_graph(4)
    expected = trained(job, whole(graph))
    for seed in range(4):
        stage_of = random_cut(graph, 1 + seed % 3, seed)
        again = trained(job, stage_of, recompute=True)
        assert differences(expected, again) == [], (seed, stage_of)


def test_random_cuts_include_gradients_that_return_use_by_use(real_job: Any) -> None:
    """Else the tests above would say nothing about them."""
    graph = real_job("dense").training_graph(4)
    cuts = [Cut(graph, random_cut(graph, 2 + s % 2, s), training=True) for s in range(12)]
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


def test_a_written_buffer_outlives_the_next_forward(job_of: Any) -> None:
    """GPipe runs all forwards before the first backward, which needs the buffer as it was."""
    job = job_of("RunningScale")
    stage_of = whole(job.training_graph(4))
    in_turn, forwards_first = (trained(job, stage_of, step=step) for step in (0, 1))
    found = {name.replace("step 1", "step 0"): tensor for name, tensor in forwards_first.items()}
    assert differences(in_turn, found) == []


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
