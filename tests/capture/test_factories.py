"""The parts of a job: found beside it or installed, called, and refused if they do not train."""

from __future__ import annotations

import importlib
import inspect
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from math import inf
from pathlib import Path
from traceback import format_exception
from types import ModuleType
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor, nn

from pipectl.capture import CapturedJob
from pipectl.capture.factories import call, find
from pipectl.capture.refusals import refuse_overlaps, refuse_unsaved
from pipectl.capture.tensor_file import CODES as SAVED
from pipectl.errors import CaptureError, SpecError
from pipectl.profile_parts import LoadedFile
from pipectl.runs import RunDirectory, sources
from pipectl.runs.code import Code, is_changed, keep, keep_loaded, loaded_here, using_code_of
from pipectl.runs.kept_code import read_code
from pipectl.spec import SpecFile, dump, load, profile_key
from pipectl.spec.code import using
from pipectl.spec.references import parse

MODELS = Path(__file__).with_name("models.py")


def found(factory: str, base: Path) -> Any:
    return find(str(parse(factory, base)))


def message(factory: str, base: Path) -> str:
    with pytest.raises(CaptureError) as raised:
        found(factory, base)
    assert raised.value.hint
    return raised.value.message


@pytest.mark.parametrize(
    ("text", "factory"),
    [
        ("def build(a, b=1): return a + b", "./own.py:build"),
        ("class Models:\n    build = lambda a, b: a + b", "./own.py:Models.build"),
        ("from operator import add as build", "./own.py:build"),
        ("from the_neighbour_module import build", "./own.py:build"),
        ("", "operator:add"),
    ],
    ids=["function", "attribute of an attribute", "imported", "of a neighbour", "package"],
)
def test_a_name_in_a_file_beside_the_spec_or_in_a_package_is_found(
    text: str, factory: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "the_neighbour_module.py").write_text("def build(a, b): return a + b\n")
    (tmp_path / "own.py").write_text(text)
    assert found(factory, tmp_path)(2, 3) == 5
    sys.modules.pop("the_neighbour_module", None)


def test_a_file_is_one_module_by_its_path_and_run_again_if_it_failed(tmp_path: Path) -> None:
    files = [tmp_path / folder / "model.py" for folder in "ab"]
    for file, text in zip(files, ("def build(): return 1", "1 / 0"), strict=True):
        file.parent.mkdir()
        file.write_text(text)
    first = found("./a/model.py:build", tmp_path)
    assert first is found("./a/model.py:build", tmp_path)
    message("./b/model.py:build", tmp_path)
    files[1].write_text("def build(): return 2\n# mended\n")
    assert (first(), found("./b/model.py:build", tmp_path)()) == (1, 2)


@pytest.mark.parametrize(
    ("text", "name", "expected"),
    [
        ("def build(): ...", "biuld", "there is no 'biuld'; did you mean 'build'?"),
        ("def build(): ...", "xyzzy", "there is no 'xyzzy'"),
        ("LIMIT = 3", "LIMIT", "is a int, not a function or class"),
        (
            "import math\nmath.sqrt(-1)",
            "build",
            "cannot be imported: ValueError: math domain error (at {path}:2)",
        ),
        ("import sys\nsys.exit(2)", "build", "cannot be imported: SystemExit: 2 (at {path}:2)"),
        (
            "def build():\n    return (\n",
            "build",
            "cannot be imported: SyntaxError: '(' was never closed (own.py, line 2) (at {path}:2)",
        ),
        (None, "build", "no such file"),
    ],
)
def test_what_is_wrong_with_a_name_is_said(
    text: str | None, name: str, expected: str, tmp_path: Path
) -> None:
    path = tmp_path / "own.py"
    if text is not None:
        path.write_text(text)
    assert message(f"./own.py:{name}", tmp_path) == f"{path}:{name}: {expected.format(path=path)}"


def test_a_raising_factory_names_the_users_deepest_line(tmp_path: Path) -> None:
    path, name = tmp_path / "deep.py", "model.factory: ./deep.py:build"
    path.write_text(
        "import json\ndef build(text):\n    return parse(text)\n"
        "def parse(text):\n    return json.loads(text)\n"
    )
    build = found("./deep.py:build", tmp_path)
    with pytest.raises(CaptureError) as raised:
        call(build, name, text="{")
    assert raised.value.message.startswith(f"{name}: raised JSONDecodeError: ")
    assert raised.value.message.endswith(f"(at {path}:5)")
    start = "call ./deep.py:build in a Python shell with the kwargs"
    assert str(raised.value.hint).startswith(start)
    with pytest.raises(CaptureError) as raised:
        call(build, name, txet="{")
    assert raised.value.message == (
        f"{name}: raised TypeError: build() got an unexpected keyword argument 'txet'"
    )


SPLIT = """
import random
import numpy, torch
from torch.utils.data import Subset, TensorDataset, random_split

torch.rand(3), random.random(), numpy.random.rand()  # on import

def part(name, kind):
    rows = list(range(100))
    if kind == "torch":
        parts = random_split(TensorDataset(torch.eye(100), torch.eye(100)), [80, 20])
        return parts[name == "held out"]
    (random if kind == "random" else numpy.random).shuffle(rows)
    rows = rows[80:] if name == "held out" else rows[:80]
    return Subset(TensorDataset(torch.eye(100), torch.eye(100)), rows)

def training(kind):
    return part("training", kind)
"""
HELD_OUT = """
from split import part

class HeldOut:
    def __new__(cls, kind):
        return part("held out", kind)
"""


@pytest.mark.parametrize("kind", ["torch", "random", "numpy"])
def test_no_row_is_in_both_parts_of_a_random_split_by_two_factories(
    tmp_path: Path, kind: str
) -> None:
    """They are in files of their own, whose first import draws; the model draws as well."""
    tmp_path.joinpath("split.py").write_text(SPLIT)
    tmp_path.joinpath("held.py").write_text(HELD_OUT)
    part = {"kwargs": {"kind": kind}}
    document = {
        "version": 1,
        "name": "split",
        "site_defaults": False,
        "model": {
            "factory": "torch.nn:Linear",
            "kwargs": {"in_features": 100, "out_features": 100},
        },
        "loss": {"factory": "torch.nn:MSELoss"},
        "data": {"factory": "./split.py:training", **part},
        "evaluation": {"data": {"factory": "./held.py:HeldOut", **part}},
        "training": {"steps": 1, "batch_size": 8},
    }
    file = tmp_path / "job.yaml"
    file.write_text(yaml.safe_dump(document))
    job = CapturedJob(load(file))
    assert job.evaluation_loader is not None
    loaders = (job.loader, job.evaluation_loader)
    rows = [{int(x.argmax()) for x, _ in loader._dataset} for loader in loaders]
    assert [len(each) for each in rows] == [80, 20]
    assert rows[0].isdisjoint(rows[1])


def test_arguments_may_have_any_name() -> None:
    given = {"function": "gelu", "factory": 3}
    assert call(dict, "models.py:dict", **given) == given


# A package that is next to the job file: found from any directory, by commands and by ranks

JOB = """\
version: 1
name: tiny
model: {factory: "ownnet.net:Model"}
loss: {factory: "torch.nn:MSELoss"}
data: {factory: "ownnet.data:samples"}
training: {steps: 1, batch_size: 8}
site_defaults: false
"""
PACKAGE = {
    "__init__.py": "",
    "layers.py": "from torch import nn\nLayer = nn.Linear\n",
    "net.py": "from .layers import Layer\n\nclass Model(Layer):\n"
    "    def __init__(self):\n        super().__init__(4, 2)\n",
    "data.py": "import torch\nfrom torch.utils.data import TensorDataset\n\n"
    "def samples():\n    return TensorDataset(torch.randn(16, 4), torch.zeros(16, 2))\n",
}


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A job beside its package; neither is in the current directory."""
    package, elsewhere = tmp_path / "jobs" / "ownnet", tmp_path / "elsewhere"
    package.mkdir(parents=True)
    elsewhere.mkdir()
    for name, text in PACKAGE.items():
        (package / name).write_text(text)
    path = tmp_path / "jobs" / "job.yaml"
    path.write_text(JOB)
    monkeypatch.chdir(elsewhere)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield path
    for name in [name for name in sys.modules if name.partition(".")[0] == "ownnet"]:
        del sys.modules[name]


def test_ranks_find_it_by_the_job_of_their_run_directory_until_it_changes(
    job: Path, tmp_path: Path
) -> None:
    spec = load(job)
    given = CapturedJob(spec)
    (tmp_path / "run.yaml").write_text(dump(spec))
    kept = load(tmp_path / "run.yaml")
    assert kept.model.factory == f"{job.parent}/ownnet.net:Model"
    found = CapturedJob(kept)
    assert type(given.model).__name__ == type(found.model).__name__ == "Model"
    assert torch.equal(given.loader.example(8)[0], found.loader.example(8)[0])  # what it draws
    assert kept.model.factory == spec.model.factory
    before = profile_key(spec)
    assert profile_key(kept) == before
    with (job.parent / "ownnet" / "layers.py").open("a") as file:
        file.write("# changed\n")
    assert profile_key(load(job)) != before


def test_a_file_with_relative_imports_is_to_be_named_as_a_module(job: Path) -> None:
    with pytest.raises(Exception, match="attempted relative import") as caught:
        CapturedJob(load(job, ["model.factory=./ownnet/net.py:Model"]))
    assert "package.module:name" in str(getattr(caught.value, "hint", ""))


def test_check_says_which_module_cannot_be_found(job: Path) -> None:
    with pytest.raises(SpecError, match=r"model\.factory: there is no module ownnet\.nets in "):
        SpecFile.read(job, ["model.factory=ownnet.nets:Model"]).spec(check_names=True)


NAMES_AT_RUN_TIME = [
    "from os.path import *",
    "def __getattr__(name): ...",
    "globals()['build'] = 1",
    "try:\n    import quick as build\nexcept ImportError:\n    build = None",
    "if True:\n    def build(): ...",
    "def make():\n    global build\n    build = 1",
    "one, (build, two) = 1, (2, 3)",
]


def test_what_may_come_about_at_run_time_or_by_a_finder_of_an_editable_install_passes(
    job: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Finder:
        @staticmethod
        def find_spec(name: str, _path: object = None, _target: object = None) -> ModuleSpec | None:
            return ModuleSpec(name, None) if name == "editable" else None

    def check(name: str) -> None:
        SpecFile.read(job, [f"model.factory={name}"]).spec(check_names=True)

    for text in NAMES_AT_RUN_TIME:
        (job.parent / "own.py").write_text(text)
        check("./own.py:build")
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path, Finder])
    check("editable.net:Model")
    monkeypatch.setitem(sys.modules, "made_at_run_time", ModuleType("made_at_run_time"))
    check("made_at_run_time.net:Model")


def test_check_loads_neither_torch_nor_the_users_code(job: Path) -> None:
    with (job.parent / "ownnet" / "net.py").open("a") as file:
        file.write("raise SystemExit('imported')\n")
    code = (
        "import sys; from pipectl.cli import main; code = main(sys.argv[1:]); "
        "assert 'torch' not in sys.modules and 'ownnet' not in sys.modules; sys.exit(code)"
    )
    command: list[Any] = [sys.executable, "-c", code, "check", job]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


# What a job is made of: models, losses and data that cannot be trained

PARTS = """
class Mappings(torch.utils.data.Dataset):
    def __len__(self):
        return 16
    def __getitem__(self, index):
        return {"x": torch.zeros(6), "y": torch.zeros(3)}

class transposed(list):
    def __init__(self):
        super().__init__([(torch.ones(6), torch.tensor(1))] * 8)
    def collate_fn(self, samples):
        vectors, classes = zip(*samples)
        return torch.stack(vectors, 1), torch.stack(classes)

def loader():
    return torch.utils.data.DataLoader([(torch.zeros(6), torch.zeros(3))], batch_size=4)

def triples():
    return torch.utils.data.TensorDataset(torch.zeros(16, 6), torch.zeros(16), torch.zeros(16))

def tensors():
    return torch.zeros(16, 6), torch.zeros(16, 3)

def nothing():
    return None

def arrays():
    return np.zeros((16, 6)), np.zeros(16)

def splits():
    return {"train": triples(), "test": triples()}

def generator():
    yield torch.zeros(6), torch.zeros(3)

def doubles():
    return torch.utils.data.TensorDataset(torch.zeros(16, 6).double(), torch.zeros(16).long())

def one_based():
    return torch.utils.data.TensorDataset(torch.zeros(16, 6), torch.full((16,), 3))

class nones(Mappings):
    def __getitem__(self, index):
        return torch.zeros(6), None

made = nn.Linear(6, 3)

def on_gpu():
    raise AssertionError("Torch not compiled with CUDA enabled")

def of_group():
    raise ValueError("Default process group has not been initialized")

def unread():
    return open("no such file")

def plain():
    return nn.Sequential(nn.Linear(6, 3))

def frozen():
    return plain().requires_grad_(False)

def hooked():
    model = plain()
    model[0].register_full_backward_hook(lambda module, given, gradient: None)
    return model

def text():
    return "a model"

def vector_loss(outputs, targets):
    return nn.functional.cross_entropy(outputs, targets, reduction="none")

def count_loss(outputs, targets):
    return (outputs.argmax(1) == targets).sum()

def float_loss(outputs, targets):
    return 1.0

def pair_loss(outputs, targets):
    return outputs.mean(), outputs

class LossLast(nn.Linear):
    def __init__(self):
        super().__init__(6, 3)
    def forward(self, x):
        x = super().forward(x)
        return x, x.mean()

class WithoutLoss(LossLast):
    def forward(self, x):
        return types.SimpleNamespace(logits=super().forward(x)[0])

def weighted_loss(outputs, targets, weights):
    return outputs.mean()
"""
SCALAR = "^loss: must be a floating-point scalar tensor, but is a "
LAZY = {"model": "torch.nn:LazyLinear", "kwargs": {"out_features": 3}}
KEYWORD = {"loss": "torch.nn:NLLLoss", "data": "Mappings"}


@pytest.mark.parametrize(
    ("names", "message", "hint"),
    [
        ({"loss": "vector_loss"}, SCALAR + r"tensor of shape \[batch\]", ""),
        ({"loss": "count_loss"}, SCALAR + "scalar of torch.int64", ""),
        ({"loss": "float_loss"}, SCALAR + "float", ""),
        ({"loss": "pair_loss"}, SCALAR + "tuple", "alone"),
        ({"loss": "model"}, SCALAR + r"tensor of shape \[batch, 3\]", ""),
        (
            {"loss": "model", "model": "LossLast"},
            SCALAR + r"tensor of shape \[batch, 3\], the first item that the model returned",
            "item number 2",
        ),
        ({"loss": "model", "model": "WithoutLoss"}, "returned a SimpleNamespace without", "first"),
        ({"loss": "weighted_loss"}, "loss.factory: .*'weights'.*called with outputs", "kwargs"),
        ({"model": "frozen"}, "^loss: depends on no parameter that requires a gradient", ""),
        ({"model": "text"}, r"^model\.factory: .*returned a str, not a torch\.nn\.Module", ""),
        (LAZY, "'weight' of a LazyLinear has no shape yet", ""),
        ({"model": "hooked"}, "^model: 0 has a backward hook, which no graph can hold", ""),
        (KEYWORD, "model.factory: .*keyword.*'x'.*x: .4, 6. of float", "inputs"),
        ({"data": "transposed"}, r"^data: a batch of 4 samples has .* shape \[6, 4\]", ""),
        ({"data": "triples"}, "data: a sample must be .* not a tuple or list of 3", "weights"),
        ({"data": "loader"}, "data.factory: .* a DataLoader, not a dataset", "itself"),
        ({"data": "tensors"}, "returned a tuple of tensors", "TensorDataset"),
        ({"data": "nothing"}, "returned a NoneType, not a dataset", "__getitem__"),
        ({"data": "arrays"}, "returned a tuple of arrays, not a dataset", "torch.from_numpy(in"),
        ({"data": "splits"}, "returned a dict, not a dataset", "that of 'train'"),
        ({"data": "generator"}, "returned a generator, not a dataset", "only once"),
        ({"data": "nones"}, "data: samples cannot be collated", "in place of None"),
        ({"data": "unread"}, "data.factory: .*FileNotFoundError", "Path(__file__).parent"),
        ({"model": "made"}, "model.factory: .*is a model that the module has made", "Linear"),
        ({"model": "on_gpu"}, "model.factory: .*not compiled with CUDA", "leave .cuda()"),
        ({"model": "of_group"}, "model.factory: .*process group", "starts the ranks"),
        (
            {"model": "torch.nn:Linear", "kwargs": {"in_features": "6", "out_features": 3}},
            "raised TypeError.*where in_features is '6'",
            "kwargs",
        ),
    ],
)
def test_parts_of_a_job_that_cannot_be_trained_are_refused_in_silence(
    spec_maker, write_modules, capfd, names: dict[str, Any], message: str, hint: str
) -> None:
    make_spec = spec_maker(write_modules({}, PARTS))
    given = {"model": "plain", "data": f"{MODELS}:Vectors", **names}
    with pytest.raises(CaptureError, match=message) as raised:
        CapturedJob(make_spec(**given)).training_graph(4)
    assert raised.value.hint
    assert hint in str(raised.value.hint)
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("data", "message", "hint"),
    [
        ("doubles", "model.factory: .* must have the same dtype", "x.float()"),
        ("one_based", "loss.factory: .*Target 3 is out of bounds", "count from 0"),
    ],
)
def test_what_only_a_run_shows_comes_with_what_to_do(
    spec_maker, write_modules, data: str, message: str, hint: str
) -> None:
    job = CapturedJob(spec_maker(write_modules({}, PARTS))("plain", data=data))
    refusal = job.misfit(4)
    assert re.match(message, refusal.message)
    assert hint in refusal.hint


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
    assert ".clone()" in raised.value.hint
    assert ("self.b.weight = self.a.weight" in raised.value.hint) == (kind != "buffer")


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


@pytest.mark.parametrize(
    ("table", "what", "cure"),
    [
        (
            torch.zeros(2, dtype=torch.complex128),
            "the type torch.complex128",
            "torch.complex64, or",
        ),
        (torch.zeros(2, dtype=torch.float8_e4m3fnuz), "the type torch.float8_e4m3fnuz", "another"),
        (torch.eye(2).to_sparse(), "the layout torch.sparse_coo", "dense"),
    ],
)
def test_what_no_checkpoint_can_hold_is_refused_before_it_is_trained(table, what, cure) -> None:
    refuse_unsaved({f"model.{i}": torch.zeros(2, dtype=each) for i, each in enumerate(SAVED)})
    with pytest.raises(CaptureError, match=f"buffer dft.table has {what}, which") as said:
        refuse_unsaved({"model.dft.table": table})
    assert cure in said.value.hint


def test_a_module_has_the_content_of_the_snapshot_and_the_path_of_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    package = tmp_path / "kept_nets"
    package.mkdir()
    (tmp_path / "own.py").write_text(
        "from pathlib import Path\nimport kept_helper\nfrom kept_nets.inner import width\n"
        "def build():\n"
        "    from kept_nets import late\n"
        "    text = (Path(__file__).parent / 'size.txt').read_text()\n"
        "    return [kept_helper.A, width(), late.A, int(text)]\n"
        "def fail():\n    raise ValueError('as submitted')\n"
    )
    (tmp_path / "kept_helper.py").write_text("A = 1\n")
    (package / "__init__.py").write_text("")
    (package / "inner.py").write_text("from . import late\ndef width(): return late.A + 1\n")
    (package / "late.py").write_text("A = 2\n")
    (tmp_path / "size.txt").write_text("1")
    job = tmp_path / "job.yaml"
    own = "./own.py:build"
    job.write_text(
        f'model: "{own}"\nloss: model\ndata: "{own}"\ntraining: {{steps: 1, batch_size: 1}}\n'
        "site_defaults: false\n"
    )
    kept = Code.of(load(job)).sources
    for path in (*tmp_path.glob("*.py"), *package.glob("*.py")):
        path.write_text("A = 100\n" * 9)
    (package / "late.py").unlink()
    (tmp_path / "kept_helper").mkdir()  # hides kept_helper.py from Python
    (tmp_path / "kept_helper/__init__.py").write_text("A = 100\n")
    (tmp_path / "size.txt").write_text("7")
    with using(kept):
        build = found(own, tmp_path)
        assert build() == [1, 3, 2, 7]
        assert build.__globals__["__file__"] == str(tmp_path / "own.py")
        assert inspect.getsource(build).splitlines()[1] == "    from kept_nets import late"
        with pytest.raises(CaptureError, match=r"as submitted \(at .*/own\.py:9\)") as raised:
            call(found("./own.py:fail", tmp_path), "model")
        assert "raise ValueError('as submitted')" in "".join(format_exception(raised.value))
    assert [*tmp_path.rglob("*.pyc")] == []
    for name in ("kept_helper", "kept_nets", "kept_nets.inner", "kept_nets.late"):
        assert sys.modules.pop(name).__file__


OPENS = """\
import json
from pathlib import Path
import yaml
HERE = Path(__file__).parent
SIZES = json.loads((HERE / 'sizes.json').read_text())
def build():
    with open(HERE / 'nets/net.yaml') as file:
        net = yaml.safe_load(file)
    for name in ('.cache/a.json', 'text.txt', 'vast.json', *(f'data/{i}.json' for i in range(17))):
        (HERE / name).read_bytes()
    (HERE / 'count.json').write_text(str(1 + json.loads((HERE / 'count.json').read_text())))
    (HERE / 'own.json').write_text('1')
    return net['a'], SIZES['b'], (HERE / 'own.json').read_text()
"""


def test_settings_that_user_code_opens_are_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not caches, data, and what the code itself makes."""
    names = ["sizes.json", "nets/net.yaml", ".cache/a.json", "text.txt", "vast.json"]
    for name in (*names, *(f"data/{i}.json" for i in range(17))):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text('{"a": 1, "b": 2}' + " " * (2**20 * (name == "vast.json")))
        os.utime(tmp_path / name, (1e9, 1e9))
    (tmp_path / "count.json").write_text("1")
    os.utime(tmp_path / "count.json", (1e9, 1e9))
    (tmp_path / "own.py").write_text(OPENS)
    own, job = "./own.py:build", tmp_path / "job.yaml"
    job.write_text(
        f'model: "{own}"\nloss: model\ndata: "{own}"\ntraining: {{steps: 1, batch_size: 1}}\n'
        "site_defaults: false\n"
    )
    sources.follow_imports()
    monkeypatch.setattr(sources, "_began_s", time.time() - 60)
    assert call(found(own, tmp_path), "model") == (1, 2, "1")
    opened = [each for each in loaded_here() if each.path.startswith(f"{tmp_path}/")]
    opened = [each for each in opened if not each.path.endswith(".py")]
    assert [each.path for each in opened] == [str(tmp_path / name) for name in names[:2]]
    run = RunDirectory.create(tmp_path / "runs", "tiny", 0.0)
    (tmp_path / "sizes.json").write_text('{"a": 1, "b": 2}')
    keep(run, Code.of(load(job)).with_loaded(opened), 1, None)
    assert read_code(run).changed() == []
    (tmp_path / "nets/net.yaml").write_text('{"a": 3}')
    (changed,) = read_code(run).changed()
    assert (changed.path, changed.copy) == (str(tmp_path / "nets/net.yaml"), None)
    assert [*map(is_changed, opened)] == [False, True]


LOADED_AT_RUN_TIME = {
    "a changed search path": (
        "sys.path.insert(0, str(HERE / 'lib'))\nfrom at_run_time import WIDTH\n"
    ),
    "a computed name": (
        "sys.path.append(str(HERE / 'sub' / '..' / 'lib'))\n"
        "WIDTH = importlib.import_module('at_' + 'run_time').WIDTH\n"
    ),
    "a relative import": (
        "sys.path.insert(0, str(HERE))\n"
        "WIDTH = importlib.import_module('.at_run_time', 'lib').WIDTH\n"
    ),
    "a path": (
        "spec = importlib.util.spec_from_file_location('any', HERE / 'lib/at_run_time.py')\n"
        "module = importlib.util.module_from_spec(spec)\nspec.loader.exec_module(module)\n"
        "WIDTH = module.WIDTH\n"
    ),
    "runpy": "WIDTH = runpy.run_path(str(HERE / 'lib/at_run_time.py'))['WIDTH']\n",
}
OWN = """\
import importlib, importlib.util, runpy, sys
from pathlib import Path
HERE = Path(__file__).parent
def build():
    {}    return WIDTH
"""


@pytest.mark.parametrize("is_planned", [True, False], ids=["profiled before", "not profiled"])
@pytest.mark.parametrize("way", LOADED_AT_RUN_TIME)
def test_code_that_no_import_names_is_kept_too(
    way: str, is_planned: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if nothing has run it before: then with all Python files of the project."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    monkeypatch.setattr(sources, "_began_s", inf)  # nothing here is made by this process
    library = tmp_path / "lib/at_run_time.py"
    library.parent.mkdir()
    (tmp_path / "sub").mkdir()
    library.write_text("WIDTH = 1\n")
    lines = LOADED_AT_RUN_TIME[way].replace("\n", "\n    ")
    (tmp_path / "own.py").write_text(OWN.format(lines.removesuffix("    ")))
    job = tmp_path / "job.yaml"
    own = "./own.py:build"
    job.write_text(
        f'model: "{own}"\nloss: model\ndata: "{own}"\ntraining: {{steps: 1, batch_size: 1}}\n'
        "site_defaults: false\n"
    )
    code = Code.of(load(job))

    def build() -> int:
        importlib.invalidate_caches()
        before = {*sys.modules}
        try:
            return found(own, tmp_path)()
        finally:
            for name in sys.modules.keys() - before:
                del sys.modules[name]

    def loaded() -> list[LoadedFile]:
        return [file for file in loaded_here() if file.path == str(library)]

    before = list[LoadedFile]()
    if is_planned:
        assert build() == 1
        before = loaded()
        assert len(before) == 1
        code = code.with_loaded(before)
    run = RunDirectory.create(tmp_path / "runs", "tiny", 0.0)
    keep(run, code, 1, None)
    (kept,) = [file for file in read_code(run).files if file.path == str(library)]
    assert kept.found == ("load" if is_planned else "beside")
    library.write_text("WIDTH = 2\n")
    assert [file.path for file in read_code(run).changed()] == [str(library)] * is_planned
    assert [*map(is_changed, before)] == [True] * is_planned
    if way != "a relative import":  # of a package without a file
        library.unlink()
        assert not any(map(is_changed, before))
    with using_code_of(run):
        assert build() == 1
        keep_loaded(run, load(job), loaded())
    (kept,) = [file for file in read_code(run).files if file.path == str(library)]
    assert kept.found == "load"
    library.write_text("WIDTH = 2\n")
    assert [file.path for file in read_code(run).changed()] == [str(library)]
    assert build() == 2
