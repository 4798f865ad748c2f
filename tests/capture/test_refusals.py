"""What a forward does that no graph can hold: refused in one sentence, with its line and a cure."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from pipectl.capture import CapturedJob
from pipectl.capture.opaque import Opaque
from pipectl.capture.randomness import seed_libraries
from pipectl.errors import CaptureError, FaultError

SOURCE = """\
import copy
import random

import numpy as np
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence
from torch.utils.data import DataLoader, TensorDataset

GENERATOR = np.random.default_rng(0)

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 3)
        self.target = copy.deepcopy(self.first)
        self.lstm = nn.LSTM(6, 6, batch_first=True)
        self.random, self.numpy = random.Random(0), np.random.RandomState(0)
        self.system = random.SystemRandom()
        self.generator = torch.Generator().manual_seed(0)
        self.optimizer = torch.optim.SGD(self.first.parameters(), 0.1)

    def forward(self, x):
        h = self.first(x)
        {code}
        return self.last(h)

class Noise(Model):
    def forward(self, x):
        {code}
        return x + self.first(x) * float(self.numpy.rand() + GENERATOR.random())

def layers():
    return nn.Sequential(nn.Linear(6, 6), Noise(), nn.Linear(6, 3))

def three(outputs, targets, weights):
    return outputs.mean()

class Mappings(torch.utils.data.Dataset):
    def __len__(self):
        return 16
    def __getitem__(self, index):
        return {{"x": torch.zeros(6), "y": torch.zeros(3)}}

def triples():
    return TensorDataset(torch.zeros(16, 6), torch.zeros(16, 3), torch.zeros(16))

def loader():
    return DataLoader(TensorDataset(torch.zeros(16, 6), torch.zeros(16, 3)), batch_size=4)

def tensors():
    return torch.zeros(16, 6), torch.zeros(16, 3)

def nothing():
    return None
"""
REFUSED = {
    "two steps": ("h.sum().backward(); self.optimizer.step()", "calls backward()", "a GAN"),
    "packing": (
        "h = self.lstm(pack_padded_sequence(x[:, None], torch.ones(len(x)), batch_first=True))",
        "packs sequences",
        "padded sequences",
    ),
    "torch generator": (
        "h = h + torch.rand(6, generator=self.generator)",
        "generator that is not torch's own",
        "draw with torch.rand",
    ),
    "python generator": (
        "h = h * self.random.random()",
        "generator that is not torch's own",
        "draw with torch.rand",
    ),
    "system's generator": (
        "h = h * self.system.uniform(0, 1)",
        "generator that is not torch's own",
        "draw with torch.rand",
    ),
    "system's generator at once": (
        "h = h * (1 + random.SystemRandom().randint(0, 1))",
        "generator that is not torch's own",
        "draw with torch.rand",
    ),
    "global generator": (
        "h = h * GENERATOR.random()",
        "generator that is not torch's own",
        "draw with torch.rand",
    ),
    "moving average": (
        "self.target.weight.data.mul_(0.9).add_(self.first.weight.data, alpha=0.1)",
        "writes to the .data",
        "end of a step",
    ),
    "item of data": ("d = h.data; d[0] = 0.0", "writes to the .data", "end of a step"),
    "hypernetwork": (
        "self.target.weight.data = h.mean() * self.target.weight",
        "assigns to the .data",
        "functional.linear",
    ),
}


@pytest.fixture
def written(tmp_path: Path) -> Any:
    """The file of models with one that does something in its forward."""

    def write(code: str = "") -> Path:
        path = tmp_path / "own.py"
        path.write_text(SOURCE.format(code=code or "pass"))
        return path

    return write


@pytest.mark.parametrize("kind", REFUSED)
def test_what_a_root_module_may_not_do_is_refused_at_its_line(make_job, written, kind) -> None:
    code, what, cure = REFUSED[kind]
    path = written(code)
    with pytest.raises(CaptureError) as caught:
        make_job(f"{path}:Model").training_graph(4)
    line = 1 + next(n for n, text in enumerate(path.read_text().splitlines()) if code in text)
    assert f"(at {path}:{line}: {code})" in caught.value.message
    assert what in caught.value.message
    assert cure in str(caught.value.cure)
    assert "\n" not in caught.value.message


def test_a_parameter_that_the_forward_replaces_is_refused(make_job, written) -> None:
    path = written("self.target.weight = nn.Parameter(2 * self.target.weight)")
    with pytest.raises(CaptureError, match=r"replaces the parameter 'target.weight'"):
        make_job(f"{path}:Model").training_graph(4)


def test_values_read_through_data_are_captured(make_job, written) -> None:
    code = """h = h + (h.round() - h).data
        d = self.first.weight.data.requires_grad_(False)
        h = h.to(d.dtype) @ d.T[:, : d.shape[-1]] * (1 - d[0]) * (d[1] == d[1].max())"""
    graph = make_job(f"{written(code)}:Model").training_graph(4)
    assert "detach" in "".join(str(node.target) for node in graph.operators)


def test_lazy_parameters_are_refused_by_their_names(make_job) -> None:
    with pytest.raises(CaptureError, match=r"'weight' of a LazyLinear has no shape yet"):
        make_job("torch.nn:LazyLinear", kwargs={"out_features": 3})


def test_a_block_with_generators_of_its_own_draws_by_seed_alone(make_job, written) -> None:
    job: CapturedJob = make_job(f"{written()}:layers")
    (noise,) = (n.target for n in job.training_graph(4).operators if isinstance(n.target, Opaque))
    assert noise.outline.draws

    def drawn(seed: int) -> Tensor:
        seed_libraries(seed, 0)
        return noise(4, *noise._states.now(), torch.ones(4, 6))

    first, other, again = drawn(1), drawn(2), drawn(1)
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_a_block_that_draws_may_compute_where_its_capture_saw_it_pass_the_input(make_job, written):
    code = "\n        ".join(["if torch.rand(1) < 0.999999:", "    return x"])
    job: CapturedJob = make_job(f"{written(code)}:layers")
    graph = job.training_graph(4)
    (node,) = (node for node in graph.operators if isinstance(node.target, Opaque))
    assert graph.requires_grad[node.name]


@pytest.mark.parametrize(
    ("model", "loss", "data", "message", "cure"),
    [
        ("Model", "three", "Vectors", "loss.factory: .*'weights'.*called with outputs", "kwargs"),
        ("Model", "nll", "Mappings", "model.factory: .*keyword.*'y'.*x: .4, 6. of float", "inputs"),
        ("Model", "three", "triples", "data: a sample must be .* not a list of 3", "weights"),
        ("Model", "three", "loader", "data.factory: .* a DataLoader, not a dataset", "itself"),
        ("Model", "three", "tensors", "returned a tuple of tensors", "TensorDataset"),
        ("Model", "three", "nothing", "returned a NoneType, not a dataset", "__getitem__"),
    ],
)
def test_data_that_do_not_fit_are_shown_beside_what_is_expected(
    make_job, written, model: str, loss: str, data: str, message: str, cure: str
) -> None:
    path = written()
    data = data if data == "Vectors" else f"{path}:{data}"
    loss = "torch.nn:NLLLoss" if loss == "nll" else f"{path}:{loss}"
    with pytest.raises(CaptureError, match=message) as caught:
        make_job(f"{path}:{model}", loss=loss, data=data).training_graph(4)
    assert cure in str(caught.value.cure)


def test_what_only_pipectl_can_have_broken_is_called_its_fault(
    make_job, written, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipectl.capture.export.call_modules", None)
    with pytest.raises(FaultError, match=r"a fault of pipectl, not of your job: TypeError"):
        make_job(f"{written()}:Model").training_graph(4)


def test_a_model_that_fails_by_itself_is_no_fault_of_pipectl(make_job, written) -> None:
    path = written("h = self.missing(h)")
    with pytest.raises(CaptureError, match=r"model.factory: .*'missing'.* \(at .*own.py:\d+: "):
        make_job(f"{path}:Model").training_graph(4)


def test_what_torch_cannot_export_is_refused_with_the_line(make_job, written) -> None:
    path = written("h = h[torch.arange(len(h)).tolist()] if nn else h")
    with pytest.raises(CaptureError, match=rf"\(at {path}:\d+: h = h"):
        make_job(f"{path}:Model").training_graph(4)


def test_a_trial_that_cannot_be_begun_is_no_fault_of_the_model(
    make_job, written, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any) -> Any:
        raise RuntimeError("broken")

    job = make_job(f"{written()}:Model")
    monkeypatch.setattr("pipectl.capture.job.undisturbed", broken)
    with pytest.raises(RuntimeError, match="broken"):
        job.misfit(4)
