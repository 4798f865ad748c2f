"""Models that export, that fix their batch size, and that cannot be captured."""

from __future__ import annotations

import pytest
import torch

from pipectl.capture import CapturedJob
from pipectl.errors import CaptureError


def test_torch_stays_silent_about_a_failed_export(make_job, capfd) -> None:
    with pytest.raises(CaptureError):
        make_job("Branching").training_graph(4)
    assert capfd.readouterr() == ("", "")


def test_one_graph_serves_every_batch_size_where_the_batch_is_free(job_of) -> None:
    job = job_of("Sizes")
    assert job.training_graph(4) is job.training_graph(1) is job.training_graph(17)
    assert not job.training_graph(4).fixed


def test_a_model_for_one_batch_size_is_captured_for_it(job_of) -> None:
    graph = job_of("FixedBatch").training_graph(4)
    assert graph.fixed
    assert graph.batch_size == 4


def test_a_model_for_one_batch_size_refuses_another(make_job) -> None:
    with pytest.raises(
        CaptureError, match=r"FixedBatch: raised RuntimeError: shape .* \(at .*models\.py:\d+: .*\)"
    ):
        make_job("FixedBatch").training_graph(6)


def test_the_model_is_equal_on_every_rank(make_job) -> None:
    first, second = make_job("mlp"), make_job("mlp")
    torch.manual_seed(99)
    assert first.states.keys() == second.states.keys()
    assert all(torch.equal(first.states[name], second.states[name]) for name in first.states)


def test_a_graph_per_fixed_size_must_be_the_same_graph(make_job) -> None:
    job: CapturedJob = make_job("PerSize")
    assert job.training_graph(4).fixed
    with pytest.raises(CaptureError) as raised:
        job.training_graph(6)
    assert raised.value.message == "model: its graph for 6 samples differs from that for 4"


@pytest.mark.parametrize(("even", "alike", "other"), [(False, 6, 3), (True, 4, 7)])
def test_what_a_model_asks_of_its_batch_size_holds_for_sizes_with_the_same_answer(
    make_job, even: bool, alike: int, other: int
) -> None:
    job = make_job("AsksForSize", kwargs={"even": even})
    graph = job.training_graph(8)
    assert not graph.fixed
    assert job.training_graph(alike) is graph
    with pytest.raises(
        CaptureError, match=f"its graph for {other} samples differs from that for 8"
    ):
        job.training_graph(other)


def test_a_size_that_became_a_number_fixes_the_graph_whatever_the_loss_leaves_out(make_job) -> None:
    job = make_job("mlp", data="Described", loss="mean_by_size")
    graphs = [job.training_graph(size) for size in (4, 8)]
    assert [(graph.fixed, graph.batch_size) for graph in graphs] == [(True, 4), (True, 8)]


def test_draws_of_a_function_that_was_imported_by_name_are_refused(make_job) -> None:
    with pytest.raises(CaptureError, match="it draws from a generator that is not torch's"):
        make_job("DrawsByName").training_graph(4)
