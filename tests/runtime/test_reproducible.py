"""Weights, buffers, losses and metrics whose bits depend neither on replicas nor on stages."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from pipectl.errors import MismatchError, SpecError
from pipectl.plan import Plan, Replication
from pipectl.runs import RunDirectory, read_metrics
from pipectl.runtime.nodes import check_supported
from pipectl.runtime.sums import GradientSums
from pipectl.runtime.written import StepWrites
from pipectl.schedule.sum_tree import insert, max_held, micro_batches_in_turn, roots, total
from tests.equality.outcome import weights

MODELS = Path(__file__).parents[1] / "equality" / "models.py"
STEPS, BATCH, MICRO_BATCHES = 3, 23, 12
"""The last micro-batch is smaller."""
SHARD = {"shard_optimizer": True}
CELLS: dict[str, dict[str, Any]] = {
    "3x1": {"stages": 1, "replicas": 3, **SHARD},
    "1 and 2 replicas": {"stages": 2, "replicas": "any"},
}
"""Pipelines that every run of the tests trains; backwards on other ranks: see test_combinations."""
PRODUCT: dict[str, dict[str, Any]] = {
    **{f"{r}x{s}": {"stages": s, "replicas": r} for r, s in product((1, 2, 3, 4, 6), (1, 2, 3, 4))},
    **{f"{r}x2 sharded": {"stages": 2, "replicas": r, **SHARD} for r in (2, 3)},
    "2x2 in halves": {"stages": 2, "replicas": 2, "schedule": "zb-h1"},
    "2x4 interleaved": {"stages": 4, "replicas": 2, "schedule": "interleaved"},
    "2x2 in blocks": {"stages": 2, "replicas": 2, "recompute": "blocks"},
    "backwards apart": {"stages": 1, "backward": "apart"},
    "1x2 recomputed apart": {"stages": 2, "backward": "apart", "recompute": "all"},
}


def ranks_of(pipeline: dict[str, Any]) -> int:
    if pipeline.get("replicas") == "any":
        return 3
    each = 2 if "backward" in pipeline else 1
    stages = pipeline["stages"] // (2 if pipeline.get("schedule") == "interleaved" else 1)
    return each * stages * pipeline.get("replicas", 1)


def sections(kind: str, **pipeline: Any) -> dict[str, Any]:
    """Batch norm, dropout and skips, or tied weights; clipped; evaluated after every step."""
    images = kind == "dense"
    data = {"factory": f"{MODELS}:{'Images' if images else 'Tokens'}"}
    loss = "torch.nn:CrossEntropyLoss" if images else f"{MODELS}:token_loss"
    metrics = {"accuracy": f"{MODELS}:accuracy"} if images else {}
    held_out = {**data, "kwargs": {"count": 11}}
    return {
        "model": {"factory": f"{MODELS}:{kind}"},
        "data": data,
        "loss": {"factory": loss},
        "optimizer": {"factory": "torch.optim:AdamW", "kwargs": {"lr": 0.01}},
        "evaluation": {"data": held_out, "every": 1, "metrics": metrics},
        "training": {
            "steps": STEPS, "batch_size": BATCH, "clip_grad_norm": 0.5, "reproducible": True
        },
        "pipeline": {"micro_batches": MICRO_BATCHES, **pipeline},
    }  # fmt: skip


def result(run: RunDirectory) -> tuple[str, list[Any]]:
    """The hash of the weights and buffers, and all losses and metrics."""
    digest = hashlib.sha256()
    for name, tensor in sorted(weights(run.path).items()):
        digest.update(name.encode() + tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
    lines = read_metrics(run)
    return digest.hexdigest(), [
        (line.step, line.loss, line.gradient_norm, line.evaluation) for line in lines
    ]


@pytest.fixture(scope="module")
def results(make_run: Any, train: Any) -> Any:
    """``results(kind, cells)``: of one rank, and of each cell."""

    def train_all(kind: str, cells: dict[str, dict[str, Any]]) -> dict[str, tuple[str, list[Any]]]:
        runs = {"1x1": make_run(1, **sections(kind, stages=1, replicas=1))}
        for name, pipeline in cells.items():
            given = {**pipeline, "replicas": 1} if "any" in pipeline.values() else pipeline
            runs[name] = make_run(ranks_of(given), **sections(kind, **given))
            if given is not pipeline:
                plan = Plan.load(runs[name].plan)
                first, last = plan.stages
                stages = first, replace(last, ranks=(1, 2))
                fields = {"warm_up": (3, 2), "node_of_rank": (0, 0, 0)}
                replace(plan, stages=stages, **fields).save(runs[name].plan)
        train(*runs.values())
        return {name: result(run) for name, run in runs.items()}

    return train_all


@pytest.mark.mpi
def test_weights_and_losses_are_the_same_bits_for_any_replicas_and_stages(results: Any) -> None:
    found = results("dense", CELLS)
    assert len(found["1x1"][1]) == 2 * STEPS
    for name, each in found.items():
        assert each == found["1x1"], name


@pytest.mark.product
@pytest.mark.mpi
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("kind", ["dense", "tied"])
def test_every_number_of_replicas_and_stages_gives_one_hash(results: Any, kind: str) -> None:
    found = results(kind, PRODUCT)
    print(found["1x1"][0])
    assert {name for name, each in found.items() if each != found["1x1"]} == set()


def written(numbers: list[int]) -> str:
    return total({(0, i): str(i) for i in numbers}, "({}+{})".format)


def test_all_replicas_together_add_in_the_order_of_one() -> None:
    assert written([*range(7)]) == "(((0+1)+(2+3))+((4+5)+6))"
    replicas_of_stages = [(1,), (2,), (3,), (4,), (1, 2), (2, 3), (3, 1, 2), (4, 6)]
    for count, replicas in product(range(1, 28), replicas_of_stages):
        turns = micro_batches_in_turn(replicas, count).tolist()
        assert sorted(turns) == [*range(count)]
        assert turns[-1] == count - 1  # the one that may be smaller
        for number in set(replicas):
            parts: dict[Any, str] = {}
            for replica in range(number):
                own: dict[Any, list[int]] = {}
                for micro_batch in turns[replica::number]:
                    insert(own, micro_batch, [micro_batch], list.__add__)
                assert set(own) == set(roots(turns[replica::number]))
                parts |= {node: written(held) for node, held in own.items()}
            assert total(parts, "({}+{})".format) == written([*range(count)])
    assert [max_held(range(count)) for count in (1, 2, 3, 4, 8, 16)] == [1, 1, 2, 2, 3, 4]
    assert max_held([3, 2, 1, 0]) == 2


def test_micro_batches_without_a_gradient_are_left_out() -> None:
    """In any order, and with two halves of a backward that end one after the other."""
    leaf, other = torch.zeros(1, requires_grad=True), torch.zeros(1, requires_grad=True)
    values = torch.randn(8, generator=torch.Generator().manual_seed(1)).tolist()
    for order in ([0, 1, 2, 3, 4, 5, 6, 7], [7, 2, 5, 0, 3, 6, 4]):
        sums = GradientSums([leaf, other])
        for number in order:
            sums.micro_batch = number
            if number != 1:
                leaf.grad = torch.tensor([values[number]])
            sums.add([leaf, other])
        sums.finish()
        assert other.grad is None
        v = torch.tensor(values)
        expected = (v[0] + (v[2] + v[3])) + ((v[4] + v[5]) + (v[6] + v[7]))
        assert leaf.grad is not None
        assert leaf.grad.item() == expected.item()
        leaf.grad = None


def test_buffers_begin_every_micro_batch_with_their_values_before_the_step() -> None:
    def forwards(numbers: list[int]) -> tuple[StepWrites, dict[str, torch.Tensor]]:
        buffers = {
            "mean": torch.tensor([1.0]),
            "same": torch.tensor([0.1], dtype=torch.float64),
            "phase": torch.tensor([2.0j]),
            "count": torch.tensor([5]),
            "place": torch.tensor([7]),
            "seen": torch.tensor([False, True]),
        }
        writes = StepWrites(buffers)
        for number in numbers:
            before = writes.begin()
            assert buffers["count"].item() == 5
            buffers["mean"] += 1.0 + number
            buffers["same"].fill_(0.3)
            buffers["phase"] *= number
            buffers["count"] += 2
            buffers["place"].fill_(number)
            buffers["seen"][0] = number == 1
            writes.end(number, before)
        return writes, buffers

    alone, expected = forwards([0, 1, 2])
    alone.settle()
    values = {name: buffer.tolist() for name, buffer in expected.items()}
    assert values == {
        "mean": [3.0], "same": [0.3], "phase": [2.0j], "count": [11], "place": [2],
        "seen": [True, True],
    }  # fmt: skip
    parts: list[Any] = []
    replicas = [forwards([0, 1]), forwards([]), forwards([2])]
    for writes, _ in replicas:
        writes.settle(lambda own: [parts.append(own) or {}])  # type: ignore[func-returns-value]
    for _, buffers in replicas:
        again = StepWrites(buffers)
        again.settle(lambda _: parts)
        assert {name: buffer.tolist() for name, buffer in buffers.items()} == values


def refusals(make_spec: Any) -> Iterator[tuple[str, Any]]:
    job = partial(sections, "dense")
    yield "needs pipeline.micro_batches", job(micro_batches=None)
    yield "does not go with schedule pipedream-2bw", job(schedule="pipedream-2bw")
    compiled = job()
    compiled["training"] |= {"compile": True, "clip_grad_norm": None}
    yield "does not go with training.compile", compiled


def test_what_cannot_be_reproducible_is_refused(make_spec: Any, pipeline: Any) -> None:
    for message, wrong in refusals(make_spec):
        with pytest.raises(SpecError, match=message):
            make_spec(2, **wrong)
    spec = make_spec(2, **sections("dense", stages=1, replicas=2))
    plan = pipeline(1, MICRO_BATCHES, micro_batch_size=2, node_of_rank=[0, 0])
    (stage,) = plan.stages
    plan = replace(plan, stages=(replace(stage, ranks=(0, 1)),), reproducible=True)
    check_supported(plan, spec=spec)
    alone = replace(plan, stages=(stage,), schedule="pipedream-2bw")
    for message, refused in (
        ("was made without training.reproducible", replace(plan, reproducible=False)),
        ("replication is split", replace(plan, replication=Replication.SPLIT)),
        ("micro-batches of 4 samples", replace(plan, micro_batch_size=4)),
        ("reproducible: true with schedule pipedream-2bw", alone),
    ):
        with pytest.raises(MismatchError, match=message):
            check_supported(refused, spec=spec)


def test_the_planner_keeps_the_micro_batches(make_spec: Any, profile_of: Any) -> None:
    """Copies would be of other sizes otherwise: 23 samples in 12 parts for 4."""
    from pipectl.cluster import assumed_cluster
    from pipectl.jobs.planning import plan_job

    for replicas in (1, 4, "any"):
        spec = make_spec(4, **sections("dense", stages=None, replicas=replicas))
        plan = plan_job(spec, profile_of(spec), assumed_cluster("here", [4], 4, None))
        assert plan.reproducible
        assert (plan.micro_batches, plan.micro_batch_size) == (12, 2)
