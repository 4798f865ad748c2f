"""Backwards on another rank give the same bits as on the rank of their forward.

The table in tests/equality has whole trainings; here are operators that are not in its models.
"""

from __future__ import annotations

from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any

import catalogue
import pytest
import torch
from cuts import random_cut
from stages import Stages
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree

from pipectl.capture import CapturedJob, Cut
from pipectl.capture.slices import Rows
from pipectl.errors import MismatchError
from pipectl.runtime import pipefb
from pipectl.runtime.pipefb import Agreement, ForwardHalf, check_operators
from pipectl.runtime.stage import MicroBatch

HERE, SIZE = Path(__file__), 2
CORPUS = {entry.name: entry for entry in catalogue.entries()}
MODELS = """
    lstm autoencoder views codebook teacher checkpointed recommender encoder-decoder islands
    parametrized gpt gpt,bf16 Normed,bf16 Placed
"""


class Hidden(torch.autograd.Function):
    """Keeps a tensor where no hook sees it."""

    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        ctx.value = value
        return value * value

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return 2 * ctx.value * gradient


class Hiding(nn.Linear):
    def __init__(self) -> None:
        super().__init__(6, 12)

    def forward(self, x: Tensor) -> Tensor:
        return Hidden.apply(super().forward(x)).sin().view(-1, 3, 4)


class Normed(nn.Sequential):
    """Norms keep statistics in float32 if their values are in bfloat16 and their weights not."""

    def __init__(self) -> None:
        norms = nn.LayerNorm(6), nn.GroupNorm(2, 6), nn.BatchNorm1d(6)
        layers = [module for norm in norms for module in (nn.Linear(6, 6), norm)]
        super().__init__(*layers, nn.Linear(6, 12), nn.Unflatten(1, (3, 4)))


class Placed(nn.Module):
    """Adds parameters through views; a sum's gradient is that of all it adds, in one memory."""

    def __init__(self) -> None:
        super().__init__()
        self.places = nn.ParameterList([nn.Parameter(torch.randn(12)) for _ in range(6)])
        self.head = nn.Linear(6, 12)

    def forward(self, x: Tensor) -> Tensor:
        for place in self.places:
            x = x + place.view(SIZE, 6)
        return self.head(x).view(-1, 3, 4)


@pytest.fixture(scope="module")
def capture(make_spec, spec_maker, tmp_path_factory):
    """``capture(model)``: of the corpus, of the equality tests, or for the usual vectors."""

    @cache
    def make(model: str, precision: str = "float32") -> CapturedJob:
        if model in CORPUS:
            path = tmp_path_factory.mktemp("pipefb") / "job.yaml"
            return CapturedJob(catalogue.spec_of(CORPUS[model], path))
        training = {"steps": 1, "batch_size": 4, "precision": precision}
        if model == "gpt":
            return CapturedJob(spec_maker(HERE)(model, training=training))
        return CapturedJob(make_spec(1, model=f"{HERE}:{model}", training=training))

    return make


def stages_of(job: CapturedJob, count: int, **how: bool) -> Stages:
    stage_of = random_cut(job.training_graph(SIZE), count, 0)
    return Stages(job, SIZE, stage_of, evaluates=False, **how)


def trained(job: CapturedJob, stages: Stages) -> dict[str, Tensor]:
    """Two steps, the second with the weights that the halves have exchanged."""
    batches = list(job.loader.micro_batches(islice(job.loader.batches(), 1), SIZE))
    steps = [stages.step(number, batches) for number in (0, 1)]
    return {**steps[0], **steps[1], **stages.states()}


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("model", MODELS.split())
@pytest.mark.parametrize("bundled_bytes", [0, pipefb.BUNDLED_BYTES])
def test_gradients_and_buffers_are_those_of_whole_stages(
    capture, monkeypatch, model, bundled_bytes, recompute
):
    """Whether small tensors are copied into one vector, or sent from where they are."""
    monkeypatch.setattr(pipefb, "BUNDLED_BYTES", bundled_bytes)
    job = capture(*model.split(","))
    for count in (1, 3):
        whole, apart = (
            trained(job, stages_of(job, count, recompute=recompute, apart=apart))
            for apart in (False, True)
        )
        assert whole.keys() == apart.keys()
        assert [n for n in whole if not torch.equal(whole[n], apart[n])] == [], count


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("recompute", [False, True])
def test_gradients_leave_stages_with_older_weights_unchanged(capture, apart, recompute):
    """Which :class:`Stages` asserts of every step."""
    job = capture("Placed")
    stages = stages_of(job, 3, apart=apart, recompute=recompute)
    for stage in stages.backwards:
        stage.keep_versions(1)
    trained(job, stages)


def run_forward(job: CapturedJob, *, recompute: bool) -> tuple[ForwardHalf, list[Tensor]]:
    """The front half of a single stage, and what it sends to the other."""
    stages, rows = stages_of(job, 1, apart=True, recompute=recompute), Rows.of(SIZE)
    (front,) = stages.forwards
    assert isinstance(front, ForwardHalf)
    leaves = pytree.tree_leaves(job.loader.example(SIZE))
    known = dict(zip(stages.cut.graph.inputs, leaves, strict=True))
    inputs = {name: known[name] for name in front.inputs(True, rows)}
    message = front.forward(MicroBatch(0, rows, 7), inputs, {})
    sent = {slot: tensor for slot, tensor in message.items() if slot.value.isdecimal()}
    return front, [tensor for tensor in sent.values() if tensor is not None]


def test_each_memory_travels_once_and_not_longer_and_weights_do_not(capture, monkeypatch):
    monkeypatch.setattr(pipefb, "BUNDLED_BYTES", 0)  # small tensors would be copied
    front, sent = run_forward(capture("gpt"), recompute=False)
    _, inputs = run_forward(capture("gpt"), recompute=True)
    assert sum(t.nbytes for t in inputs) < sum(t.nbytes for t in sent) / 2
    agreed = front._agreed[Rows.of(SIZE)]
    states = {~view.number for view in agreed.views if view.number < 0}
    assert len(agreed.sizes) < len(agreed.views) - len(states)
    slots = front.segments[0].codes[Rows.of(SIZE)].stage.states
    large = ("out_weight", "qkv_weight")
    weights = {i for i, slot in enumerate(slots) if slot.value.endswith(large)}
    assert weights
    assert states >= weights
    memories = [StorageWeakRef(tensor.untyped_storage()) for tensor in sent]
    assert not any(memory.expired() for memory in memories)
    sent.clear()
    assert all(memory.expired() for memory in memories)


def test_a_function_that_hides_a_tensor_is_refused(capture: Any) -> None:
    job = capture("Hiding")
    with pytest.raises(MismatchError, match=r"stages\[0\].*keeps more than numbers"):
        trained(job, stages_of(job, 1, apart=True))


def test_code_that_no_graph_holds_is_refused(capture: Any) -> None:
    graph = capture("unsteady").training_graph(SIZE)
    cut = Cut(graph, {node.name: 0 for node in graph.operators}, training=True)
    with pytest.raises(MismatchError, match=r"stages\[0\].*\((Gate|Noisy)\) runs code of its own"):
        check_operators(cut, 0)


def test_a_forward_that_makes_another_graph_is_told(capture, monkeypatch):
    check = Agreement.check

    def other(self: Agreement, stage: int, graph: Any) -> None:
        graph.saved[3] = (torch.float64, (1,))
        check(self, stage, graph)

    monkeypatch.setattr(Agreement, "check", other)
    job = capture("gpt")
    with pytest.raises(MismatchError, match=r"saved tensor 3 is .* instead of"):
        trained(job, stages_of(job, 1, apart=True))
