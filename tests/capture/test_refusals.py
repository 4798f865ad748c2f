"""What no graph can hold: refused in one sentence, with its line and a cure, and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor, nn

from pipectl.capture.opaque import Opaque
from pipectl.capture.randomness import seed_libraries
from pipectl.capture.refusals import refuse_overlaps
from pipectl.errors import CaptureError, FaultError

MODULES = yaml.safe_load(Path(__file__).with_name("modules.yaml").read_text())
UNPATCHED = vars(torch.autograd.Function)["apply"], Tensor.register_hook


@pytest.mark.parametrize(
    ("kind", "module", "says", "cure"),
    [
        pytest.param(kind, module, row["says"], row.get("cure", "submodule of its own"), id=kind)
        for row in MODULES["refused"] + MODULES["breaking"]
        for kind, module in row["modules"].items()
    ],
)
def test_what_a_model_may_not_do_is_refused_at_its_line(
    make_job, write_modules, place_of, kind: str, module: Any, says: str, cure: str
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
    assert cure in str(caught.value.cure)
    assert "\n" not in caught.value.message
    assert (vars(torch.autograd.Function)["apply"], Tensor.register_hook) == UNPATCHED


@pytest.mark.parametrize(("kind", "opaque"), [("harmless", []), ("opaque", ["1", "2", "3", "4"])])
def test_what_no_step_reads_of_another_may_be_kept_and_is_left_as_it_was(
    make_job, write_modules, kind: str, opaque: list[str]
) -> None:
    job = make_job(f"{write_modules(MODULES[kind])}:layers", opaque=opaque)
    before = [dict(vars(module)) for module in job.model]
    targets = [node.target for node in job.training_graph(4).operators]
    assert [target.path for target in targets if isinstance(target, Opaque)] == opaque
    for module, attributes in zip(job.model, before, strict=True):
        assert vars(module).keys() == attributes.keys()
        assert getattr(module, "kept", None) is attributes.get("kept")


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


def test_draws_by_a_function_that_has_another_name_are_refused(make_job, write_modules) -> None:
    path = write_modules({"ByName": "x = x * (2 if draw() < 0.5 else 3)"})
    with pytest.raises(CaptureError, match="generator that is not torch's own"):
        make_job(f"{path}:WholeByName").training_graph(4)


def test_a_block_with_generators_of_its_own_draws_by_seed_alone(make_job, write_modules) -> None:
    code = "x = x + x * float(self.kept.rand() + GENERATOR.random())"
    path = write_modules({"Noise": ("np.random.RandomState(0)", code)})
    job = make_job(f"{path}:layers")
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
    code = "if torch.rand(1) < 0.999999:\n    return x.detach()"
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


# What a model is built with: hooks, and parameters in the memory of others

BUILT = """\
from torch import nn

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)
        self.head = nn.Linear(6, 3)
        {code}
    def forward(self, x):
        return self.head(self.b(self.a(x)))
"""
ACCUMULATED = "self.a.weight.register_post_accumulate_grad_hook(lambda p: None)"
FROZEN = "self.a.weight.requires_grad_(False); "
HOOKED = "model: parameter a.weight has a hook on its gradient, which would not run in every plan"
CODES = {
    "hook": ("self.a.weight.register_hook(lambda gradient: gradient * 0.5)", HOOKED),
    "hook afterwards": (ACCUMULATED, HOOKED),
    "removed hook": (f"{ACCUMULATED}.remove()", ""),
    "hook that never runs": (f"{ACCUMULATED}; {FROZEN}", ""),
    "whole": ("self.b.weight = nn.Parameter(self.a.weight.data)", "b.weight"),
    "transposed": ("self.b.weight = nn.Parameter(self.a.weight.data.t())", "b.weight"),
    "row": ("self.b.bias = nn.Parameter(self.a.weight.data[1])", "b.bias"),
    "buffer": ("self.register_buffer('kept', self.a.weight.detach())", "kept"),
    "frozen": ("self.b.bias = nn.Parameter(self.a.weight.data[1], False)", "b.bias"),
    "tied": ("self.b.weight = self.a.weight", ""),
    "copied": ("self.b.weight = nn.Parameter(self.a.weight.data.clone())", ""),
    "neither trained": (f"{FROZEN}self.b.weight = nn.Parameter(self.a.weight.data, False)", ""),
}
"""Code, and what is said, or the name of what shares memory; nothing if it may be."""


@pytest.mark.parametrize("materialize", ["eager", "per_rank"])
@pytest.mark.parametrize("kind", CODES)
def test_hooks_and_memory_of_trained_parameters_that_others_share_are_refused(
    kind: str, materialize: str, make_job: Callable[..., Any], tmp_path: Path
) -> None:
    code, said = CODES[kind]
    path = tmp_path / "parts.py"
    path.write_text(BUILT.format(code=code))
    if not said:
        assert make_job(f"{path}:Model", materialize=materialize).states
        return
    with pytest.raises(CaptureError) as raised:
        make_job(f"{path}:Model", materialize=materialize)
    if said == HOOKED:
        assert raised.value.message == HOOKED
        return
    assert raised.value.message.startswith(f"model: a.weight and {said} share memory")
    assert ".clone()" in raised.value.cure
    assert ("self.b.weight = self.a.weight" in raised.value.cure) == (kind != "buffer")


def parameters(*tensors: Tensor) -> dict[str, Tensor]:
    return {name: nn.Parameter(tensor) for name, tensor in zip("abc", tensors, strict=False)}


WHOLE, WIDE = torch.zeros(12), torch.zeros(4, 6)
APART = {
    "halves": parameters(WHOLE[:3], WHOLE[3:]),
    "packed": parameters(*WHOLE.split(4)),
    "columns": parameters(*WIDE.split(3, 1)),
    "interleaved": parameters(*WHOLE.view(6, 2).unbind(1)),
    "empty": parameters(torch.zeros(0), torch.zeros(0)),
    "no memory": parameters(*(torch.zeros(3, device="meta") for _ in "ab")),
    "recurrent": dict(nn.LSTM(3, 4, num_layers=2).named_parameters()),
    "lazy": dict(nn.LazyLinear(3).named_parameters()),
}
OVERLAPPING = {
    "one element": parameters(WHOLE[:7], WHOLE[6:]),
    "columns": parameters(WIDE[:, :4], WIDE[:, 3:]),
    "every other": parameters(WHOLE[::2], WHOLE[4:5]),
    "expanded": parameters(WHOLE[:1].expand(5), WHOLE),
    "other type": parameters(WHOLE[1:3], WHOLE.view(torch.float16)[5:6]),
    "by numpy": parameters(WHOLE, torch.from_numpy(WHOLE.numpy())[3:]),
    "no memory": parameters(*[torch.zeros(3, device="meta")] * 2),
    "after others": parameters(WHOLE, WHOLE[1:2], WHOLE[8:9]),
}


@pytest.mark.parametrize("kind", APART)
def test_neighbours_in_one_memory_do_not_overlap(kind: str) -> None:
    refuse_overlaps(APART[kind])


@pytest.mark.parametrize("kind", OVERLAPPING)
def test_any_byte_in_common_counts(kind: str) -> None:
    with pytest.raises(CaptureError, match="a and b share memory"):
        refuse_overlaps(OVERLAPPING[kind])
