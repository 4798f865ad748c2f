"""The captured graph: operators, edges, what belongs together, its fingerprint and its sizes."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from pipectl.capture import CapturedGraph, Cut, build_stage
from pipectl.capture.accelerator_autocast import autocast_of
from pipectl.capture.groups import assign_groups
from pipectl.capture.operators import FunctionCall, is_random, runs_own_code
from pipectl.capture.randomness import SEEDERS, seed_backward, seed_libraries
from pipectl.capture.regions import WHOLE, Autocast, Region, arithmetic, region_of
from pipectl.capture.slices import Span, coupled_operators
from pipectl.capture.traits import find_traits
from pipectl.errors import CaptureError
from pipectl.torch_api import choose_kernels, kernels

MODELS = Path(__file__).with_name("models.py")


INTEGERS = """
def integers():
    return [(torch.arange(6) - i % 2, torch.tensor(i % 3)) for i in range(20)]

"""


@pytest.mark.parametrize(
    ("code", "length"),
    [
        ("return self.kept(ids.view(-1, 6).clamp(min=0)).sum(1)", 6),
        ("return self.linear(ids.float())", 0),
        ("return self.kept(ids[:, 0]) + ids[:, 1:].float().sum(1, keepdim=True)", 0),
    ],
    ids=["ids", "numbers", "one is a class"],
)
def test_only_integers_that_an_embedding_looks_up_are_tokens(
    make_job, write_modules, code: str, length: int
) -> None:
    module = f"class Reading(Ids):\n    def forward(self, ids):\n        {code}\n"
    path = write_modules({"Ids": ("nn.Embedding(6, 6)", "pass")}, INTEGERS + module)
    job = make_job(f"{path}:Reading", data=f"{path}:integers")
    assert job.training_graph(4).tokens_per_sample == length


def test_no_more_than_what_is_written_and_its_readers_before_the_last_write_is_a_group(
    job_of, graph_of
) -> None:
    """Less than that would change bits, and more would keep a stage from ending there."""
    groups = graph_of("cnn").groups
    norms = [name for name in groups if "batch_norm" in name]
    assert {name for name in groups if groups[name] == groups["batch_norm"]} == {"add_", norms[0]}
    assert len({groups[name] for name in norms}) == 7
    assert not {"linear_2", "mean"} & graph_of("Inplace").groups.keys()
    assert job_of("dense").evaluation_graph(4).groups == {}  # in which it writes nothing


# Models, losses and data as users write them


NAMED = """
def named():
    return [{"inputs": torch.ones(6), "targets": torch.tensor(i % 3)} for i in range(20)]

def scaled_loss(outputs, targets, scale):
    return scale * nn.functional.cross_entropy(outputs, targets)
"""
LOSSES = """
import dataclasses
from collections import namedtuple
Output = namedtuple("Output", ["loss", "logits"])

@dataclasses.dataclass
class ModelOutput:
    loss: torch.Tensor
    logits: torch.Tensor
    past: object = None
    cache: object = None

class OwnLoss(Plain):
    def forward(self, x, y):
        logits = super().forward(x)[:, :3]
        loss = nn.functional.cross_entropy(logits, y)
        return {}
"""


@pytest.mark.parametrize(
    ("returned", "outputs"),
    [
        ("loss", None),
        ("loss, logits", None),
        ("{'logits': logits, 'loss': loss}", None),
        ("Output(loss, logits)", None),
        ("ModelOutput(loss, logits, cache=object())", ["loss", "logits"]),
        ("{'loss': loss, 'kind': 'linear'}", ["loss", None]),  # a text names no operator
    ],
)
def test_a_model_may_return_its_own_loss_and_metrics_get_what_it_returns(
    make_job, write_modules, returned: str, outputs: list[str | None] | None
) -> None:
    path = write_modules({"Plain": "pass"}, LOSSES.format(returned))
    data = f"{MODELS}:by_keyword"
    evaluation = {"data": data, "metrics": {"m": "builtins:max"} if outputs else {}}
    job = make_job(f"{path}:OwnLoss", loss="model", data=data, evaluation=evaluation)
    assert job.training_graph(4).loss == "cross_entropy_loss"
    graph = job.evaluation_graph(4)
    names = {"loss": graph.loss, "logits": graph.operators[-2].name, None: None}
    assert graph.outputs == tuple(names[name] for name in outputs or ())
    if "ModelOutput" in returned:
        rebuilt = torch.utils._pytree.tree_unflatten(list(graph.outputs), graph.output_spec)
        assert type(rebuilt).__name__ == "ModelOutput"
        assert (rebuilt.loss, rebuilt.past, rebuilt.cache) == (graph.loss, None, None)


def test_a_mapping_of_inputs_and_targets_is_a_pair_and_kwargs_of_the_loss_are_bound(
    make_job, write_modules
) -> None:
    path = write_modules({}, NAMED)
    loss = {"loss": f"{path}:scaled_loss", "loss_kwargs": {"scale": 3.0}}
    graph = make_job("mlp", data=f"{path}:named", **loss).training_graph(4)
    assert graph.inputs.keys() == {"inputs", "targets"}
    assert 3.0 in graph.operators[-1].args


# Batch sizes


def test_one_graph_serves_every_batch_size_or_one_alone(job_of, make_job, run_whole) -> None:
    job = job_of("Sizes")
    graph = job.training_graph(4)
    assert graph is job.training_graph(1) is job.training_graph(17)
    assert not graph.fixed
    for size in (1, 3, 9):
        assert torch.equal(run_whole(job, size), job.wrapper(*job.loader.example(size)))
    graph = job_of("FixedBatch").training_graph(4)
    assert (graph.fixed, graph.samples) == (True, 4)
    with pytest.raises(CaptureError, match="captured for 4 samples, not for 3"):
        build_stage(Cut(graph, dict.fromkeys(graph.position, 0), training=True), 0, 3)
    place = r"\(at .*models\.py:\d+: .*\)"
    with pytest.raises(CaptureError, match=rf"FixedBatch: raised RuntimeError: shape .* {place}"):
        job_of("FixedBatch").training_graph(6)
    by_number = make_job(
        "mlp", data="Described", loss="mean_by_size"
    )  # of which it leaves out some
    graphs = [by_number.training_graph(size) for size in (4, 8)]
    assert [(each.fixed, each.samples) for each in graphs] == [(True, 4), (True, 8)]


def test_a_size_that_is_fixed_in_one_input_is_fixed_in_all(make_job, run_whole) -> None:
    held_out = {"data": {"factory": f"{MODELS}:by_keyword"}}
    job = make_job("Listing", loss="model", data="by_keyword", evaluation=held_out)
    graph = job.training_graph(4)
    assert (graph.fixed, graph.samples) == (True, 4)
    assert torch.equal(run_whole(job), job.wrapper(*job.loader.example(4)))
    multiple = "let evaluation.data have a number of samples that is a multiple of 4"
    for graph_of, hint in (
        (job.training_graph, "divide the batch"),
        (job.evaluation_graph, multiple),
    ):
        assert graph_of(4).fixed
        with pytest.raises(CaptureError, match=r"its graph for 3 samples differs") as caught:
            graph_of(3)
        assert hint in str(caught.value.hint)


@pytest.mark.parametrize(
    ("code", "alike", "other"),
    [
        ("x = x * 2 if x.shape[0] > 5 else x", 6, 3),
        ("x = x * 2 if x.shape[0] % 2 == 0 else x", 4, 7),
        ("for _ in range(int(x.shape[0])):\n    x = x + 1", 8, 6),
    ],
)
def test_another_size_must_have_the_same_graph(
    make_job, write_modules, code: str, alike: int, other: int
) -> None:
    job = make_job(f"{write_modules({'Asking': code})}:WholeAsking")
    graph = job.training_graph(8)
    assert job.training_graph(alike) is graph
    assert graph.fixed == (alike == 8)
    with pytest.raises(
        CaptureError, match=f"^model: its graph for {other} samples differs from that for 8"
    ):
        job.training_graph(other)


# Fingerprints


def test_the_fingerprint_depends_neither_on_captured_sizes_and_texts_nor_on_weights(
    make_job,
) -> None:
    """A profile and a run may have captured batches of different sizes."""
    given = {"data": "Described", "loss": "mean_by_y"}
    trainings = [{"steps": 1, "batch_size": 8, "seed": seed} for seed in (1, 1, 2)]
    jobs = [make_job("mlp", training=each, **given) for each in trainings]
    graphs = [job.training_graph(size) for job, size in zip(jobs, (1, 4, 6), strict=True)]
    assert not graphs[0].fixed
    assert len({graph.fingerprint for graph in graphs}) == 1
    assert graphs[0].difference(graphs[1].fingerprint, graphs[1].signatures) is None
    first, again, other = (job.states["model.0.weight"] for job in jobs)
    assert torch.equal(first, again)  # on every rank
    assert not torch.equal(first, other)


OTHER_ARGUMENTS = "has other arguments here than there"


@pytest.mark.parametrize(
    ("model", "here", "there", "difference"),
    [
        ("mlp", {}, {"deep": 1}, "operator 3 is 'cross_entropy_loss' here and 'linear_2' there"),
        ("mlp", {}, {"width": 9}, "the operators agree, but parameters, inputs or the loss do not"),
        ("mlp", {"slope": 0.1}, {"slope": 0.2}, f"operator 1, 'leaky_relu', {OTHER_ARGUMENTS}"),
        ("Nested", {}, {"half": False}, f"operator 0, 'linear', {OTHER_ARGUMENTS}"),
    ],
    ids=["more operators", "other shapes", "other arguments", "another arithmetic"],
)
def test_the_first_operator_that_differs_is_named(
    make_job, model: str, here: Any, there: Any, difference: str
) -> None:
    graph, other = (make_job(model, kwargs=each).training_graph(4) for each in (here, there))
    assert graph.fingerprint != other.fingerprint
    assert graph.difference(other.fingerprint, other.signatures) == difference


# Gradients of the user's own making


def test_an_autograd_function_is_one_operator_and_no_address_or_directory_names_it(
    job_of, make_job, tmp_path: Path
) -> None:
    job = job_of("OwnBackward")
    here = job.training_graph(4)
    calls = [node.target for node in here.operators if isinstance(node.target, FunctionCall)]
    assert [call.function for call in calls] == [job.model.first, job.model.second]
    assert "0x" not in "".join(map(str, calls))
    there = make_job(f"{shutil.copy(MODELS, tmp_path)}:OwnBackward").training_graph(4)
    assert (there.signatures, there.fingerprint) == (here.signatures, here.fingerprint)


def test_recomputed_blocks_are_captured_as_operators(make_job, write_modules) -> None:
    code = "for reentrant in (True, False):\n    x = {}(nn.Tanh(), x, use_reentrant=reentrant)"
    path = write_modules({"Recomputed": code.format("torch.utils.checkpoint.checkpoint")})
    graph = make_job(f"{path}:WholeRecomputed").training_graph(4)
    assert [node.name for node in graph.operators][:3] == ["linear", "tanh", "tanh_1"]
    assert all(graph.requires_grad.values())


# Autocast and no_grad inside a model: properties of its operators, which can be cut apart

HALF = Autocast("cpu", torch.bfloat16, enabled=True)
FULL = Autocast("cpu", torch.bfloat16, enabled=False)


def regions(graph: CapturedGraph) -> dict[str, Region]:
    return {node.name: region_of(node) for node in graph.operators}


def test_every_operator_knows_what_holds_for_it_and_neighbours_enter_it_once(job_of) -> None:
    graph = job_of("Nested").training_graph(4)
    found = regions(graph)
    assert not any("autocast" in name or "grad" in name for name in found)
    assert found["linear"] == found["mul_2"] == Region((HALF,), gradients=True)
    assert found["softmax"] == Region((FULL,), gradients=True)
    assert found["linear_1"] == found["mul_1"] == Region((FULL,), gradients=False)
    assert found["linear_3"] == found["cross_entropy_loss"] == WHOLE
    assert (graph.requires_grad["mul_1"], graph.requires_grad["softmax"]) == (False, True)
    names = list(found)
    half = names.index("softmax")
    cut = Cut(graph, {name: int(i >= half) for i, name in enumerate(names)}, training=True)
    for stage, entered in ((0, 2), (1, 3)):
        module: Any = build_stage(cut, stage, 4).module
        assert sum(node.name.startswith("enter") for node in module.graph.nodes) == entered


CHOOSING = """
q = x.unflatten(1, (1, 3, 2))
with sdpa_kernel(SDPBackend.MATH):
    x = x + nn.functional.scaled_dot_product_attention(q, q, q).flatten(1)
    with torch.backends.mkldnn.flags(enabled=False):
        x = Twice.apply(x)
x = x + nn.functional.scaled_dot_product_attention(q, q, q).flatten(1)
torch.use_deterministic_algorithms(True, warn_only=True)
x = x * 2
"""
TWICE = """
from torch.nn.attention import SDPBackend, sdpa_kernel

class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return 2 * x
    @staticmethod
    def backward(ctx, gradient):
        return 2 * gradient
"""


def test_operators_run_with_the_kernels_that_the_model_chooses(
    make_job, write_modules, run_whole
) -> None:
    before = kernels()
    job = make_job(f"{write_modules({'Choosing': CHOOSING.strip()}, TWICE)}:WholeChoosing")
    graph = job.training_graph(4)
    assert kernels() == before
    found = {node.name: dict(region_of(node).kernels) for node in graph.operators}
    attention = {"sdp_cudnn", "sdp_flash", "sdp_mem_efficient", "sdp_overrideable"}
    assert found["linear"] == found["scaled_dot_product_attention_1"] == {}
    assert dict.fromkeys(attention, False).items() >= found["scaled_dot_product_attention"].items()
    assert not found["scaled_dot_product_attention"]["sdp_flash"]
    assert found["twice"] == {**found["scaled_dot_product_attention"], "mkldnn": False}
    assert [found[name] for name in found if "mul" in name] == [{"deterministic": (True, True)}]
    assert torch.equal(run_whole(job), job.wrapper(*job.loader.example(4)))
    choose_kernels(before)  # the model has changed them for good
    run_whole(job)
    assert kernels() == before


def test_a_view_without_gradients_lets_none_through(graph_of) -> None:
    """torch itself says otherwise."""
    graph = graph_of("Written")
    passes = {name: region.gradients for name, region in regions(graph).items()}
    assert dict(graph.requires_grad) == passes


def test_a_graph_captured_in_half_precision_gives_what_the_model_gives(make_job, run_whole) -> None:
    job = make_job("Asking", training={"steps": 1, "batch_size": 8, "precision": "bf16"})
    assert any(region.autocasts for region in regions(job.training_graph(4)).values())
    batch = job.loader.example(4)
    with arithmetic("bf16", torch.device("cpu")):
        assert torch.equal(run_whole(job), job.wrapper(*batch))
        assert job.model(batch[0]).dtype == torch.bfloat16


TYPES_UNDER_AUTOCAST: dict[str, tuple[Any, str, str]] = {
    "layer_norm": (lambda x: F.layer_norm(x, (4,)), "bfloat16", "float32"),
    "rms_norm": (lambda x: F.rms_norm(x, (4,)), "bfloat16", "float32"),
    "softmax": (lambda x: x.softmax(-1), "bfloat16", "float32"),
    "sum": (lambda x: x.sum(), "bfloat16", "float32"),
    "exp": (lambda x: x.exp(), "bfloat16", "float32"),
    "pow": (lambda x: x**2, "bfloat16", "float32"),
    "cumsum": (lambda x: x.cumsum(0), "bfloat16", "float32"),
    "norm": (lambda x: x.norm(), "bfloat16", "float32"),
    "mean": (lambda x: x.mean(), "bfloat16", "bfloat16"),
    "gelu": (F.gelu, "bfloat16", "bfloat16"),
    "cross_entropy": (lambda x: F.cross_entropy(x, torch.tensor([0, 1])), "float32", "float32"),
    "mse_loss": (lambda x: F.mse_loss(x, x), "float32", "float32"),
    "linear": (lambda x: F.linear(x.float(), x.float()), "bfloat16", "bfloat16"),
    "mv": (lambda x: torch.mv(x.float(), x[0].float()), "float32", "bfloat16"),
    "cat": (lambda x: torch.cat([x, x]), "bfloat16", "bfloat16"),
    "cat of two": (lambda x: torch.cat([x, x.float()]), "float32", "float32"),
    "pad": (lambda x: F.pad(x[None], (1, 1), mode="reflect"), "float32", "bfloat16"),
    "pool": (lambda x: F.avg_pool3d(x.view(1, 2, 2, 2, 1), 1), "float32", "bfloat16"),
    "conv": (
        lambda x: F.conv2d(x[None, None].float(), torch.ones(1, 1, 3, 3), padding="same"),
        "bfloat16",
        "bfloat16",
    ),
}
"""Operators on bfloat16 values, with the type of the result on CPUs and on NVIDIA's GPUs, as the
lists of "Autocast Op Reference" in torch's documentation say."""


def _is_cast(operator: str) -> bool:
    """Whether the autocast of NVIDIA's GPUs knows an operator of torch."""
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    return bool(has_kernel(f"aten::{operator}", "AutocastCUDA"))


@pytest.mark.parametrize("name", TYPES_UNDER_AUTOCAST)
def test_the_autocast_of_an_accelerator_gives_its_types_on_a_cpu(name: str) -> None:
    run, on_cpu, on_gpu = TYPES_UNDER_AUTOCAST[name]
    if name == "rms_norm" and not _is_cast("rms_norm"):
        on_gpu = "bfloat16"  # in releases that make it of other operators
    values = torch.linspace(0, 1, 8).view(2, 4).bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        before = run(values)
        with autocast_of("cuda"):
            there = run(values)
        after = run(values)
    assert [str(x.dtype) for x in (before, there, after)] == [
        f"torch.{kind}" for kind in (on_cpu, on_gpu, on_cpu)
    ]
    torch.testing.assert_close(there.float(), before.float(), rtol=0.02, atol=0.02)


def test_a_model_for_accelerators_is_captured_with_the_types_that_it_reads_there(
    make_job, monkeypatch
) -> None:
    monkeypatch.setattr("pipectl.capture.job.accelerator", lambda: ("cuda", None))
    training = {"steps": 1, "batch_size": 8, "precision": "bf16"}
    for gpus, dtype in ((1, torch.float32), (0, torch.bfloat16)):
        job = make_job("Reading", training=training, resources={"gpus_per_node": gpus})
        nodes = {node.name: node for node in job.training_graph(4).operators}
        for name in ("layer_norm", "softmax", "zeros"):
            assert nodes[name].meta["val"].dtype is dtype, name
        assert nodes["to"].args[1] is dtype
        assert nodes["linear"].meta["val"].dtype is torch.bfloat16


@pytest.mark.parametrize("precision", ["bf16", "bf16-weights"])
def test_attention_stays_one_operator_whose_kernel_the_device_chooses(
    make_job, precision: str
) -> None:
    """Flash and other fused kernels are behind it; its parts, such as a softmax, would be slow."""
    job = make_job("gpt", training={"steps": 1, "batch_size": 8, "precision": precision})
    for graph in (job.training_graph(4), job.evaluation_graph(4)):
        targets = [str(node.target) for node in graph.operators]
        assert targets.count("aten.scaled_dot_product_attention.default") == 2
        assert not [each for each in targets if "softmax" in each or "matmul" in each]


# What is known of a model


@pytest.mark.parametrize(
    ("first", "code", "coupled"),
    [
        ("nn.LayerNorm(6)", "x = self.kept(x)", []),
        ("nn.BatchNorm1d(6)", "x = self.kept(x)", ["batch_norm"]),
        (
            "nn.BatchNorm1d(6)",
            "x = nn.functional.batch_norm(x, self.kept.running_mean, self.kept.running_var)",
            [],
        ),
        ("None", "x = x - 0.5 * x.mean(dim=0)", ["sub"]),
        ("None", "x = torch.softmax(x @ x.T, dim=1) @ x", ["matmul", "softmax"]),
        ("None", "x = torch.softmax(x, dim=-2)", ["softmax"]),
        ("None", "x = x.cumsum(0).flip(1)", ["cumsum"]),
        ("None", "x = x + 0.1 * x[torch.randperm(x.shape[0])]", ["index"]),
        ("None", "x = x[torch.arange(x.shape[0])].roll(1, 1)", []),
    ],
)
def test_operators_that_couple_samples_are_found(
    make_job, write_modules, first: str, code: str, coupled: list[str]
) -> None:
    path = write_modules({"Coupled": (first, code)})
    graph = make_job(f"{path}:WholeCoupled").training_graph(4)
    assert [graph.operators[i].name for i in coupled_operators(graph)] == coupled


def test_replicas_do_not_share_what_draws_numbers_of_samples(
    make_job, write_modules, run_whole
) -> None:
    code = "x = x + torch.randint({}, (x.shape[0],)).unsqueeze(1)"
    draws = {"OfClasses": code.format(6), "OfSamples": code.format("x.shape[0]")}
    path = write_modules(draws)
    run_whole(make_job(f"{path}:WholeOfClasses"), Span(2, 4, 4))
    with pytest.raises(CaptureError, match=r"'randint' may draw .* cannot share its samples"):
        run_whole(make_job(f"{path}:WholeOfSamples"), Span(2, 4, 4))


MEAN = "self.kept.running_mean"
NEWER = f"0.9 * {MEAN} + 0.1 * x.detach().mean(0)"
BRANCH = "if x.sum() > 1e9: x = x + 1"
NORM = "nn.BatchNorm1d(6)"
OWN_NORM = "type('OwnNorm', (nn.BatchNorm1d,), {})(6)"
SPECTRAL = "nn.utils.parametrizations.spectral_norm(nn.Linear(6, 6))"
CARRIED: dict[str, tuple[str, str, str | None]] = {
    "statistics of a norm": (NORM, "x = self.kept(x)", None),
    "they are means over all": ("nn.BatchNorm1d(6, momentum=None)", "x = self.kept(x)", None),
    "they are read": (NORM, f"x = self.kept(x) * {MEAN}", "kept.running_mean"),
    "a mean of its own": (
        NORM, f"{MEAN}.lerp_(x.detach().mean(0), 0.1)\nx = x - {MEAN}", "kept.running_mean",
    ),
    "read before": (
        NORM, f"x = x - {MEAN}\n{MEAN}.lerp_(x.detach().mean(0), 0.1)", "kept.running_mean",
    ),
    "assigned": (NORM, f"{MEAN} = {NEWER}\nx = x - {MEAN}", "kept.running_mean"),
    "one entry": (NORM, f"{MEAN}[0] = x.detach().mean()\nx = x - {MEAN}", "kept.running_mean"),
    "moved by one": (
        NORM, f"{MEAN}[1:] = {MEAN}[:-1].clone()\nx = x - {MEAN}", "kept.running_mean",
    ),
    "turned": (
        NORM,
        f"a = {MEAN}[:1].clone()\n{MEAN}[:5] = {MEAN}[1:].clone()\n{MEAN}[5:] = a\nx = x - {MEAN}",
        "kept.running_mean",
    ),
    "a counter": (
        NORM, "self.kept.num_batches_tracked += 1\nx = x / self.kept.num_batches_tracked",
        "kept.num_batches_tracked",
    ),
    "for a log alone": (NORM, f"{MEAN} = {NEWER}", None),
    "for this micro-batch alone": (NORM, f"{MEAN}.copy_(x.detach().mean(0))\nx = x - {MEAN}", None),
    "read alone": (NORM, f"x = x - {MEAN}", None),
    "a power iteration": (SPECTRAL, "x = self.kept(x)", "kept.parametrizations.weight.0._v"),
    "in one operator": (
        OWN_NORM, f"{BRANCH}\n{MEAN} = {NEWER}\nx = x - {MEAN}", "kept.running_mean",
    ),
    "read alone in one operator": (NORM, f"{BRANCH}\nx = x - {MEAN}", None),
}  # fmt: skip
"""A module, what it computes, and the buffer that later losses depend on."""


@pytest.mark.parametrize("name", CARRIED)
def test_buffers_that_later_forwards_read_are_named(make_job, write_modules, name: str) -> None:
    first, code, buffer = CARRIED[name]
    job = make_job(f"{write_modules({'Carrying': (first, code)})}:layers")
    graph = job.training_graph(4)
    assert list(graph.carried) == ([] if buffer is None else [f"model.1.{buffer}"])
    assert all(writer in graph.position for writer in graph.carried.values())


ELSEWHERE = {
    "list": ("[self.linear.weight]", "x = x @ self.kept[0]"),
    "branch": (
        "[self.linear.weight]",
        "x = torch.cond(x.sum() > -1e9, lambda x: x @ self.kept[0], torch.sin, (x,))",
    ),
    "tuples": ("[*self.named_parameters()]", "x = x * self.kept[0][1].sum()"),
    "closure": ("lambda x, weight=self.linear.weight: x @ weight", "x = self.kept(x)"),
    "partial": ("functools.partial(torch.mul, self.linear.bias)", "x = self.kept(x)"),
    "function": (
        "{'weight': self.linear.weight}",
        "x = Product.apply(x, self.kept['weight'])",
    ),
    "attribute": (
        "object.__setattr__(self, 'weight', self.linear.weight)",
        "x = x @ self.weight.T",
    ),
}
"""What a module keeps, and how it reads a parameter through it."""
PRODUCT = """
class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x @ weight
    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        return gradient @ weight.T, x.T @ gradient
"""


@pytest.mark.parametrize("way", ELSEWHERE)
def test_a_parameter_is_trained_wherever_a_model_keeps_it(
    make_job, write_modules, run_whole, way: str
) -> None:
    job = make_job(f"{write_modules({'Keeping': ELSEWHERE[way]}, PRODUCT)}:layers")
    graph = job.training_graph(4)
    assert all(state.kind == "parameter" for state in graph.states.values())
    losses = run_whole(job), job.wrapper(*job.loader.example(4))
    found, expected = (torch.autograd.grad(loss, [*job.wrapper.parameters()]) for loss in losses)
    assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize(
    ("model", "random", "shared"),
    [("mlp", [], []), ("Dropping", ["dropout"], []), ("tied", ["dropout"] * 4, ["tokens.weight"])],
)
def test_random_operators_and_shared_parameters_are_named(
    make_spec, model: str, random: list[str], shared: list[str]
) -> None:
    traits = find_traits(make_spec(model), 4)
    assert [name.rstrip("_0123456789") for name in traits.random] == random
    assert list(traits.shared) == shared


PADDED = """
x = self.kept(x.unflatten(1, (3, 2)), src_key_padding_mask=(torch.arange(3) {}).expand(len(x), 3))
x = x.flatten(1)
"""
ENCODER = "nn.TransformerEncoder(nn.TransformerEncoderLayer(2, 2, 4, 0.0, batch_first=True), {})"


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize(
    ("first", "code"),
    [
        ("None", "x = x * 3 if torch.is_grad_enabled() else x"),
        ("None", "x = x * 3 if x.requires_grad else x"),
        ("None", "with torch.no_grad(): y = x.sin()\nx = x * 3 if torch.is_grad_enabled() else y"),
        ("None", "if x.sum() > 1e9: x = x + 1\nx = x * 3 if torch.is_grad_enabled() else x"),
        (ENCODER.format(2), PADDED.format("> 1")),
        (ENCODER.format("1, norm=nn.LayerNorm(2)"), PADDED.format("> 0")),
        (ENCODER.format(1), PADDED.format("< 1")),
        (ENCODER.format("1, enable_nested_tensor=False"), PADDED.format("> 1")),
    ],
)
def test_an_evaluation_is_captured_without_gradients(
    make_job, write_modules, run_whole, first: str, code: str
) -> None:
    path = write_modules({"Asking": (first, code.strip())})
    job = make_job(f"{path}:layers")
    job.evaluation_graph(4)
    with torch.no_grad():
        found = run_whole(job, training=False)
    expected, _ = job.evaluate(job.loader.example(4), torch.device("cpu"))
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
    job.wrapper.train()
    torch.testing.assert_close(run_whole(job), job.wrapper(*job.loader.example(4)))


CUSTOM = """
@torch.library.custom_op("tests_graphs::{name}", mutates_args=())
def {name}(x: torch.Tensor) -> torch.Tensor:
    return x + {term}

{name}.register_fake(torch.empty_like)
{name}.register_autograd(lambda _, gradient: {gradient})
"""
JITTER = "random.random()"


def test_a_custom_operator_is_random_if_it_draws_when_it_runs(
    make_job, write_modules, run_whole
) -> None:
    """Others may be shared by replicas."""
    terms = {"shifted": "1", "jittered": JITTER, "own": "GENERATOR.random()"}
    customs = [CUSTOM.format(name=n, term=t, gradient="gradient") for n, t in terms.items()]
    path = write_modules({name.title(): f"x = {name}(x)" for name in terms}, "".join(customs))
    graphs = {}
    for name in ("Shifted", "Jittered"):
        job = make_job(f"{path}:Whole{name}")
        graphs[name] = graph = job.training_graph(4)
        random = [node.name for node in graph.operators if is_random(node, graph.root)]
        assert random == (["jittered"] if name == "Jittered" else [])
        if random:
            with pytest.raises(CaptureError, match="cannot share its samples"):
                run_whole(job, Span(2, 4, 4))
        else:
            run_whole(job, Span(2, 4, 4))
    with pytest.raises(CaptureError, match=r"a generator that is not torch's own") as raised:
        make_job(f"{path}:WholeOwn").training_graph(4)
    assert "x = own(x)" in raised.value.message
    kept = make_job(f"{path}:layers").training_graph(4)
    assert [repr(node.target) for node in kept.operators if runs_own_code(node)] == ["3 (Own)"]


@pytest.mark.parametrize(
    ("terms", "gradient", "code", "seeded"),
    [
        ("1", "gradient", "x = {0}(x)", []),
        (JITTER, "gradient", "x = {0}(x)", [seed_libraries]),
        ("1", f"gradient * {JITTER}", "x = {0}(x)", [seed_backward]),
        ("1", f"gradient * {JITTER}", "x = x + {0}(x.detach())", []),
        (JITTER, f"gradient * {JITTER}", "x = {0}(x)", [seed_libraries, seed_backward]),
        # A branch that no run of the capture takes.
        (
            JITTER,
            "gradient",
            "x = torch.cond(x.sum() > 1e9, {0}, torch.tanh, (x,))",
            [seed_libraries, seed_backward],
        ),
    ],
)
def test_custom_operators_are_seeded_only_where_they_may_draw(
    make_job, write_modules, terms, gradient, code, seeded
) -> None:
    """A seeder cuts the code of a stage where it is compiled."""
    name = f"seeded_{abs(hash((terms, gradient, code)))}"
    custom = CUSTOM.format(name=name, term=terms, gradient=gradient)
    path = write_modules({"Seeded": code.format(name)}, custom)
    job = make_job(f"{path}:WholeSeeded")
    graph = job.training_graph(4)
    job.wrapper(*job.loader.example(4))  # as before: torch.cond, for one, compiles its code
    cut = Cut(graph, {node.name: 0 for node in graph.operators}, training=True)
    found: Any = build_stage(cut, 0, 4).module
    calls = [node.target for node in found.graph.nodes if node.op == "call_function"]
    assert [call for call in calls if call in (*SEEDERS, seed_backward)] == seeded


NAMES = ("embed.weight", "block.0.bias", "block.0.weight", "norm.bias", "head")


@pytest.mark.parametrize(
    ("patterns", "groups"),
    [
        (
            ["*.bias", "block.*", "norm.*"],  # the first pattern that matches, or none
            {"block.0.bias": 0, "norm.bias": 0, "block.0.weight": 1},
        ),
        (["b*s"], {"block.0.bias": 0}),
        (["tied.*"], {"embed.weight": 0}),
        (["*", "bias"], "did you mean '*.bias'?"),
        (["*", "block"], "did you mean 'block.*'?"),
        (["*", "embed.wieght"], "did you mean 'embed.weight'?"),
        (["*", "*.BIAS"], "matches no parameter"),
    ],
)
def test_parameters_belong_to_the_first_group_that_matches_a_name(
    patterns: list[str], groups: dict[str, int] | str
) -> None:
    names = {name: [name] for name in NAMES}
    names["embed.weight"].append("tied.weight")
    if isinstance(groups, dict):
        assert assign_groups(names, patterns) == groups
        return
    with pytest.raises(CaptureError, match=r"optimizer\.groups\[1\]\.match") as caught:
        assign_groups(names, patterns)
    assert groups in caught.value.message
    assert "embed.weight" in str(caught.value.hint)
