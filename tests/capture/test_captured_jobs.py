"""Model and loss of a job: the forms that are captured, what is refused, and batch sizes."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from pipectl.capture.job import assign_groups, find_traits
from pipectl.capture.slices import coupled_operators
from pipectl.errors import CaptureError

MODELS = Path(__file__).with_name("models.py")
EQUALITY = Path(__file__).parents[1] / "equality" / "models.py"


@pytest.mark.parametrize(
    ("model", "form"),
    [
        *(("WithLoss", form) for form in ("tensor", "tuple", "dict", "namedtuple")),
        ("WithModelOutput", ""),
    ],
)
def test_a_model_may_return_its_own_loss(make_job, model: str, form: str) -> None:
    graph = make_job(model, loss="model", data="Mappings", kwargs={"form": form}).training_graph(4)
    loss = graph.operators[graph.position[graph.loss]]
    assert loss.target is torch.ops.aten.cross_entropy_loss.default


def test_a_mapping_of_inputs_and_targets_is_a_pair(make_job) -> None:
    assert make_job("mlp", data="Named").training_graph(4).inputs.keys() == {"inputs", "targets"}


def test_kwargs_of_the_loss_are_bound(make_job) -> None:
    job = make_job("mlp", loss="scaled_loss", loss_kwargs={"scale": 3.0})
    assert 3.0 in job.training_graph(4).operators[-1].args


SCALAR = "^loss: must be a floating-point scalar tensor, but is a "


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ({"model": "mlp", "loss": "vector_loss"}, SCALAR + r"tensor of shape \[batch\]"),
        ({"model": "mlp", "loss": "count_loss"}, SCALAR + "scalar of torch.int64"),
        ({"model": "mlp", "loss": "float_loss"}, SCALAR + "float"),
        ({"model": "mlp", "loss": "model"}, SCALAR + r"tensor of shape \[batch, 3\]"),
        ({"model": "Frozen"}, "^loss: depends on no parameter that requires a gradient"),
        (
            {"model": "mlp", "data": "Transposed"},
            r"^data: a batch of 4 samples has a tensor of shape \[6, 4\]",
        ),
        (
            {"model": "not_a_module"},
            r"^model\.factory: .*returned a str, not a torch\.nn\.Module",
        ),
        (
            {"model": "torch.nn:LazyLinear", "kwargs": {"out_features": 3}},
            "'weight' of a LazyLinear has no shape yet",
        ),
        ({"model": "BackwardHook"}, "^model: inner.0 has a backward hook, which no graph can hold"),
    ],
)
def test_what_cannot_be_trained_is_refused_in_silence(
    make_job, capfd, names: dict[str, Any], message: str
) -> None:
    with pytest.raises(CaptureError, match=message) as raised:
        make_job(**names).training_graph(4)
    assert raised.value.cure
    assert capfd.readouterr() == ("", "")


def test_torch_warns_of_nothing_while_it_exports(make_job, monkeypatch) -> None:
    logger, export = logging.getLogger("torch"), torch.export.export
    speaks: list[bool] = []

    def watched(*given: Any, **options: Any) -> Any:
        speaks.append(logger.isEnabledFor(logging.WARNING))
        return export(*given, **options)

    monkeypatch.setattr("torch.export.export", watched)
    before = logger.level
    make_job("mlp").training_graph(4)
    assert speaks
    assert not any(speaks)
    assert logger.level == before


def test_an_assigned_buffer_is_written(graph_of) -> None:
    """torch.export alone forgets what is assigned anywhere but in the outermost module."""
    graph = graph_of("Running")
    placeholder = next(p for p, state in graph.states.items() if state.name == "model.mean")
    writes = [node for node in graph.operators if "copy_" in str(node.target)]
    assert [node.args[0].name for node in writes] == [placeholder]
    assert (graph.written, graph.rewritten) == ({placeholder: writes[0].name}, set())


def test_a_text_among_the_outputs_names_no_operator(make_job) -> None:
    metrics = {"one": f"{MODELS}:float_loss"}
    evaluation = {"data": f"{MODELS}:Vectors", "metrics": metrics}
    graph = make_job("NamingOutputs", loss="model", evaluation=evaluation).evaluation_graph(4)
    assert graph.outputs == (graph.loss, None, None)


def test_the_model_is_equal_on_every_rank(make_job) -> None:
    first, second = make_job("mlp"), make_job("mlp")
    torch.manual_seed(99)
    assert first.states.keys() == second.states.keys()
    assert all(torch.equal(first.states[name], second.states[name]) for name in first.states)


# Batch sizes


def test_one_graph_serves_every_batch_size_if_the_batch_is_free(job_of) -> None:
    job = job_of("Sizes")
    assert job.training_graph(4) is job.training_graph(1) is job.training_graph(17)
    assert not job.training_graph(4).fixed


def test_a_model_for_one_batch_size_is_captured_for_it_alone(job_of) -> None:
    graph = job_of("FixedBatch").training_graph(4)
    assert (graph.fixed, graph.batch_size) == (True, 4)
    with pytest.raises(
        CaptureError, match=r"FixedBatch: raised RuntimeError: shape .* \(at .*models\.py:\d+: .*\)"
    ):
        job_of("FixedBatch").training_graph(6)


@pytest.mark.parametrize(
    ("model", "kwargs", "alike", "other"),
    [
        ("AsksForSize", {"even": False}, 6, 3),
        ("AsksForSize", {"even": True}, 4, 7),
        ("PerSize", {}, 8, 6),
    ],
)
def test_another_size_must_have_the_same_graph(
    make_job, model: str, kwargs: dict[str, Any], alike: int, other: int
) -> None:
    job = make_job(model, kwargs=kwargs)
    graph = job.training_graph(8)
    assert job.training_graph(alike) is graph
    assert graph.fixed == (model == "PerSize")
    with pytest.raises(
        CaptureError, match=f"^model: its graph for {other} samples differs from that for 8"
    ):
        job.training_graph(other)


def test_a_size_that_became_a_number_fixes_the_graph_whatever_the_loss_leaves_out(make_job) -> None:
    job = make_job("mlp", data="Described", loss="mean_by_size")
    graphs = [job.training_graph(size) for size in (4, 8)]
    assert [(graph.fixed, graph.batch_size) for graph in graphs] == [(True, 4), (True, 8)]


# What is known of a model


COUPLED = """
import torch
from torch import nn

def data():
    return torch.utils.data.TensorDataset(torch.randn(16, 6), torch.randint(3, (16,)))

class Model(nn.Module):
    def __init__(self, code):
        super().__init__()
        self.layer, self.norm, self.code = nn.Linear(6, 3), nn.BatchNorm1d(3), code

    def train(self, mode=True):
        super().train(mode)
        self.norm.train(mode and "frozen" not in self.code)
        return self

    def forward(self, x):
        return eval(self.code, {"self": self, "x": x, "y": self.layer(x), "torch": torch})
"""


@pytest.mark.parametrize(
    ("code", "coupled"),
    [
        ("self.layer(torch.layer_norm(x, (6,)))", []),
        ("self.norm(y)  # frozen", []),
        ("self.norm(y)", ["batch_norm"]),
        ("y - 0.5 * y.mean(dim=0)", ["sub"]),
        ("torch.softmax(y @ y.T, dim=1) @ y", ["matmul"]),
    ],
)
def test_operators_that_couple_samples_are_found(
    make_job, tmp_path: Path, code: str, coupled: list[str]
) -> None:
    path = tmp_path / "coupled.py"
    path.write_text(COUPLED)
    job = make_job(f"{path}:Model", data=f"{path}:data", kwargs={"code": code})
    graph = job.training_graph(4)
    assert [graph.operators[i].name for i in coupled_operators(graph)] == coupled


def test_random_operators_and_shared_parameters_are_named(make_spec) -> None:
    traits = find_traits(make_spec("mlp"), 4)
    assert (traits.random, traits.shared) == ((), ())
    assert find_traits(make_spec("Dropping"), 4).random == ("dropout",)
    spec = make_spec(f"{EQUALITY}:tied", loss=f"{EQUALITY}:token_loss", data=f"{EQUALITY}:Tokens")
    assert find_traits(spec, 4).shared == ("tokens.weight",)


NAMES = ("embed.weight", "block.0.bias", "block.0.weight", "norm.bias", "head")


@pytest.mark.parametrize(
    ("patterns", "groups"),
    [
        (
            ["*.bias", "block.*", "norm.*"],  # the first pattern that matches, or none
            {"block.0.bias": 0, "norm.bias": 0, "block.0.weight": 1},
        ),
        (["b*s"], {"block.0.bias": 0}),
        (["tied.*"], {"embed.weight": 0}),
    ],
)
def test_parameters_belong_to_the_first_group_that_matches_a_name(
    patterns: list[str], groups: dict[str, int]
) -> None:
    names = {name: [name] for name in NAMES}
    names["embed.weight"].append("tied.weight")
    assert assign_groups(names, patterns) == groups


@pytest.mark.parametrize(
    ("pattern", "hint"),
    [
        ("bias", "did you mean '*.bias'?"),
        ("block", "did you mean 'block.*'?"),
        ("embed.wieght", "did you mean 'embed.weight'?"),
        ("*.BIAS", "matches no parameter"),
    ],
)
def test_a_pattern_without_a_match_is_refused_with_help(pattern: str, hint: str) -> None:
    with pytest.raises(CaptureError, match=r"optimizer\.groups\[1\]\.match") as caught:
        assign_groups({name: [name] for name in NAMES}, ["*", pattern])
    assert hint in caught.value.message
    assert "embed.weight" in str(caught.value.cure)
