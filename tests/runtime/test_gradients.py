"""The end of a step: clipping and loss scales as torch has them, optimizers that are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from mpi4py import MPI
from torch import nn

from pipectl.capture import CapturedJob, Slot
from pipectl.errors import CaptureError
from pipectl.runs import read_errors
from pipectl.runtime.device import CpuDevice
from pipectl.runtime.gradients import (
    LossScale,
    SharedGradients,
    clip_gradients,
    gradient_norms,
    total_norm,
)
from pipectl.runtime.manifest import LossScaleState
from pipectl.runtime.optimizer import refuse_coupled_updates
from pipectl.runtime.step_end import Vote
from pipectl.runtime.transport import Wire
from pipectl.spec.models import LossScale as Spec


def model_with_gradients() -> nn.Module:
    torch.manual_seed(4)
    model = nn.Sequential(nn.Linear(7, 5), nn.LayerNorm(5), nn.Linear(5, 3), nn.Linear(3, 2))
    for index, parameter in enumerate(model.parameters()):
        parameter.grad = torch.randn_like(parameter) * 10.0 ** (index % 5 - 2)
    model[3].bias.grad = None
    return model


def clip(model: nn.Module, max_norm: float) -> float:
    """Clip by norms that have travelled in a vote; the norm before."""
    parameters = dict(model.named_parameters())
    vote = Vote(MPI.COMM_SELF, list(parameters), with_norms=True)
    vote.cast(1, norms=gradient_norms(parameters))
    result = vote.count()
    assert result is not None
    total = total_norm(result.norms, [parameter.dtype for parameter in parameters.values()])
    clip_gradients(parameters.values(), total, max_norm)
    return float(total)


SINGLE = (torch.float32,)
EVERY = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@pytest.mark.parametrize(
    ("largest", "size", "dtypes"),
    [
        *((largest, 1.0, SINGLE) for largest in (1e-3, 0.5, 30.0, 1e9)),
        (1e-6, 1e-5, SINGLE),  # gradients as small as what torch adds to their norm
        (0.5, 1.0, (torch.float64,)),
        (0.5, 1.0, (torch.bfloat16,)),
        (0.5, 1.0, (torch.float32, torch.float64)),
        (0.5, 1.0, EVERY),
    ],
    ids=str,
)
def test_clipping_on_one_rank_is_torchs_to_the_bit(
    largest: float, size: float, dtypes: tuple[torch.dtype, ...]
) -> None:
    mine, torchs = model_with_gradients(), model_with_gradients()
    for model in (mine, torchs):
        for index, parameter in enumerate(model.parameters()):
            gradient, dtype = parameter.grad, dtypes[index % len(dtypes)]
            parameter.data = parameter.data.to(dtype)
            parameter.grad = None if gradient is None else (gradient * size).to(dtype)
    expected = torch.nn.utils.clip_grad_norm_(torchs.parameters(), largest)
    assert clip(mine, largest) == float(expected)
    for ours, other in zip(mine.parameters(), torchs.parameters(), strict=True):
        assert (ours.grad is None) == (other.grad is None)
        assert ours.grad is None or torch.equal(ours.grad, other.grad)


def test_without_any_gradient_the_norm_is_zero() -> None:
    assert clip(nn.Linear(2, 2), 1.0) == 0.0


def test_gradients_of_several_uses_are_summed_in_graph_order() -> None:
    """In another order the sum of these three differs in its last bit."""
    parts = [torch.tensor([value]) for value in (1e8, 1.0, -1e8)]
    parameter = nn.Parameter(torch.zeros(1))
    slots = [Slot("model.weight", f"use_{index}") for index in range(4)]
    leaves = {slot: torch.zeros(1, requires_grad=True) for slot in slots}
    for slot, part in zip(slots, parts, strict=False):
        leaves[slot].grad = part.clone()
    uses = {"model.weight": [(slot, 0) for slot in slots]}
    shared = SharedGradients(
        Wire(MPI.COMM_SELF, CpuDevice()), uses, [(0,)], leaves, {"model.weight": parameter}
    )
    shared.reduce()
    expected = (parts[0] + parts[1]) + parts[2]
    assert torch.equal(parameter.grad, expected)
    assert not torch.equal(parameter.grad, parts[0] + parts[2] + parts[1])
    assert all(leaf.grad is None for leaf in leaves.values())


def test_a_parameter_that_no_gradient_reaches_has_none() -> None:
    parameter, slot = nn.Parameter(torch.zeros(1)), Slot("w", "use")
    leaves = {slot: torch.zeros(1, requires_grad=True)}
    shared = SharedGradients(
        Wire(MPI.COMM_SELF, CpuDevice()), {"w": [(slot, 0)]}, [(0,)], leaves, {"w": parameter}
    )
    shared.reduce()
    assert parameter.grad is None


PARTS = Path(__file__).with_name("job_parts.py")
OPTIMIZERS = [
    *("SGD", "Adam", "AdamW", "Adagrad", "Adadelta", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop"),
    *("Rprop", "Adafactor"),
]


@pytest.mark.parametrize("options", [{}, {"foreach": True}, {"fused": True}], ids=str)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_of_torch_update_each_parameter_by_itself(
    make_spec, name: str, options: dict[str, Any]
) -> None:
    optimizer = {"factory": f"torch.optim:{name}", "kwargs": {"lr": 0.01, **options}}
    refuse_coupled_updates(CapturedJob(make_spec(2, optimizer=optimizer)), torch.device("cpu"))


@pytest.mark.parametrize("kind", ["norm", "clipped", "adam", "noise"])
def test_an_optimizer_that_looks_at_all_parameters_is_refused(make_spec, kind: str) -> None:
    optimizer = {"factory": f"{PARTS}:Coupled", "kwargs": {"kind": kind}}
    groups = [{"match": "layers.*", "lr": 0.02}]
    for more in ({}, {"groups": groups}):
        job = CapturedJob(make_spec(2, optimizer={**optimizer, **more}))
        with pytest.raises(CaptureError, match=r"job_parts\.py:Coupled updates a parameter dif"):
            refuse_coupled_updates(job, torch.device("cpu"))


def test_a_parameter_without_elements_is_no_sample(make_spec) -> None:
    job = CapturedJob(make_spec(2))
    job.states["model.empty"] = nn.Parameter(torch.empty(0, 2, 2))
    refuse_coupled_updates(job, torch.device("cpu"))


@pytest.mark.mpi
def test_ranks_that_share_parameters_out_refuse_it_before_the_first_step(
    make_run, work, train
) -> None:
    """One rank that has them all trains."""
    optimizer = {"factory": f"{PARTS}:Coupled", "kwargs": {"kind": "norm"}}
    one, two = (make_run(ranks, optimizer=optimizer) for ranks in (1, 2))
    train(one)
    assert work(2, two).returncode != 0
    assert "updates a parameter differently" in read_errors(two)[0].message


@pytest.mark.parametrize("other", [torch.bfloat16, torch.float64])
def test_norms_are_added_in_the_order_of_torch(other: torch.dtype) -> None:
    torch.manual_seed(1)
    parameters = {
        str(index): nn.Parameter(torch.zeros(9, dtype=(torch.float32, other)[index % 2]))
        for index in range(300)
    }
    for parameter in parameters.values():
        parameter.grad = torch.randn_like(parameter)
    norms = [*gradient_norms(parameters).values()]
    found = total_norm(norms, [parameter.dtype for parameter in parameters.values()])
    assert torch.equal(found, torch.nn.utils.get_total_norm([p.grad for p in parameters.values()]))
    in_model_order = torch.linalg.vector_norm(torch.tensor(norms, dtype=found.dtype))
    assert not torch.equal(found, in_model_order), "so that the order shows"


def layer() -> nn.Module:
    torch.manual_seed(2)
    return nn.Linear(3, 2)


@pytest.mark.parametrize("initial", [65536.0, 3e38, 1000.0])
def test_it_unscales_skips_and_grows_as_torchs_scaler_does(initial: float) -> None:
    mine, torchs = layer(), layer()
    scale = LossScale(Spec(initial=initial, growth_interval=2), dict(mine.named_parameters()))
    scaler = torch.amp.GradScaler("cpu", initial, growth_interval=2)
    optimizer = torch.optim.SGD(torchs.parameters(), lr=0.0)
    scaler.scale(torch.zeros(()))
    skipped = []
    for step in range(9):
        bad = [float("inf"), float("nan"), 1.0, 1.0, 1.0, float("inf"), 1.0, 1.0, 1.0][step]
        for model in (mine, torchs):
            for parameter in model.parameters():
                parameter.grad = torch.full_like(parameter, 3.7)
            model.bias.grad[1] *= bad
        before = scaler.get_scale()
        assert scale.value == before
        scaler.unscale_(optimizer)
        skipped.append(scale.unscale())
        scale.update(overflow=skipped[-1])
        scaler.step(optimizer)
        scaler.update()
        assert skipped[-1] is (scaler.get_scale() < before)
        for ours, other in zip(mine.parameters(), torchs.parameters(), strict=True):
            assert torch.equal(ours.grad.nan_to_num(), other.grad.nan_to_num())
    assert skipped == [True, True, False, False, False, True, False, False, False]


def test_a_restored_scale_grows_when_it_would_have_grown() -> None:
    restored = LossScale(Spec(initial=4.0, growth_interval=2), {})
    restored.restore(LossScaleState(8.0, 1))
    assert restored.state == LossScaleState(8.0, 1)
    restored.update(overflow=False)
    assert restored.value == 16.0


def test_parameters_in_half_precision_are_refused() -> None:
    parameters = {"model.head.weight": nn.Parameter(torch.zeros(2, dtype=torch.float16))}
    with pytest.raises(CaptureError, match=r"'head\.weight' is in float16"):
        LossScale(Spec(), parameters)
