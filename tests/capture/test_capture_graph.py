"""The captured graph: operators, edges, what must stay together, and its fingerprint."""

from __future__ import annotations

import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from pipectl.spec import dump

MODELS = Path(__file__).with_name("models.py")


def members(graph, name: str) -> set[str]:
    group = graph.groups.get(name)
    return {other for other, found in graph.groups.items() if found == group and group is not None}


def test_operators_and_edges_of_a_chain(graph_of) -> None:
    graph = graph_of("mlp")
    names = ["linear", "relu", "linear_1", "cross_entropy_loss"]
    assert [node.name for node in graph.operators] == names
    assert list(graph.edges) == list(pairwise(names))
    assert graph.loss == "cross_entropy_loss"
    assert graph.groups == {}
    assert all(graph.requires_grad.values())


@pytest.mark.parametrize(("use", "length"), [("ids", 6), ("numbers", 0), ("class", 0)])
def test_only_integers_that_an_embedding_looks_up_are_tokens(
    make_job, use: str, length: int
) -> None:
    job = make_job("ReadsIntegers", data="Integers", kwargs={"use": use})
    assert job.training_graph(4).tokens_per_sample == length


def test_readers_of_a_written_value_read_the_writing_operator(graph_of) -> None:
    graph = graph_of("Inplace")
    assert graph.users["linear"] == ("relu_",)
    assert set(graph.users["relu_"]) == {"linear_1", "add_"}
    assert graph_of("OutArgument").users["add"] == ("mul",)


def test_a_norm_used_twice_stays_in_one_stage(graph_of) -> None:
    graph = graph_of("SharedNorm")
    assert members(graph, "batch_norm") >= {"batch_norm", "batch_norm_1"}
    assert members(graph, "add_") >= {"add_", "add__1"}


def test_readers_of_a_written_buffer_stay_with_the_write(graph_of) -> None:
    """A buffer exists once per rank, so that another stage would read its old values."""
    assert members(graph_of("RunningScale"), "lerp_") == {"lerp_", "div"}


def test_readers_behind_the_last_write_are_free(graph_of) -> None:
    graph = graph_of("Inplace")
    assert "linear_2" not in graph.groups
    assert "mean" not in graph.groups


def test_a_norm_used_once_stays_with_its_counter_alone(real_job) -> None:
    graph = real_job("cnn").training_graph(4)
    norms = [node.name for node in graph.operators if "batch_norm" in str(node.target)]
    assert len(norms) == 7
    assert members(graph, "batch_norm") == {"add_", "batch_norm"}
    assert not any({a, b} <= members(graph, a) for a in norms for b in norms if a != b)


def test_a_norm_in_evaluation_writes_nothing(job_of) -> None:
    graph = job_of("SharedNorm").evaluation_graph(4)
    norms = [node.name for node in graph.operators if "batch_norm" in str(node.target)]
    assert len(norms) == 2
    assert graph.groups == {}


def test_tied_names_are_one_state(job_of) -> None:
    job = job_of("Tied")
    assert job.tied == {"model.last.weight": "model.first.weight"}
    graph = job.training_graph(4)
    names = [state.name for state in graph.states.values()]
    assert names.count("model.first.weight") == 1
    assert "model.last.weight" not in names
    placeholder = next(p for p, s in graph.states.items() if s.name == "model.first.weight")
    assert len(graph.users[placeholder]) == 2


def test_outputs_of_the_evaluation_graph_have_the_models_structure(make_job) -> None:
    job = make_job(
        "WithModelOutput",
        loss="model",
        data="Mappings",
        kwargs={"form": ""},
        evaluation={"data": f"{MODELS}:Mappings", "metrics": {"m": "builtins:max"}},
    )
    graph = job.evaluation_graph(4)
    assert graph.outputs[0] == graph.loss
    leaves = [torch.full((2,), float(index)) for index in range(len(graph.outputs))]
    rebuilt = torch.utils._pytree.tree_unflatten(leaves, graph.output_spec)
    assert type(rebuilt).__name__ == "ModelOutput"
    assert rebuilt.logits.tolist() == [1.0, 1.0]
    assert rebuilt.past is rebuilt.cache is None


def test_outputs_that_no_metric_asks_for_are_left_out(make_job) -> None:
    job = make_job("WithModelOutput", loss="model", data="Mappings", kwargs={"form": ""})
    assert job.evaluation_graph(4).outputs == ()


CODE = """
import sys
from itertools import pairwise
from pathlib import Path
from pipectl.capture import CapturedJob
from pipectl.spec import load
for path in sys.argv[1:]:
    graph = CapturedJob(load(Path(path))).training_graph(4)
    print(graph.fingerprint, sorted(graph.groups.items()))
print("MPI" if "mpi4py" in sys.modules else "no MPI")
"""


def test_the_fingerprint_is_equal_in_another_process_which_needs_no_mpi(job_of, tmp_path) -> None:
    jobs = [job_of(name) for name in ("Inplace", "Tuples", "SharedNorm", "Tied")]
    files = [tmp_path / f"{number}.yaml" for number in range(len(jobs))]
    for job, file in zip(jobs, files, strict=True):
        file.write_text(dump(job.spec))
    other = "1" if os.environ.get("PYTHONHASHSEED") != "1" else "2"
    lines = subprocess.run(
        [sys.executable, "-c", CODE, *map(str, files)],
        env={**os.environ, "PYTHONHASHSEED": other},
        capture_output=True,
        text=True,
        check=True,
        timeout=200,
    ).stdout.splitlines()
    graphs = [job.training_graph(4) for job in jobs]
    assert lines[:-1] == [f"{g.fingerprint} {sorted(g.groups.items())}" for g in graphs]
    assert len(set(lines)) == 5
    assert lines[-1] == "no MPI"


def test_the_fingerprint_does_not_depend_on_the_captured_batch_size(make_job) -> None:
    fingerprints = {make_job("mlp").training_graph(size).fingerprint for size in (1, 4, 6)}
    assert len(fingerprints) == 1


def test_the_fingerprint_does_not_depend_on_weights(make_job) -> None:
    seeds = [{"training": {"steps": 1, "batch_size": 8, "seed": seed}} for seed in (1, 2)]
    jobs = [make_job("mlp", **seed) for seed in seeds]
    first, second = (job.training_graph(4).fingerprint for job in jobs)
    assert first == second
    assert not torch.equal(jobs[0].states["model.0.weight"], jobs[1].states["model.0.weight"])


@pytest.mark.parametrize(
    ("model", "kwargs", "difference"),
    [
        ("mlp", {}, None),
        ("deeper", {}, "operator 3 is 'cross_entropy_loss' here and 'linear_2' there"),
        ("mlp", {"width": 9}, "the operators agree, but parameters, inputs or the loss do not"),
        ("mlp", {"slope": 0.2}, "operator 1, 'leaky_relu', has other arguments here than there"),
    ],
)
def test_the_first_operator_that_differs_is_named(
    make_job, model: str, kwargs: dict[str, float], difference: str | None
) -> None:
    like = {"slope": 0.1} if "slope" in kwargs else {}
    graph, other = (
        make_job(name, kwargs=each).training_graph(4)
        for name, each in (("mlp", like), (model, kwargs))
    )
    assert (graph.fingerprint == other.fingerprint) == (difference is None)
    assert graph.difference(other.fingerprint, other.signatures) == difference
