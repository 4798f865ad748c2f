"""The code of stages: split backwards, compilation, versions of the weights."""

from __future__ import annotations

import copy
import shutil
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from pipectl.capture import CapturedJob, Cut, Slot
from pipectl.capture.randomness import seed_operator
from pipectl.capture.regions import WHOLE, Autocast, Region, Switch
from pipectl.capture.slices import Rows
from pipectl.capture.stage import StageCode
from pipectl.errors import CaptureError, MismatchError
from pipectl.planner.costs import stage_costs
from pipectl.runtime.asynchronous import refuse
from pipectl.runtime.device import CpuDevice
from pipectl.runtime.stage import MicroBatch, Stage
from pipectl.runtime.stage_code import SPLIT, WeightHalf, compile_stage, split_backwards
from pipectl.runtime.versions import Versions
from pipectl.spec.models import Training

PARTS = Path(__file__).with_name("job_parts.py")


def test_the_planner_knows_which_operators_are_split():
    assert {target.name().split("::")[1].split(".")[0] for target in SPLIT} == (stage_costs.SPLIT)


class Product(nn.Module):
    """Weights as they stand, transposed, and with a bias added."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.form = form
        self.weight = nn.Parameter(torch.randn(6, 5) if form == "transposed" else torch.randn(5, 6))
        self.bias = nn.Parameter(torch.randn(6)) if form == "addmm" else None

    def forward(self, x: Tensor) -> Tensor:
        if self.form == "addmm":
            return torch.addmm(self.bias, x, self.weight)
        return x @ (self.weight.t() if self.form == "transposed" else self.weight)


CASES = {
    "linear": (nn.Linear(5, 6), (3, 5)),
    "linear without bias": (nn.Linear(5, 6, bias=False), (2, 3, 5)),
    "matmul": (Product("matmul"), (2, 3, 5)),
    "matmul with a transposed weight": (Product("transposed"), (2, 3, 5)),
    "mm": (Product("matmul"), (3, 5)),
    "addmm": (Product("addmm"), (3, 5)),
    "conv2d, stride": (nn.Conv2d(4, 6, 3, stride=2, padding=1), (3, 4, 9, 9)),
    "conv2d, dilation": (nn.Conv2d(4, 6, 3, dilation=2, bias=False), (3, 4, 9, 9)),
    "conv2d, depthwise": (nn.Conv2d(4, 4, 3, groups=4), (3, 4, 9, 9)),
    "conv2d, same padding": (nn.Conv2d(4, 6, 3, padding="same"), (3, 4, 9, 9)),
    "conv3d": (nn.Conv3d(2, 3, 3), (2, 2, 5, 5, 5)),
    "conv_transpose1d": (nn.ConvTranspose1d(4, 6, 3, stride=2), (3, 4, 9)),
    "conv_transpose2d": (nn.ConvTranspose2d(4, 6, 3, stride=2, groups=2), (3, 4, 9, 9)),
}


def code_of(model: nn.Module, value: Tensor) -> tuple[StageCode, list[nn.Parameter]]:
    """The code of a stage that is the whole model, and its parameters as it takes them."""
    exported = torch.export.export(model, (value,))
    graph, copied = fx.Graph(), {}
    graph.placeholder("seed")
    for node in exported.graph.nodes:
        if node.op == "output":
            graph.output(copied[node.args[0][0]])
        else:
            copied[node] = graph.node_copy(node, copied.__getitem__)
    names = [spec.target for spec in exported.graph_signature.input_specs if spec.target]
    module = fx.GraphModule(nn.Module(), graph)
    found = dict(model.named_parameters())
    code = StageCode(module, tuple(map(Slot, names)), ("x",), (), ())
    return code, [found[name] for name in names]


def split(code: StageCode, current: list[WeightHalf]) -> StageCode:
    module = copy.deepcopy(code.module)
    apart = StageCode(module, code.states, code.inputs, code.received, code.results)
    states = {slot.value: SimpleNamespace(kind="parameter") for slot in code.states}
    split_backwards(apart, states, lambda: current[-1])
    return apart


def trained(code, parameters, inputs, precision, deferred=None):
    """Results, gradients and layouts of two micro-batches."""
    found = []
    for parameter in parameters:
        parameter.grad = None
    for value in inputs:
        value = value.detach().requires_grad_()
        if deferred is not None:
            deferred.append(WeightHalf())
        context = torch.autocast("cpu", dtype=precision) if precision else nullcontext()
        with context:
            result = code.module(0, *parameters, value * 1)
        result.backward(torch.linspace(-1, 1, result.numel()).reshape(result.shape).to(result))
        found += [result.detach(), value.grad]
        if deferred is not None:
            before = [None if p.grad is None else p.grad.clone() for p in parameters]
            assert len(deferred[-1].roots) == 1
            deferred[-1].run()
            changed = [p.grad for p in parameters]
            assert all(b is None or not b.equal(a) for b, a in zip(before, changed, strict=True))
    return [*found, *(p.grad for p in parameters)]


@pytest.mark.parametrize("precision", [None, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("case", CASES)
def test_halves_give_the_bits_of_a_whole_backward(case, precision):
    model, shape = CASES[case]
    torch.manual_seed(0)
    inputs = [torch.randn(shape) for _ in range(2)]
    if len(shape) == 4:
        inputs.append(torch.randn(shape).to(memory_format=torch.channels_last))
    code, parameters = code_of(model, inputs[0])
    whole = trained(code, parameters, inputs, precision)
    current: list[WeightHalf] = []
    halves = trained(split(code, current), parameters, inputs, precision, current)
    assert all(torch.equal(one, other) for one, other in zip(whole, halves, strict=True))
    strides = [[tensor.stride() for tensor in tensors] for tensors in (whole, halves)]
    assert strides[0] == strides[1]


def in_halves(model: nn.Module, *shape: int) -> tuple[Any, list[nn.Parameter], list[WeightHalf]]:
    code, parameters = code_of(model, torch.randn(shape))
    current = [WeightHalf()]
    return split(code, current).module, parameters, current


def test_a_weight_with_two_users_is_not_split():
    """Its gradient would be summed in another order."""

    class Twice(Product):
        def forward(self, x):
            return (x @ self.weight) @ self.weight.t()

    module, parameters, current = in_halves(Twice("matmul"), 3, 5)
    module(0, *parameters, torch.randn(3, 5, requires_grad=True)).sum().backward()
    assert current[0].roots == []


def test_neither_results_nor_autocast_inputs_are_kept_for_the_second_half():
    module, parameters, current = in_halves(nn.Linear(5, 6), 3, 5)
    value = torch.randn(3, 5, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        result = module(0, *parameters, value * 1)
    seen = torch.multiprocessing.reductions.StorageWeakRef(result.untyped_storage())
    result.backward(torch.ones_like(result))
    assert len(current[0].roots) == 1
    del result
    assert seen.expired()


def test_weight_halves_leave_the_gradients_alone_that_they_are_given():
    """A value that is added to the result may be on its way with the same gradient."""

    class Turned(Product):
        def forward(self, x):
            return torch.addmm(self.bias.t(), x, self.weight)

    model = Turned("addmm")
    model.bias = nn.Parameter(torch.ones(6, 1))
    module, parameters, current = in_halves(model, 1, 5)
    given = []
    for _ in range(2):
        current.append(WeightHalf())
        result = module(0, *parameters, torch.randn(1, 5, requires_grad=True))
        result.backward(torch.ones_like(result))
        given += current[-1].gradients
        current[-1].run()
    assert [gradient.tolist() for gradient in given] == [[[1.0] * 6]] * 2


def test_weight_halves_that_come_late_use_the_gradients_of_their_own_micro_batch(make_spec):
    """The gradient of the place, behind a view, is in the memory of the linear layer's."""
    job = CapturedJob(make_spec(1, model={"factory": f"{PARTS}:Placed"}))
    graph = job.training_graph(1)
    cuts = {
        (True, Rows.of(1)): Cut(graph, {node.name: 0 for node in graph.operators}, training=True)
    }
    found = []
    for halves in (False, True):
        stage = Stage(0, cuts, job.states, CpuDevice())
        if halves:
            stage.split_backwards()
        for number in range(2):
            values = torch.full((1, 6), 1.0 + number), torch.tensor([[0, 1, 2]])
            micro_batch = MicroBatch(number, Rows.of(1))
            stage.forward(micro_batch, dict(zip(graph.inputs, values, strict=True)), {})
            stage.backward(micro_batch, {}, 1.0)
        for number in range(2):
            stage.finish_backward(number)
        found.append({name: tensor.grad for name, tensor in stage.parameters.items()})
        stage.forget()
    whole, late = found
    assert len(whole) == 5
    assert [name for name in whole if not torch.equal(whole[name], late[name])] == []


WEIGHT, INPUT = torch.linspace(-1, 1, 48).view(6, 8), torch.linspace(-2, 2, 24).view(3, 8)


def stage() -> StageCode:
    """A layer and a dropout, as the builder of stages writes them."""
    graph = fx.Graph()
    seed, weight, x = (graph.placeholder(name) for name in ("seed", "weight", "x"))
    layer = graph.call_function(F.gelu, (graph.call_function(F.linear, (x, weight)),))
    graph.call_function(seed_operator, (seed, 7))
    dropped = graph.call_function(F.dropout, (layer, 0.5))
    return written(graph, graph.call_function(torch.sin, (dropped,)))


def written(graph: fx.Graph, result: fx.Node) -> StageCode:
    graph.output((result,))
    module = fx.GraphModule(nn.Module(), graph)
    return StageCode(module, (Slot("weight"),), ("x",), (), (Slot("result"),))


def trained_once(code: StageCode, seed: int) -> tuple[Tensor, Tensor]:
    weight = WEIGHT.clone().requires_grad_()
    (result,) = code.module(seed, weight, INPUT)
    result.sum().backward()
    assert weight.grad is not None
    return result.detach(), weight.grad


@pytest.mark.skipif(not shutil.which("g++"), reason="needs a C++ compiler")
def test_compiled_stages_draw_the_same_masks_and_agree_within_rounding() -> None:
    compiled = compile_stage(stage())
    for seed in (1, 2, 3):
        expected, found = trained_once(stage(), seed), trained_once(compiled, seed)
        assert torch.equal(found[0] == 0, expected[0] == 0)
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other)
    assert not torch.equal(trained_once(compiled, 1)[0], trained_once(compiled, 2)[0])


def test_compiled_stages_follow_an_autocast_inside_the_model() -> None:
    graph = fx.Graph()
    _, weight, x = (graph.placeholder(name) for name in ("seed", "weight", "x"))
    switch = Switch(graph)
    switch.to(Region((Autocast("cpu", torch.bfloat16, enabled=True),), gradients=True))
    half = graph.call_function(F.linear, (x, weight))
    switch.to(WHOLE)
    whole = graph.call_function(F.linear, (x, weight))
    code = written(graph, graph.call_function(torch.add, (whole, half)))
    compiled = compile_stage(code, "eager")
    for one, other in zip(trained_once(compiled, 1), trained_once(code, 1), strict=True):
        assert one.dtype == other.dtype
        torch.testing.assert_close(one, other)


def test_a_new_seed_compiles_nothing_anew() -> None:
    compiled: list[fx.GraphModule] = []

    def counting(module: fx.GraphModule, _: Any) -> Any:
        compiled.append(module)
        return module

    code = compile_stage(stage(), counting)
    for seed in (1, 2, 3):
        trained_once(code, seed)
        assert len(compiled) == 2  # what is before the dropout, and what is behind it


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
    ("training", "message"),
    [({"clip_grad_norm": 1.0}, "training.clip_grad_norm needs"),
     ({"precision": "float16"}, "training.precision: float16 needs")],
)  # fmt: skip
def test_what_needs_all_stages_at_once_is_refused(training, message):
    with pytest.raises(MismatchError, match=message):
        refuse(Training(steps=1, batch_size=1, **training), "pipedream", {})


def test_weights_with_several_uses_are_refused():
    with pytest.raises(CaptureError, match=r"'head\.weight' is used by several operators"):
        refuse(Training(steps=1, batch_size=1), "pipedream", {"model.head.weight": ()})
