"""What no graph can hold: kept as one operator, or refused with its line and a hint."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor

from pipectl.capture import CapturedGraph, CapturedJob
from pipectl.capture.opaque import Opaque, enter, leave
from pipectl.capture.python_state import changed_state, state_values
from pipectl.capture.randomness import seed_backward, seed_libraries, states_of
from pipectl.capture.tensors import is_deferred
from pipectl.errors import CaptureError, FaultError
from tests.capture.conftest import MODELS
from tests.corpus.trial import Trial

MODULES = yaml.safe_load(Path(__file__).with_name("modules.yaml").read_text())
BREAKING = {kind: code for row in MODULES["breaking"] for kind, code in row["modules"].items()}
BRANCHING, CHECKING = MODULES["branching"], MODULES["checking"]
UNPATCHED = vars(torch.autograd.Function)["apply"], Tensor.register_hook


def operators(graph: CapturedGraph) -> list[str]:
    return [node.target.path for node in graph.operators if isinstance(node.target, Opaque)]


def opaque_of(graph: CapturedGraph) -> Opaque:
    return next(n.target for n in graph.operators if isinstance(n.target, Opaque))


OF_A_RULE = 4
"""Modules of a row of modules.yaml that every run of the tests tries."""


@pytest.mark.parametrize(
    ("kind", "module", "says", "hint"),
    [
        pytest.param(
            kind,
            module,
            row["says"],
            row.get("hint", "submodule of its own"),
            id=kind,
            marks=[pytest.mark.product] if number >= OF_A_RULE else [],
        )
        for row in MODULES["refused"] + MODULES["breaking"]
        for number, (kind, module) in enumerate(row["modules"].items())
    ],
)
def test_what_a_model_may_not_do_is_refused_at_its_line(
    make_job, write_modules, place_of, kind: str, module: Any, says: str, hint: str
) -> None:
    path = write_modules({kind: module})
    job = make_job(f"{path}:Whole{kind}")
    before = str(vars(job.model).get("kept"))
    with pytest.raises(CaptureError) as caught:
        job.training_graph(4)
    assert str(vars(job.model).get("kept")) == before
    code = module if isinstance(module, str) else module[1]
    assert place_of(path, code) in caught.value.message
    assert says in caught.value.message
    assert hint in str(caught.value.hint)
    assert "\n" not in caught.value.message
    assert (vars(torch.autograd.Function)["apply"], Tensor.register_hook) == UNPATCHED


@pytest.mark.parametrize(("kind", "opaque"), [("harmless", []), ("opaque", ["1", "2", "3", "4"])])
def test_what_no_step_reads_of_another_may_be_kept_and_is_left_as_it_was(
    make_job, write_modules, kind: str, opaque: list[str]
) -> None:
    job = make_job(f"{write_modules(MODULES[kind])}:layers", opaque=opaque)
    before = [dict(vars(module)) for module in job.model]
    assert operators(job.training_graph(4)) == opaque
    code = sys.modules[type(job.model[1]).__module__]
    assert (code.STEPS, code.COUNTS, code.LAST, code.Meter.calls) == (0, {"a": 0}, None, 0)
    assert (len(code.QUEUE), code.ARRAY.tolist()) == (0, [0])
    for module, attributes in zip(job.model, before, strict=True):
        assert vars(module).keys() == attributes.keys()
        assert getattr(module, "kept", None) is attributes.get("kept")


@pytest.mark.parametrize("kind", ["Filled", "Grown", "Pair", "BufferedTable", "GlobalTable"])
def test_tables_that_every_step_would_compute_alike_may_be_kept(
    make_job, write_modules, kind: str
) -> None:
    trial = Trial(make_job(f"{write_modules({kind: MODULES['harmless'][kind]})}:layers"))
    assert trial.plain_differences() == {}
    assert trial.differences(trial.cut(1), recompute=True) == []


def test_state_that_no_graph_shows_is_named(make_job, write_modules) -> None:
    table = {
        "Length": ["[]", "self.kept.append(1); x = x * len(self.kept)"],
        "Running": ["nn.BatchNorm1d(6)", "x = self.kept(x)"],
        "Outer": "global STEPS; STEPS += 1; COUNTS['b'] = 1; Meter.calls += 1; count()",
    }
    job = make_job(f"{write_modules(table)}:layers")
    before = state_values(job.wrapper)
    assert changed_state(before, state_values(job.wrapper)) == []
    job.wrapper(*job.loader.example(4))
    names = ["1.kept", "Meter.calls", "count_from.count.n", "modules.py:COUNTS", "modules.py:STEPS"]
    assert changed_state(before, state_values(job.wrapper)) == names


TWO_INPUTS = """
class Sum(nn.Linear):
    def __init__(self):
        super().__init__(6, 3)
    def forward(self, a, b):
        return super().forward(a + b)

def pairs():
    return [((torch.ones(6), torch.ones(6)), torch.tensor(i % 3)) for i in range(20)]

def named():
    return [({"a": a, "b": b}, target) for (a, b), target in pairs()]
"""


def test_several_inputs_have_names(make_job, write_modules) -> None:
    path = write_modules({}, TWO_INPUTS)
    assert make_job(f"{path}:Sum", data=f"{path}:named").training_graph(4).operators
    with pytest.raises(CaptureError, match="missing 1 required positional argument: 'b'") as caught:
        make_job(f"{path}:Sum", data=f"{path}:pairs").training_graph(4)
    assert str(caught.value.hint).startswith("a tuple or list is one argument of forward()")
    assert '({"a": ..., "b": ...}, targets)' in str(caught.value.hint)


EXTRA = """
class Extra(Counting):
    def get_extra_state(self):
        return {{{state}}}
    def set_extra_state(self, state):
        pass

def model():
    return [nn.Linear(6, 6), Extra(), nn.Linear(6, 3)]
"""


@pytest.mark.parametrize(
    ("state", "opaque", "refused"),
    [
        ("'calls': self.kept", [], True),
        ("'calls': self.kept", ["1"], True),
        ("'values': np.arange(3) + self.kept", [], True),
        ("'settings': object(), 'values': np.arange(3)", [], False),
    ],
)
def test_an_extra_state_that_a_forward_changes_is_refused(
    make_job, write_modules, state: str, opaque: list[str], refused: bool
) -> None:
    path = write_modules({"Counting": ("0", "self.kept += 1")}, EXTRA.format(state=state))
    job = make_job(f"{path}:model", opaque=opaque)
    if not refused:
        assert job.training_graph(4).operators
        return
    with pytest.raises(
        CaptureError, match=r"^model: 1 changes its extra state \(get_extra_state\)"
    ):
        job.training_graph(4)


@pytest.mark.parametrize(
    ("first", "code", "message"),
    [
        (
            "nn.Linear(6, 6)",
            "self.kept.weight = nn.Parameter(2 * self.kept.weight)",
            "its forward replaces the parameter '1.kept.weight'",
        ),
        (
            "nn.Embedding(50, 6, max_norm=1.0)",
            "x = x + self.kept(torch.ones(len(x), dtype=torch.long))",
            "writes the parameter '1.kept.weight' in its forward",
        ),
        (
            "nn.Buffer(torch.zeros(6))",
            "self.kept = x.detach().mean()",
            "changes the shape of buffer '1.kept' from [6] to []",
        ),
        (
            "nn.Buffer(torch.empty(0))",
            "self.kept.resize_(6 + self.kept.numel())",
            "changes the shape of buffer '1.kept' from [0] to [6]",
        ),
        (
            "nn.Buffer(torch.zeros(6))",
            "self.kept = self.kept + 1.0j",
            "changes the type of buffer '1.kept' from torch.float32 to torch.complex64",
        ),
        (
            "nn.Buffer(torch.zeros(6))",
            "x = x + self.kept; self.kept = self.linear.bias.detach()[:]",
            "its forward lets the buffer '1.kept' share the memory of '1.linear.bias'",
        ),
        (
            "nn.BatchNorm1d(6)",
            "x = self.kept(x); self.kept.running_var = self.kept.running_mean.mul_(0.9)",
            "its forward lets the buffer '1.kept.running_var' share the memory of "
            "'1.kept.running_mean'",
        ),
        (
            "nn.BatchNorm1d(6)",
            "x = self.kept(x); self.kept.running_mean = None",
            "its forward clears the buffer '1.kept.running_mean'",
        ),
    ],
)
@pytest.mark.parametrize("opaque", [[], ["1"]], ids=["captured", "kept whole"])
def test_parameters_stay_and_buffers_keep_their_kind(
    make_job, write_modules, first: str, code: str, message: str, opaque: list[str]
) -> None:
    """Other uses of a parameter, replicas and recomputed forwards would have one of their own."""
    path = write_modules({"Changing": (first, code)})
    with pytest.raises(CaptureError) as caught:
        make_job(f"{path}:layers", opaque=opaque).training_graph(4)
    assert caught.value.message.startswith(f"model: {message}")


MODES = """
class Own(nn.Linear):
    def __init__(self):
        super().__init__(6, 3)
        self.table = None
        self.register_buffer("held", torch.eye(6))
    def train(self, mode=True):
        {train}
        return super().train(mode)
    def eval(self):
        {eval}
        return super().eval()
    def forward(self, x):
        if not self.training and self.table is None:
            self.table = self.weight.detach().clone()
        return super().forward(x)
"""


@pytest.mark.parametrize(
    ("train", "eval_", "name"),
    [
        ("self.weight.data.mul_(1 if mode else 2)", "pass", "weight"),
        ("self.table = None if mode else self.weight.detach() * 2", "pass", "table"),
        ("pass", "self.held = self.weight.detach().T @ self.weight.detach()", "held"),
        ("pass", "self.fused, self.bias = self.bias, None", "fused"),
        ("self.table, self.merged = None, not mode", "float(self.weight.sum())", None),
    ],
)
def test_a_switch_to_evaluation_may_not_change_tensors(
    make_job, write_modules, train: str, eval_: str, name: str | None
) -> None:
    path = write_modules({}, MODES.format(train=train, eval=eval_))
    job = make_job(f"{path}:Own", evaluation={"data": f"{MODELS}:Vectors"})
    before = {key: tensor.clone() for key, tensor in job.wrapper.state_dict().items()}
    with nullcontext() if name is None else pytest.raises(CaptureError, match=f"'{name}'"):
        job.training_graph(4)
        job.evaluation_graph(4)
    after = job.wrapper.state_dict()
    assert all(torch.equal(after[key], tensor) for key, tensor in before.items())


SWITCHED = """
class Switched(nn.Linear):
    def __init__(self):
        super().__init__(6, 3)
        self.scale = 1.0
    def train(self, mode=True):
        self.scale = 1.0 if mode else 3.0
        return super().train(mode)
    def forward(self, x):
        return super().forward(x) * self.scale
"""


def test_an_operator_is_switched_to_training_by_its_own_function(make_job, write_modules) -> None:
    path = write_modules(
        {},
        SWITCHED + "class Net(nn.Sequential):\n    def __init__(self):\n"
        "        super().__init__(Switched())\n",
    )
    job = make_job(f"{path}:Net", opaque=["0"], evaluation={"data": f"{MODELS}:Vectors"})
    x, states = torch.rand(4, 6), [*job.wrapper.model.parameters()]
    graphs = job.training_graph(4), job.evaluation_graph(4)
    plain = torch.nn.functional.linear(x, *states)
    for scale, graph in zip((1.0, 3.0, 1.0), (*graphs, graphs[0]), strict=True):
        with torch.set_grad_enabled(graph is graphs[0]):
            assert torch.equal(opaque_of(graph)(4, *states, x), plain * scale)


ELSEWHERE = """
import numpy as np
GENERATOR = np.random.default_rng(0)
def drawn():
    return GENERATOR.random()
"""
NOISY_LOSS = """
def noisy(outputs, targets):
    return nn.functional.cross_entropy(outputs, targets) * GENERATOR.random()
"""


@pytest.mark.parametrize(
    ("code", "line"),
    [
        ("x = x * (2 if draw() < 0.5 else 3)", "x = x * (2 if draw()"),
        ("x = x * noise()", "return generator.random()"),
        ("x = x * elsewhere.drawn()", "return GENERATOR.random()"),
    ],
)
def test_draws_by_functions_are_refused_where_they_draw(
    make_job, write_modules, tmp_path, monkeypatch, code: str, line: str
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "elsewhere.py").write_text(ELSEWHERE)
    path = write_modules({"Drawing": code}, "import elsewhere")
    with pytest.raises(CaptureError, match="generator that is not torch's own") as caught:
        make_job(f"{path}:WholeDrawing").training_graph(4)
    assert line in caught.value.message


def test_a_loss_that_draws_from_a_generator_of_its_file_is_kept_whole(
    make_job, write_modules
) -> None:
    path = write_modules({"Plain": "x = x.relu()"}, NOISY_LOSS)
    graph = make_job(f"{path}:layers", loss=f"{path}:noisy").training_graph(4)
    assert operators(graph) == ["loss"]
    assert opaque_of(graph).outline.draws


def test_generators_that_an_import_makes_are_no_draws(
    make_job, write_modules, tmp_path, monkeypatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "imported_late.py").write_text("import random\nGENERATOR = random.Random()\n")
    path = write_modules({"Importing": "import imported_late"})
    assert operators(make_job(f"{path}:layers").training_graph(4)) == []


@pytest.mark.parametrize(
    ("kept", "code"),
    [
        ("np.random.RandomState(0)", "x = x * (self.kept.rand() + GENERATOR.random())"),
        ("[random.Random(0)]", "x = x * self.kept[0].random()"),
        (
            "types.SimpleNamespace(rng=torch.Generator())",
            "x = x * torch.rand(6, generator=self.kept.rng)",
        ),
        ("None", "x = x * noise()"),
        ("None", "x = x * np.random.default_rng().random()"),
        ("None", "x = x * np.random.RandomState().rand()"),
        ("None", "x = x * random.Random().random()"),
        ("None", "with torch.random.fork_rng(devices=[]):\n    x = x * torch.rand(6)"),
    ],
)
def test_a_block_with_generators_of_its_own_draws_by_seed_alone(
    make_job, write_modules, kept: str, code: str
) -> None:
    job = make_job(f"{write_modules({'Noise': (kept, code)})}:layers")
    noise = opaque_of(job.training_graph(4))
    assert noise.outline.draws
    before = states_of(noise._generators)

    def drawn(seed: int) -> Tensor:
        seed_libraries(seed, 0)
        return noise(4, *job.model[1].parameters(), torch.ones(4, 6))

    first, other, again = drawn(1), drawn(2), drawn(1)
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert states_of(noise._generators) == before


JITTER = """
class Jitter(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, generator):
        ctx.generator = generator
        return x * 1
    @staticmethod
    def backward(ctx, gradient):
        return gradient * torch.rand(6, generator=ctx.generator), None
"""


def test_a_backward_of_a_block_draws_from_its_own_generator_by_seed_alone(
    make_job, write_modules
) -> None:
    table = {"Noise": ("torch.Generator()", "x = Jitter.apply(x, self.kept)")}
    job = make_job(f"{write_modules(table, JITTER)}:layers", opaque=["1"])
    noise = opaque_of(job.training_graph(4))
    before = states_of([job.model[1].kept])

    def gradient(seed: int) -> Tensor:
        x = torch.ones(4, 6, requires_grad=True)
        seed_libraries(seed, 0)
        result = noise(4, *job.model[1].parameters(), x)
        seed_backward(result, seed, 0)
        return torch.autograd.grad(result.sum(), x)[0]

    first, other, again = gradient(1), gradient(2), gradient(1)
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert states_of([job.model[1].kept]) == before


def test_a_block_that_seeds_itself_draws_the_same_in_each_call(make_job, write_modules) -> None:
    code = "torch.manual_seed(0); x = x * torch.rand(6)"
    job = make_job(f"{write_modules({'Seeding': code})}:layers")
    seeding = opaque_of(job.training_graph(4))
    drawn = []
    for seed in (1, 2):
        seed_libraries(seed, 0)
        drawn.append(seeding(4, *job.model[1].parameters(), torch.ones(4, 6)))
    assert torch.equal(*drawn)


def test_a_block_that_draws_may_compute_where_its_capture_saw_it_pass_the_input(
    make_job, write_modules
) -> None:
    code = "if torch.rand(1) < 0.999999:\n    return x.detach()"
    graph = make_job(f"{write_modules({'Passing': code})}:layers").training_graph(4)
    (node,) = (node for node in graph.operators if isinstance(node.target, Opaque))
    assert graph.requires_grad[node.name]


def test_what_only_pipectl_can_have_broken_is_called_its_fault(
    make_job, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any) -> Any:
        raise RuntimeError("broken")

    job = make_job("mlp")
    with monkeypatch.context() as patch:
        patch.setattr("pipectl.capture.export.drop_conditions", None)
        with pytest.raises(FaultError, match=r"a fault of pipectl, not of your job: TypeError"):
            job.training_graph(4)
    monkeypatch.setattr("pipectl.capture.job.preserve_state", broken)
    with pytest.raises(RuntimeError, match="broken"):  # nor is it one of the model
        job.misfit(4)


# A submodule that no export takes becomes one operator, which runs as it is


@pytest.mark.parametrize("kind", [*BREAKING, *BRANCHING])
def test_a_layer_that_breaks_or_branches_becomes_one_operator(
    make_job, write_modules, place_of, kind: str
) -> None:
    """A branch that goes on either way is no check of values."""
    code = {**BREAKING, **BRANCHING}[kind]
    path = write_modules({kind: code})
    job = make_job(f"{path}:layers")
    graph = job.training_graph(4)
    assert operators(graph) == ["1"]
    if kind in BREAKING:
        assert len(graph.operators) == 4
        assert place_of(path, code) in job.kept["1"]


def test_checks_of_values_are_left_out(make_job, write_modules) -> None:
    path = write_modules({"Checked": "\n".join(CHECKING.values())})
    targets = [str(node.target) for node in make_job(f"{path}:layers").training_graph(4).operators]
    kinds = [name.split(".")[1] for name in targets if "max" not in name and "item" not in name]
    assert kinds == ["linear", "linear", "linear", "cross_entropy_loss"]
    assert "__bool__" not in vars(Tensor)


@pytest.mark.parametrize(
    ("code", "kinds"),
    [
        ("x = x * 2 if torch.compiler.is_compiling() else x.exp()", ["exp"]),
        ("x = x * 2 if torch.compiler.is_exporting() else x.exp()", ["exp"]),
        ("x = x * 2 if compiling() else x.exp()", ["exp"]),
        ("x = x * 2 if torch.compiler.is_compiling() else x if x.sum() > 0 else -x", ["mul"]),
    ],
)
def test_a_model_sees_no_compiler_unless_it_cannot_be_captured_otherwise(
    make_job, write_modules, code: str, kinds: list[str]
) -> None:
    code_of_torch = torch.compiler.is_compiling.__code__
    path = write_modules({"Asking": code}, "from torch.compiler import is_compiling as compiling")
    targets = [str(node.target) for node in make_job(f"{path}:layers").training_graph(4).operators]
    assert [name.split(".")[1] for name in targets[2:-2]] == kinds
    assert torch.compiler.is_compiling.__code__ is code_of_torch


@pytest.mark.parametrize("kind", MODULES["masked"])
def test_masks_of_transformers_are_captured(make_job, write_modules, kind: str) -> None:
    job = make_job(f"{write_modules({kind: MODULES['masked'][kind]})}:layers")
    assert Trial(job).plain_differences() == {}
    assert not job.kept


def between(*names: str) -> dict[str, Any]:
    return {"model": "between", "kwargs": {"names": [*names]}}


def test_gradients_across_modules_keep_the_model_whole(make_job) -> None:
    job = make_job("Equation")
    operator = opaque_of(job.training_graph(4))
    assert (operator.path, "differentiates" in job.kept["model"]) == ("model", True)
    x = torch.randn(4, 6)
    operator(4, *job.model.parameters(), x).sum().backward()
    assert job.model.a.weight.grad.abs().sum() > 0
    assert not x.requires_grad


@pytest.mark.parametrize(
    ("names", "what"),
    [
        (
            {"model": "Pair", "loss": "slope_of"},
            "^model: loss .* it differentiates what was computed outside of it",
        ),
        ({"model": "sparse", "loss": "mean"}, "^model: 0 gives sparse gradients"),
        ({"model": "scripted", "loss": "mean"}, "^model: 0 is a program of TorchScript"),
        ({"model": "selecting", "loss": "mean"}, "^model: 1 cannot be .* size depends on the data"),
        (
            {"model": "mlp", "opaque": ["blocks.*"]},
            r"^model.opaque: 'blocks.\*' matches no submodule",
        ),
    ],
)
def test_what_no_operator_can_do_is_refused(make_job, names: dict[str, Any], what: str) -> None:
    with pytest.raises(CaptureError, match=what):
        make_job(**names).training_graph(4)


ROWS = "torch.zeros(len(x), {}, dtype=torch.long)"
BRANCH = "if x.sum() > 1e9: x = x + 1"
FUNCTIONS = "import torch.nn.functional as F"


@pytest.mark.parametrize(
    ("code", "flag"),
    [
        (
            f"x = x + F.embedding({ROWS.format(2)}, self.linear.weight, sparse=True).sum(1)",
            "sparse",
        ),
        (f"x = F.embedding_bag({ROWS.format(2)}, self.linear.weight, sparse=True) - x", "sparse"),
        (f"x = x.gather(1, {ROWS.format(6)}, sparse_grad=True)", "sparse_grad"),
    ],
)
def test_sparse_gradients_are_refused_at_the_line_that_gives_them(
    make_job, write_modules, code: str, flag: str
) -> None:
    frozen = code.replace("weight", "weight.detach()").replace("x.gather", "x.detach().gather")
    path = write_modules({"Sparse": code, "Frozen": f"x = x - 0 * x\n{frozen}"}, FUNCTIONS)
    with pytest.raises(CaptureError, match=rf"gives sparse gradients \({flag}=True\)") as raised:
        make_job(f"{path}:WholeSparse").training_graph(4)
    assert code in raised.value.message
    if flag == "sparse":
        make_job(f"{path}:WholeFrozen").training_graph(4)


def test_sparse_gradients_of_an_operator_are_refused_in_a_backward(make_job, write_modules) -> None:
    code = f"{BRANCH}\nx = x + F.embedding({ROWS.format(2)}, self.kept.weight, sparse=True).sum(1)"
    path = write_modules({"Sparse": ("nn.Linear(6, 6)", code)}, FUNCTIONS)
    with pytest.raises(CaptureError, match=r"one operator gives .* of '1\.kept\.weight'"):
        Trial(make_job(f"{path}:layers"))


@pytest.mark.parametrize("sparse", [True, False])
def test_gradients_of_what_enters_an_operator_are_dense(sparse: bool) -> None:
    value = torch.randn(3, 4, requires_grad=True)
    (alias,), anchor = enter([value])
    (left,) = leave(anchor, [alias.gather(1, torch.ones(3, 2).long(), sparse_grad=sparse)])
    left.sum().backward()
    assert value.grad.layout is torch.strided
    assert torch.equal(value.grad, torch.tensor([[0.0, 2.0, 0.0, 0.0]]).expand(3, 4))


SCALED = """
class Scaled(torch.autograd.Function):
    calls, seen = 1, False
    @staticmethod
    def forward(ctx, x):
        {code}
        return x * Scaled.calls
    @staticmethod
    def backward(ctx, gradient):
        return gradient * Scaled.calls

class Scaling(nn.Linear):
    def forward(self, x):
        return super().forward(Scaled.apply(x))

def scaling():
    return Scaling(6, 3)
"""


@pytest.mark.parametrize(
    ("code", "name"),
    [
        ("Scaled.calls += 1", "Scaled.calls"),
        ("global STEPS; STEPS += 1; x = x * STEPS", "modules.py:STEPS"),
        ("Scaled.seen = True", None),
    ],
)
def test_an_autograd_function_that_counts_its_calls_is_refused(
    make_job, write_modules, code: str, name: str | None
) -> None:
    job = make_job(f"{write_modules({}, SCALED.format(code=code))}:scaling")
    if name is None:
        assert job.training_graph(4).operators
        return
    with pytest.raises(CaptureError, match=f"keeps '{name}' from one step to the next") as caught:
        job.training_graph(4)
    assert "Scaled.apply(x)" in caught.value.message or code in caught.value.message
    assert "leave the count out, or pass" in str(caught.value.hint)


@pytest.mark.parametrize(
    ("way", "line"), [("length", "len(each)"), ("table", "self.table[each]"), ("branch", "2 * x")]
)
def test_a_model_that_computes_with_texts_is_refused_at_its_line(make_job, way, line) -> None:
    """A graph would hold those of the batch that was captured."""
    with pytest.raises(CaptureError, match="computes with the texts of a batch") as caught:
        make_job("Named", data="NamedVectors", kwargs={"way": way}).training_graph(4)
    assert line in caught.value.message


def test_texts_that_a_model_gets_and_ignores_are_allowed(make_job) -> None:
    job = make_job("Named", data="NamedVectors", kwargs={"way": "none"})
    assert job.training_graph(4) is job.training_graph(3)


def test_an_operator_gets_no_texts(make_job) -> None:
    with pytest.raises(CaptureError, match="computes with the texts of a batch"):
        make_job("Passing", data="NamedVectors", opaque=["inside"]).training_graph(4)


def test_a_buffer_that_others_read_is_not_written_in_place_by_an_operator(make_job) -> None:
    with pytest.raises(CaptureError, match=r"writes a torch.FloatTensor \[6\] of a submodule"):
        Trial(make_job("Twice", kwargs={"in_place": True}))


def test_an_operator_serves_all_batch_sizes_and_every_branch_has_gradients(make_job) -> None:
    job = make_job(**between("Branch", "Counting"))
    before = {name: tensor.clone() for name, tensor in job.states.items()}
    graph = job.training_graph(4)
    assert graph is job.training_graph(1)
    assert all(torch.equal(before[name], tensor) for name, tensor in job.states.items())
    assert job.model[1].kept == []
    assert not vars(job.model[1]).keys() & {"forward", "_call_impl"}

    def run(x: Tensor, size: int) -> Tensor:
        states = [t.clone() for name, t in job.states.items() if name.startswith("model.1.")]
        return opaque_of(graph)(size, *states, x)[0]

    assert run(torch.ones(7, 6), 7).shape == (7, 6)
    with pytest.raises(CaptureError, match=r"model: 1 gave \[4, 6\] .* captured with \[3, 6\]"):
        run(torch.ones(4, 6), 3)
    unread = torch.full((4, 6), 1e9, requires_grad=True)
    run(unread, 4).sum().backward()
    assert torch.equal(unread.grad, torch.zeros(4, 6))
    passed = torch.full((4, 6), -1.0, requires_grad=True)
    run(passed, 4).mul_(2).sum().backward()  # which leaves the input as it is
    assert torch.equal(passed, torch.full((4, 6), -1.0))
    assert torch.equal(passed.grad, torch.full((4, 6), 2.0))


@pytest.mark.parametrize(
    ("names", "kept"),
    [
        ({"model": "mlp", "loss": "branching_loss"}, ["loss"]),
        (between("Branch", "Branch", "Counting"), ["1", "2", "3"]),  # also two of one class
        (between("Around"), ["1"]),  # the result inside has any size
        ({"model": "Outer"}, ["gate"]),
        ({"model": "Twice"}, ["scaling", "scaling"]),
    ],
)
def test_the_smallest_parts_that_can_be_operators_are_kept(
    make_job, names: dict[str, Any], kept: list[str]
) -> None:
    graph = make_job(**names).training_graph(4)
    job = make_job(**names, materialize="per_rank")
    assert operators(graph) == operators(job.training_graph(4)) == kept
    assert graph.requires_grad[graph.loss]
    assert graph.fingerprint == job.training_graph(4).fingerprint
    assert all(is_deferred(tensor) for tensor in job.states.values())


def test_a_loss_that_is_kept_whole_is_so_for_its_own_line(make_job, write_modules) -> None:
    code = "count = targets.sum().item()"
    loss = f"def loss(outputs, targets):\n    {code}\n    return outputs.mean() / (1 + count)\n"
    path = write_modules({}, loss)
    job = make_job("mlp", loss=f"{path}:loss")
    assert operators(job.training_graph(4)) == ["loss"]
    assert f"{path}:" in job.kept["loss"]
    assert f": {code}): it reads the values" in job.kept["loss"]


# What an operator does besides giving its result

BESIDE = """
class Settings:
    def __init__(self, inner=None):
        self.depth, self.scale, self.inner, self.seen = 0, 0.5, inner, set()

class Kept(nn.Linear):
    def __init__(self, own=0):
        super().__init__(6, 6)
        self.own = {first}
    def forward(self, x, *given):
        y = super().forward(x)
        {code}
        return y * 2 if y.sum() > 0 else y

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.kept, self.also, self.head = Kept(), Kept(), nn.Linear(6, 3)
        self.seen = {{}}
        self.kept.register_forward_hook(lambda _, given, y: self.seen.update(y=y))
    def forward(self, x):
        self.calls, extra = [], 0.0
        {forward}
        return self.head(y) + extra
"""
CHANGES = "changes a list, mapping or object"
BOTH = "y = self.also(self.kept(x))"
OWN = "self.own = y.square().mean()"


@pytest.mark.parametrize(
    ("first", "code", "forward", "says", "line"),
    [
        ("0.0", OWN, f"{BOTH}; extra = 2 * self.kept.own", "sets 'kept.own'", "self.kept.own"),
        ("None", OWN, f"{BOTH}; extra = self.kept.own or 0", "sets 'kept.own'", "self.kept.own"),
        (
            "nn.Buffer(torch.zeros(()))",
            OWN,
            f"{BOTH}; extra = 2 * self.kept.own",
            "sets 'kept.own'",
            "self.kept.own",
        ),
        (
            "1.0",
            "self.own = float(y.abs().mean())",
            f"{BOTH}; y = y / self.kept.own",
            "sets 'kept.own'",
            "self.kept.own",
        ),
        (
            "0",
            "self.own += 1",
            f"{BOTH}; y = y / self.kept.own",
            "sets 'kept.own'",
            "self.kept.own",
        ),
        (
            "None",
            "COUNTS['y'] = y.mean()",
            f"{BOTH}; extra = COUNTS.get('y', 0) * 2",
            "sets \"modules.py:COUNTS['y']\"",
            "extra = COUNTS",
        ),
        ("None", "pass", f"{BOTH}; extra = self.seen['y'].mean()", "sets \"seen['y']\"", "extra ="),
        (
            "None",
            "QUEUE.append(y.mean()); y = y + (sum(QUEUE) if len(QUEUE) > 1 else 0)",
            BOTH,
            "'modules.py:QUEUE[0]'",
            "QUEUE.append",
        ),
        (
            "None",
            "given[0].append(y.mean())",
            "y = self.kept(x, self.calls); extra = sum(self.calls)",
            CHANGES,
            "",
        ),
        (
            "None",
            "given[0]['y'] = y.mean()",
            "given = {'y': x.mean()}; y = self.kept(x, given); extra = given['y']",
            CHANGES,
            "",
        ),
        (
            "None",
            "given[0]['a'] += 1; y = y * 0.9 ** given[0]['a']",
            "given = {'a': 0, 'b': 1}; y = self.also(self.kept(x, given), given)",
            CHANGES,
            "",
        ),
        (
            "None",
            "given[0].depth += 1; y = y * 0.9 ** given[0].depth",
            "state = Settings(); y = self.also(self.kept(x, state), state)",
            CHANGES,
            "",
        ),
        (
            "None",
            "given[0].inner.seen.add('kept')",
            "state = Settings(Settings()); y = self.kept(x, state) * len(state.inner.seen)",
            CHANGES,
            "",
        ),
        (
            "None",
            "given[0].inner[0].h = y",
            "state = Settings([Settings()]); self.kept(x, state); y = state.inner[0].h",
            CHANGES,
            "",
        ),
        (
            "None",
            "y = y * given[0].inner[0].scale",
            "state = Settings([Settings()]); state.inner[0].scale = x.mean()\n"
            "        y = self.kept(x, state)",
            "is called with a Settings that contains tensors",
            "",
        ),
        (
            "None",
            "y = y if self.own is None else y * self.own",
            "self.kept.own = x.mean(); y = self.kept(x)",
            "reads 'kept.own'",
            "y * self.own",
        ),
        (
            "1.0",
            "y = y * self.own",
            "self.kept.own = 2.0; y = self.kept(x)",
            "reads 'kept.own'",
            "y = y * self.own",
        ),
        (
            "1.0",
            "self.own = self.own * 1.0; y = y * self.own",
            "self.kept.own = x.mean(); y = self.kept(x)",
            "reads 'kept.own'",
            "self.own = self.own * 1.0",
        ),
    ],
)
@pytest.mark.parametrize("opaque", [[], ["kept", "also"]], ids=["unasked", "named"])
def test_what_passes_an_operator_outside_of_arguments_and_results_is_refused(
    make_job, write_modules, first, code, forward, says, line, opaque
) -> None:
    path = write_modules({}, BESIDE.format(first=first, code=code, forward=forward))
    with pytest.raises(CaptureError) as caught:
        make_job(f"{path}:Model", opaque=opaque).training_graph(4)
    message = caught.value.message
    assert says in message
    assert line in message.partition("(at ")[2].partition(")), ")[0]
    # No submodule has both; else it would be kept.
    is_of_the_whole = " as one operator, sets " in message or " as one operator, reads " in message
    assert ("under model.opaque" in str(caught.value.hint)) is not is_of_the_whole


def test_the_part_that_sets_a_value_and_the_one_that_reads_it_are_kept_together(
    make_job, write_modules
) -> None:
    code = BESIDE.format(first="0.0", code=OWN, forward=f"{BOTH}; extra = 2 * self.kept.own")
    path = write_modules({}, f"{code}\ndef inner():\n    return [nn.Linear(6, 6), Model()]\n")
    trial = Trial(make_job(f"{path}:inner"))
    assert operators(trial.graph) == ["1"]
    assert trial.plain_differences() == {}
    assert trial.differences(trial.cut(1), recompute=True) == []


@pytest.mark.parametrize(
    ("first", "code", "forward"),
    [
        ("0", "self.own += 1; COUNTS['a'] += 1", f"{BOTH}; COUNTS['a'] += 1"),
        ("None", OWN, f"{BOTH}; self.calls.append(self.kept.own)"),
        ("[]", "self.own.append(y.mean().detach())", BOTH),
        (
            "None",
            "self.own = torch.arange(6.0) if self.own is None else self.own; y = y + self.own",
            f"{BOTH}; extra = self.kept.own[:3]",
        ),
        ("1.0", "self.own = 2.0", f"{BOTH}; y = y * self.kept.own"),
        (
            "self.register_buffer('table', None)",
            "self.table = torch.arange(6.0) if self.table is None else self.table\n"
            "        y = y + self.table",
            BOTH,
        ),
        ("self.register_buffer('log', None)", "self.log = y.detach().mean(0)", BOTH),
        ("[nn.Buffer(torch.ones(6))]; self.mean = self.own[0]", "y = y + self.own[0]", BOTH),
        (
            "None",
            "STATE.table = STATE.table if hasattr(STATE, 'table') else torch.ones(6)\n"
            "        y = y * STATE.table",
            BOTH,
        ),
        ("None", "y = y * given[0]['scale']", "y = self.kept(x, {'scale': 2.0})"),
        ("None", "y = y * given[0].inner[0].scale", "y = self.kept(x, Settings([Settings()]))"),
        (
            "None",
            "y = y * 0.5 ** given[0].depth",
            "state = Settings(); state.depth = 2; y = self.kept(x, state); state.depth = 3\n"
            "        y = self.also(y, state)",
        ),
        (
            "None",
            "self.own = (tuple(x.shape[1:]), x.shape[1:], x.device, np.float32(0.5))",
            f"{BOTH}; y = y * self.kept.own[0][0] * self.kept.own[1][0] * float(self.kept.own[3])",
        ),
    ],
)
def test_what_an_operator_sets_alike_in_every_call_or_nobody_reads_is_no_matter(
    make_job, write_modules, first, code, forward
) -> None:
    path = write_modules({}, BESIDE.format(first=first, code=code, forward=forward))
    trial = Trial(make_job(f"{path}:Model"))
    assert operators(trial.graph)[0] == "kept"
    assert trial.plain_differences() == {}
    assert trial.differences(trial.cut(1), recompute=True) == []


@pytest.mark.parametrize(
    ("first", "code"),
    [
        ("1.0", "self.own = max(0.1, self.own * 0.8); y = y / self.own"),
        ("0", "self.own += 1; y = y * 2 if self.own > 1000 else y"),
        (
            "None",
            "m = y.detach().mean(0); self.own = m if self.own is None else 0.9 * self.own + m\n"
            "        y = y - self.own",
        ),
        ("[]", "self.own.append(y.detach().mean()); y = y + sum(self.own)"),
        ("None", "self.own = y.detach() if self.own is None else self.own; y = y - self.own[0]"),
        ("torch.zeros(6)", "self.own.add_(y.detach().mean(0)); y = y + self.own"),
        ("np.zeros(1)", "self.own += 1; y = y * float(self.own[0])"),
        ("None", "Meter.calls += 1; y = y * Meter.calls"),
        (
            "[nn.Sequential(nn.BatchNorm1d(6))]",
            "m = self.own[0][0].running_mean.add_(y.detach().mean(0)); y = y - m",
        ),
    ],
)
def test_an_operator_keeps_state_only_if_the_user_has_named_it(
    make_job, write_modules, first, code
) -> None:
    """No checkpoint would hold it, and a recomputed forward would change it twice."""
    path = write_modules({}, BESIDE.format(first=first, code=code, forward="y = self.kept(x)"))
    with pytest.raises(CaptureError, match=r"keeps .* from one step to the next") as caught:
        make_job(f"{path}:Model").training_graph(4)
    assert "register_buffer(), or name the submodule" in str(caught.value.hint)
    assert operators(make_job(f"{path}:Model", opaque=["kept"]).training_graph(4)) == ["kept"]


MEAN = "m = y.detach().mean(0); "


@pytest.mark.parametrize(
    "code",
    [
        MEAN + "self.mean = m if self.mean is None else self.mean + m; y = y - self.mean",
        MEAN + "self.mean = m if self.mean is None else self.mean; y = y - self.mean",
    ],
)
def test_a_buffer_that_an_operator_sets_first_gets_a_value_in_the_factory(
    make_job, write_modules, code: str
) -> None:
    first = "self.register_buffer('mean', None)"
    path = write_modules({}, BESIDE.format(first=first, code=code, forward="y = self.kept(x)"))
    with pytest.raises(
        CaptureError, match=r"keeps 'kept.mean' from one step to the next"
    ) as caught:
        make_job(f"{path}:Model").training_graph(4)
    assert "give it a value in the factory" in str(caught.value.hint)


HELD = "[nn.Buffer(torch.zeros(6))]; self.mean = self.own[0]"


@pytest.mark.parametrize(
    ("first", "code", "says"),
    [
        (HELD, f"{MEAN}self.mean.add_(m); y = y - self.own[0]", "reads the buffer 'kept.mean'"),
        (HELD, f"{MEAN}self.own[0].add_(m); y = y - self.mean", "writes the buffer 'kept.mean'"),
        ("nn.Buffer(torch.zeros(6)); self.part = [self.own[:3]]",
         f"{MEAN}self.own = m; y = y - self.part[0].sum()", "reads the buffer 'kept.own'"),
        ("None", "y = y - self.norm[0].running_mean", "reads the buffer 'norm.running_mean'"),
        ("None", f"{MEAN}self.norm[0].running_var.add_(m)", "writes the buffer 'norm.running_var'"),
        ("None", f"{MEAN}self.norm[0].running_var = m", "assigns the buffer 'norm.running_var'"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("opaque", [[], ["kept"]], ids=["unasked", "named"])
def test_an_operator_uses_buffers_that_change_by_their_names_alone(
    make_job, write_modules, place_of, first: str, code: str, says: str, opaque: list[str]
) -> None:
    more = BESIDE.format(first=first, code=code, forward="y = self.norm(self.kept(x))")
    more += "class Beside(Model):\n    def __init__(self):\n        super().__init__()\n"
    more += "        self.norm = nn.BatchNorm1d(6)\n        self.kept.norm = [self.norm]\n"
    path = write_modules({}, more)
    with pytest.raises(CaptureError, match=f"kept, which .* {says}") as caught:
        make_job(f"{path}:Beside", opaque=opaque).training_graph(4)
    assert "assigns" in says or place_of(path, code) in caught.value.message


@pytest.mark.parametrize(
    ("first", "code"),
    [
        ("[self.weight]", "y = y @ self.own[0]"),
        ("functools.partial(torch.matmul, other=self.weight)", "y = self.own(y)"),
        ("self.weight.data", "y = y @ self.own"),
        ("None", "y = y @ self.others[0].weight"),
    ],
)
def test_an_operator_reads_parameters_by_their_names_alone(
    make_job, write_modules, place_of, first: str, code: str
) -> None:
    """A stage gives it those of its own step, which only its modules hold."""
    more = BESIDE.format(first=first, code=code, forward="y = self.kept(x)")
    more += "class Beside(Model):\n    def __init__(self):\n        super().__init__()\n"
    path = write_modules({}, f"{more}        self.kept.others = [self.also]\n")
    with pytest.raises(CaptureError, match=r"kept, which .* the parameter '\w+.weight'") as caught:
        make_job(f"{path}:Beside").training_graph(4)
    assert place_of(path, code) in caught.value.message


@pytest.mark.parametrize(("opaque", "second"), [([], "'2.mean'"), (["1"], "a buffer of another")])
def test_a_buffer_of_two_modules_is_assigned_in_both(
    make_job, write_modules, opaque: list[str], second: str
) -> None:
    code = "x = x + self.mean; self.mean = 0.5 * self.mean + x.detach().mean(0)"
    more = "def tied():\n    model = nn.Sequential(*layers())\n"
    more += "    model[2].mean = model[1].mean\n    return model\n"
    kept = dict.fromkeys(("A", "B"), ("self.register_buffer('mean', torch.ones(6))", code))
    path = write_modules(kept, more)
    with pytest.raises(CaptureError, match=f"'1.mean' and {second}.* one buffer") as caught:
        make_job(f"{path}:tied", opaque=opaque).training_graph(4)
    assert "buffer.copy_(value)" in str(caught.value.hint)


@pytest.mark.parametrize(
    ("code", "says"),
    [
        ("self.weight.data.mul_(0.9)", "writes the parameter 'kept.weight' in its forward"),
        ("self.bias.requires_grad_(False)", "changes requires_grad of a parameter of kept"),
        ("self.weight.register_hook(lambda g: 2 * g)", "puts a hook on the gradient"),
        ("super().forward(x.detach()).sum().backward()", "its forward calls backward() of kept"),
    ],
)
def test_what_a_forward_may_not_do_to_parameters_an_operator_may_neither(
    make_job, write_modules, code, says
) -> None:
    path = write_modules({}, BESIDE.format(first="0", code=code, forward="y = self.kept(x)"))
    with pytest.raises(CaptureError) as caught:
        make_job(f"{path}:Model", opaque=["kept"]).training_graph(4)
    assert says in caught.value.message


AGAIN = """
from torch.utils.checkpoint import checkpoint

class Again(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, module):
        ctx.module = module
        ctx.save_for_backward(x)
        with torch.no_grad():
            return module(x)
    @staticmethod
    def backward(ctx, gradient):
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            y = ctx.module(x)
        torch.autograd.backward(y, gradient)
        return x.grad, None

class Kept(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.calls = nn.Sequential(nn.Linear(6, 6), nn.Tanh()), []
        self.inner.register_forward_hook(lambda *_: self.calls.append(1))
    def forward(self, x):
        return {code}

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.kept, self.head = nn.Linear(6, 6), Kept(), nn.Linear(6, 3)
    def forward(self, x):
        return self.head(self.kept(self.kept(self.first(x))))
"""
CHECKPOINT = "checkpoint(self.inner, x, use_reentrant={})"


@pytest.mark.parametrize(
    ("code", "runs"),
    [
        ("Again.apply(Again.apply(x, self.inner), self.inner)", 4),
        (CHECKPOINT.format(True), 1),
        (CHECKPOINT.format(False), 1),
    ],
)
def test_a_backward_that_runs_modules_again_finds_the_weights_of_its_stage(
    make_job, write_modules, code: str, runs: int
) -> None:
    """What torch would recompute it keeps, as everywhere in a stage."""
    path = write_modules({}, AGAIN.format(code=code))
    trial = Trial(make_job(f"{path}:Model", opaque=["kept"]))
    assert max(trial.plain_differences().values(), default=0.0) < 1e-6
    assert trial.differences(trial.cut(1), recompute=True) == []
    kept = trial.job.model.kept
    kept.calls.clear()
    x, weights = torch.randn(4, 6, requires_grad=True), [*kept.parameters()]
    given = [each.detach().requires_grad_() for each in weights]
    result = opaque_of(trial.graph)(4, *given, x)
    (gradient,) = torch.autograd.grad(result.sum(), [x])
    assert len(kept.calls) == runs
    assert gradient.abs().sum() > 0
    assert [each.grad for each in weights] == [None, None]
    assert [*kept.parameters()] == weights


def test_a_part_of_a_result_that_changes_its_structure_may_not_be_read(make_job) -> None:
    job = make_job("Speech")
    operator = opaque_of(job.training_graph(4))
    assert (operator.path, len(operator.outline.forms)) == ("encoder", 1)
    x = torch.randn(4, 6)
    for seed in range(4):
        torch.manual_seed(seed)
        assert operator(4, *job.model.encoder.parameters(), x).shape == (4, 6)
    place = "at .*models.py:.*: more = sum.outputs"
    with pytest.raises(CaptureError, match=f"{place}.*: it reads a part of a submodule's result"):
        make_job("Speech", kwargs={"reads": True}).training_graph(4)


def test_a_long_loop_of_a_submodule_becomes_one_operator_and_one_of_the_model_is_told_of(
    make_job, monkeypatch: pytest.MonkeyPatch
) -> None:
    unrolled = between("Unrolled")
    assert operators(make_job(**unrolled).training_graph(4)) == []
    monkeypatch.setattr("pipectl.capture.patches.MAX_REPEATS", 9)
    job = make_job(**unrolled)
    assert operators(job.training_graph(4)) == operators(job.evaluation_graph(4)) == ["1"]
    assert "x = super().forward(x).tanh()): it repeats that line more than 9 times" in job.kept["1"]
    messages: list[str] = []
    job = CapturedJob(make_job("Unrolled", loss="mean").spec, messages.append)
    assert len(job.training_graph(4).operators) == 2 * 12 + 1
    (message,) = messages
    assert message.startswith("capturing a long loop (at ")
    assert "put it into a submodule of its own" in message


MANY = """
def many():
    return nn.Sequential(*(nn.Linear(6, 6) for _ in range(9)), nn.Linear(6, 3))
"""


def test_many_parameters_are_no_long_loop(
    make_job, write_modules, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second export would take as long as the first."""
    monkeypatch.setattr("pipectl.capture.patches.MAX_REPEATS", 9)
    messages: list[str] = []
    spec = make_job(f"{write_modules({}, MANY)}:many").spec
    assert len(CapturedJob(spec, messages.append).training_graph(4).operators) == 11
    assert messages == []


def test_a_model_that_a_library_brings_is_kept_whole(
    make_job, write_modules, place_of, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = tmp_path / "site-packages" / "a_library_of_models"
    library.mkdir(parents=True)
    write_modules({"Branch": BREAKING["Branch"]}).rename(library / "net.py")
    monkeypatch.syspath_prepend(library.parent)
    job = make_job("a_library_of_models.net:WholeBranch")
    assert operators(job.training_graph(4)) == ["model"]
    assert place_of(library / "net.py", "if x.sum() > 0:") in job.kept["model"]
    assert "control flow depends" in job.kept["model"]
