"""Tensors that a model keeps in plain attributes: refused where a step reads those of another."""

from __future__ import annotations

import pytest
import torch

from pipectl.capture.opaque import Opaque
from pipectl.capture.python_state import preserve_state
from pipectl.errors import CaptureError

MEAN = ("torch.zeros(6)", "self.kept = 0.9 * self.kept + 0.1 * x.detach().mean(0)")
HARMLESS = {
    "Map": ("None", "self.kept = x.detach()"),
    "WrittenFirst": ("torch.zeros(6)", "self.kept = x.detach(); x = x + self.kept"),
    "Table": ("None", "self.kept = torch.arange(6.0) if self.kept is None else self.kept"),
    "Sized": ("None", "self.kept = self.kept or x.new_ones(x.shape[1]); x = x * self.kept"),
    "Converted": ("torch.ones(6).double()", "self.kept = self.kept.to(x.dtype); x = x * self.kept"),
    "Number": ("0", "self.kept += 1"),
    "Longest": (
        "0",
        "if x.shape[1] > self.kept: "
        "self.register_buffer('table', x.new_ones(1)); self.kept = x.shape[1]",
    ),
    "Maximum": ("0", "self.kept = max(self.kept, x.shape[1]); x = x * self.kept"),
    "New": ("None", "self.called, self.seen = True, self.linear(x)"),
}
NOT_RESTORED = {
    "Sparse": ("torch.eye(6).to_sparse()", "x = torch.sparse.mm(self.kept, x.T).T"),
    "Expanded": ("torch.ones(1).expand(6)", "x = x * self.kept"),
    "System": ("random.SystemRandom()", "pass"),
}
"""What has no values to restore."""


@pytest.mark.parametrize(
    ("table", "opaque"), [(HARMLESS, []), (NOT_RESTORED, ["1", "2", "3"])], ids=["read", "opaque"]
)
def test_what_no_step_reads_of_another_may_be_kept_and_is_left_as_it_was(
    make_job, write_modules, table, opaque: list[str]
) -> None:
    job = make_job(f"{write_modules(table)}:layers", opaque=opaque)
    before = [dict(vars(module)) for module in job.model]
    targets = [node.target for node in job.training_graph(4).operators]
    assert sum(isinstance(target, Opaque) for target in targets) == len(opaque)
    for module, attributes in zip(job.model, before, strict=True):
        assert vars(module).keys() == attributes.keys()
        assert getattr(module, "kept", None) is attributes.get("kept")


def test_numbers_deeper_than_attributes_are_refused_and_left_as_they_were(
    make_job, write_modules, place_of
) -> None:
    first = "types.SimpleNamespace(counts={'a': 0}, other=0)"
    code = "self.kept.counts['a'] += 1; self.kept.other += 1; x = x * self.kept.counts['a']"
    path = write_modules({"Deep": (first, code)})
    job = make_job(f"{path}:WholeDeep")
    with pytest.raises(CaptureError) as raised:
        job.training_graph(4)
    assert raised.value.message == (
        "model: keeps \"kept.counts['a']\" from one step to the next "
        f"{place_of(path, code)}, which a graph would freeze"
    )
    assert (job.model.kept.counts, job.model.kept.other) == ({"a": 0}, 0)


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


def test_a_submodule_that_keeps_something_stays_as_it_is_where_the_spec_says_so(
    make_job, write_modules
) -> None:
    layers = f"{write_modules({'Mean': MEAN})}:layers"
    with pytest.raises(CaptureError, match=r"^model: keeps '1\.kept' from one step to the next"):
        make_job(layers).training_graph(4)
    job = make_job(layers, opaque=["1"])
    kept = [n.target for n in job.training_graph(4).operators if isinstance(n.target, Opaque)]
    assert [operator.path for operator in kept] == ["1"]
    assert torch.equal(job.model[1].kept, torch.zeros(6))


def test_a_set_that_a_forward_leaves_alone_keeps_its_order() -> None:
    model = torch.nn.Module()
    model.seen = {64 * number for number in range(40)}
    model.seen -= {64 * number for number in range(0, 40, 3)}
    order = list(model.seen)
    assert list(model.seen.copy()) != order
    with preserve_state(model, []):
        pass
    assert list(model.seen) == order
    with preserve_state(model, []):
        model.seen.add(1)
    assert model.seen == set(order)
