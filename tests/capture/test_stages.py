"""Cuts into stages: what crosses them, which are refused, and that every one changes no bit.

The stages run one after another in this process; every value between two stages passes through
the form it would have in a message.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from pipectl.capture import (
    CapturedGraph,
    CapturedJob,
    Cut,
    Slot,
    build_stage,
    evaluation_stages,
    randomness,
    regions,
)
from pipectl.capture.batch import by_name
from pipectl.capture.operators import is_random
from pipectl.capture.randomness import seed_of, seed_operator
from pipectl.capture.regions import _devices, accelerator_in_use
from pipectl.capture.slices import Span
from pipectl.errors import CaptureError, MismatchError
from pipectl.lanes import Lane, TransferKind
from pipectl.runtime.device import CpuDevice
from pipectl.runtime.evaluation import outputs_of
from pipectl.runtime.evaluation_metrics import Metrics
from pipectl.runtime.offload import Mover
from pipectl.runtime.saved_tensors import SavedTensors
from pipectl.runtime.segment import MicroBatch
from pipectl.runtime.stage import Stage
from tests.corpus.trial import Trial
from tests.equality.cuts import random_cut

MODELS = Path(__file__).with_name("models.py")
ACTIVATION, GRADIENT = TransferKind.ACTIVATION, TransferKind.GRADIENT


def stages(graph: CapturedGraph, *starts: str) -> dict[str, int]:
    """Stage 0 up to the first named operator, 1 from there to the next, and so on."""
    found, stage = {}, 0
    for node in graph.operators:
        stage += node.name in starts
        found[node.name] = stage
    return found


COUNT = """
def count_of_outputs(outputs, targets):
    return torch.tensor(float(outputs["n"] == len(targets)))
"""


# What crosses a cut


@pytest.mark.parametrize(
    ("model", "starts", "lanes"),
    [
        ("mlp", (), {}),
        ("mlp", ("linear_1",), {(ACTIVATION, 0, 1): ["relu"], (GRADIENT, 1, 0): ["relu"]}),
        (
            "Skip",  # stage 2 hands the gradient of tanh to 1, and 1 to 0
            ("linear_1", "linear_2"),
            {
                (ACTIVATION, 0, 1): ["tanh"],
                (ACTIVATION, 0, 2): ["tanh"],
                (ACTIVATION, 1, 2): ["linear_1"],
                (GRADIENT, 2, 1): ["tanh", "linear_1"],
                (GRADIENT, 1, 0): ["tanh"],
            },
        ),
        ("TwoHeads", ("linear_1",), {(ACTIVATION, 0, 1): ["tanh"], (GRADIENT, 1, 0): ["tanh"]}),
    ],
    ids=["one stage", "chain", "skip", "several uses"],
)
@pytest.mark.parametrize("training", [True, False])
def test_values_are_sent_once_and_gradients_from_the_last_use_to_the_first(
    graph_of, model: str, starts, lanes, training: bool
) -> None:
    cut = Cut(graph_of(model), stages(graph_of(model), *starts), training)
    assert cut.lanes == {
        Lane(*lane): list(map(Slot, values))
        for lane, values in lanes.items()
        if training or lane[0] is ACTIVATION
    }
    assert cut.split_uses == set()


def test_gradients_return_use_by_use_where_uses_are_not_in_stage_order(graph_of) -> None:
    """tanh is used by linear_1 (in stage 2 here), then by linear_2 (in stage 1)."""
    late = {"linear_1": 2, "linear_2": 1, "sigmoid": 1, "add": 2, "linear_3": 2}
    first = {"linear": 0, "tanh": 0, "cross_entropy_loss": 2}
    cut = Cut(graph_of("TwoHeads"), {**first, **late}, training=True)
    assert (cut.split_uses, cut.forked(0)) == ({"tanh"}, ["tanh"])
    assert cut.lanes[Lane(ACTIVATION, 0, 2)] == [Slot("tanh")]
    assert cut.lanes[Lane(GRADIENT, 2, 0)] == [Slot("tanh", "linear_1")]
    assert cut.lanes[Lane(GRADIENT, 1, 0)] == [Slot("tanh", "linear_2")]
    assert cut.received(2) == [Slot("tanh", "linear_1"), Slot("sigmoid")]


@pytest.mark.parametrize(
    ("model", "stage_of", "message"),
    [
        ("mlp", {"linear": 0, "linear_1": 0}, "has no stage for operator 'relu'"),
        (
            "mlp",
            {"linear": 0, "relu": 1, "linear_1": 0, "cross_entropy_loss": 1},
            "'linear_1' (stage 0) reads 'relu', which a later stage (1) computes",
        ),
        ("Inplace", "relu_", "'relu_' shares memory with 'linear' but is in another stage"),
    ],
    ids=["without a stage", "not convex", "through a group"],
)
def test_a_plan_that_is_no_cut_is_refused(graph_of, model: str, stage_of, message: str) -> None:
    graph = graph_of(model)
    stage_of = stages(graph, stage_of) if isinstance(stage_of, str) else stage_of
    with pytest.raises(MismatchError) as raised:
        Cut(graph, stage_of, training=True)
    assert raised.value.message == f"plan: {message}"


# Evaluation, which follows the cut of the training


def test_outputs_travel_to_the_loss_of_an_evaluation_which_waits_for_them(
    make_job, write_modules
) -> None:
    first = "nn.ModuleList([nn.Linear(6, 3), nn.Linear(6, 2)])"
    code = "return {'y': self.kept[0](x), 'e': self.kept[1](x), 'n': x.shape[0]}"
    path = write_modules({"Several": (first, code)}, COUNT)
    metrics = {"right": {"factory": f"{path}:count_of_outputs"}}
    evaluation = {"data": {"factory": f"{MODELS}:Vectors"}, "metrics": metrics}
    job = make_job(f"{path}:Several", loss=f"{MODELS}:loss_of_y", evaluation=evaluation)
    training, graph = job.training_graph(4), job.evaluation_graph(4)
    found = evaluation_stages(graph, training, stages(training, "linear_2"))
    cut = Cut(graph, found, training=False)
    assert (found["linear_1"], found["linear_2"], cut.loss_stage) == (0, 1, 1)
    assert cut.result_names == {graph.loss, "linear_1", "linear_2"}
    assert list(cut.lanes) == [Lane(ACTIVATION, 0, 1)]
    assert Slot("linear_1") not in cut.received(0)
    for size in (4, 7):  # which is an output, too
        stage = build_stage(Cut(graph, stages(graph), training=False), 0, size)
        inputs, targets = job.loader.example(size)
        batch = by_name(graph, (inputs, targets))
        states = [job.states[graph.states[slot.value].name] for slot in stage.states]
        results = stage.module(0, *states, *(batch[name] for name in stage.inputs))
        found = dict(zip(stage.results, results, strict=True))
        measured = Metrics(job.metrics())
        measured.add(size, 1.0, outputs_of(graph, Span.of(size), found), targets)
        assert measured.result()["right"] == 1.0


@pytest.mark.parametrize(
    ("first", "code", "message"),
    [
        (
            "nn.ModuleList([nn.Linear(6, 6), nn.Linear(6, 6)])",
            "a, b = self.kept if self.training else reversed(self.kept)\nx = {'y': b(a(x))[:, :3]}",
            "in evaluation 'linear_2' needs 'model.kept.0.weight' after its stage",
        ),
        (
            "nn.Parameter(torch.ones(3))",
            "x = {'y': x[:, :3], 'n': self.kept}",
            "returns 'model.kept'",
        ),
    ],
    ids=["other order", "unused parameter"],
)
def test_an_evaluation_that_the_stages_of_the_training_cannot_compute_is_refused(
    make_job, write_modules, first: str, code: str, message: str
) -> None:
    metrics = {"data": f"{MODELS}:Vectors", "metrics": {"m": "builtins:max"}}
    path = write_modules({"Other": (first, code)})
    job = make_job(f"{path}:Other", loss=f"{MODELS}:loss_of_y", evaluation=metrics)
    training, graph = job.training_graph(4), job.evaluation_graph(4)
    trained = stages(training, "linear_2")
    with pytest.raises(CaptureError, match=f"^model: {message}"):
        build_stage(Cut(graph, evaluation_stages(graph, training, trained), False), 0, 4)


# Any convex cut computes the bits of the whole graph: losses, gradients, strides and buffers

TRIED = [
    *("mlp", "Inplace", "Dropping", "Sizes", "OwnBackward", "Filled", "Assigning", "OutArgument"),
    *("Shifting", "WritingInput", "Outer", "Twice", "Branches", "Written"),
    *("gpt", "tied", "cnn", "dense"),
]
"""Those of ``tests/corpus`` are cut once each; these at several places, or at every one with
``product``, and computed again."""


@pytest.mark.parametrize("model", TRIED)
@pytest.mark.parametrize(
    ("places", "random", "again"),
    [(5, 3, 1), pytest.param(1000, 8, 3, marks=pytest.mark.product)],
    ids=["some", "all"],
)
def test_any_cut_gives_the_bits_of_the_model(
    job_of, model: str, places: int, random: int, again: int
) -> None:
    """Random ones and those at positions that divide no group; also of forwards that are computed
    again, whose buffers are seen as they were and count once.
    """
    trial = Trial(job_of(model))
    if not trial.draws:
        allowed = 1e-5 if trial.shares else 0.0  # gradients of several uses are summed otherwise
        assert {n: d for n, d in trial.plain_differences().items() if d > allowed} == {}
    assert any("gradient of" in name for name in trial.reference)
    in_two = [*cuts_in_two(trial.graph)]
    assert in_two
    for stage_of in (*in_two[:: -(-len(in_two) // places)], *map(trial.cut, range(random))):
        assert trial.differences(stage_of) == [], stage_of
    for stage_of in (stages(trial.graph), *map(trial.cut, range(again))):
        assert trial.differences(stage_of, recompute=True) == [], stage_of
    assert (torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")) == (True, False)


def cuts_in_two(graph: CapturedGraph) -> Iterator[dict[str, int]]:
    """At every position that divides no group."""
    for position in range(1, len(graph.position)):
        stage_of = {name: int(at >= position) for name, at in graph.position.items()}
        with suppress(MismatchError):
            Cut(graph, stage_of, training=True)
            yield stage_of


def test_random_cuts_include_gradients_that_return_use_by_use(job_of) -> None:
    """Else the tests above would say nothing about them."""
    graph = job_of("dense").training_graph(4)
    cuts = [Cut(graph, random_cut(graph, 2 + s % 5, s), training=True) for s in range(8)]
    assert sum(bool(cut.split_uses) for cut in cuts) >= 2


def test_a_stage_reads_only_what_it_needs(graph_of) -> None:
    graph = graph_of("mlp")
    cut = Cut(graph, stages(graph, "linear_1"), training=True)
    first, second = (build_stage(cut, stage, 4) for stage in (0, 1))
    names = [[graph.states[slot.value].name for slot in code.states] for code in (first, second)]
    assert names == [["model.0.weight", "model.0.bias"], ["model.2.weight", "model.2.bias"]]
    assert (first.inputs, first.received, first.results) == (("inputs",), (), (Slot("relu"),))
    assert (second.received, second.results) == ((Slot("relu"),), (Slot("cross_entropy_loss"),))
    assert len(second.inputs) == 1


def test_tensors_that_a_stage_and_its_branches_make_are_on_its_device(graph_of) -> None:
    graph, device = graph_of("Positions"), torch.device("meta")
    module: Any = build_stage(Cut(graph, stages(graph), training=True), 0, 4, device).module
    graphs = [each.graph for each in module.modules() if hasattr(each, "graph")]
    makers = [node for inner in graphs for node in inner.nodes if "arange" in str(node.target)]
    assert [node.kwargs["device"] for node in makers] == [device] * 2


@pytest.mark.parametrize("kind", ["keeping", "recomputing", "in blocks"])
def test_saved_tensors_may_leave_the_device(
    make_job, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That changes no bit, so that other tests would not miss it."""
    span = Span.of(4)
    monkeypatch.setattr(SavedTensors, "min_bytes", 0)
    mover = Mover(None, torch.device("cpu"))
    job = make_job("mlp", kwargs={"deep": 1})
    graph = job.training_graph(4)
    cuts = {(True, span): Cut(graph, stages(graph), training=True)}
    firsts = [graph.operators[-4].name] if kind == "in blocks" else []  # the last four are a block
    given = {"firsts": firsts, "recompute": kind == "recomputing", "mover": mover}
    stage = Stage(0, cuts, job.states, CpuDevice(), **given)
    known = by_name(graph, job.loader.example(4))
    stage.forward(MicroBatch(0, span), {name: known[name] for name in stage.inputs(True, span)}, {})
    assert stage.saved[0].blocks
    mover.close()


# Random operators draw the same numbers whatever ran before, and wherever they run


def test_seeds_are_64_bit_differ_by_every_part_and_are_the_same_in_every_release() -> None:
    """A resumed run must draw what the first one would have drawn."""
    seeds = {seed_of(*parts) for parts in [(1, 2), (2, 1), (12,), ("12",), (1, "2", 0), (1, 2, 0)]}
    assert len(seeds) == 4  # 12 and "12", and 2 and "2", read alike
    assert all(0 <= seed < 2**64 for seed in seeds)
    assert seed_of(0, 1, 2) == 16458573689347739231
    seed_operator(1, 2)
    assert torch.default_generator.initial_seed() == 2185194620014831856


def test_what_drops_nothing_draws_nothing(job_of) -> None:
    class Model(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
            return [
                F.dropout(x, 0.1),
                F.dropout(x, 0.0),
                F.dropout(x, 0.1, training=False),
                F.scaled_dot_product_attention(x, x, x, dropout_p=0.1),
                F.scaled_dot_product_attention(x, x, x),
                F.rrelu(x, training=True),
                F.rrelu(x),
                x + torch.rand_like(x),
                torch.bernoulli(x.sigmoid()),
            ]

    program = torch.export.export(Model(), (torch.randn(2, 3, 4, 5),), strict=False)
    calls = [node for node in program.graph.nodes if node.op == "call_function"]
    assert {node.name for node in calls if is_random(node, program.graph_module)} == {
        "dropout", "scaled_dot_product_attention", "rrelu", "rand_like", "bernoulli"
    }  # fmt: skip


def test_rows_of_a_draw_that_gives_several_tensors(make_job, write_modules, run_whole) -> None:
    first = "nn.LSTM(3, 3, num_layers=2, dropout=0.5, batch_first=True)"
    code = "x = self.kept(x.unflatten(1, (2, 3)))[0].flatten(1)"
    job = make_job(f"{write_modules({'Dropped': (first, code)})}:WholeDropped")
    whole, *halves = (run_whole(job, span, seed=5) for span in (8, Span(0, 4, 8), Span(4, 8, 8)))
    assert torch.allclose(whole, sum(halves) / 2)
    assert not torch.equal(run_whole(job, 8, seed=6), whole)


DRAWN = """
import torch

def dataset():
    return torch.utils.data.TensorDataset(torch.randn(8, 6), torch.randint(3, (8,)))
"""


def test_what_a_data_factory_draws_follows_from_the_seed_wherever_its_file_lies(
    make_spec, tmp_path: Path
) -> None:
    def inputs_of(place: str, seed: int) -> torch.Tensor:
        file = tmp_path / place / "drawn.py"
        file.parent.mkdir(exist_ok=True)
        file.write_text(DRAWN)
        training = {"steps": 1, "batch_size": 8, "seed": seed}
        job = CapturedJob(make_spec("mlp", data=f"{file}:dataset", training=training))
        inputs: torch.Tensor = job.loader.example(8)[0]
        return inputs

    here = inputs_of("here", 0)
    assert torch.equal(inputs_of("there", 0), here)
    assert not torch.equal(inputs_of("here", 1), here)


def test_an_accelerator_of_any_kind_is_seeded_if_it_is_in_use(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Pretended, as torch knows those of other vendors."""

    def seed_on(module: Any) -> int:
        monkeypatch.setattr(regions, "accelerator", lambda: ("npu", module))
        monkeypatch.setattr(randomness, "accelerator", lambda: ("npu", module))
        seed_operator(1, 2)
        return torch.default_generator.initial_seed()

    seed_on(SimpleNamespace(is_initialized=lambda: False))
    assert accelerator_in_use() is None
    generators = [torch.Generator().manual_seed(3), torch.Generator()]
    seed = seed_on(SimpleNamespace(default_generators=generators, current_device=lambda: 1))
    assert [each.initial_seed() for each in generators] == [3, seed]
    seeds: list[int] = []
    seed_on(SimpleNamespace(manual_seed=seeds.append))  # it has no generators of its own
    assert seeds == [seed]
    # An autocast that was captured on the CPU applies to both.
    assert [list(_devices(kind)) for kind in ("cpu", "npu", "cuda")] == [
        ["cpu", "npu"],
        ["npu"],
        [],
    ]
