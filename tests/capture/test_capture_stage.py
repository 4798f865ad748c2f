"""Any convex cut computes the bits of the whole graph: losses, gradients, strides and buffers.

The stages run one after another in this process; every value between two stages passes through
the form it would have in a message.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from plans import random_stages
from torch import Tensor
from torch.utils import _pytree as pytree

from pipectl.capture import CapturedGraph, CapturedJob, Cut, Slot, build_stage
from pipectl.capture.batch import by_name
from pipectl.capture.data import Loader
from pipectl.capture.randomness import seed_of
from pipectl.errors import CaptureError
from pipectl.graph import TransferKind
from pipectl.runtime.device import CpuDevice
from pipectl.runtime.evaluation import Metrics
from pipectl.runtime.layout import Layout
from pipectl.runtime.stage import StageRuntime

MODELS = Path(__file__).with_name("models.py")

SMALL = [
    *("mlp", "Inplace", "SharedNorm", "Tied", "Tuples", "Dropping", "Sizes", "Crossing"),
    *("OwnBackward", "RunningScale", "Filled"),
]
REAL = ["gpt", "tied", "cnn", "dense"]
WEIGHTS = (0.75, 0.25)


@dataclass
class Outcome:
    """Everything that training two micro-batches leaves behind, with strides."""

    losses: list[Tensor]
    gradients: dict[str, Tensor]
    buffers: dict[str, Tensor]

    def differences(self, other: Outcome) -> list[str]:
        found = [
            f"loss {i}" for i, loss in enumerate(self.losses) if not same(loss, other.losses[i])
        ]
        for mine, others in ((self.gradients, other.gradients), (self.buffers, other.buffers)):
            assert mine.keys() == others.keys()
            found += [name for name, tensor in mine.items() if not same(tensor, others[name])]
        return found


def same(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a, b) and a.stride() == b.stride()


class Pipeline:
    """The stages of a cut in one process; forwards come first if they are recomputed."""

    def __init__(
        self,
        job: CapturedJob,
        graph: CapturedGraph,
        stage_of: Mapping[str, int],
        *,
        recompute: bool = False,
    ) -> None:
        self.cut = Cut(graph, stage_of, training=True)
        self.job = job
        self.recompute = recompute
        cuts = {(True, 4): self.cut}
        count = max(stage_of.values()) + 1
        self.stages = [
            StageRuntime(i, cuts, job.states, CpuDevice(), recompute=recompute)
            for i in range(count)
        ]
        self.arrived: dict[tuple[TransferKind, int, int], dict[Slot, Tensor | None]] = {}

    def train(self) -> Outcome:
        before = {name: tensor.detach().clone() for name, tensor in self.buffers()}
        batches = Loader(self.job.loader._dataset, seed=7).micro_batches([(0, range(8))], 4)
        self.arrived = defaultdict(dict)
        if self.recompute:
            losses = [self.forward(i, batch) for i, batch in enumerate(batches)]
            for number in range(len(losses)):
                self.backward(number)
        else:
            losses = [self.micro_batch(i, batch) for i, batch in enumerate(batches)]
        outcome = Outcome(
            losses, dict(self.gradients()), {n: tensor.clone() for n, tensor in self.buffers()}
        )
        with torch.no_grad():
            for name, tensor in self.buffers():
                tensor.copy_(before[name])
        for stage in self.stages:
            stage.forget()
        return outcome

    def buffers(self) -> Iterator[tuple[str, Tensor]]:
        known = self.job.states.items()
        return ((n, t) for n, t in known if not isinstance(t, torch.nn.Parameter))

    def gradients(self) -> Iterator[tuple[str, Tensor]]:
        for stage in self.stages:
            leaves = {**stage.parameters, **{"/".join(slot): t for slot, t in stage.uses.items()}}
            for name, leaf in leaves.items():
                if leaf.grad is not None:
                    yield name, leaf.grad

    def micro_batch(self, number: int, batch: tuple[Any, Any]) -> Tensor:
        loss = self.forward(number, batch)
        self.backward(number)
        return loss

    def forward(self, number: int, batch: tuple[Any, Any]) -> Tensor:
        known = dict(zip(self.cut.graph.inputs, pytree.tree_leaves(batch), strict=True))
        loss = Slot(self.cut.graph.loss)
        found: list[Tensor] = []
        for index, stage in enumerate(self.stages):
            inputs = {name: known[name] for name in stage.inputs(True, 4)}
            arrived = self.arrived.pop((TransferKind.ACTIVATION, index, number), {})
            made = stage.forward(number, 4, seed_of("step", number), inputs, arrived)
            found += [tensor.clone() for slot, tensor in made.items() if slot == loss]
            self.deliver(TransferKind.ACTIVATION, index, number, made)
        return found[0]

    def backward(self, number: int) -> None:
        loss = Slot(self.cut.graph.loss)
        for index, stage in reversed(list(enumerate(self.stages))):
            gradients = self.arrived.pop((TransferKind.GRADIENT, index, number), {})
            latest_first = dict(sorted(gradients.items(), key=self.latest_use, reverse=True))
            if self.recompute:
                stage.recompute(number)
            made = stage.backward(number, latest_first, loss, WEIGHTS[number])
            self.deliver(TransferKind.GRADIENT, index, number, made)

    def deliver(
        self, kind: TransferKind, stage: int, number: int, made: Mapping[Slot, Tensor | None]
    ) -> None:
        for lane, slots in self.cut.lanes.items():
            if lane.kind is kind and lane.source == stage:
                sent = {slot: through_a_message(made.get(slot)) for slot in slots}
                self.arrived[kind, lane.target, number].update(sent)

    def latest_use(self, item: tuple[Slot, Any]) -> int:
        users = self.cut.graph.users.get(item[0].value, ("",))
        return self.cut.graph.position.get(users[-1], -1)


def through_a_message(tensor: Tensor | None) -> Tensor | None:
    if tensor is None:
        return None
    layout = Layout.of(tensor)
    return layout.unflatten(layout.flatten(tensor).clone())


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


@pytest.mark.parametrize("name", [*SMALL, *REAL])
def test_a_cut_at_every_position_changes_no_bit(job_named: Any, name: str) -> None:
    job = job_named(name)
    graph = job.training_graph(4)
    expected = Pipeline(job, graph, whole(graph)).train()
    assert expected.gradients
    cuts = list(prefix_cuts(graph))
    assert len(cuts) >= 2
    for stage_of in cuts:
        last = [node for node, stage in stage_of.items() if stage == 0][-1]
        assert Pipeline(job, graph, stage_of).train().differences(expected) == [], last


@pytest.mark.parametrize("name", [*SMALL, "Running", *REAL])
def test_random_convex_cuts_change_no_bit(job_named: Any, name: str) -> None:
    job = job_named(name)
    graph = job.training_graph(4)
    expected = Pipeline(job, graph, whole(graph)).train()
    for seed in range(12):
        stage_of = random_stages(graph, 2 + seed % 2, seed)
        assert Pipeline(job, graph, stage_of).train().differences(expected) == [], (seed, stage_of)


@pytest.mark.parametrize("name", [*SMALL, "Running", "WritingInput", *REAL])
def test_forwards_that_are_computed_again_change_no_bit(job_named: Any, name: str) -> None:
    """Neither gradients nor buffers, which are seen as they were and count once."""
    job = job_named(name)
    graph = job.training_graph(4)
    expected = Pipeline(job, graph, whole(graph)).train()
    for seed in range(4):
        stage_of = random_stages(graph, 1 + seed % 3, seed)
        again = Pipeline(job, graph, stage_of, recompute=True)
        assert again.train().differences(expected) == [], (seed, stage_of)


def test_random_cuts_include_gradients_that_return_use_by_use(real_job: Any) -> None:
    """Else the tests above would say nothing about them."""
    graph = real_job("dense").training_graph(4)
    cuts = [Cut(graph, random_stages(graph, 2 + s % 2, s), training=True) for s in range(12)]
    assert sum(bool(cut.split_uses) for cut in cuts) >= 2


def test_the_whole_graph_gives_the_users_own_gradients(real_job: Any) -> None:
    job = real_job("cnn")
    graph = job.training_graph(4)
    found = Pipeline(job, graph, whole(graph)).train()
    buffers = {name: tensor.clone() for name, tensor in job.step.named_buffers()}
    job.step.train().requires_grad_(True)
    batches = Loader(job.loader._dataset, seed=7).micro_batches([(0, range(8))], 4)
    for weight, (inputs, targets) in zip(WEIGHTS, batches, strict=True):
        (torch.nn.functional.cross_entropy(job.model(inputs), targets) * weight).backward()
    for name, parameter in job.step.named_parameters():
        assert torch.equal(parameter.grad, found.gradients[name]), name
        parameter.grad = None
    for name, tensor in job.step.named_buffers():
        assert torch.equal(tensor, found.buffers[name]), name
        tensor.data.copy_(buffers[name])


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


def test_a_free_graph_serves_other_batch_sizes(graph_of: Any) -> None:
    graph = graph_of("Sizes")
    cut = Cut(graph, whole(graph), training=True)
    for size in (1, 3, 9):
        code = build_stage(cut, 0, size)
        job_states = [
            torch.ones(3, 3) if "weight" in s.value else torch.ones(3) for s in code.states
        ]
        given = [torch.ones(size, 6), torch.zeros(size, dtype=torch.long)]
        (loss,) = code.module(0, *job_states, *given)
        assert loss.shape == ()


def test_a_fixed_graph_refuses_other_batch_sizes(graph_of: Any) -> None:
    graph = graph_of("FixedBatch")
    with pytest.raises(CaptureError) as raised:
        build_stage(Cut(graph, whole(graph), training=True), 0, 3)
    assert raised.value.message == "model: captured for 4 samples, not for 3"


def test_a_written_buffer_outlives_the_next_forward(job_of: Any) -> None:
    """GPipe runs all forwards before the first backward, which needs the buffer as it was."""
    job = job_of("RunningScale")
    graph = job.training_graph(4)
    found = []
    for forwards_first in (False, True):
        before = job.states["model.scale"].clone()
        pipeline = Pipeline(job, graph, whole(graph))
        (stage,), loss = pipeline.stages, Slot(graph.loss)
        batches = Loader(job.loader._dataset, seed=7).micro_batches([(0, range(8))], 4)
        for number, batch in enumerate(batches):
            known = dict(zip(graph.inputs, pytree.tree_leaves(batch), strict=True))
            stage.forward(number, 4, 0, known, {})
            if not forwards_first:
                stage.backward(number, {}, loss, 0.5)
        for number in range(2 if forwards_first else 0):
            stage.backward(number, {}, loss, 0.5)
        found.append([*dict(pipeline.gradients()).values(), job.states["model.scale"].clone()])
        found[-1] = [tensor.clone() for tensor in found[-1]]
        stage.forget()
        job.states["model.scale"].data.copy_(before)
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_tensors_that_a_stage_makes_are_on_its_device(job_of: Any) -> None:
    job, device = job_of("Positions"), torch.device("meta")
    graph = job.training_graph(4)
    code = build_stage(Cut(graph, whole(graph), training=True), 0, 4, device)
    states = [job.states[graph.states[slot.value].name].to(device) for slot in code.states]
    batch = {
        name: value.to(device) for name, value in by_name(graph, job.loader.example(4)).items()
    }
    (loss,) = code.module(0, *states, *(batch[name] for name in code.inputs))
    assert loss.device == device


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
    metrics = Metrics(job.metrics(), lambda _: graph)
    metrics.add(size, dict(zip(code.results, results, strict=True)), targets)
    assert metrics.result()["right"] == 1.0


def test_a_parameter_that_is_returned_but_not_used_is_refused(make_job: Any) -> None:
    graph = evaluated(make_job, "parameter").evaluation_graph(4)
    with pytest.raises(CaptureError, match=r"^model: returns 'model\.extra'"):
        build_stage(Cut(graph, whole(graph), training=False), 0, 4)


def test_so_are_those_of_the_branches_that_it_calls(make_job: Any) -> None:
    device = torch.device("meta")
    graph = make_job("BranchPositions").training_graph(4)
    code = build_stage(Cut(graph, whole(graph), training=True), 0, 4, device)
    inner = [module for name, module in code.module.named_modules() if name]
    made = [n for module in inner for n in module.graph.nodes if "arange" in str(n.target)]
    assert [node.kwargs["device"] for node in made] == [device]
