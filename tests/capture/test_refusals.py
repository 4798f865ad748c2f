"""What a forward does that no graph can hold: refused in one sentence, with its line and a cure."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from pipectl.capture import CapturedJob
from pipectl.capture.opaque import Opaque
from pipectl.capture.randomness import seed_libraries
from pipectl.errors import CaptureError, FaultError

DRAWS = "generator that is not torch's own", "draw with torch.rand"
UNPATCHED = vars(torch.autograd.Function)["apply"], Tensor.register_hook
WRITES = "writes to the .data", "end of a step"
REFUSED = {
    "TwoSteps": ("None", "x.sum().backward()", "calls backward()", "a GAN"),
    "Packing": (
        "nn.LSTM(6, 6, batch_first=True)",
        "x = self.kept(nn.utils.rnn.pack_padded_sequence(x[:, None], torch.ones(len(x)), True))",
        "packs sequences",
        "padded sequences",
    ),
    "Torchs": ("torch.Generator()", "x = x + torch.rand(6, generator=self.kept)", *DRAWS),
    "Pythons": ("random.Random(0)", "x = x * self.kept.random()", *DRAWS),
    "Systems": ("random.SystemRandom()", "x = x * self.kept.uniform(0, 1)", *DRAWS),
    "Hook": (
        "None",
        "x.register_hook(lambda gradient: gradient * 0.5)",
        "puts a hook on a gradient",
        "autograd.Function",
    ),
    "Written": (
        "torch.zeros(6)",
        "self.kept.mul_(0.9).add_(x.detach().mean(0)); x = x + self.kept",
        "writes the tensor 'kept' in its forward",
        "register_buffer()",
    ),
    "SystemsAtOnce": ("None", "x = x * (1 + random.SystemRandom().randint(0, 1))", *DRAWS),
    "Global": ("None", "x = x * GENERATOR.random()", *DRAWS),
    "MovingAverage": (
        "nn.Linear(6, 6)",
        "self.kept.weight.data.mul_(0.9).add_(self.linear.weight.data, alpha=0.1)",
        *WRITES,
    ),
    "Item": ("None", "d = x.data; d[0] = 0.0", *WRITES),
    "Buffer": (
        "nn.BatchNorm1d(6)",
        "x = x * self.kept.running_var; self.kept.running_var.mul_(0.9)",
        "writes 'kept.running_var' in place",
        "x.clone()",
    ),
    "Value": ("None", "y = x.exp(); x = x + y + y.neg_()", "writes 'exp' in place", "x.clone()"),
    "HyperNetwork": (
        "nn.Linear(6, 6)",
        "self.kept.weight.data = x.mean() * self.kept.weight",
        "assigns to the .data",
        "functional.linear",
    ),
}


READ_IN_THE_NEXT_STEP = {
    "Mean": ("torch.zeros(6)", "self.kept = 0.9 * self.kept + 0.1 * x.detach().mean(0)"),
    "Count": ("torch.ones(())", "self.kept = self.kept + 1"),
    "Detached": ("torch.zeros(6)", "self.kept = self.kept.detach(); self.kept = self.kept + x[0]"),
    "Hidden": ("None", "self.kept = x.detach() if self.kept is None else x + self.kept"),
    "Pair": ("()", "x, self.kept = x + sum(self.kept), (*self.kept[:1], x.tanh().detach())"),
    "Counter": ("0", "self.kept += 1; x = x * self.kept"),
    "Threshold": ("0", "self.kept += 1; x = x * 2 if self.kept > 1000 else x"),
    "Loop": ("0", "self.kept += 1; x = sum((x for _ in range(self.kept // 100)), x)"),
    "Flag": ("True", "x, self.kept = x * 2 if self.kept else x, False"),
    "Previous": ("None", "x, self.kept = x if self.kept is None else x + self.kept, x"),
}
KEEPS = "keeps 'kept' from one step to the next", "register_buffer()"
REFUSED.update({kind: (*kept, *KEEPS) for kind, kept in READ_IN_THE_NEXT_STEP.items()})
REFUSED["Nested"] = (
    "{}",
    "x, self.kept['a'] = x + self.kept.get('a', 0), x.detach()",
    "keeps \"kept['a']\" from one step to the next",
    "register_buffer()",
)


@pytest.mark.parametrize("kind", REFUSED)
def test_what_a_root_module_may_not_do_is_refused_at_its_line(
    make_job, write_modules, place_of, kind: str
) -> None:
    first, code, what, cure = REFUSED[kind]
    path = write_modules({kind: (first, code)})
    with pytest.raises(CaptureError) as caught:
        make_job(f"{path}:Whole{kind}").training_graph(4)
    assert place_of(path, code) in caught.value.message
    assert what in caught.value.message
    assert cure in str(caught.value.cure)
    assert "\n" not in caught.value.message
    assert (vars(torch.autograd.Function)["apply"], Tensor.register_hook) == UNPATCHED


def test_draws_by_a_function_that_has_another_name_are_refused(make_job, write_modules) -> None:
    path = write_modules({"ByName": ("None", "x = x * (2 if draw() < 0.5 else 3)")})
    with pytest.raises(CaptureError, match=DRAWS[0]):
        make_job(f"{path}:WholeByName").training_graph(4)


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
            "nn.Buffer(torch.zeros(6))",
            "self.kept = self.kept + 1.0j",
            "changes the type of buffer '1.kept' from torch.float32 to torch.complex64",
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


def test_values_read_through_data_are_captured(make_job, write_modules) -> None:
    code = """x = x + (x.round() - x).data
        d = self.linear.weight.data.requires_grad_(False)
        x = x.to(d.dtype) @ d.T[:, : d.shape[-1]] * (1 - d[0]) * (d[1] == d[1].max())"""
    graph = make_job(f"{write_modules({'Reading': code})}:WholeReading").training_graph(4)
    assert "detach" in "".join(str(node.target) for node in graph.operators)


def test_a_block_with_generators_of_its_own_draws_by_seed_alone(make_job, write_modules) -> None:
    code = "x = x + x * float(self.kept.rand() + GENERATOR.random())"
    path = write_modules({"Noise": ("np.random.RandomState(0)", code)})
    job: CapturedJob = make_job(f"{path}:layers")
    (noise,) = (n.target for n in job.training_graph(4).operators if isinstance(n.target, Opaque))
    assert noise.outline.draws

    def drawn(seed: int) -> Tensor:
        seed_libraries(seed, 0)
        return noise(4, *job.model[1].parameters(), torch.ones(4, 6))

    first, other, again = drawn(1), drawn(2), drawn(1)
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_a_block_that_draws_may_compute_where_its_capture_saw_it_pass_the_input(
    make_job, write_modules
) -> None:
    code = "if torch.rand(1) < 0.999999:\n            return x.detach()"
    graph = make_job(f"{write_modules({'Passing': code})}:layers").training_graph(4)
    (node,) = (node for node in graph.operators if isinstance(node.target, Opaque))
    assert graph.requires_grad[node.name]


DATA = """
def three(outputs, targets, weights):
    return outputs.mean()

class Mappings(torch.utils.data.Dataset):
    def __len__(self):
        return 16
    def __getitem__(self, index):
        return {"x": torch.zeros(6), "y": torch.zeros(3)}

def triples():
    return torch.utils.data.TensorDataset(torch.zeros(16, 6), torch.zeros(16), torch.zeros(16))

def loader():
    return torch.utils.data.DataLoader([(torch.zeros(6), torch.zeros(3))], batch_size=4)

def tensors():
    return torch.zeros(16, 6), torch.zeros(16, 3)

def nothing():
    return None
"""


@pytest.mark.parametrize(
    ("loss", "data", "message", "cure"),
    [
        ("three", "Vectors", "loss.factory: .*'weights'.*called with outputs", "kwargs"),
        ("nll", "Mappings", "model.factory: .*keyword.*'x'.*x: .4, 6. of float", "inputs"),
        ("three", "triples", "data: a sample must be .* not a tuple or list of 3", "weights"),
        ("three", "loader", "data.factory: .* a DataLoader, not a dataset", "itself"),
        ("three", "tensors", "returned a tuple of tensors", "TensorDataset"),
        ("three", "nothing", "returned a NoneType, not a dataset", "__getitem__"),
    ],
)
def test_data_that_do_not_fit_are_shown_beside_what_is_expected(
    make_job, write_modules, loss: str, data: str, message: str, cure: str
) -> None:
    path = write_modules({}, DATA)
    data = data if data == "Vectors" else f"{path}:{data}"
    loss = "torch.nn:NLLLoss" if loss == "nll" else f"{path}:{loss}"
    with pytest.raises(CaptureError, match=message) as caught:
        make_job("mlp", loss=loss, data=data).training_graph(4)
    assert cure in str(caught.value.cure)


def test_what_only_pipectl_can_have_broken_is_called_its_fault(
    make_job, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipectl.capture.export.drop_conditions", None)
    with pytest.raises(FaultError, match=r"a fault of pipectl, not of your job: TypeError"):
        make_job("mlp").training_graph(4)


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("x = self.missing(x)", r"^model.factory: .*'missing'.* "),
        ("x = x[torch.arange(len(x)).tolist()] if nn else x", "^model: cannot be captured "),
    ],
    ids=["fails by itself", "fails in torch.export"],
)
def test_a_model_that_fails_is_no_fault_of_pipectl(
    make_job, write_modules, place_of, code: str, message: str
) -> None:
    path = write_modules({"Failing": code})
    with pytest.raises(CaptureError, match=message) as caught:
        make_job(f"{path}:WholeFailing").training_graph(4)
    assert place_of(path, code) in caught.value.message


def test_a_trial_that_cannot_be_begun_is_no_fault_of_the_model(
    make_job, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any) -> Any:
        raise RuntimeError("broken")

    job = make_job("mlp")
    monkeypatch.setattr("pipectl.capture.job.preserve_state", broken)
    with pytest.raises(RuntimeError, match="broken"):
        job.misfit(4)


@pytest.mark.parametrize("materialize", ["eager", "per_rank"])
@pytest.mark.parametrize("kind", ["gradient", "accumulated"])
def test_a_hook_on_a_trained_parameter_is_refused(make_job, kind: str, materialize: str) -> None:
    """Tied parameters, versions of weights and weights made on their rank would not run it."""
    with pytest.raises(CaptureError) as raised:
        make_job("ParameterHook", kwargs={"kind": kind}, materialize=materialize)
    assert raised.value.message == (
        "model: parameter inner.0.weight has a hook on its gradient, which would not run in every "
        "plan"
    )


@pytest.mark.parametrize("kwargs", [{"frozen": True}, {"kind": "removed"}])
def test_a_hook_that_never_runs_is_none(make_job, kwargs) -> None:
    assert make_job("ParameterHook", kwargs=kwargs).training_graph(4).operators
