"""Micro-batches that torch refuses for a norm of a single value, which a graph would compute."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pipectl.capture import CapturedJob
from pipectl.capture.norms import refuse_single_values
from pipectl.capture.refusals import Refusal, RefusedError

FUNCTIONS = "x = nn.functional."
NORMS: dict[str, tuple[str, str, int]] = {
    "of values": ("nn.BatchNorm1d(6)", "x = self.kept(x)", 2),
    "of positions": ("nn.BatchNorm1d(3)", "x = self.kept(x.view(-1, 3, 2)).flatten(1)", 1),
    "of pixels": ("nn.BatchNorm2d(6)", "x = self.kept(x[..., None, None]).flatten(1)", 2),
    "of volumes": ("nn.BatchNorm3d(6)", "x = self.kept(x[..., None, None, None]).flatten(1)", 2),
    "of all ranks": ("nn.SyncBatchNorm(6)", "x = self.kept(x)", 2),
    "without statistics": ("nn.BatchNorm1d(6, track_running_stats=False)", "x = self.kept(x)", 2),
    "without training": ("nn.BatchNorm1d(6).eval()", "x = self.kept.eval()(x)", 1),
    "by a function": ("None", f"{FUNCTIONS}batch_norm(x, None, None, training=True)", 2),
    "of half a micro-batch": ("nn.BatchNorm1d(6)", "x[::2] += self.kept(x[::2])", 3),
    "of one sample": ("nn.InstanceNorm1d(6)", "x = self.kept(x.T[None])[0].T", 2),
    "of one by a function": ("None", f"{FUNCTIONS}instance_norm(x.T[None])[0].T", 2),
    "of groups": ("nn.GroupNorm(2, 6)", "x = self.kept(x)", 1),
    "of groups of one": ("nn.GroupNorm(6, 6)", "x = self.kept(x)", 2),
    "of features": ("nn.LayerNorm(6)", "x = self.kept(x)", 1),
    "in a block": ("nn.BatchNorm1d(6, momentum=None)", "x = self.kept(x)", 2),
}
"""A module, what it computes, and the least samples that it takes."""


def refuses(error: Exception | None) -> bool:
    return isinstance(error, RefusedError) and error.refusal is Refusal.SINGLE_VALUE


@pytest.mark.parametrize("name", NORMS)
def test_a_graph_takes_the_micro_batches_that_torch_takes(
    make_job: Callable[..., CapturedJob], write_modules: Any, place_of: Any, name: str
) -> None:
    first, code, least = NORMS[name]
    path: Path = write_modules({"Norm": (first, code)})
    job = make_job(f"{path}:WholeNorm", training={"steps": 1, "batch_size": 4})
    assert job.training_graph(4).samples == 4
    for samples in (1, 2, 3):
        refusal = job.refusal(samples)
        assert refuses(job.misfit(samples)) is refuses(refusal) is (samples < least), samples
        if refusal is not None:
            assert place_of(path, code) in refusal.message
            assert "Expected more than 1 " in refusal.message
    assert job.smallest(4)[0] == least
    graph = job.training_graph(4)
    refuse_single_values(graph, 1, names=["linear", graph.loss])  # another stage has the norm


CHECKED = """
def checked(x):
    assert not x.isnan().any()
    if x.isinf().any() or x.abs().max().item() > 1e9:
        raise ValueError("too large")
    return x

def argument(x):
    return torch.distributions.Normal(x, 1.0, validate_args=True).log_prob(x)
"""
ONE_SAMPLE = {
    "another number": ("x = x * 2 if x.shape[0] > 1 else x * 3", 2),
    "another function": ("x = x.relu() if x.shape[0] != 1 else x.tanh()", 2),
    "one that torch refuses": ("x = torch.cat([x.squeeze(), x], 1)[:, 6:]", 2),
    "another number after checks of values": ("x = checked(x) * 2 if x.shape[0] > 1 else x * 3", 2),
    "after checks of arguments": ("x = argument(x) if x.shape[0] > 1 else x.tanh()", 2),
    "checks of values alone": ("x = argument(checked(x)) * 2", 1),
    "another shape": (
        "x = x + (x[:1] if x.shape[0] == 1 else x[:1].expand(x.shape[0], 6)).detach()",
        1,
    ),
    "a number of samples": (
        "x = x.view(x.shape[0], 6) / x.shape[0] + torch.zeros(x.shape[0], 6)",
        1,
    ),
    "its own graph": ("x = x * 2 if len(x) > 1 else x * 3", 1),
    "tables that are made once": (
        "x = x + table(6) + COUNTS.setdefault('table', torch.arange(6))",
        1,
    ),
}
"""What a module computes, and the least samples for which one graph computes that."""


@pytest.mark.parametrize("name", ONE_SAMPLE)
def test_a_graph_takes_one_sample_if_the_model_computes_the_same(
    make_job: Callable[..., CapturedJob], write_modules: Any, place_of: Any, name: str
) -> None:
    code, least = ONE_SAMPLE[name]
    path: Path = write_modules({"One": code}, CHECKED)
    job = make_job(f"{path}:WholeOne", training={"steps": 1, "batch_size": 4})
    assert job.smallest(4)[0] == least
    for graph_of in (job.training_graph, job.evaluation_graph) if least > 1 else ():
        with pytest.raises(RefusedError, match="a micro-batch of 1 sample is too small") as caught:
            graph_of(1)
        assert place_of(path, code) in caught.value.message
    if least == 1:
        job.evaluation_graph(1)
        assert job.misfit(4) is None


def test_evaluations_refuse_what_torch_refuses_there(make_job: Any, write_modules: Any) -> None:
    """A norm without running statistics takes those of the micro-batch; others do not."""
    kept = ("nn.BatchNorm1d(6, track_running_stats=False)", "x = self.kept(x)")
    usual = ("nn.BatchNorm1d(6)", "x = self.kept(x)")
    path = write_modules({"Kept": kept, "Usual": usual})
    with pytest.raises(RefusedError, match="a micro-batch of 1 sample is too small for kept"):
        make_job(f"{path}:WholeKept").evaluation_graph(1)
    make_job(f"{path}:WholeUsual").evaluation_graph(1)


@pytest.mark.parametrize(
    ("samples", "drop_last", "size", "fault"),
    [
        (20, False, 4, None),
        (13, False, 4, "a micro-batch of 1 sample"),  # the last batch of an epoch
        (13, True, 4, None),
        (13, False, None, None),
        (17, False, None, "a micro-batch of 1 sample"),  # however it is divided
        (20, False, 1, "a micro-batch of 1 sample"),
    ],
)
def test_the_last_micro_batch_of_an_epoch_counts_too(
    make_job: Any,
    write_modules: Any,
    samples: int,
    drop_last: bool,
    size: int | None,
    fault: str | None,
) -> None:
    more = f"""
from torch.utils.data import TensorDataset
def data():
    return TensorDataset(torch.ones({samples}, 6), torch.zeros({samples}, dtype=torch.long))
"""
    path = write_modules({"Norm": ("nn.BatchNorm1d(6)", "x = self.kept(x)")}, more)
    data = {"factory": f"{path}:data", "drop_last": drop_last}
    job = make_job(f"{path}:WholeNorm", data=data, training={"steps": 1, "batch_size": 8})
    assert job.loader.counts == (samples,)
    if fault is None:
        job.check_epoch(size, 2)
        return
    with pytest.raises(RefusedError, match=fault) as refused:
        job.check_epoch(size, 2)
    assert refused.value.hint is not None
    assert "data.drop_last: true" in refused.value.hint
