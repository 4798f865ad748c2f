"""The captured graph: operators, edges, what must stay together, and its fingerprint."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from pipectl.capture.operators import FunctionCall
from pipectl.spec import dump

MODELS = Path(__file__).with_name("models.py")


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


@pytest.mark.parametrize(
    ("model", "name", "users"),
    [
        ("Inplace", "linear", {"relu_"}),
        ("Inplace", "relu_", {"linear_1", "add_"}),
        ("OutArgument", "add", {"mul"}),
    ],
)
def test_readers_of_a_written_value_read_the_writing_operator(
    graph_of, model: str, name: str, users: set[str]
) -> None:
    assert {*graph_of(model).users[name]} == users


@pytest.mark.parametrize(
    ("model", "name", "members"),
    [
        ("SharedNorm", "batch_norm", {"batch_norm", "batch_norm_1"}),
        ("SharedNorm", "add_", {"add_", "add__1"}),
        ("RunningScale", "lerp_", {"lerp_", "div"}),  # another stage would read its old values
        ("Inplace", "linear_2", set()),  # reads after the last write
        ("Inplace", "mean", set()),
        ("cnn", "batch_norm", {"add_", "batch_norm"}),  # used once: with its counter alone
    ],
)
def test_what_shares_memory_that_is_written_is_one_group(
    graph_of, model: str, name: str, members: set[str]
) -> None:
    groups = graph_of(model).groups
    assert {each for each in groups if groups[each] == groups.get(name)} == members


def test_norms_that_are_used_once_share_no_group(graph_of) -> None:
    graph = graph_of("cnn")
    norms = [node.name for node in graph.operators if "batch_norm" in str(node.target)]
    assert len({graph.groups[name] for name in norms}) == len(norms) == 7


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


def test_the_fingerprint_depends_neither_on_the_captured_batch_size_nor_on_weights(
    make_job,
) -> None:
    jobs = [
        make_job("mlp", training={"steps": 1, "batch_size": 8, "seed": seed}) for seed in (1, 2, 3)
    ]
    graphs = [job.training_graph(size) for job, size in zip(jobs, (1, 4, 6), strict=True)]
    assert len({graph.fingerprint for graph in graphs}) == 1
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


# Gradients of the user's own making


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


def test_functions_of_one_name_are_told_apart(make_job) -> None:
    job = make_job("OneName")
    applied = [node.target for node in job.training_graph(4).operators]
    assert [t.function for t in applied if isinstance(t, FunctionCall)] == list(job.model.functions)
