"""Backwards on another rank give the same bits as on the rank of their forward.

The table in tests/equality has whole trainings; here are operators that are not in its models.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from itertools import islice, product
from typing import Any

import catalogue
import pytest
import torch
import torch.nn.functional as F
from cuts import random_cut
from stages import Stages
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.data import Dataset

from pipectl.capture import CapturedJob, Cut
from pipectl.capture.slices import Rows
from pipectl.errors import MismatchError
from pipectl.runtime import pipefb
from pipectl.runtime.pipefb import Agreement, ForwardHalf, check_operators
from pipectl.runtime.stage import MicroBatch

WIDTH, SIZE = 24, 2
MODELS = """
    lstm autoencoder views straight-through codebook running-norm frozen checkpointed siamese
    experts encoder-decoder islands parametrized attention Placed
"""


class Samples(Dataset):
    def __init__(self) -> None:
        self.values = torch.randn(8, 6, WIDTH, generator=torch.Generator().manual_seed(2))

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.values[index], self.values[index].mean()


def loss(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs.mean((1, 2)) - targets).square().mean()


class Attention(nn.Module):
    """Three views of one projection, a reshaped input, random masks."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH)
        self.out, self.dropout = nn.Linear(WIDTH, WIDTH), nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        b, t, c = x.shape
        q, k, v = self.qkv(self.norm(x)).view(b, t, 3, 3, c // 3).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.dropout(self.out(y.transpose(1, 2).reshape(b, t, c)))


def attention() -> nn.Module:
    return nn.Sequential(Attention(), Attention())


def normed() -> nn.Module:
    """Norms keep statistics in float32 if their values are in bfloat16 and their weights not."""
    norms = nn.LayerNorm(WIDTH), nn.GroupNorm(2, 6), nn.BatchNorm1d(6)
    return nn.Sequential(*(m for norm in norms for m in (nn.Linear(WIDTH, WIDTH), norm)))


class Placed(nn.Module):
    """Adds parameters through views; a sum's gradient is that of all it adds, in one memory."""

    def __init__(self) -> None:
        super().__init__()
        self.places = nn.ParameterList([nn.Parameter(torch.randn(12, WIDTH)) for _ in range(6)])
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        for place in self.places:
            x = x + place.view(2, 6, WIDTH)
        return self.linear(x)


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
        super().__init__(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return Hidden.apply(super().forward(x)).sin()


@pytest.fixture(scope="module")
def capture(make_spec: Any, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., CapturedJob]:
    """``capture(model)``: of this file, or of the corpus."""
    corpus = {entry.name: entry for entry in catalogue.entries()}

    @cache
    def make(model: str, precision: str = "float32") -> CapturedJob:
        if model in corpus:
            path = tmp_path_factory.mktemp("pipefb") / "job.yaml"
            return CapturedJob(catalogue.spec_of(corpus[model], path))
        data, parts = {"factory": f"{__file__}:Samples"}, {"model": model, "loss": "loss"}
        training = {"steps": 1, "batch_size": 4, "precision": precision}
        factories = {key: f"{__file__}:{name}" for key, name in parts.items()}
        return CapturedJob(make_spec(1, data, **factories, training=training))

    return make


def stages_of(job: CapturedJob, count: int, **how: bool) -> Stages:
    stage_of = random_cut(job.training_graph(SIZE), count, 0)
    return Stages(job, SIZE, stage_of, evaluates=False, **how)


def trained(job: CapturedJob, stages: Stages) -> dict[str, Tensor]:
    """Two steps, the second with the weights that the halves have exchanged."""
    batches = list(job.loader.micro_batches(islice(job.loader.batches(), 1), SIZE))
    steps = [stages.step(number, batches) for number in (0, 1)]
    return {**steps[0], **steps[1], **stages.states()}


def bytes_of(stages: Stages) -> int:
    return sum(
        t.nbytes for message in stages.between_halves for t in message.values() if t is not None
    )


@pytest.mark.parametrize("model", MODELS.split())
@pytest.mark.parametrize("bundled_bytes", [0, pipefb.BUNDLED_BYTES])
def test_gradients_and_buffers_are_those_of_whole_stages(
    capture: Any, monkeypatch: pytest.MonkeyPatch, model: str, bundled_bytes: int
) -> None:
    """Whether small tensors are copied into one vector, or sent from where they are."""
    monkeypatch.setattr(pipefb, "BUNDLED_BYTES", bundled_bytes)
    job = capture(model)
    for count, recompute in product((1, 3), (False, True)):
        whole, apart = (
            trained(job, stages_of(job, count, recompute=recompute, apart=apart))
            for apart in (False, True)
        )
        assert whole.keys() == apart.keys()
        assert [n for n in whole if not torch.equal(whole[n], apart[n])] == [], (count, recompute)


@pytest.mark.parametrize("model", ["attention", "normed"])
def test_half_precision_too(capture: Any, model: str) -> None:
    job = capture(model, "bf16")
    whole, apart = (trained(job, stages_of(job, 2, apart=apart)) for apart in (False, True))
    assert [name for name in whole if not torch.equal(whole[name], apart[name])] == []


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("recompute", [False, True])
def test_gradients_leave_stages_with_older_weights_unchanged(
    capture: Any, apart: bool, recompute: bool
) -> None:
    """Which :class:`Stages` asserts of every step."""
    job = capture("Placed")
    stages = stages_of(job, 3, apart=apart, recompute=recompute)
    for stage in stages.backwards:
        stage.keep_versions(1)
    trained(job, stages)


def test_each_memory_travels_once_and_weights_do_not(capture: Any) -> None:
    job = capture("attention")
    stages = stages_of(job, 1, apart=True)
    trained(job, stages)
    (front,) = stages.forwards
    assert isinstance(front, ForwardHalf)
    agreed = front._agreed[Rows.of(SIZE)]
    states = {~view.number for view in agreed.views if view.number < 0}
    assert len(agreed.sizes) < len(agreed.views) - len(states)
    code = front.segments[0].codes[Rows.of(SIZE)].stage
    weights = ("out_weight", "qkv_weight")
    named = [i for i, slot in enumerate(code.states) if slot.value.endswith(weights)]
    assert named
    assert states >= {*named}


def test_recomputation_sends_what_a_forward_starts_from(capture: Any) -> None:
    job = capture("attention")
    kept, again = (stages_of(job, 1, apart=True, recompute=it) for it in (False, True))
    for stages in (kept, again):
        trained(job, stages)
    assert bytes_of(again) < bytes_of(kept) / 2


def test_nothing_of_a_forward_outlives_its_message(
    capture: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pipefb, "BUNDLED_BYTES", 0)  # small tensors would be copied
    (front,) = stages_of(capture("attention"), 1, apart=True).forwards
    first, *others = front.inputs(True, Rows.of(SIZE))
    inputs = {first: torch.zeros(SIZE, 6, WIDTH), **{name: torch.zeros(SIZE) for name in others}}
    message = front.forward(MicroBatch(0, Rows.of(SIZE), 7), inputs, {})
    for slot in [slot for slot in message if not slot.value.isdecimal()]:
        del message[slot]
    sent = [StorageWeakRef(t.untyped_storage()) for t in message.values() if t is not None]
    inputs.clear()
    assert sent
    assert not any(memory.expired() for memory in sent)
    message.clear()
    assert all(memory.expired() for memory in sent)


def test_a_function_that_hides_a_tensor_is_refused(capture: Any) -> None:
    job = capture("Hiding")
    with pytest.raises(MismatchError, match=r"stages\[0\].*keeps more than numbers"):
        trained(job, stages_of(job, 1, apart=True))


def test_code_that_no_graph_holds_is_refused(capture: Any) -> None:
    graph = capture("unsteady").training_graph(SIZE)
    cut = Cut(graph, {node.name: 0 for node in graph.operators}, training=True)
    with pytest.raises(MismatchError, match=r"stages\[0\].*\((Gate|Noisy)\) runs code of its own"):
        check_operators(cut, 0)


def test_a_forward_that_makes_another_graph_is_told(
    capture: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    check = Agreement.check

    def other(self: Agreement, stage: int, graph: Any) -> None:
        graph.saved[3] = (torch.float64, (1,))
        check(self, stage, graph)

    monkeypatch.setattr(Agreement, "check", other)
    job = capture("attention")
    with pytest.raises(MismatchError, match=r"saved tensor 3 is .* instead of"):
        trained(job, stages_of(job, 1, apart=True))
