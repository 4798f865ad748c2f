"""Backwards on another rank, or in two halves, give the bits of a whole one on one rank.

The table in tests/equality has whole trainings; here are operators that are not in its models. What
is compiled agrees within rounding.
"""

from __future__ import annotations

import random
import shutil
from functools import cache, partial
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, fx, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional as F
from torch.utils import _pytree as pytree

from pipectl.capture import CapturedJob, Cut, Slot
from pipectl.capture.slices import Span
from pipectl.capture.stage import Pass, StageCode
from pipectl.errors import CaptureError, MismatchError
from pipectl.planner.costs import stage_costs
from pipectl.runtime import pipefb
from pipectl.runtime.pipefb import Agreement, ForwardHalf, check_operators
from pipectl.runtime.segment import MicroBatch
from pipectl.runtime.stage_code import SPLIT, WeightHalf, compile_stage, split_backwards
from pipectl.runtime.unflushed import refuse
from pipectl.runtime.versions import Versions
from pipectl.spec.models import Training
from tests.corpus import catalogue
from tests.corpus.stages import Stages
from tests.equality.cuts import random_cut

HERE, SIZE = Path(__file__), 2
CORPUS = {entry.name: entry for entry in catalogue.entries()}
MODELS = """
    lstm autoencoder views codebook teacher checkpointed recommender encoder-decoder own-precision
    parametrized gpt gpt,bf16 Normed,bf16 Placed Conjugated Sprinkled
    Products Products,bf16 Products,float16
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


@torch.library.custom_op("tests_backwards::sprinkle", mutates_args=())
def sprinkle(x: Tensor) -> Tensor:
    return x + torch.rand_like(x) + random.random()


sprinkle.register_fake(torch.empty_like)
sprinkle.register_autograd(lambda _, gradient: gradient * torch.rand_like(gradient))


class Rounded(torch.autograd.Function):
    """Draws in its backward."""

    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        return value * 1

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient + torch.randn_like(gradient) * np.random.rand()


class Sprinkled(nn.Module):
    """Operators of others that draw, in the forward and the backward."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(6, 6) for _ in range(3)])
        self.head = nn.Linear(6, 12)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = sprinkle(Rounded.apply(layer(x)))
        return self.head(x).view(-1, 3, 4)


class Rounding(nn.Linear):
    """Stays one operator, and draws in its backward alone."""

    def forward(self, x: Tensor) -> Tensor:
        x = Rounded.apply(super().forward(x))
        return x if x.sum() > 0 else 2 * x


class SprinkledInside(nn.Sequential):
    def __init__(self) -> None:
        layers = Rounding(6, 6), nn.Tanh(), Rounding(6, 6)
        super().__init__(*layers, nn.Linear(6, 12), nn.Unflatten(1, (3, 4)))


class Placed(nn.Module):
    """Adds parameters through views; a sum's gradient is that of all it adds, in one memory."""

    def __init__(self) -> None:
        super().__init__()
        self.places = nn.ParameterList([nn.Parameter(torch.randn(12)) for _ in range(6)])
        self.before, self.head = nn.Linear(6, 6), nn.Linear(6, 12)

    def forward(self, x: Tensor) -> Tensor:
        x = self.before(x)
        for place in self.places:
            x = x + place.view(SIZE, 6)
        return self.head(x).view(-1, 3, 4)


class Conjugated(nn.Module):
    """Saves conjugate and negative views, and a parameter as one."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = nn.Linear(6, 6), nn.Linear(6, 12)
        self.weight = nn.Parameter(torch.randn(6, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        values = torch.fft.fft(self.before(x))
        turned = values.conj() * self.weight.conj()
        values = turned.conj().imag * values.conj().imag + turned.real
        return self.after(values).view(-1, 3, 4)


class Products(nn.Module):
    """All operators whose backward has two halves; one weight, behind a view, has two users."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6, bias=False)
        names = ("matrix", "transposed", "product", "added", "twice")
        self.weights = nn.ParameterDict({n: nn.Parameter(torch.randn(6, 6) / 2) for n in names})
        self.bias = nn.Parameter(torch.randn(6))
        self.flat = nn.Sequential(
            nn.Conv1d(1, 4, 3, padding="same"),
            nn.ConvTranspose1d(4, 4, 3, stride=2, padding=1, groups=2),
            nn.Conv1d(4, 4, 3, stride=2),
        )
        self.dilated = nn.Conv2d(2, 4, 3, padding=2, dilation=2, bias=False)
        self.areas = nn.Sequential(
            nn.Conv2d(4, 4, (1, 3), groups=4, padding="same"),
            nn.ConvTranspose2d(4, 4, 2, groups=2),
        )
        self.volumes = nn.Sequential(
            nn.Conv3d(2, 2, (1, 2, 3)),
            nn.Conv3d(2, 2, 3, padding="same"),
            nn.ConvTranspose3d(2, 1, (1, 2, 1)),
        )
        self.head = nn.Linear(24, 12)

    def forward(self, x: Tensor) -> Tensor:
        weights = self.weights
        x = torch.mm(self.linear(x) @ weights["matrix"], weights["product"])
        x = x @ weights["transposed"].t()
        twice = weights["twice"].t()
        x = torch.addmm(self.bias, x @ twice @ twice, weights["added"])
        x = self.dilated(self.flat(x.sin().unsqueeze(1)).view(SIZE, 2, 2, 5))
        x = self.areas(x.to(memory_format=torch.channels_last))
        x = self.volumes(x.contiguous().view(SIZE, 2, 2, 3, 6))
        return self.head(x.flatten(1)).view(-1, 3, 4)


class Dropping(nn.Sequential):
    """A random operator, and an autocast of its own."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(6, 64), nn.GELU(), nn.Dropout(), nn.Linear(64, 12))

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            half = F.linear(x, self[0].weight)
        return super().forward(x + half[:, :6]).sin().view(-1, 3, 4)


class Gate(nn.Linear):
    """Cannot be exported, draws random numbers, and uses another autocast than the model."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            y = super().forward(x)
        return F.dropout(y.float() if float(x.detach().sum()) > 0 else -y.float(), 0.25)


class Kept(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(6, 8), nn.Tanh(), Gate(8, 8), nn.Tanh(), nn.Linear(8, 12))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).view(-1, 3, 4)


class Twice(nn.Module):
    """Uses one matrix on both sides of what may be a border, and a constant that it computes."""

    def __init__(self) -> None:
        super().__init__()
        self.matrix, self.head = nn.Parameter(torch.randn(6, 6) / 2), nn.Linear(6, 12)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(x @ self.matrix)
        x = torch.tanh(F.linear(x, self.matrix)) + torch.ones(6)
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


class InHalves(Stages):
    """Computes the gradients of weights behind all backwards of a step.

    Attributes:
        at_once: parameters that had their gradients before.
    """

    def __init__(self, *given: Any, **how: Any) -> None:
        super().__init__(*given, **how)
        for stage in self.backwards:
            stage.split_backwards()

    def _add_uses(self) -> None:
        parameters = [item for stage in self.backwards for item in stage.parameters.items()]
        self.at_once = [name for name, parameter in parameters if parameter.grad is not None]
        for stage in self.backwards:
            for number in range(2):
                stage.finish_backward(number)
        super()._add_uses()


def stages_of(job: CapturedJob, count: int, kind: type[Stages] = Stages, **how: bool) -> Stages:
    graph = job.training_graph(SIZE)
    stage_of = random_cut(graph, count, 0)
    if how.pop("constant", False):  # the first stage computes a constant, and nothing else
        stage_of = {node.name: int(node.name != "ones") for node in graph.operators}
    return kind(job, SIZE, stage_of, evaluates=False, **how)


def trained(job: CapturedJob, stages: Stages) -> dict[str, Tensor]:
    """Two steps, the second with the weights that the halves have exchanged."""
    batches = list(job.loader.micro_batches(islice(job.loader.batches(), 1), SIZE))
    steps = [stages.step(number, batches) for number in (0, 1)]
    return {**steps[0], **steps[1], **stages.states()}


@pytest.mark.parametrize(
    ("way", "recompute"),
    [
        *[("apart", True), ("apart, sent from where it is", False), ("in halves", True)],
        pytest.param("apart", False, marks=pytest.mark.product),
        pytest.param("apart, sent from where it is", True, marks=pytest.mark.product),
        pytest.param("in halves", False, marks=pytest.mark.product),
    ],
)
@pytest.mark.parametrize("model", MODELS.split())
def test_gradients_and_buffers_are_those_of_whole_backwards(
    capture, monkeypatch, model, way, recompute
):
    """Small tensors are copied into one vector, or not; a gradient has the same layout."""
    monkeypatch.setattr(pipefb, "BUNDLED_BYTES", pipefb.BUNDLED_BYTES * (way == "apart"))
    how = {"kind": InHalves} if way == "in halves" else {"apart": True}
    job = capture(*model.split(","))
    for count in (1, 3):
        whole = trained(job, stages_of(job, count, recompute=recompute))
        found = trained(job, stages_of(job, count, recompute=recompute, **how))
        assert whole.keys() == found.keys()
        assert [n for n in whole if not torch.equal(whole[n], found[n])] == [], count
        assert [n for n in whole if whole[n].stride() != found[n].stride()] == [], count


@pytest.mark.parametrize("model", ["Sprinkled", "SprinkledInside"])
def test_backwards_draw_by_seed_alone(capture, model: str) -> None:
    """Whatever ran before, in every cut, and if the forward is computed again."""
    job = capture(model)
    whole = trained(job, stages_of(job, 1))
    for count, again in (1, True), (3, False), (3, True):
        torch.rand(count), random.random(), np.random.rand()
        found = trained(job, stages_of(job, count, recompute=again))
        assert [n for n in whole if not torch.equal(whole[n], found[n])] == [], (count, again)


def test_all_gradients_of_products_come_late_but_that_of_a_weight_with_two_users(capture):
    """Which would be summed in another order. The planner knows these operators."""
    stages: Any = stages_of(capture("Products"), 1, InHalves)
    trained(capture("Products"), stages)
    assert stages.at_once == ["model.weights.twice"]
    assert {target.name().split("::")[1].split(".")[0] for target in SPLIT} == (stage_costs.SPLIT)


def test_second_halves_keep_no_result_and_leave_the_gradients_alone_that_they_are_given():
    """A value that is added to the result may be on its way with the same gradient."""
    graph, halves = fx.Graph(), [WeightHalf()]
    _, bias, weight, x = (graph.placeholder(name) for name in ("seed", "bias", "weight", "x"))
    turned = graph.call_function(torch.ops.aten.t.default, (bias,))
    graph.output(graph.call_function(torch.ops.aten.addmm.default, (turned, x, weight)))
    slots = Slot("bias"), Slot("weight")
    code = StageCode(fx.GraphModule(nn.Module(), graph), slots, ("x",), (), ())
    states: Any = {slot.value: SimpleNamespace(kind="parameter") for slot in slots}
    split_backwards(code, states, lambda: halves[-1])
    values = [torch.ones(size, requires_grad=True) for size in ((6, 1), (5, 6), (1, 5))]
    for _ in range(2):
        halves.append(WeightHalf())
        result: Any = code.module(0, *values)
        memory = StorageWeakRef(result.untyped_storage())
        result.backward(torch.ones_like(result))
        del result
        assert memory.expired()
        halves[-1].run()
    assert [half.gradients[0].tolist() for half in halves[1:]] == [[[1.0] * 6]] * 2


@pytest.mark.parametrize("how", [{}, {"apart": True}, {"kind": InHalves}], ids=str)
@pytest.mark.parametrize("recompute", [False, True])
def test_gradients_leave_stages_with_older_weights_unchanged(capture, how, recompute):
    """Which :class:`Stages` asserts of every step."""
    job = capture("Placed")
    stages = stages_of(job, 3, recompute=recompute, **how)
    for stage in stages.backwards:
        stage.keep_versions(1)
    trained(job, stages)


def run_forward(job: CapturedJob, *, recompute: bool) -> tuple[ForwardHalf, list[Tensor]]:
    """The front half of a single stage, and what it sends to the other."""
    stages, span = stages_of(job, 1, apart=True, recompute=recompute), Span.of(SIZE)
    (front,) = stages.forwards
    assert isinstance(front, ForwardHalf)
    leaves = pytree.tree_leaves(job.loader.example(SIZE))
    known = dict(zip(stages.cut.graph.inputs, leaves, strict=True))
    inputs = {name: known[name] for name in front.inputs(True, span)}
    message = front.forward(MicroBatch(0, span, 7), inputs, {})
    sent = {slot: tensor for slot, tensor in message.items() if slot.value.isdecimal()}
    return front, [tensor for tensor in sent.values() if tensor is not None]


@pytest.mark.parametrize("precision", ["float32", "bf16"])
def test_each_memory_travels_once_and_not_longer_and_weights_do_not(
    capture, monkeypatch, precision
):
    """Nor casts of weights."""
    monkeypatch.setattr(pipefb, "BUNDLED_BYTES", 0)  # small tensors would be copied
    job = capture("gpt", precision)
    front, sent = run_forward(job, recompute=False)
    _, inputs = run_forward(job, recompute=True)
    assert sum(t.nbytes for t in inputs) < sum(t.nbytes for t in sent) / 2
    agreed = front._agreed[Span.of(SIZE)]
    states = {~view.number for view in agreed.views if view.number < 0}
    assert len(agreed.sizes) < len(agreed.views) - len(states)
    slots = front.segments[0].codes[Span.of(SIZE)].code.states
    large = ("out_weight", "qkv_weight")
    weights = {i for i, slot in enumerate(slots) if slot.value.endswith(large)}
    assert weights
    assert states >= weights
    casts = {~view.number: view.cast.dtype for view in agreed.views if view.cast is not None}
    assert casts == (
        {} if precision == "float32" else casts | dict.fromkeys(weights, torch.bfloat16)
    )
    whole = [tuple(weight.shape) for weight in front.parameters.values() if weight.dim() > 1]
    assert not {tuple(tensor.shape) for tensor in sent} & set(whole)
    memories = [StorageWeakRef(tensor.untyped_storage()) for tensor in sent]
    assert not any(memory.expired() for memory in memories)
    sent.clear()
    assert all(memory.expired() for memory in memories)


def test_what_another_rank_cannot_run_backwards_is_refused(capture, monkeypatch) -> None:
    """A tensor that is hidden, code that no graph holds, a forward that makes another graph."""
    hiding, gpt = capture("Hiding"), capture("gpt")
    with pytest.raises(MismatchError, match=r"stages\[0\].*keeps more than numbers"):
        trained(hiding, stages_of(hiding, 1, apart=True))
    graph = capture("unsteady").training_graph(SIZE)
    cut = Cut(graph, {node.name: 0 for node in graph.operators}, training=True)
    with pytest.raises(MismatchError, match=r"stages\[0\].*\((Gate|Noisy)\) runs code of its own"):
        check_operators(cut, 0)
    check = Agreement.check

    def other(self: Agreement, stage: int, graph: Any) -> None:
        graph.saved[3] = (torch.float64, (1,))
        check(self, stage, graph)

    monkeypatch.setattr(Agreement, "check", other)
    with pytest.raises(MismatchError, match=r"saved tensor 3 is .* instead of"):
        trained(gpt, stages_of(gpt, 1, apart=True))


def test_compiled_stages_agree_within_rounding_and_a_new_seed_compiles_nothing_anew(
    capture, monkeypatch
) -> None:
    """Random operators draw the same masks, and autocasts inside the model stay."""
    from torch._inductor.compile_fx import compile_fx  # takes a second

    compiled: list[Any] = []

    def counting(module: Any, example: Any) -> Any:
        compiled.append(module)
        return compile_fx(module, example) if shutil.which("g++") else module

    backend = partial(compile_stage, backend=counting)
    monkeypatch.setattr("pipectl.runtime.stage.compile_stage", backend)
    job = capture("Dropping")
    whole, stages = trained(job, stages_of(job, 1)), stages_of(job, 1)
    stages.forwards[0].compile()
    found = trained(job, stages)
    assert len(compiled) == 3
    assert found["step 0 loss 0"] != found["step 1 loss 0"]
    for name, tensor in whole.items():
        torch.testing.assert_close(found[name], tensor)


@pytest.mark.parametrize(
    ("model", "how"),
    [
        ("Products", "in halves"),
        ("Products,bf16", "in halves"),
        ("Products,bf16-weights", "in halves"),
        ("Dropping,bf16", "in halves, again"),
        ("Twice", "in halves"),
        ("Twice", "constant"),
        ("Kept", "again"),
        ("Kept", "in halves"),
        ("Kept", "apart, again"),
        ("Sprinkled", "again"),
    ],
)
def test_compiled_code_trains_what_its_operators_train(capture, monkeypatch, model, how):
    """The backend of this test keeps the operators, so only the order of some sums differs."""
    quickly = partial(compile_stage, backend="aot_eager")
    monkeypatch.setattr("pipectl.runtime.stage.compile_stage", quickly)
    kind, again = InHalves if "halves" in how else Stages, "again" in how
    job = capture(*model.split(","))
    plain, stages = (
        stages_of(job, 2, kind, recompute=again, **{w: w in how for w in ("apart", "constant")})
        for _ in range(2)
    )
    for stage in {*stages.forwards, *stages.backwards}:
        stage.compile()
    expected, found = trained(job, plain), trained(job, stages)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-5, atol=1e-6, msg=name)


def test_passes_follow_each_other_in_one_order_and_none_follows_a_compiler(capture) -> None:
    (stage,) = stages_of(capture("Placed"), 1).forwards
    bound = next(iter(stage.segments[0].codes.values()))
    stage.split_backwards()
    assert bound.code.last is Pass.SPLIT
    with pytest.raises(ValueError, match="SPLIT cannot follow SPLIT"):
        stage.split_backwards()
    stage.compile()
    for change in (stage.split_backwards, stage.compile):
        with pytest.raises(
            ValueError, match=r"cannot follow COMPILE; the order is BUILD, CAST, SPLIT"
        ):
            change()


def test_weights_are_copied_only_where_an_older_version_waits():
    layer = nn.Linear(3, 2)
    versions = Versions(list(layer.parameters()), kept=1)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    address = layer.weight.data_ptr()

    def step(in_use):
        versions.before_update(in_use)
        optimizer.step()
        versions.after_update()

    version = versions.of_age(0)
    leaves = [version.leaves[id(each)] for each in (layer.weight, layer.bias)]
    F.linear(torch.ones(1, 3), *leaves).sum().backward()
    versions.collect(version)
    step([])
    assert layer.weight.data_ptr() == address
    version = versions.of_age(0)
    step([version])
    assert layer.weight.data_ptr() != address
    assert version.leaves[id(layer.weight)].data_ptr() == address


@pytest.mark.parametrize(
    ("training", "uses", "message"),
    [
        (
            {"clip_grad_norm": 1.0},
            {},
            "training.clip_grad_norm: does not go with schedule pipedream",
        ),
        (
            {"precision": "float16"},
            {},
            "training.precision: float16 does not go with schedule pipedream",
        ),
        ({}, {"model.head.weight": ()}, r"'head\.weight' is used by several operators"),
    ],
)
def test_what_needs_all_stages_at_once_is_refused(training, uses, message):
    with pytest.raises((CaptureError, MismatchError), match=message):
        refuse(Training(steps=1, batch_size=1, **training), "pipedream", uses)
