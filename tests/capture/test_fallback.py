"""Models that no export takes: what breaks becomes one operator, or an error names the line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor
from trial import Trial

from pipectl.capture import CapturedGraph, CapturedJob
from pipectl.capture.opaque import Opaque
from pipectl.capture.tensors import is_deferred
from pipectl.errors import CaptureError

MODULES = yaml.safe_load(Path(__file__).with_name("modules.yaml").read_text())
BREAKING = {kind: code for row in MODULES["breaking"] for kind, code in row["modules"].items()}


def operators(graph: CapturedGraph) -> list[str]:
    return [node.target.path for node in graph.operators if isinstance(node.target, Opaque)]


@pytest.mark.parametrize("kind", [*BREAKING, *MODULES["branching"]])
def test_a_layer_that_breaks_or_branches_becomes_one_operator(
    make_job, write_modules, place_of, kind: str
) -> None:
    """A branch that goes on either way is no check of values."""
    code = {**BREAKING, **MODULES["branching"]}[kind]
    path = write_modules({kind: code})
    job = make_job(f"{path}:layers")
    graph = job.training_graph(4)
    assert operators(graph) == ["1"]
    if kind in BREAKING:
        assert len(graph.operators) == 4
        assert place_of(path, code) in job.kept["1"]


def test_checks_of_values_are_left_out(make_job, write_modules) -> None:
    path = write_modules({"Checked": "\n".join(MODULES["checking"].values())})
    targets = [str(node.target) for node in make_job(f"{path}:layers").training_graph(4).operators]
    kinds = [name.split(".")[1] for name in targets if "max" not in name and "item" not in name]
    assert kinds == ["linear", "linear", "linear", "cross_entropy_loss"]
    assert "__bool__" not in vars(Tensor)


@pytest.mark.parametrize("kind", MODULES["masked"])
def test_masks_of_transformers_are_captured(make_job, write_modules, kind: str) -> None:
    job = make_job(f"{write_modules({kind: MODULES['masked'][kind]})}:layers")
    assert Trial(job).plain_differences() == {}
    assert not job.kept


FURTHER = """\
import torch
from torch import nn

class Branch(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.norm = nn.Linear(6, 6), nn.BatchNorm1d(6)
        self.kept = []
    def forward(self, x):
        y = self.norm(self.linear(x))
        self.kept.append(x.sum().item())
        if x.sum() > 1e6:
            return torch.ones_like(y)
        return y if x.sum() > 0 else x

class Skipping(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(9))
    def forward(self, x):
        every = []
        for layer in self.layers:
            every.append(x)
            if torch.rand([]) > 0.5:
                x = layer(x)
            else:
                every.append(x)
        return {"last": x, "every": tuple(every)}

class Speech(nn.Module):
    def __init__(self, reads=False):
        super().__init__()
        self.encoder, self.head, self.reads = Skipping(), nn.Linear(6, 3), reads
    def forward(self, x):
        outputs = self.encoder(x)
        assert isinstance(outputs["every"], tuple)
        more = sum(outputs["every"]) if self.reads else 0
        return self.head(outputs["last"] + more)

class Unrolled(nn.Linear):
    def forward(self, x):
        for _ in range(12):
            x = super().forward(x).tanh()
        return x
    def __len__(self):
        return 0

def unrolled():
    return nn.Sequential(Unrolled(6, 6), nn.Linear(6, 3))

class Select(nn.Module):
    def forward(self, x):
        return x[x > 0]

class Around(nn.Sequential):
    def forward(self, x):
        return x + self[0](x).sum()

class Counting(nn.Module):
    def forward(self, x):
        return x * (1 + sum(v > 0 for v in x.flatten().tolist()))

def two():
    return nn.Sequential(nn.Linear(6, 6), Branch(), nn.ReLU(True), Counting(), nn.Linear(6, 3))

class Sizing(nn.Identity):
    def forward(self, x):
        low = x.amin(0)
        if not self.least.numel():
            self.least.resize_(low.shape).copy_(low)
        return x - self.least

class Slope(nn.Module):
    def forward(self, y, x):
        return torch.autograd.grad(y.sum(), x, create_graph=True)[0]

class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.slope, self.head = nn.Linear(6, 6), Slope(), nn.Linear(6, 3)
    def forward(self, x):
        x = x.clone().requires_grad_()
        return self.layer(x).tanh(), x

class Equation(Pair):
    def forward(self, x):
        x.requires_grad_()
        return self.head(self.slope(self.layer(x).tanh(), x))

def slope_of(outputs, targets):
    return torch.autograd.grad(outputs[0].sum(), outputs[1], create_graph=True)[0].sum()

def sizing():
    model = nn.Sequential(nn.Linear(6, 6), Sizing(), nn.Linear(6, 3))
    model[1].register_buffer("least", torch.empty(0))
    return model

def sparse():
    return nn.Sequential(nn.Embedding(4, 6, sparse=True), nn.Linear(6, 3))

def three():
    return nn.Sequential(*(Branch() for _ in range(3)), nn.Linear(6, 3))

def around():
    return nn.Sequential(nn.Linear(6, 6), Around(Select()), nn.Linear(6, 3))

def selecting():
    return nn.Sequential(nn.Linear(6, 3), Select())

def plain():
    return [nn.Linear(6, 6), nn.Dropout(0.5), nn.Linear(6, 3)]

def mean(outputs, targets):
    return outputs.mean()

def loss(outputs, targets):
    if outputs.mean() > 1e6:
        return outputs.mean()
    return nn.functional.cross_entropy(outputs, targets)

class Gate(nn.Module):
    def forward(self, x):
        return x.mul_(2 if x.sum() > 0 else 3)

class Outer(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.gate = nn.Linear(6, 6), Gate()
        self.head, self.beside = nn.Linear(6, 3), nn.Linear(6, 3)

    def forward(self, x):
        x = self.first(x)
        y = self.gate(x)
        y.add_(1)
        return self.head(y) + self.beside(x)

class Scaling(nn.Module):
    def __init__(self, in_place=False):
        super().__init__()
        self.in_place = in_place
        self.register_buffer("newer", torch.full((6,), 0.5))
        self.register_buffer("older", torch.full((6,), 2.0))

    def forward(self, x):
        y = x * self.newer * self.older
        if x.sum() > 1e9:
            return y
        if self.in_place:
            self.newer.mul_(0.9)
        self.newer, self.older = 0.9 * self.newer, self.newer
        return y

class Twice(nn.Module):
    def __init__(self, in_place=False):
        super().__init__()
        self.first, self.scaling = nn.Linear(6, 6), Scaling(in_place)
        self.head = nn.Linear(6, 3)

    def forward(self, x):
        newer = self.scaling.newer
        x = self.first(x) * newer
        x = self.scaling(x) * self.scaling.newer
        return self.head(self.scaling(x) * newer)
"""


@pytest.fixture(scope="module")
def further(make_job: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """``further(model, loss=, **sections)``: a job of what is above."""
    path = tmp_path_factory.mktemp("further") / "further_models.py"
    path.write_text(FURTHER)

    def make(model: str, loss: str = "", **more: Any) -> CapturedJob:
        return make_job(f"{path}:{model}", loss=loss and f"{path}:{loss}", **more)

    return make


SQUARE = {"in_features": 6, "out_features": 6}


def opaque_of(graph: CapturedGraph) -> Opaque:
    return next(n.target for n in graph.operators if isinstance(n.target, Opaque))


def test_gradients_across_modules_keep_the_model_whole(further: Any) -> None:
    job = further("Equation")
    operator = opaque_of(job.training_graph(4))
    assert (operator.path, "differentiates" in job.kept["model"]) == ("model", True)
    x = torch.randn(4, 6)
    operator(4, *job.model.parameters(), x).sum().backward()
    assert job.model.layer.weight.grad.abs().sum() > 0
    assert not x.requires_grad


@pytest.mark.parametrize(
    ("model", "loss", "what"),
    [
        ("Pair", "slope_of", "loss .* it differentiates what was computed outside of it"),
        ("sizing", "mean", "changes the shape of buffer '1.least' from .0. to .6."),
        ("sparse", "mean", "0 gives sparse gradients"),
        ("selecting", "mean", "1 cannot be .* size depends on the data"),
    ],
)
def test_what_no_operator_can_do_is_refused(further: Any, model: str, loss: str, what: str) -> None:
    with pytest.raises(CaptureError, match=f"^model: {what}"):
        further(model, loss).training_graph(4)


def test_an_operator_serves_all_batch_sizes_and_every_branch_has_gradients(further: Any) -> None:
    job = further("two")
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


def test_what_is_written_into_a_result_is_written_into_the_input_that_it_is(
    further: Any,
) -> None:
    trial = Trial(further("Outer"))
    assert operators(trial.graph) == ["gate"]
    assert trial.plain_differences() == {}


def test_a_buffer_that_an_operator_assigns_is_read_before_between_and_after_but_not_written(
    further: Any,
) -> None:
    trial = Trial(further("Twice"))
    assert operators(trial.graph) == ["scaling", "scaling"]
    assert trial.plain_differences() == {}
    assert trial.differences(dict.fromkeys(trial.graph.position, 0), recompute=True) == []
    with pytest.raises(CaptureError, match=r"writes a torch.FloatTensor \[6\] of a submodule"):
        Trial(further("Twice", kwargs={"in_place": True}))


@pytest.mark.parametrize(
    ("model", "loss", "kept"),
    [
        ("plain", "loss", ["loss"]),
        ("three", "mean", ["0", "1", "2"]),  # of one class
        ("around", "mean", ["1"]),  # the result inside has any size
        ("two", "mean", ["1", "3"]),
    ],
)
def test_the_smallest_parts_that_can_be_operators_are_kept(
    further: Any, model: str, loss: str, kept: list[str]
) -> None:
    graph = further(model, loss).training_graph(4)
    job = further(model, loss, materialize="per_rank")
    assert operators(graph) == operators(job.training_graph(4)) == kept
    assert graph.requires_grad[graph.loss]
    assert graph.fingerprint == job.training_graph(4).fingerprint
    assert all(is_deferred(tensor) for tensor in job.states.values())


def test_a_part_of_a_result_that_changes_its_structure_may_not_be_read(further: Any) -> None:
    job = further("Speech")
    operator = opaque_of(job.training_graph(4))
    assert (operator.path, len(operator.outline.forms)) == ("encoder", 1)
    x = torch.randn(4, 6)
    for seed in range(4):
        torch.manual_seed(seed)
        assert operator(4, *job.model.encoder.parameters(), x).shape == (4, 6)
    place = "at .*further_models.py:.*: more = sum.outputs"
    with pytest.raises(CaptureError, match=f"{place}.*: it reads a part of a submodule's result"):
        further("Speech", kwargs={"reads": True}).training_graph(4)


def test_a_long_loop_of_a_submodule_becomes_one_operator_and_one_of_the_model_is_told_of(
    further: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert operators(further("unrolled").training_graph(4)) == []
    monkeypatch.setattr("pipectl.capture.patches.MAX_REPEATS", 9)
    job = further("unrolled")
    assert operators(job.training_graph(4)) == operators(job.evaluation_graph(4)) == ["0"]
    assert "x = super().forward(x).tanh()): it repeats that line more than 9 times" in job.kept["0"]
    messages: list[str] = []
    graph = CapturedJob(
        further("Unrolled", "mean", kwargs=SQUARE).spec, messages.append
    ).training_graph(4)
    assert len(graph.operators) == 2 * 12 + 1
    (message,) = messages
    assert message.startswith("capturing a long loop (at ")
    assert "put it into a submodule of its own" in message


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


def test_a_pattern_that_matches_nothing_is_an_error(make_job) -> None:
    with pytest.raises(CaptureError, match=r"^model.opaque: 'blocks.\*' matches no submodule"):
        make_job("mlp", opaque=["blocks.*"])
