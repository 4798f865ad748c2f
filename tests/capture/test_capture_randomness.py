"""Random operators draw the same numbers whatever ran before, and wherever they run."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from pipectl.capture import CapturedJob, Cut, build_stage, randomness, regions
from pipectl.capture.operators import is_random
from pipectl.capture.randomness import seed_of, seed_operator
from pipectl.capture.regions import _devices, accelerator_in_use
from pipectl.capture.slices import Rows
from pipectl.spec import JobSpec, dump, load


def test_seeds_are_64_bit_and_differ_by_every_part() -> None:
    seeds = {seed_of(*parts) for parts in [(1, 2), (2, 1), (12,), ("12",), (1, "2", 0), (1, 2, 0)]}
    assert len(seeds) == 4  # 12 and "12", and 2 and "2", read alike
    assert all(0 <= seed < 2**64 for seed in seeds)


def test_seeds_are_the_same_in_every_release() -> None:
    """A resumed run must draw what the first one would have drawn."""
    assert seed_of(0, 1, 2) == 16458573689347739231


def test_seeding_ignores_what_was_drawn_before() -> None:
    seed_operator(7, 9)
    first = torch.rand(4)
    torch.rand(100)
    seed_operator(7, 9)
    assert torch.equal(torch.rand(4), first)
    seed_operator(7, 10)
    assert not torch.equal(torch.rand(4), first)
    seed_operator(8, 9)
    assert not torch.equal(torch.rand(4), first)


def random_operators(graph) -> list[str]:
    return [node.name for node in graph.operators if is_random(node, graph.root)]


def test_dropout_is_random_and_linear_is_not(graph_of, job_of) -> None:
    assert random_operators(graph_of("Dropping")) == ["dropout"]
    gpt = random_operators(job_of("gpt").training_graph(4))
    assert {name.rstrip("_0123456789") for name in gpt} == {"dropout"}  # its attention drops none
    assert len(gpt) == 4
    assert random_operators(graph_of("mlp")) == []


def test_what_drops_nothing_draws_nothing() -> None:
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


def test_a_mask_follows_from_the_seed_alone(job_of, run_whole) -> None:
    job = job_of("Dropping")
    graph = job.training_graph(4)
    cut = Cut(graph, {n.name: int(n.name != "linear") for n in graph.operators}, training=True)
    first, second = build_stage(cut, 0, 4), build_stage(cut, 1, 4)
    inputs, targets = job.loader.example(4)

    def values(code) -> list[torch.Tensor]:
        return [job.states[graph.states[slot.value].name] for slot in code.states]

    expected = run_whole(job, seed=5)
    (sent,) = first.module(5, *values(first), inputs)
    torch.rand(11)
    assert torch.equal(second.module(5, *values(second), targets, sent)[0], expected)
    assert torch.equal(run_whole(job, seed=5), expected)
    assert not torch.equal(run_whole(job, seed=6), expected)


DRAWN = """
import torch
from torch.utils.data import TensorDataset

def dataset():
    return TensorDataset(torch.randn(8, 6), torch.randint(3, (8,)))
"""
JOB = """
version: 1
name: job
model: {factory: torch.nn:Linear, kwargs: {in_features: 6, out_features: 3}}
loss: torch.nn:CrossEntropyLoss
data: ./drawn.py:dataset
training: {steps: 1, batch_size: 8}
"""


def test_what_a_data_factory_draws_follows_from_the_seed_wherever_its_file_lies(
    tmp_path: Path,
) -> None:
    def inputs_of(spec: JobSpec) -> torch.Tensor:
        return CapturedJob(spec).loader.example(8)[0]

    for name in ("here", "there"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "drawn.py").write_text(DRAWN)
        (tmp_path / name / "job.yaml").write_text(JOB)
    here, there = (load(tmp_path / name / "job.yaml", sites=()) for name in ("here", "there"))
    (tmp_path / "run.yaml").write_text(dump(there))
    drawn = inputs_of(here)
    assert torch.equal(inputs_of(there), drawn)
    assert torch.equal(inputs_of(load(tmp_path / "run.yaml", sites=())), drawn)
    other = load(tmp_path / "here" / "job.yaml", ["training.seed=1"], sites=())
    assert not torch.equal(inputs_of(other), drawn)


def test_rows_of_a_draw_that_gives_several_tensors(job_of, run_whole) -> None:
    job = job_of("DroppedLstm")
    whole, *halves = (run_whole(job, rows, seed=5) for rows in (8, Rows(0, 4, 8), Rows(4, 8, 8)))
    assert torch.allclose(whole, sum(halves) / 2)


# An accelerator of any kind: pretended, as torch knows those of other vendors


@pytest.fixture
def pretend(monkeypatch: pytest.MonkeyPatch) -> Any:
    def make(module: Any) -> None:
        monkeypatch.setattr(regions, "accelerator", lambda: ("npu", module))
        monkeypatch.setattr(randomness, "accelerator", lambda: ("npu", module))

    return make


def test_one_that_nobody_has_used_is_left_alone(pretend: Any) -> None:
    pretend(SimpleNamespace(is_initialized=lambda: False))
    assert accelerator_in_use() is None
    seed_operator(1, 2)


def test_an_operator_is_seeded_on_the_current_one(pretend: Any) -> None:
    generators = [torch.Generator().manual_seed(3), torch.Generator()]
    pretend(SimpleNamespace(default_generators=generators, current_device=lambda: 1))
    seed_operator(1, 2)
    expected = torch.default_generator.initial_seed()
    assert [each.initial_seed() for each in generators] == [3, expected]


def test_one_without_generators_of_its_own_is_seeded_as_a_whole(pretend: Any) -> None:
    seeds: list[int] = []
    pretend(SimpleNamespace(manual_seed=seeds.append))
    seed_operator(1, 2)
    assert seeds == [torch.default_generator.initial_seed()]
    # An autocast that was captured on the CPU applies to both.
    assert [list(_devices(kind)) for kind in ("cpu", "npu", "cuda")] == [
        ["cpu", "npu"],
        ["npu"],
        [],
    ]
