"""Models that no export takes: what breaks becomes one operator, or an error names the line."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from stages import Stages
from torch import Tensor
from trial import Trial

from pipectl.capture import CapturedGraph, CapturedJob
from pipectl.capture.opaque import Opaque
from pipectl.capture.tensors import is_deferred
from pipectl.errors import CaptureError

BREAKING = {
    "Branch": ("if x.sum() > 0:\n            x = x * 2", "its control flow depends"),
    "Loop": ("for _ in range(int(x.abs().sum().item())):\n            x = x * 0.9", "control flow"),
    "Numpy": ("x = x * float(np.tanh(x.detach().numpy()).mean())", "outside torch"),
    "Print": ("print(float(x.mean()))", "control flow depends"),
    "Random": ("x = x * random.random()", "generator that is not torch's"),
    "NumpyRandom": ("x = x + np.random.rand()", "generator that is not torch's"),
    "List": ("self.kept = [float(x.mean() + 1)]", "control flow depends"),
    "Nonzero": ("x = x.index_fill(1, x[0].gt(0).nonzero().flatten(), 0.5)", "size that depends"),
    "C": ("ctypes.memset(x.data_ptr(), 0, 0)", "outside torch"),
    "ToList": ("x = x * len([v for v in x.tolist() if v[0] > 0])", ""),
}


def operators(graph: CapturedGraph) -> list[str]:
    return [node.target.path for node in graph.operators if isinstance(node.target, Opaque)]


@pytest.mark.parametrize("kind", BREAKING)
def test_a_layer_that_breaks_becomes_one_operator_and_a_model_is_named(
    make_job, write_modules, place_of, kind: str
) -> None:
    code, what = BREAKING[kind]
    path = write_modules({kind: code})
    job = make_job(f"{path}:layers")
    graph = job.training_graph(4)
    assert operators(graph) == ["1"]
    assert len(graph.operators) == 4
    assert place_of(path, code) in job.kept["1"]
    with pytest.raises(CaptureError) as raised:
        make_job(f"{path}:Whole{kind}").training_graph(4)
    assert place_of(path, code) in raised.value.message
    assert what in raised.value.message
    assert "\n" not in raised.value.message
    assert "submodule of its own" in str(raised.value.cure)


CHECKS = (
    "assert not x.isnan().any(), f'{x.mean()} in {x.shape}'",
    "assert x.max() < 1e9 and x.min() > -1e9",
    "assert (x > 1e9).double().mean() < 1",
    "torch._assert(x.sum() < 1e9, 'large')",
    "if x.isnan().any():\n            text = 'nan'\n            raise ValueError(text)",
    "if x.max().item() > 1e9:\n            raise ValueError('large')",
    "with torch.no_grad():\n            assert x.isfinite().all()",
    "assert bool(x.isfinite().all())",
    "assert -1e9 < x.sum() < 1e9",
    "torch._assert_async(x.isfinite().all(), 'not finite')",
    "torch.distributions.Categorical(logits=x, validate_args=True)",
    "try:\n            assert x.isfinite().all()\n"
    "        except AssertionError as error:\n            raise ValueError('nan') from error\n"
    "        finally:\n            text = 'done'",
)
"""Checks of values that a graph leaves out."""
BRANCHES = {
    "Caught": "try:\n            assert x.sum() > 0\n        except AssertionError:\n"
    "            x = x * 2",
    "CaughtAbove": "try:\n            torch._assert(x.sum() > 0, 'small')\n"
    "        except AssertionError:\n            x = x * 2",
    "CaughtDistribution": "try:\n            torch.distributions.Categorical(logits=x, "
    "validate_args=True)\n        except ValueError:\n            x = x * 2",
    "CaughtOutside": "try:\n            try:\n                assert x.sum() > 0\n"
    "            finally:\n                x = x + 1\n"
    "        except AssertionError:\n            x = x * 2",
    "Suppressed": "with contextlib.suppress(AssertionError):\n"
    "            assert x.sum() > 0\n            x = x * 2",
    "Either": "if x.sum() > 0:\n            x = x * 2\n        elif x.sum() > 1e9:\n"
    "            raise ValueError('large')",
}


def test_checks_of_values_are_left_out(make_job, write_modules) -> None:
    path = write_modules({"Checked": "\n        ".join(CHECKS)})
    targets = [str(node.target) for node in make_job(f"{path}:layers").training_graph(4).operators]
    kinds = [name.split(".")[1] for name in targets if "max" not in name and "item" not in name]
    assert kinds == ["linear", "linear", "linear", "cross_entropy_loss"]
    assert "__bool__" not in vars(Tensor)


@pytest.mark.parametrize("kind", BRANCHES)
def test_a_branch_that_goes_on_either_way_is_no_check(make_job, write_modules, kind: str) -> None:
    path = write_modules({kind: BRANCHES[kind]})
    assert operators(make_job(f"{path}:layers").training_graph(4)) == ["1"]


CAUSAL = "nn.Transformer.generate_square_subsequent_mask(3)"
DECODER = "nn.TransformerDecoderLayer(6, 2, 8, 0.0, batch_first=True)"
ENCODER = "nn.TransformerEncoderLayer(6, 2, 8, 0.0, batch_first=True)"
MASKED = {
    "Decoder": (f"nn.TransformerDecoder({DECODER}, 2)", f"y, y, tgt_mask={CAUSAL}"),
    "Encoder": (f"nn.TransformerEncoder({ENCODER}, 2)", f"y, mask={CAUSAL}"),
    "Both": (
        "nn.Transformer(6, 2, 1, 1, 8, 0.0, batch_first=True)",
        "y, y, tgt_mask=torch.ones(3, 3, dtype=torch.bool).triu(1)",
    ),
    "Band": (f"nn.TransformerEncoder({ENCODER}, 2)", "y, mask=(y[0, :, 0] > 9).expand(3, 3)"),
}
"""Layers of torch that ask whether a mask is causal, and their arguments; the last is not."""


@pytest.mark.parametrize("kind", MASKED)
def test_masks_of_transformers_are_captured(
    make_job, write_modules, assert_as_the_model, kind: str
) -> None:
    layer, arguments = MASKED[kind]
    code = f"y = torch.stack([x, x.sin(), x.cos()], 1)\n        x = self.kept({arguments})[:, 1]"
    job = make_job(f"{write_modules({kind: (layer, code)})}:layers")
    assert_as_the_model(job)
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

class Unrolled(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell = nn.Linear(6, 6)
    def forward(self, x):
        for _ in range(12):
            x = self.cell(x).tanh()
        return x
    def __len__(self):
        return 0

def unrolled():
    return nn.Sequential(Unrolled(), nn.Linear(6, 3))

class Select(nn.Module):
    def forward(self, x):
        return x[x > 0]

class Around(nn.Module):
    def __init__(self):
        super().__init__()
        self.select = Select()
    def forward(self, x):
        return x + self.select(x).sum()

def one():
    return nn.Sequential(nn.Linear(6, 6), Branch(), nn.ReLU(inplace=True), nn.Linear(6, 3))

class Counting(nn.Module):
    def forward(self, x):
        return x * (1 + sum(v > 0 for v in x.flatten().tolist()))

def two():
    return nn.Sequential(nn.Linear(6, 6), Branch(), nn.ReLU(True), Counting(), nn.Linear(6, 3))

class Sizing(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("least", torch.empty(0))
    def forward(self, x):
        low = x.amin(0)
        if not self.least.numel():
            self.least.resize_(low.shape).copy_(low)
        return x - self.least

class Slope(nn.Module):
    def forward(self, y, x):
        return torch.autograd.grad(y.sum(), x, create_graph=True)[0]

class Equation(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.slope, self.head = nn.Linear(6, 6), Slope(), nn.Linear(6, 3)
    def forward(self, x):
        x.requires_grad_()
        return self.head(self.slope(self.layer(x).tanh(), x))

def slope_of(outputs, targets):
    return torch.autograd.grad(outputs[0].sum(), outputs[1], create_graph=True)[0].sum()

class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 6)
    def forward(self, x):
        x = x.clone().requires_grad_()
        return self.layer(x).tanh(), x

def sizing():
    return nn.Sequential(nn.Linear(6, 6), Sizing(), nn.Linear(6, 3))

def sparse():
    return nn.Sequential(nn.Embedding(4, 6, sparse=True), nn.Linear(6, 3))

def many():
    return nn.Sequential(*(Branch() for _ in range(5)), nn.Linear(6, 3))

def around():
    return nn.Sequential(nn.Linear(6, 6), Around(), nn.Linear(6, 3))

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
"""


@pytest.fixture(scope="module")
def further(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("further") / "further_models.py"
    path.write_text(FURTHER)
    return str(path)


@pytest.fixture(scope="module")
def captured(make_job, further: str) -> CapturedJob:
    """A job whose second layer is kept; tests may run it, which leaves its buffers as they are."""
    job = make_job(f"{further}:one")
    before = {name: tensor.clone() for name, tensor in job.states.items()}
    job.training_graph(4)
    assert all(torch.equal(before[name], tensor) for name, tensor in job.states.items())
    assert job.model[1].kept == []
    assert not vars(job.model[1]).keys() & {"forward", "_call_impl"}
    return job


def test_gradients_across_modules_keep_the_model_whole(make_job, further: str) -> None:
    job = make_job(f"{further}:Equation")
    operator = opaque_of(job.training_graph(4))
    assert (operator.path, "differentiates" in job.kept["model"]) == ("model", True)
    x = torch.randn(4, 6)
    given = operator(4, *job.model.parameters(), x)
    given.sum().backward()
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
def test_what_no_operator_can_do_is_refused(
    make_job, further: str, model: str, loss: str, what: str
) -> None:
    with pytest.raises(CaptureError, match=f"^model: {what}"):
        make_job(f"{further}:{model}", loss=f"{further}:{loss}").training_graph(4)


def opaque_of(graph: CapturedGraph) -> Opaque:
    return next(n.target for n in graph.operators if isinstance(n.target, Opaque))


def call(job: CapturedJob, x: Tensor, size: int | None = None) -> Tensor:
    """What the kept layer gives for some samples."""
    operator = opaque_of(job.training_graph(4))
    states = [t.clone() for name, t in job.states.items() if name.startswith("model.1.")]
    return operator(len(x) if size is None else size, *states, x)[0]


def test_one_graph_serves_every_batch_size(captured: CapturedJob) -> None:
    assert captured.training_graph(4) is captured.training_graph(1)
    assert call(captured, torch.ones(7, 6)).shape == (7, 6)
    with pytest.raises(CaptureError, match=r"model: 1 gave \[4, 6\] .* captured with \[3, 6\]"):
        call(captured, torch.ones(4, 6), size=3)


def test_a_branch_without_its_input_still_gives_it_a_gradient(captured: CapturedJob) -> None:
    x = torch.full((4, 6), 1e9, requires_grad=True)
    call(captured, x).sum().backward()
    assert torch.equal(x.grad, torch.zeros(4, 6))


def test_a_result_that_may_be_the_input_can_be_written(captured: CapturedJob) -> None:
    x = torch.full((4, 6), -1.0, requires_grad=True)
    call(captured, x).mul_(2).sum().backward()
    assert torch.equal(x, torch.full((4, 6), -1.0))
    assert torch.equal(x.grad, torch.full((4, 6), 2.0))


WRITES_OUTSIDE = """
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
"""


def test_what_is_written_into_a_result_is_written_into_the_input_that_it_is(
    make_job, write_modules, assert_as_the_model
) -> None:
    path = write_modules({}, WRITES_OUTSIDE)
    job = make_job(f"{path}:Outer")
    assert operators(job.training_graph(4)) == ["gate"]
    assert_as_the_model(job)


ASSIGNS = """
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


def test_a_buffer_that_an_operator_assigns_is_read_before_between_and_after(
    make_job, write_modules
) -> None:
    trial = Trial(make_job(f"{write_modules({}, ASSIGNS)}:Twice"))
    assert operators(trial.graph) == ["scaling", "scaling"]
    assert trial.plain_differences() == {}
    assert trial.differences(dict.fromkeys(trial.graph.position, 0), recompute=True) == []


def test_a_buffer_that_an_operator_writes_before_its_backward_is_refused(
    make_job, write_modules
) -> None:
    job = make_job(f"{write_modules({}, ASSIGNS)}:Twice", kwargs={"in_place": True})
    states = Stages(job, 4, dict.fromkeys(job.training_graph(4).position, 0), evaluates=False)
    with pytest.raises(CaptureError, match=r"writes a torch.FloatTensor \[6\] of a submodule"):
        states.step(0, [job.loader.example(4)])


@pytest.mark.parametrize(
    ("model", "loss", "kept"),
    [
        ("plain", "mean", []),  # a list of layers
        ("plain", "loss", ["loss"]),
        ("many", "mean", ["0", "1", "2", "3", "4"]),  # of one class
        ("around", "mean", ["1"]),  # the result inside has any size
        ("two", "mean", ["1", "3"]),
    ],
)
@pytest.mark.parametrize("materialize", ["eager", "per_rank"])
def test_the_smallest_parts_that_can_be_operators_are_kept(
    make_job, further: str, model: str, loss: str, kept: list[str], materialize: str
) -> None:
    names = {"model": f"{further}:{model}", "loss": f"{further}:{loss}"}
    job = make_job(**names, materialize=materialize)
    graph = job.training_graph(4)
    assert operators(graph) == kept
    assert graph.requires_grad[graph.loss]
    if materialize == "per_rank":
        assert all(is_deferred(tensor) for tensor in job.states.values())
        assert graph.fingerprint == make_job(**names).training_graph(4).fingerprint


def test_a_part_of_a_result_that_changes_its_structure_may_not_be_read(
    make_job, further: str
) -> None:
    job = make_job(f"{further}:Speech")
    operator = opaque_of(job.training_graph(4))
    assert (operator.path, len(operator.outline.forms)) == ("encoder", 1)
    x = torch.randn(4, 6)
    for seed in range(4):
        torch.manual_seed(seed)
        assert operator(4, *job.model.encoder.parameters(), x).shape == (4, 6)
    place = f"at {further}:.*: more = sum.outputs"
    with pytest.raises(CaptureError, match=f"{place}.*: it reads a part of a submodule's result"):
        make_job(f"{further}:Speech", kwargs={"reads": True}).training_graph(4)


def test_a_long_loop_of_a_submodule_becomes_one_operator(
    make_job, further: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert operators(make_job(f"{further}:unrolled").training_graph(4)) == []
    monkeypatch.setattr("pipectl.capture.patches.MAX_REPEATS", 9)
    job = make_job(f"{further}:unrolled")
    assert operators(job.training_graph(4)) == operators(job.evaluation_graph(4)) == ["0"]
    assert f"(at {further}:" in job.kept["0"]
    assert "x = self.cell(x).tanh()): it repeats that line more than 9 times" in job.kept["0"]


def test_a_long_loop_of_the_model_itself_is_unrolled_and_told_of(
    make_spec, further: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipectl.capture.patches.MAX_REPEATS", 9)
    messages: list[str] = []
    spec = make_spec(f"{further}:Unrolled", loss=f"{further}:mean")
    graph = CapturedJob(spec, messages.append).training_graph(4)
    assert len(graph.operators) == 2 * 12 + 1
    (message,) = messages
    assert message.startswith(f"capturing a long loop (at {further}:")
    assert "put it into a submodule of its own" in message


def test_a_model_that_a_library_brings_is_kept_whole(
    make_job, write_modules, place_of, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = tmp_path / "site-packages" / "a_library_of_models"
    library.mkdir(parents=True)
    write_modules({"Branch": BREAKING["Branch"][0]}).rename(library / "net.py")
    monkeypatch.syspath_prepend(library.parent)
    job = make_job("a_library_of_models.net:WholeBranch")
    assert operators(job.training_graph(4)) == ["model"]
    assert place_of(library / "net.py", "if x.sum() > 0:") in job.kept["model"]
    assert "control flow depends" in job.kept["model"]


def test_a_pattern_that_matches_nothing_is_an_error(make_job) -> None:
    with pytest.raises(CaptureError, match=r"^model.opaque: 'blocks.\*' matches no submodule"):
        make_job("mlp", opaque=["blocks.*"])
