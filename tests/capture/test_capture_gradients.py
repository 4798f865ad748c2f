"""Gradients of the user's own making: recorded with an autograd function, refused as a hook."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from pipectl.capture.operators import FunctionCall
from pipectl.errors import CaptureError

MODELS = Path(__file__).with_name("models.py")


def test_an_autograd_function_is_one_operator_with_its_own_backward(
    job_of, assert_as_the_model
) -> None:
    job = job_of("OwnBackward")
    operators = job.training_graph(4).operators
    assert sum("Doubling" in str(node.target) for node in operators) == 1
    assert_as_the_model(job)


def test_the_fingerprint_names_the_function_but_no_address_and_no_directory(
    graph_of, make_job, tmp_path: Path
) -> None:
    copy = shutil.copy(MODELS, tmp_path)
    here, there = graph_of("OwnBackward"), make_job(f"{copy}:OwnBackward").training_graph(4)
    assert "0x" not in "".join(str(node.target) for node in here.operators)
    assert (there.signatures, there.fingerprint) == (here.signatures, here.fingerprint)


@pytest.mark.parametrize("reentrant", [True, False])
def test_recomputed_blocks_are_captured_as_operators(make_job, reentrant: bool) -> None:
    graph = make_job("Recomputed", kwargs={"reentrant": reentrant}).training_graph(4)
    assert [node.name for node in graph.operators][:3] == ["linear", "tanh", "linear_1"]
    assert all(graph.requires_grad.values())


@pytest.mark.parametrize("materialize", ["eager", "per_rank"])
@pytest.mark.parametrize("kind", ["gradient", "accumulated"])
def test_a_hook_on_a_trained_parameter_is_refused(make_job, kind: str, materialize: str) -> None:
    """Tied parameters, versions of weights and weights made on their rank would not run it."""
    with pytest.raises(CaptureError) as raised:
        make_job("ParameterHook", kwargs={"kind": kind}, materialize=materialize)
    assert raised.value.message == (
        "model: parameter inner.0.weight has a hook on its gradient, which would not run in every "
        "plan"
    )


@pytest.mark.parametrize("kwargs", [{"frozen": True}, {"kind": "removed"}])
def test_a_hook_that_never_runs_is_none(make_job, kwargs) -> None:
    assert make_job("ParameterHook", kwargs=kwargs).training_graph(4).operators


def test_functions_of_one_name_are_told_apart(make_job) -> None:
    job = make_job("OneName")
    applied = [node.target for node in job.training_graph(4).operators]
    assert [t.function for t in applied if isinstance(t, FunctionCall)] == list(job.model.functions)
