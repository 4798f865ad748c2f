"""What a job needs besides its training steps is refused while it is profiled, not by its ranks."""

from __future__ import annotations

import re
from contextlib import nullcontext
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import IterableDataset, TensorDataset

from pipectl.capture import CapturedJob
from pipectl.errors import InvalidInputError
from pipectl.profile_parts import MeasuredOn
from pipectl.profiler import profile_job
from pipectl.profiler.effort import Effort
from pipectl.profiler.optimizer import optimizer_cost
from pipectl.profiler.trial import try_job, try_metrics
from pipectl.runtime.device import CpuDevice

HERE = Path(__file__)
VECTORS = f"{HERE.with_name('models.py')}:Vectors"
CPU = torch.device("cpu")


class Endless(IterableDataset):
    def __iter__(self) -> Any:
        while True:
            yield torch.ones(6), 1


def wide() -> TensorDataset:
    return TensorDataset(torch.ones(8, 7), torch.zeros(8, dtype=torch.int64))


def empty() -> TensorDataset:
    return TensorDataset(torch.ones(0, 6), torch.zeros(0, dtype=torch.int64))


class Metric:
    """Gives something, raises, or needs some updates before it has a result."""

    def __init__(self, gives: Any = 1.0, raises: str = "", updates: int = 1) -> None:
        self.gives, self.raises, self.updates = gives, raises, updates

    def update(self, outputs: Tensor, targets: Tensor) -> None:
        assert outputs.shape == (len(targets), 3)
        assert not outputs.requires_grad
        self.updates -= 1

    def compute(self) -> Any:
        if self.raises or self.updates > 0:
            raise ValueError(self.raises or "too few")
        return torch.eye(2) if self.gives == "matrix" else self.gives


class Detector(nn.Module):
    """Returns losses in training, and what it has found in evaluation."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Any:
        found = self.body(x)
        return {"loss": found.square().mean()} if self.training else [found]


def total(outputs: Any, targets: Any) -> Tensor:
    return sum(outputs.values())


def weight(targets: Tensor) -> Tensor:
    raise KeyError("mask")


def held_out(data: str = VECTORS, **more: Any) -> dict[str, Any]:
    return {"evaluation": {"data": data, "every": 1, **more}}


def measured(**kwargs: Any) -> dict[str, Any]:
    metrics = {"m": {"factory": f"{HERE}:Metric", "kwargs": kwargs}}
    return {
        **held_out(batch_size=4),
        "evaluation": {**held_out()["evaluation"], "metrics": metrics},
    }


class Seen:
    """Keeps what it has seen in its class."""

    seen: ClassVar[list[int]] = []

    def update(self, outputs: Any, targets: Any) -> None:
        self.seen.append(len(targets))

    def compute(self) -> int:
        return sum(self.seen)

    def reset(self) -> None:
        self.seen.clear()


def grown(outputs: Any, targets: Any) -> int:
    GROWN.append(len(targets))
    return len(GROWN)


GROWN: list[int] = []


def lasting(metric: str) -> dict[str, Any]:
    return held_out(metrics={"m": f"{HERE}:{metric}"})


IN_EVALUATION = r".*, in evaluation \(model\.eval\(\)\)$"


@pytest.mark.parametrize(
    ("model", "sections", "message"),
    [
        ("Counted", held_out(f"{HERE}:weight"), r"evaluation\.data\.factory: .*:weight: raised Ty"),
        ("Counted", held_out(f"{HERE}:Endless"), r"evaluation\.data: is iterable, so that its end"),
        ("Counted", held_out(f"{HERE}:wide"), r"evaluation\.data: .* is \[4, 7\] of torch\."),
        ("Counted", held_out(f"{HERE}:empty"), r"evaluation\.data: the dataset is empty"),
        ("Counted", measured(gives="matrix"), r"evaluation\.metrics\.m: must give one number, but"),
        ("Counted", measured(raises="no"), r"evaluation\.metrics\.m: raised ValueError: no \(at "),
        ("Counted", measured(updates=3), ""),
        ("Counted", lasting("Seen"), ""),
        ("Counted", lasting("grown"), r"evaluation\.metrics\.m: gives \d+, then \d+ for the"),
        (f"{HERE}:Detector", {**held_out(), "loss": f"{HERE}:total"},
         rf"loss\.factory: .*:total: raised AttributeError{IN_EVALUATION}"),
        ("Counted", {"loss_weight": f"{HERE}:weight"}, r"loss\.weight: .*:weight: raised KeyError"),
        ("Counted", {"callbacks": {"c": f"{HERE}:gone"}}, r".*:gone: there is no 'gone'"),
        ("tied", {"pipeline": {"micro_batches": 2, "schedule": "pipedream-2bw"}},
         r"model: .* is used by several operators"),
        ("Counted", {"data": "Vectors", "training": {"steps": 1, "batch_size": 64},
                     "dropping": True}, r"data: 20 samples fill no batch of 64"),
    ],
)  # fmt: skip
def test_a_job_is_tried(spec_of, monkeypatch, model, sections, message) -> None:
    monkeypatch.setattr("pipectl.profiler.trial._PATIENCE_S", 1e9)
    dropping, weighing = sections.pop("dropping", False), sections.pop("loss_weight", None)
    spec = spec_of(model, **sections)
    if dropping:
        spec = spec.model_copy(update={"data": spec.data.model_copy(update={"drop_last": True})})
    if weighing:
        spec = spec.model_copy(update={"loss": spec.loss.model_copy(update={"weight": weighing})})
    job = CapturedJob(spec)
    with pytest.raises(InvalidInputError) if message else nullcontext() as raised:
        try_job(job, 4, CPU)
        try_metrics(job, 4, CPU)
    if not message:
        return
    assert re.match(message, raised.value.message, re.DOTALL), raised.value.message
    assert raised.value.hint


class Schedule(torch.optim.lr_scheduler.LRScheduler):
    """Fails when it steps."""

    def get_lr(self) -> list[float]:
        if self.last_epoch:
            raise ValueError("no rate")
        return [0.1]


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"lr_scheduler": f"{HERE}:Schedule"}, r"lr_scheduler: raised ValueError: no rate"),
        ({"lr_scheduler": f"{HERE}:weight"}, r"lr_scheduler\.factory: .*:weight: raised KeyError"),
        ({"optimizer": {"factory": "torch.optim:AdamW", "groups": [{"match": "*", "lr": "0.1"}]}},
         r"optimizer: raised TypeError"),
    ],
)  # fmt: skip
def test_optimizer_and_schedule_make_a_step(spec_of, sections, message) -> None:
    with pytest.raises(InvalidInputError) as raised:
        optimizer_cost(CapturedJob(spec_of(**sections)), CpuDevice())
    assert re.match(message, raised.value.message), raised.value.message


def deep() -> nn.Module:
    return nn.Sequential(
        nn.Linear(6, 256, bias=False), nn.Linear(256, 256, bias=False), nn.Linear(256, 3)
    )


class Matrices(torch.optim.Adafactor):
    """Takes nothing but matrices in one of its groups, as Muon does."""

    def step(self, closure: Any = None) -> None:
        assert all(p.dim() == 2 for p in self.param_groups[1]["params"])
        super().step(closure)


def test_an_optimizer_is_measured_on_parameters_with_the_dimensions_of_the_real_ones(
    spec_of, monkeypatch
) -> None:
    """Also if these have no memory, or are larger than a sample may be."""
    optimizer = {"factory": f"{HERE}:Matrices", "groups": [{"match": "*.weight", "lr": 0.1}]}

    def state_bytes(materialize: str) -> float:
        spec = spec_of(f"{HERE}:deep", materialize=materialize, optimizer=optimizer)
        return optimizer_cost(CapturedJob(spec), CpuDevice()).state_bytes_per_parameter_byte

    whole = state_bytes("eager")
    assert state_bytes("per_rank") == whole
    monkeypatch.setattr("pipectl.profiler.optimizer._SAMPLE_BYTES", 1 << 14)
    assert whole < state_bytes("per_rank") < 0.2


def test_a_profile_tries_the_job_first(spec_of) -> None:
    with pytest.raises(InvalidInputError, match=r"^evaluation\.metrics\.m: must give one number"):
        profile_job(spec_of(**measured(gives="matrix")), MeasuredOn("cpu"), effort=Effort.FAST)
