"""Options of parameters that no rank can know, and what trials of an optimizer leave as it was."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from pipectl.capture import CapturedJob
from pipectl.errors import CaptureError
from pipectl.profiler.optimizer import optimizer_cost
from pipectl.runtime.device import choose_device
from pipectl.runtime.option_trials import refuse_options, refuse_options_of_rank
from pipectl.runtime.update_trials import (
    loses_state,
    refuse_coupled_updates,
    refuse_late_changes,
    refuse_outer_state,
)
from pipectl.spec import load

HERE = Path(__file__)
CPU = torch.device("cpu")
Maker = Callable[..., CapturedJob]
MODELS: list[nn.Module] = []


class Scaled(nn.Module):
    """With a parameter of no dimension."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x * self.scale).unflatten(1, (3, 4))


def build() -> nn.Module:
    MODELS[:] = [nn.Sequential(nn.Linear(6, 5), nn.LayerNorm(5), nn.Linear(5, 12), Scaled())]
    return MODELS[0]


class Bare:
    """Around an optimizer, with what pipectl needs of one."""

    def __init__(self, groups: Any, **options: Any) -> None:
        self.inner = torch.optim.SGD(groups, **options)
        self.param_groups, self.state = self.inner.param_groups, self.inner.state

    def step(self) -> None:
        self.inner.step()


def divided(parameters: Any, by: str, ways: dict[str, Any] | None = None) -> Any:
    """An optimizer whose groups follow from all parameters, or from each."""
    one, two = parameters, []
    if by == "position":
        one, two = parameters[:4], parameters[4:]
    elif by == "last":
        one, two = parameters[:-1], parameters[-1:]
    elif by == "number":
        one, two = ([], one) if len(one) > 5 else (one, [])
    elif by == "size":
        one, two = ([], one) if sum(p.numel() for p in one) > 100 else (one, [])
    elif by == "kind":
        one, two = [p for p in one if p.dim() > 1], [p for p in one if p.dim() < 2]
    rate = 0.1
    if by == "norm":
        rate /= 1 + float(sum(p.detach().norm() for p in parameters))
    elif by == "random":
        rate = random.random()
    kind = (ways or {}).pop("name", "SGD")
    kind = Bare if kind == "Bare" else getattr(torch.optim, kind)
    if by == "labels":
        return kind([{"params": [p], "label": f"p{i}"} for i, p in enumerate(one)], lr=rate)
    groups = [{"params": one, "lr": rate}, {"params": two, "lr": 0.2}]
    return kind(groups, lr=rate, **(ways or {}))


def following(optimizer: Any, what: str) -> Any:
    """A schedule that follows some number."""
    own = random.Random(0)
    parameters = [p for group in optimizer.param_groups for p in group["params"]]

    def factor(step: int) -> float:
        if what == "norm":
            return 1 / (1 + sum(float(p.detach().norm()) for p in parameters))
        if what == "growth":
            weight = parameters[-1].detach()
            return (
                float(weight.norm() / first) if (first := norms.setdefault(0, weight.norm())) else 1
            )
        if what == "model":
            return 1 / (1 + sum(float(p.detach().norm()) for p in MODELS[0].parameters()))
        if what == "gradient":
            return 1 / (1 + sum(float(p.grad.norm()) for p in parameters if p.grad is not None))
        if what == "number":
            return 1 / len(parameters)
        if what == "random":
            return random.random()
        return own.random() if what == "seed" else 1 / (1 + step)

    norms: dict[int, Any] = {}
    return LambdaLR(optimizer, factor)


class Counting:
    """A schedule that counts its steps in its class."""

    steps = 0

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer

    def step(self) -> None:
        Counting.steps += 1
        for group in self.optimizer.param_groups:
            group["lr"] = 0.1 / (1 + Counting.steps)


RATE = torch.tensor(0.1)


def of_tensor(parameters: Any) -> Any:
    return torch.optim.Adam(parameters, lr=RATE, foreach=False)


@pytest.fixture
def job(make_spec: Any) -> Maker:
    """``job(kwargs, schedule, optimizer, **sections)``."""

    def make(
        kwargs: Any = None, schedule: Any = None, optimizer: str = "divided", **more: Any
    ) -> CapturedJob:
        if schedule is not None:
            kind = {"factory": f"{HERE}:following", "kwargs": {"what": schedule}}
            more["lr_scheduler"] = f"{HERE}:Counting" if schedule == "class" else kind
        factory = optimizer if ":" in optimizer else f"{HERE}:{optimizer}"
        made = {"factory": factory, "kwargs": kwargs or {}}
        return CapturedJob(make_spec(1, model=f"{HERE}:build", optimizer=made, **more))

    return make


@pytest.mark.parametrize("by", ["position", "last", "number", "size"])
def test_options_by_position_or_number_are_refused(job: Maker, by: str) -> None:
    """A rank would give other ones to the parameters of its stages."""
    words = r":divided gives another lr for '.*(0\.1 instead of 0\.2|0\.2 instead of 0\.1)\), so it"
    for ways in ({}, {"fused": True}, {"name": "Adagrad"}, {"name": "Bare"}):
        made = job({"by": by, "ways": ways})
        refuse_options(made, CPU, divides=False)
        with pytest.raises(CaptureError, match=words) as caught:
            refuse_options(made, CPU, divides=True)
        assert "write the groups under optimizer.groups" in str(caught.value.hint)
    made.release([name for name in made.states if not name.startswith("model.2")])  # as on a rank
    names = [*dict(made.wrapper.named_parameters())]
    refuse_options_of_rank(made, CPU, names)
    if by != "last":
        with pytest.raises(CaptureError, match=words):
            refuse_options_of_rank(made, CPU, names[4:])


@pytest.mark.parametrize("schedule", [None, "step", "seed"])
def test_options_by_each_parameter_and_rates_by_steps_are_not(job: Maker, schedule: Any) -> None:
    for name in ("SGD", "AdamW", "Adagrad", "Adafactor"):
        by = "labels" if name == "AdamW" and schedule is None else "kind"
        made = job({"by": by, "ways": {"name": name}}, schedule)
        before = {name: (each.data_ptr(), each.clone()) for name, each in made.states.items()}
        refuse_options(made, CPU, divides=True)
        refuse_coupled_updates(made, CPU)
        for name, (place, value) in before.items():
            assert made.states[name].data_ptr() == place
            assert torch.equal(made.states[name], value)


@pytest.mark.parametrize("by", ["norm", "random"])
def test_options_by_weights_or_random_numbers_are_refused(job: Maker, by: str) -> None:
    with pytest.raises(CaptureError, match=r"^optimizer: .* computes lr for '0.weight' from we"):
        refuse_options(job({"by": by}), CPU, divides=False)


@pytest.mark.parametrize("what", ["norm", "growth", "model", "gradient", "random"])
def test_rates_by_weights_or_random_numbers_are_refused(job: Maker, what: str) -> None:
    refuse_options(job({"by": "kind"}, "number"), CPU, divides=False)
    with pytest.raises(CaptureError, match=r"^lr_scheduler: .*:following computes rates from wei"):
        refuse_options(job({"by": "kind"}, what), CPU, divides=False)


def test_rates_by_the_number_of_parameters_are_refused(job: Maker) -> None:
    with pytest.raises(CaptureError, match=r"^lr_scheduler: .*:following has other rates for a pa"):
        refuse_coupled_updates(job({"by": "kind"}, "number"), CPU)


def test_a_schedule_that_goes_on_where_another_one_was_is_refused(job: Maker) -> None:
    words = r"^lr_scheduler: .*:{} keeps something in its class, in a variable"
    with pytest.raises(CaptureError, match=words.format("Counting")):
        refuse_outer_state(job(schedule="class", optimizer="torch.optim:SGD"), CPU)
    refuse_outer_state(job(optimizer="of_tensor"), CPU)
    with pytest.raises(CaptureError, match=words.format("following")):
        refuse_outer_state(job(schedule="step", optimizer="of_tensor"), CPU)
    assert float(RATE) == pytest.approx(0.1)


SCRIPT = """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3))
loader = DataLoader(TensorDataset(torch.randn(32, 4), torch.randint(0, 3, (32,))), batch_size=8)


class Own(torch.optim.SGD):
    def __init__(self, params, lr, clips=False):
        self.own, self.clips = list(params), clips
        super().__init__(self.own, lr=lr)

    def step(self, closure=None):
        held = [p for p in self.own if p.grad is not None]
        if self.clips:
            nn.utils.clip_grad_norm_(held, 1e-3)
        for p in held:
            p.data -= self.param_groups[0]["lr"] * p.grad


def clamp(*_):
    for p in model.parameters():
        p.data.clamp_(-0.1, 0.1)


def clip(*_):
    nn.utils.clip_grad_norm_(model.parameters(), 1e-3)


def norm(step):
    return 1 / (1 + sum(float(p.detach().norm()) for p in model.parameters()))


SETUP
for x, y in loader:
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(x), y).backward()
    optimizer.step()
    STEP
"""
SGD = "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)"
SCHEDULE = "schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, {})"


@pytest.fixture
def script(tmp_path: Path) -> Callable[..., CapturedJob]:
    """``script(*lines)``: a job of a script that makes the optimizer by these."""

    def make(*lines: str) -> CapturedJob:
        step = "schedule.step()" if any("LambdaLR" in line for line in lines) else ""
        path = tmp_path / "script.py"
        path.write_text(SCRIPT.replace("SETUP", "\n".join(lines)).replace("STEP", step))
        training = {"steps": 4, "batch_size": 8}
        spec = {"script": {"file": str(path)}, "training": training}
        spec["resources"] = {"nodes": 1, "tasks_per_node": 2}
        (tmp_path / "job.yaml").write_text(json.dumps(spec))
        return CapturedJob(load(tmp_path / "job.yaml"))

    return make


@pytest.mark.parametrize(
    "lines",
    [
        ("optimizer = Own(model.parameters(), 0.1)",),
        (SGD, "optimizer.register_step_post_hook(clamp)"),
        ("optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)",),
        (SGD, SCHEDULE.format("lambda step: min(1.0, step / 3)")),
    ],
)
def test_trials_leave_a_script_as_it_was(script: Any, lines: tuple[str, ...]) -> None:
    made = script(*lines)
    optimizer = made.script.optimizer
    before = {name: (each.data_ptr(), each.clone()) for name, each in made.states.items()}
    state = {key: str(value) for key, value in optimizer.state.items()}
    optimizer_cost(made, choose_device(0, 0))
    refuse_late_changes(made, CPU)
    assert not loses_state(made, CPU)
    for name, (place, value) in before.items():
        assert made.states[name].data_ptr() == place
        assert torch.equal(made.states[name], value)
        assert made.states[name].grad is None
    assert {key: str(value) for key, value in optimizer.state.items()} == state
    assert math.isfinite(optimizer.param_groups[0]["lr"])


@pytest.mark.parametrize(
    "lines",
    [
        ("optimizer = Own(model.parameters(), 0.1, clips=True)",),
        (SGD, "optimizer.register_step_pre_hook(clip)", SCHEDULE.format("lambda step: step / 3")),
    ],
)
def test_a_script_whose_optimizer_looks_at_all_parameters_is_refused(
    script: Any, lines: tuple[str, ...]
) -> None:
    """Also past its groups, and if its schedule begins with a rate of 0."""
    with pytest.raises(CaptureError, match="updates a parameter differently"):
        refuse_coupled_updates(script(*lines), CPU)


def test_a_script_whose_rates_follow_its_weights_is_refused(script: Any) -> None:
    with pytest.raises(CaptureError, match=r"^lr_scheduler: .* computes rates from weights"):
        refuse_options(script(SGD, SCHEDULE.format("norm")), CPU, divides=False)
