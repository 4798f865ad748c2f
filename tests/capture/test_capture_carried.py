"""Tensors that a model keeps in plain attributes: refused where a step reads those of another."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from pipectl.capture.opaque import Opaque
from pipectl.errors import CaptureError

CARRIED = {
    "mean": ("torch.zeros(6)", "self.kept = 0.9 * self.kept + 0.1 * x.detach().mean(0)"),
    "count": ("torch.ones(())", "self.kept = self.kept + 1"),
    "detached": ("torch.zeros(6)", "self.kept = self.kept.detach(); self.kept = self.kept + x[0]"),
    "hidden": ("None", "self.kept = x.detach() if self.kept is None else x + self.kept"),
    "pair": ("()", "self.kept = (*self.kept[:1], x.tanh().detach())"),
    "counter": ("0", "self.kept += 1; x = x * self.kept"),
    "threshold": ("0", "self.kept += 1; x = x * 2 if self.kept > 1000 else x"),
    "loop": ("0", "self.kept += 1; x = sum((x for _ in range(self.kept // 100)), x)"),
    "flag": ("True", "x, self.kept = x * 2 if self.kept else x, False"),
    "in_place": (
        "torch.zeros(6)",
        "self.kept.mul_(0.9).add_(x.detach().mean(0)); x = x + self.kept",
    ),
    "previous": ("None", "x, self.kept = x if self.kept is None else x + self.kept, x"),
}
HARMLESS = {
    "map": ("None", "self.kept = x.detach()"),
    "written_first": ("torch.zeros(6)", "self.kept = x.detach(); x = x + self.kept"),
    "table": ("None", "self.kept = torch.arange(6.0) if self.kept is None else self.kept"),
    "sized": ("None", "self.kept = self.kept or x.new_ones(x.shape[1]); x = x * self.kept"),
    "converted": ("torch.ones(6).double()", "self.kept = self.kept.to(x.dtype); x = x * self.kept"),
    "number": ("0", "self.kept += 1"),
    "longest": (
        "0",
        "if x.shape[1] > self.kept: "
        "self.register_buffer('table', x.new_ones(1)); self.kept = x.shape[1]",
    ),
    "maximum": ("0", "self.kept = max(self.kept, x.shape[1]); x = x * self.kept"),
}
SOURCE = """\
import torch
from torch import nn

class Keeping(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.kept = {first}
    def forward(self, x):
        x = self.linear(x)
        {code}
        return x

class Whole(Keeping):
    def forward(self, x):
        return super().forward(x)[:, :3]

def layers():
    return [nn.Linear(6, 6), Keeping(), nn.Linear(6, 3)]

class New(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 3)
    def forward(self, x):
        self.called, self.seen = True, self.linear(x)
        return self.seen
"""

WRITING = """\
import torch
from torch import nn
from torch.utils.data import TensorDataset

class Mean(nn.Module):
    def forward(self, x):
        return x.mean(1)

def layers():
    return [nn.Embedding(50, 6, max_norm=1.0), Mean(), nn.Linear(6, 3)]

def tokens():
    return TensorDataset(torch.randint(50, (20, 4)), torch.randint(3, (20,)))
"""


@pytest.fixture
def written(tmp_path: Path) -> Any:
    """A file with models that keep something."""

    def write(kind: str) -> Path:
        first, code = {**CARRIED, **HARMLESS}[kind]
        path = tmp_path / f"keeps_{kind}.py"
        path.write_text(SOURCE.format(first=first, code=code))
        return path

    return write


@pytest.mark.parametrize("kind", CARRIED)
def test_what_a_step_reads_of_the_one_before_is_refused(make_job, written, kind: str) -> None:
    path = written(kind)
    with pytest.raises(CaptureError) as raised:
        make_job(f"{path}:Whole").training_graph(4)
    line = CARRIED[kind][1]
    if kind == "in_place":
        assert raised.value.message == (
            f"model: writes the tensor 'kept' in its forward (at {path}:11: {line}), which no "
            "checkpoint would hold"
        )
        return
    assert raised.value.message == (
        f"model: keeps 'kept' from one step to the next (at {path}:11: {line}), "
        "which a graph would freeze"
    )
    assert raised.value.cure is not None
    assert "register_buffer()" in raised.value.cure


@pytest.mark.parametrize("kind", HARMLESS)
def test_what_no_step_reads_of_another_may_be_kept(make_job, written, kind: str) -> None:
    job = make_job(f"{written(kind)}:Whole")
    first = job.model.kept
    assert job.training_graph(4).requires_grad["linear"]
    assert job.model.kept is first


UNTOUCHED = {
    "sparse": ("torch.eye(6).to_sparse()", "x = torch.sparse.mm(self.kept, x.T).T"),
    "expanded": ("torch.ones(1).expand(6)", "x = x * self.kept"),
    "system random": ("__import__('random').SystemRandom()", "pass"),
}


@pytest.mark.parametrize("kind", UNTOUCHED)
def test_what_has_no_values_to_restore_is_left_alone(make_job, tmp_path: Path, kind: str) -> None:
    first, code = UNTOUCHED[kind]
    path = tmp_path / "keeps.py"
    path.write_text(SOURCE.format(first=first, code=code))
    job = make_job(f"{path}:layers", opaque=["1"])
    kept = job.model[1].kept
    assert any(isinstance(node.target, Opaque) for node in job.training_graph(4).operators)
    assert job.model[1].kept is kept


def test_numbers_deeper_than_attributes_are_refused_and_left_as_they_were(
    make_job, tmp_path: Path
) -> None:
    path = tmp_path / "deep.py"
    first = "types.SimpleNamespace(counts={'a': 0}, other=0)"
    code = "self.kept.counts['a'] += 1; self.kept.other += 1; x = x * self.kept.counts['a']"
    path.write_text("import types\n" + SOURCE.format(first=first, code=code))
    job = make_job(f"{path}:Whole")
    with pytest.raises(CaptureError) as raised:
        job.training_graph(4)
    assert raised.value.message == (
        "model: keeps \"kept.counts['a']\" from one step to the next, which a graph would freeze"
    )
    assert (job.model.kept.counts, job.model.kept.other) == ({"a": 0}, 0)


@pytest.mark.parametrize("whole", [False, True], ids=["captured", "kept whole"])
def test_a_parameter_that_a_forward_writes_is_refused(make_job, tmp_path, whole: bool) -> None:
    """Its other uses, replicas and recomputed forwards would each have one of their own."""
    path = tmp_path / "writes.py"
    path.write_text(WRITING)
    job = make_job(f"{path}:layers", data=f"{path}:tokens", opaque=["0"] if whole else [])
    with pytest.raises(
        CaptureError, match=r"^model: writes the parameter '0\.weight' in its forward"
    ):
        job.training_graph(4)


@pytest.mark.parametrize("whole", [False, True], ids=["captured", "kept whole"])
def test_an_extra_state_that_a_forward_changes_is_refused(make_job, tmp_path, whole) -> None:
    path = tmp_path / "extra.py"
    more = """
    def get_extra_state(self):
        return {"calls": self.kept}
    def set_extra_state(self, state):
        self.kept = state["calls"]

class Whole"""
    source = SOURCE.format(first="0", code="self.kept += 1")
    path.write_text(source.replace("\nclass Whole", more, 1))
    job = make_job(f"{path}:layers", opaque=["1"] if whole else [])
    with pytest.raises(
        CaptureError, match=r"^model: 1 changes its extra state \(get_extra_state\)"
    ):
        job.training_graph(4)


@pytest.mark.parametrize("changes", [False, True])
def test_only_an_extra_state_that_changes_by_itself_is_refused(
    make_job, tmp_path: Path, changes: bool
) -> None:
    path = tmp_path / "extra.py"
    settings = "" if changes else "'settings': object(), "
    more = f"""
    def get_extra_state(self):
        return {{{settings}'values': __import__('numpy').arange(3) + self.kept}}
    def set_extra_state(self, state):
        pass

class Whole"""
    source = SOURCE.format(first="0", code="self.kept += 1" if changes else "pass")
    path.write_text(source.replace("\nclass Whole", more, 1))
    job = make_job(f"{path}:Whole")
    if changes:
        with pytest.raises(CaptureError, match=r"^model: Whole changes its extra state"):
            job.training_graph(4)
    else:
        assert job.training_graph(4).operators


def test_a_tensor_in_a_new_attribute_is_gone_after_the_capture(make_job, written) -> None:
    job = make_job(f"{written('map')}:New")
    job.training_graph(4)
    assert not hasattr(job.model, "seen")
    assert job.model.called


def test_a_submodule_that_keeps_something_stays_as_it_is_where_the_spec_says_so(
    make_job, written
) -> None:
    layers = f"{written('mean')}:layers"
    with pytest.raises(CaptureError, match=r"^model: keeps '1\.kept' from one step to the next"):
        make_job(layers).training_graph(4)
    job = make_job(layers, opaque=["1"])
    kept = [n.target for n in job.training_graph(4).operators if isinstance(n.target, Opaque)]
    assert [operator.path for operator in kept] == ["1"]
    assert torch.equal(job.model[1].kept, torch.zeros(6))
