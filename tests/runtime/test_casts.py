"""Casts of weights under autocast are made once for all micro-batches; no gradient changes."""

from __future__ import annotations

from copy import deepcopy
from functools import cache
from itertools import islice, product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.utils.parametrize import register_parametrization
from torch.utils import _pytree as pytree

from pipectl.capture import CapturedJob
from pipectl.capture.model_with_loss import own_name
from pipectl.capture.slices import Span
from pipectl.capture.tensors import storage_of
from pipectl.runtime.casts import SharedCasts
from pipectl.runtime.pipefb import lasting_states
from pipectl.runtime.segment import MicroBatch
from pipectl.runtime.stage import Stage
from tests.corpus.stages import Stages

HERE, SIZE, SPAN = Path(__file__), 2, Span.of(2)
HALF = torch.bfloat16


class Mixed(nn.Module):
    """Weights that are frozen, views, first used without gradients, or not cast; and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(6, 8).requires_grad_(False)
        self.twice = nn.Parameter(torch.randn(8, 8) / 3)
        self.packed = nn.Parameter(torch.randn(8, 24) / 3)
        self.turned = nn.Parameter(torch.randn(8, 8) / 3)
        self.register_buffer("mix", torch.randn(8, 8) / 3)
        self.convolution = nn.Conv1d(1, 4, 3)
        self.norm, self.head = nn.LayerNorm(24), nn.Linear(24, 12)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.frozen(x))
        with torch.no_grad():
            mean = torch.tanh(x @ self.twice).mean()
        x = torch.tanh(x @ self.twice) + mean
        one, two, three = self.packed.chunk(3, 1)
        x = torch.tanh((x @ one + x @ two) @ three + x @ self.mix) @ self.turned.t()
        return self.head(self.norm(self.convolution(x.unsqueeze(1)).flatten(1))).view(-1, 3, 4)


class Gate(nn.Module):
    """Kept whole: it decides by a value."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        assert self.inner.weight.dtype is x.dtype
        return self.inner(x) if float(x.sum()) < 1e9 else x


class Halved(nn.Module):
    """Weights in bfloat16: of an LSTM, a part that is kept whole, twice used and frozen ones; norms
    with statistics; an autocast and a buffer of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.memory, self.gate = nn.LSTM(6, 8, batch_first=True), Gate()
        self.norm, self.scale = nn.BatchNorm1d(8), nn.LayerNorm(8)
        self.twice, self.frozen = nn.Linear(8, 8), nn.Linear(8, 8).requires_grad_(False)
        self.precise, self.head = nn.Linear(8, 8), nn.Linear(8, 12)
        self.register_buffer("mix", torch.randn(8))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        assert x.dtype is self.head.weight.dtype is HALF
        x, _ = self.memory(x.unsqueeze(1))
        x = self.twice(self.frozen(self.twice(self.norm(self.gate(x[:, 0])))))
        x = self.scale((x + self.mix).to(x.dtype))
        with torch.autocast("cpu", torch.float16):
            x = torch.tanh(self.precise(x))
        return {"logits": self.head(x.to(self.head.weight.dtype)).view(-1, 3, 4)}


def loss_of_logits(outputs: dict[str, Tensor], targets: Tensor) -> Tensor:
    assert outputs["logits"].dtype is torch.float32
    return nn.functional.cross_entropy(
        outputs["logits"].flatten(0, 1), targets.flatten().clamp(min=0)
    )


class InHalves(Stages):
    def __init__(self, *given: Any, **how: Any) -> None:
        super().__init__(*given, **how)
        for stage in self.backwards:
            stage.split_backwards()

    def _add_uses(self) -> None:
        for stage in self.backwards:
            for number in range(2):
                stage.finish_backward(number)
        super()._add_uses()


@pytest.fixture(scope="module")
def job(make_spec: Any) -> CapturedJob:
    training = {"steps": 1, "batch_size": 4, "precision": "bf16"}
    return CapturedJob(make_spec(1, model=f"{HERE}:Mixed", training=training))


def whole(job: CapturedJob, kind: type[Stages] = Stages, **how: Any) -> Any:
    stage_of = dict.fromkeys(job.training_graph(SIZE).position, 0)
    return kind(job, SIZE, stage_of, evaluates=False, **how)


def batches(job: CapturedJob) -> list[Any]:
    return list(job.loader.micro_batches(islice(job.loader.batches(), 1), SIZE))


def run_forward(stage: Stage, job: CapturedJob, number: int = 0) -> dict[int, Tensor]:
    """What autograd keeps of a forward, by storage."""
    kept: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        kept[storage_of(tensor)] = tensor
        return tensor

    known = dict(
        zip(job.training_graph(SIZE).inputs, pytree.tree_leaves(batches(job)[number]), strict=True)
    )
    inputs = {name: known[name] for name in stage.inputs(True, SPAN)}
    with saved_tensors_hooks(pack, lambda tensor: tensor):
        stage.forward(MicroBatch(number, SPAN), inputs, {})
    return kept


def casts_of(stage: Stage) -> dict[int, Tensor]:
    states = lasting_states(stage.segments[0].codes[SPAN]).values()
    made = [cast for state in states for cast in stage.casts.made_of(state).values()]
    return {storage_of(cast): cast for cast in made}


@pytest.mark.parametrize(
    "how", [{}, {"recompute": True}, {"apart": True}, {"kind": InHalves}], ids=str
)
def test_gradients_are_those_of_plain_torch_which_casts_every_time(job, how) -> None:
    """Without torch's cache: it would give a weight no gradient that is first used without one."""
    model, data = deepcopy(job.wrapper), batches(job)
    for inputs, targets in data:
        with torch.autocast("cpu", HALF, cache_enabled=False):
            loss = model(inputs, targets)
        (loss / len(data)).backward()
    found = whole(job, **how).step(0, data)
    trained = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    for name, gradient in trained.items():
        assert torch.equal(found[f"step 0 gradient of {name}"], gradient), name
    assert len(trained) == 9


@pytest.mark.parametrize("materialize", ["eager", "per_rank"])
@pytest.mark.parametrize("how", [{}, {"recompute": True}, {"kind": InHalves}], ids=str)
def test_half_weights_have_the_gradients_of_a_model_that_converts_them_at_every_use(
    half_job: Any, materialize: str, how: Any
) -> None:
    """Gradients are added in float32, over micro-batches and over uses."""
    job = half_job(materialize)
    model = Halved()
    model.load_state_dict({own_name(n): tensor for n, tensor in job.states.items()})
    layers = [m for m in model.modules() if type(m) in (nn.Linear, nn.LayerNorm)]
    for layer, name in product(layers, ("weight", "bias")):
        register_parametrization(layer, name, ToHalf(), unsafe=True)
    memory = model.memory
    for inputs, targets in (data := batches(job)):
        memory._flat_weights = [getattr(memory, n).to(HALF) for n in memory._flat_weights_names]
        outputs = {"logits": model(inputs.to(HALF))["logits"].float()}
        (loss_of_logits(outputs, targets) / len(data)).backward()
    found = whole(job, **how).step(0, data)
    trained = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    assert len(trained) == 16
    for name, gradient in trained.items():
        own = name.replace("parametrizations.", "").replace(".original", "")
        assert gradient.dtype is torch.float32
        twice = {"rtol": 1e-5, "atol": 1e-7} if own.startswith("twice") else {"rtol": 0, "atol": 0}
        torch.testing.assert_close(found[f"step 0 gradient of model.{own}"], gradient, **twice)


class ToHalf(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight.to(HALF)


@pytest.fixture(scope="module")
def half_job(make_spec: Any) -> Any:
    @cache
    def make(materialize: str) -> CapturedJob:
        model = {"factory": f"{HERE}:Halved", "materialize": materialize}
        training = {"steps": 1, "batch_size": 4, "precision": "bf16-weights"}
        loss = {"factory": f"{HERE}:loss_of_logits"}
        job = CapturedJob(make_spec(1, model=model, loss=loss, training=training))
        job.training_graph(SIZE)
        job.materialize(job.states)
        assert list(job.kept) == ["gate"]
        return job

    return make


def test_micro_batches_keep_the_same_casts_of_all_weights_that_are_cast(job) -> None:
    (stage,) = whole(job).forwards
    first, second = (run_forward(stage, job, number) for number in (0, 1))
    casts = casts_of(stage)
    assert {tensor.dtype for tensor in casts.values()} == {HALF}
    states = {storage_of(t) for t in (*stage.parameters.values(), *stage.buffers.values())}
    assert first.keys() & second.keys() <= casts.keys() | states
    own = [tensor for storage, tensor in second.items() if storage not in casts.keys() | states]
    weights = {tuple(t.shape) for t in casts.values()} - {(8, 8)}  # that of a view is turned
    assert not [t for t in own if tuple(t.shape) in weights and t.dtype is HALF]
    assert len(casts) == 12
    stage.forget()
    assert casts_of(stage) == {}


def test_every_version_of_the_weights_has_casts_for_as_long_as_a_backward_needs_it(job) -> None:
    (stage,) = whole(job).forwards
    stage.keep_versions(1)
    weight = stage.parameters["model.head.weight"]
    run_forward(stage, job, 0)
    old = [StorageWeakRef(cast.untyped_storage()) for cast in casts_of_version(stage, weight)]
    assert len(old) == 1
    with stage.updating(), torch.no_grad():
        weight.data.add_(1.0)
    run_forward(stage, job, 1)
    (new,) = casts_of_version(stage, weight)
    assert torch.equal(new, weight.detach().to(HALF))
    assert not old[0].expired()
    stage.backward(MicroBatch(0, SPAN), {}, 1.0)
    with stage.updating():
        pass
    assert old[0].expired()


def casts_of_version(stage: Stage, weight: Tensor) -> list[Tensor]:
    assert stage.versions is not None
    return list(stage.casts.made_of(stage.versions.of_age(0).leaves[id(weight)]).values())


def test_a_weight_that_changes_is_cast_again(job) -> None:
    casts, weight = SharedCasts(), nn.Parameter(torch.ones(3, 4))
    first = casts.of(weight, HALF)
    assert casts.of(weight, HALF) is first
    assert casts.of(weight.t(), HALF) is not first
    with torch.no_grad():
        weight.add_(1)
    assert casts.of(weight, HALF).tolist() == weight.tolist()
    weight.data.add_(1)  # without a trace
    casts.drop([weight])
    assert casts.of(weight, HALF).tolist() == weight.tolist()
    flat = torch.zeros(20)
    one, two = flat[:12].view(3, 4), flat[12:].view(2, 4)
    for part in (one, two):
        casts.of(part, HALF)
    ((view, cast),) = casts.made_of(two).items()
    assert view.offset == 0
    assert casts.again(two, view) is cast
