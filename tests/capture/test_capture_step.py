"""The wrapper around model and loss: every form of loss and of sample."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from pipectl.errors import CaptureError

MODELS = Path(__file__).with_name("models.py")


@pytest.mark.parametrize("form", ["tensor", "tuple", "dict", "namedtuple"])
def test_a_model_may_return_its_own_loss(make_job, form: str) -> None:
    job = make_job("WithLoss", loss="model", data="Mappings", kwargs={"form": form})
    graph = job.training_graph(4)
    loss = graph.operators[graph.position[graph.loss]]
    assert loss.target is torch.ops.aten.cross_entropy_loss.default


def test_a_model_may_return_a_dataclass_with_its_loss(make_job) -> None:
    job = make_job("WithModelOutput", loss="model", data="Mappings", kwargs={"form": ""})
    graph = job.training_graph(4)
    assert graph.loss == graph.operators[-1].name


def test_a_mapping_of_inputs_and_targets_is_a_pair(make_job) -> None:
    assert make_job("mlp", data="Named").training_graph(4).inputs.keys() == {"inputs", "targets"}


def test_kwargs_of_the_loss_are_bound(make_job) -> None:
    job = make_job("mlp", loss="scaled_loss", loss_kwargs={"scale": 3.0})
    graph = job.training_graph(4)
    assert 3.0 in graph.operators[-1].args


@pytest.mark.parametrize(
    ("loss", "found"),
    [
        ("vector_loss", "a tensor of shape [batch]"),
        ("count_loss", "a scalar of torch.int64"),
        ("float_loss", "a float"),
    ],
)
def test_a_loss_that_cannot_be_trained_on(make_job, loss: str, found: str) -> None:
    with pytest.raises(CaptureError) as raised:
        make_job("mlp", loss=loss).training_graph(4)
    assert raised.value.message == f"loss: must be a floating-point scalar tensor, but is {found}"
    assert raised.value.cure is not None
    assert ".mean()" in raised.value.cure


def test_a_model_without_its_announced_loss(make_job) -> None:
    with pytest.raises(
        CaptureError, match=r"loss: must be .* but is a tensor of shape \[batch, 3\]"
    ):
        make_job("mlp", loss="model").training_graph(4)


def test_a_frozen_model_cannot_be_trained(make_job) -> None:
    with pytest.raises(CaptureError) as raised:
        make_job("Frozen").training_graph(4)
    assert raised.value.message == "loss: depends on no parameter that requires a gradient"


def test_the_batch_must_come_first(make_job) -> None:
    with pytest.raises(CaptureError) as raised:
        make_job("mlp", data="Transposed").training_graph(4)
    assert raised.value.message == "data: a batch of 4 samples has a tensor of shape [6, 4]"


def test_a_factory_that_returns_no_module(make_job) -> None:
    with pytest.raises(
        CaptureError, match=r"^model\.factory: .*returned a str, not a torch\.nn\.Module"
    ):
        make_job("not_a_module")


def test_an_assigned_buffer_is_written(graph_of) -> None:
    """torch.export alone forgets what is assigned anywhere but in the outermost module."""
    graph = graph_of("Running")
    placeholder = next(p for p, state in graph.states.items() if state.name == "model.mean")
    writes = [node for node in graph.operators if "copy_" in str(node.target)]
    assert [node.args[0].name for node in writes] == [placeholder]
    assert graph.rewritten == {placeholder}


def test_an_assigned_buffer_of_another_shape_is_refused(make_job) -> None:
    with pytest.raises(CaptureError) as raised:
        make_job("Resizing").training_graph(4)
    assert raised.value.message == "model: changes the shape of buffer 'mean' from [6] to []"


def test_a_text_among_the_outputs_names_no_operator(make_job) -> None:
    job = make_job(
        "NamingOutputs",
        loss="model",
        evaluation={"data": f"{MODELS}:Vectors", "metrics": {"one": f"{MODELS}:float_loss"}},
    )
    graph = job.evaluation_graph(4)
    assert graph.outputs == (graph.loss, None, None)
