"""The optimizer of a job: its groups and its schedule, and which ones are refused."""

from __future__ import annotations

import math
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from mpi4py import MPI
from torch import nn

from pipectl.capture import CapturedJob
from pipectl.errors import CaptureError, WorkerError
from pipectl.runtime.changed_optimizer import restore_optimizer
from pipectl.runtime.checkpoint import Keep, Saver, Stored, take_snapshot
from pipectl.runtime.manifest import Manifest
from pipectl.runtime.optimizer import Updater, make_updater
from pipectl.runtime.option_trials import refuse_options
from pipectl.runtime.update_trials import (
    loses_state,
    refuse_coupled_updates,
    refuse_late_changes,
    refuse_outer_state,
    refuse_own_memory,
)

HERE = Path(__file__)
PARTS = HERE.with_name("job_parts.py")
PATTERNS = [{"match": "*.bias", "weight_decay": 0.0}, {"match": "1.*", "lr": 0.5}]
Maker = Callable[..., CapturedJob]


def build() -> nn.Module:
    model = nn.Sequential(
        nn.Linear(6, 3), nn.LayerNorm(3), nn.Linear(3, 12), nn.Unflatten(1, (3, 4))
    )
    model[0].bias.requires_grad_(False)
    return model


def turned() -> nn.Module:
    """Weights that are views of transposed ones, as those of images with channels last are."""
    model = build()
    for parameter in model.parameters():
        parameter.data = parameter.data.mT.contiguous().mT if parameter.dim() > 1 else parameter
    return model


def plateau(optimizer: Any, patience: int) -> Any:
    return torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=patience)


class Timed:
    """A schedule whose steps take what no evaluation gives, as those of timm do."""

    def __init__(self, optimizer: Any, takes: str) -> None:
        self.step = {
            "epoch": lambda epoch, metric=None: None,
            "steps": lambda num_updates: None,
            "both": lambda epoch, val_loss: None,
            "keyword": lambda *, score: None,
        }[takes]


def failing(optimizer: Any) -> Any:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: {0: 1.0}[step])


class Broken(torch.optim.SGD):
    def step(self, closure: Any = None) -> None:
        raise KeyError("beta3")


def returning(parameters: Any) -> Any:
    return parameters


def of_model(model: Any) -> Any:
    return torch.optim.SGD(model.parameters())


class StepOnly:
    def __init__(self, parameters: Any) -> None:
        self.parameters = parameters

    def step(self) -> None:
        pass


class Closing(torch.optim.SGD):
    """Looks around, as SAM does."""

    def step(self, closure: Any = None) -> None:
        closure()


class Modal(torch.optim.SGD):
    def train(self) -> None:
        pass

    def eval(self) -> None:
        pass


class Wrapping(torch.optim.Optimizer):
    def __init__(self, parameters: Any, inner: str) -> None:
        super().__init__(parameters, {"lr": 0.1})
        self.inner = getattr(torch.optim, inner)(self.param_groups, lr=0.1)

    def step(self, closure: Any = None) -> None:
        self.inner.step()


class Around:
    """No optimizer of torch, but around one; rebinds parameters to parts of copies in float64."""

    def __init__(self, parameters: Any) -> None:
        self.inner = torch.optim.SGD(parameters, lr=0.1)
        self.param_groups, self.state = self.inner.param_groups, self.inner.state

    def zero_grad(self) -> None:
        self.inner.zero_grad(set_to_none=False)

    def step(self) -> None:
        for p in self.param_groups[0]["params"]:
            wide = self.state[p].setdefault("wide", p.detach().double())
            wide -= 0.1 * p.grad
            p.data = wide.to(p.dtype)


class Ahead(torch.optim.SGD):
    """Looks ahead every few steps, which it counts itself."""

    def __init__(self, parameters: Any, every: int = 5) -> None:
        super().__init__(parameters, lr=0.1)
        self.every, self.count = every, 0

    def step(self, closure: Any = None) -> None:
        super().step()
        self.count += 1
        for parameter in self.param_groups[0]["params"] if self.count % self.every == 0 else []:
            parameter.data /= 2


class Stirring(torch.optim.SGD):
    """Adds noise that is small beside an update."""

    def __init__(self, parameters: Any, how: str) -> None:
        super().__init__(parameters, lr=0.1)
        self.how, self.own = how, torch.Generator().manual_seed(1)

    def step(self, closure: Any = None) -> None:
        for parameter in (p for group in self.param_groups for p in group["params"]):
            state, size = self.state[parameter], 1e-3
            state["count"] = count = state.get("count", 0) + 1
            if self.how == "python":
                size *= random.random()
            elif self.how == "numpy":
                size *= float(np.random.rand())
            else:
                generator = {"torch": None, "generator": self.own}.get(
                    self.how, torch.Generator().manual_seed(count)
                )
                size = 1e-3 * torch.rand(parameter.shape, generator=generator)
            parameter.data += size
        super().step()


class Late(torch.optim.SGD):
    """Does something only now and then, that needs all parameters or changes what is its own."""

    def __init__(self, parameters: Any, how: str) -> None:
        super().__init__(parameters, lr=0.1)
        self.how, self.count, self.size = how, 0, 1e-3

    def step(self, closure: Any = None) -> None:
        own = [p for group in self.param_groups for p in group["params"]]
        self.count += 1
        if self.how == "estimates":  # a step size from how far gradients have led, as Prodigy
            for p in own:
                sums = self.state[p].setdefault("sums", torch.zeros_like(p))
                sums += p.grad
            travelled = sum(float(self.state[p]["sums"].norm()) for p in own)
            self.size = max(self.size, travelled / 100)
            for p in own:
                p.grad *= self.size
        elif self.how == "clips":
            nn.utils.clip_grad_norm_(own, 1e4)
        elif self.how == "pulls" and self.count == 20:
            mean = sum(float(p.detach().mean()) for p in own) / len(own)
            for p in own:
                p.data.lerp_(torch.full_like(p, mean), 0.5)
        elif self.how == "float32":
            assert all(p.dtype == torch.float32 for p in own)
            nn.utils.clip_grad_norm_(own, 1e-3)
        elif self.how in ("replaces", "swaps") and self.count == 20:
            self.replace(own[0])
        elif self.how == "groups" and self.count == 20:
            self.param_groups[0]["lr"] /= 2
        super().step()

    def replace(self, parameter: nn.Parameter) -> None:
        if self.how == "swaps":
            torch.utils.swap_tensors(parameter, nn.Parameter(parameter.detach().clone()))
        else:
            parameter.data = parameter.data.half()


class Attached(torch.optim.Optimizer):
    """Momentum in an attribute of each parameter."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    def step(self, closure: Any = None) -> None:
        for p in self.param_groups[0]["params"]:
            p.velocity = 0.9 * getattr(p, "velocity", 0.0) + p.grad
            p.data -= 0.1 * p.velocity


class Drawing(torch.optim.SGD):
    """Adds noise by the generators that all share."""

    def step(self, closure: Any = None) -> None:
        for p in self.param_groups[0]["params"]:
            p.grad += random.gauss(0, 1) + float(np.random.rand())
        super().step()


COUNTS = {"steps": 0}


class Warming(torch.optim.SGD):
    """Takes smaller steps at first, which it counts in its class or in a variable."""

    count = 0

    def __init__(self, parameters: Any, where: str) -> None:
        super().__init__(parameters, lr=0.1)
        self.where = where

    def step(self, closure: Any = None) -> None:
        if self.where == "class":
            Warming.count += 1
        else:
            COUNTS["steps"] += 1
        share = min(1.0, (Warming.count if self.where == "class" else COUNTS["steps"]) / 20)
        for p in self.param_groups[0]["params"]:
            p.data -= 0.1 * share * p.grad


def by_kind(parameters: Any, *, fixed: bool = False) -> Any:
    """A group for each number of dimensions, in the order of parameters unless it is fixed."""
    kinds: dict[int, list[Any]] = {0: [], 1: [], 2: []} if fixed else {}
    for p in parameters:
        kinds.setdefault(p.dim(), []).append(p)
    return torch.optim.SGD([{"params": kind} for kind in kinds.values()], lr=0.1)


def by_group(optimizer: Any) -> Any:
    """Another rate for each group."""
    rates = [lambda step, k=k: 1 / (1 + k) for k in range(len(optimizer.param_groups))]
    return torch.optim.lr_scheduler.LambdaLR(optimizer, rates)


def two_rates(optimizer: Any) -> Any:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, [lambda step: 1.0, lambda step: 0.5])


class Large(torch.optim.SGD):
    def step(self, closure: Any = None) -> None:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried ...")


class Hooking(torch.optim.SGD):
    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters)
        self.param_groups[0]["params"][0].register_post_accumulate_grad_hook(print)


class Counting(torch.optim.SGD):
    def step(self, closure: Any = None) -> None:
        super().step(closure)
        for group in self.param_groups:
            group["k"] = group.get("k", 0) + 1


class Shared(torch.optim.SGD):
    """Keeps a count for all parameters together, as MADGRAD does, or a tensor for each."""

    def __init__(self, parameters: Any, kept: str = "") -> None:
        super().__init__(parameters, lr=0.1)
        self.kept = kept

    def step(self, closure: Any = None) -> None:
        super().step()
        state: Any = self.state
        if self.kept:
            k = torch.tensor([0]) if self.kept == "tensor" else 0
            state["k"] = state.get("k", k) + 1
            return
        for p in self.param_groups[0]["params"]:
            state[p] = state.get(p, torch.zeros(())) + p.grad.sum()
            p.data -= 0.1 * state[p]


class Following(torch.optim.SGD):
    """May keep a mean of the weights, which begins with their values."""

    def __init__(self, parameters: Any, mean: bool = False) -> None:
        super().__init__(parameters, lr=0.1, momentum=0.9)
        self.mean = mean

    def step(self, closure: Any = None) -> None:
        super().step()
        for p in self.param_groups[0]["params"] if self.mean else []:
            state = self.state[p]
            if "momentum_buffer" in state and "steps" not in state:
                state["steps"], state["mean"] = 0, p.detach().clone()
            state["mean"].lerp_(p, 0.1)


class Replacing(torch.optim.SGD):
    """Trains copies; parameters in half precision; or what it keeps in its state."""

    def __init__(self, parameters: Any, how: str) -> None:
        super().__init__(parameters)
        self.how, group = how, self.param_groups[0]
        if how == "copies":
            group["params"] = [nn.Parameter(p.detach().clone()) for p in group["params"]]

    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            if self.how == "half":
                parameter.data = parameter.data.half()
            elif self.how == "state":
                self.state[parameter]["kept"] = parameter.data


class Flat(torch.optim.SGD):
    """Moves all parameters into one vector, of which it keeps the parts."""

    def __init__(self, parameters: Any, lr: float = 0.1) -> None:
        super().__init__(parameters, lr)
        every = [p for group in self.param_groups for p in group["params"]]
        self.vector, self.parts = torch.cat([p.detach().reshape(-1) for p in every]), []
        for part, p in zip(self.vector.split([p.numel() for p in every]), every, strict=True):
            p.data = part.view(p.shape)
            self.parts.append((p, p.data))

    def step(self, closure: Any = None) -> None:
        for parameter, part in self.parts:
            part -= 0.1 * parameter.grad


class Keeping(torch.optim.SGD):
    def __init__(self, parameters: Any, kept: str) -> None:
        super().__init__(parameters)
        self.kept = {1} if kept == "set" else torch.zeros(1, dtype=torch.complex128)

    def step(self, closure: Any = None) -> None:
        super().step(closure)
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["kept"] = self.kept


@pytest.fixture
def job(make_spec: Any) -> Maker:
    """``job(optimizer, kwargs, groups, **sections)``: an optimizer of torch, or of this file."""

    def make(name: str = "AdamW", kwargs: Any = None, groups: Any = (), **more: Any) -> CapturedJob:
        factory = f"torch.optim:{name}" if hasattr(torch.optim, name) else f"{HERE}:{name}"
        optimizer = {"factory": factory, "kwargs": kwargs or {}, "groups": list(groups)}
        spec = make_spec(1, **{"model": f"{HERE}:build", "optimizer": optimizer, **more})
        return CapturedJob(spec)

    return make


def updater_of(job: CapturedJob, *names: str) -> Updater:
    """The updater of a rank with these parameters, by default all."""
    every = dict(job.wrapper.named_parameters())
    return make_updater(job, {n: p for n, p in every.items() if not names or n in names})


def groups_of(job: CapturedJob, updater: Updater) -> list[tuple[list[str], dict[str, Any]]]:
    names = {id(p): name.removeprefix("model.") for name, p in job.wrapper.named_parameters()}
    assert updater.optimizer is not None
    return [
        ([names[id(p)] for p in group["params"]], group) for group in updater.optimizer.param_groups
    ]


def test_groups_follow_the_rest_and_keep_the_other_options(job: Maker) -> None:
    made = job(kwargs={"lr": 0.1})
    ((names, options),) = groups_of(made, updater_of(made))
    assert names == ["0.weight", "1.weight", "1.bias", "2.weight", "2.bias"]  # 0.bias is frozen
    assert options["lr"] == 0.1
    made = job(kwargs={"lr": 0.1, "weight_decay": 0.2}, groups=PATTERNS)
    found = [
        (names, options["lr"], options["weight_decay"])
        for names, options in groups_of(made, updater_of(made))
    ]
    assert found == [
        (["0.weight", "2.weight"], 0.1, 0.2),
        (["1.bias", "2.bias"], 0.1, 0.0),
        (["1.weight"], 0.5, 0.2),
    ]


def test_a_rank_has_every_group_for_schedules_that_count_them(job: Maker) -> None:
    cycle = {"max_lr": [0.1, 0.2, 0.3], "total_steps": 10}
    schedule = {"factory": "torch.optim.lr_scheduler:OneCycleLR", "kwargs": cycle}
    made = job(kwargs={"lr": 0.1}, groups=PATTERNS, lr_scheduler=schedule)
    updater = updater_of(made, "model.2.bias")
    assert [names for names, _ in groups_of(made, updater)] == [[], ["2.bias"], []]
    made.wrapper.model[2].bias.grad = torch.ones(12)
    before = updater.learning_rate
    updater.step()
    assert updater.learning_rate != before
    assert made.wrapper.model[2].bias.grad is None
    for idle in (updater_of(made, "model.0.bias"), make_updater(made, {})):  # one is frozen
        idle.step()
        assert (idle.optimizer, idle.lr_scheduler) == (None, None)
        assert math.isnan(idle.learning_rate)


def test_a_schedule_that_takes_a_loss_follows_evaluations(job: Maker) -> None:
    for factory in (f"{HERE}:plateau", "torch.optim.lr_scheduler:ReduceLROnPlateau"):
        schedule = {"factory": factory, "kwargs": {"patience": 1}}
        held_out = {"data": f"{PARTS}:Samples", "every": 1}
        made = job("SGD", {"lr": 1.0}, lr_scheduler=schedule, evaluation=held_out)
        updater, rates = updater_of(made), []
        for loss in (1.0, math.nan, 1.0, 0.5, 0.7):
            updater.step()
            updater.watch(loss)
            rates.append(updater.learning_rate)
        assert rates == [1.0, 1.0, 0.1, 0.1, 0.1]
        again = updater_of(made)
        again.restore(updater.updates, updater.losses)
        assert (again.learning_rate, again.updates, len(again.losses)) == (0.1, 5, 5)
        assert str(again.lr_scheduler.state_dict()) == str(updater.lr_scheduler.state_dict())
        idle = make_updater(made, {})
        idle.watch(1.0)
        assert idle.losses == []


def first_step_of(made: CapturedJob) -> Updater:
    """After a step with gradients of 1."""
    updater = updater_of(made)
    for parameter in made.wrapper.parameters():
        parameter.grad = torch.ones_like(parameter)
    updater.step()
    return updater


def test_an_object_around_an_optimizer_is_one(job: Maker) -> None:
    made = job("Around")
    updater = first_step_of(made)
    assert updater.updates == 1
    assert all(each.grad is None for each in updater.parameters.values())


PLATEAU = {"factory": f"{HERE}:plateau", "kwargs": {"patience": 1}}
HELD_OUT = {"data": f"{PARTS}:Samples"}
OFTEN = {**HELD_OUT, "every": 1}
RISING = {"factory": "torch.optim.lr_scheduler:ReduceLROnPlateau", "kwargs": {"mode": "max"}}
NEEDS_EVALUATIONS = r"^lr_scheduler: ReduceLROnPlateau needs.*set evaluation.every"


def timed(takes: str) -> dict[str, Any]:
    return {"factory": f"{HERE}:Timed", "kwargs": {"takes": takes}}


@pytest.mark.parametrize(
    ("name", "how", "words"),
    [
        ("AdamW", {"groups": [{"match": "*", "weight_decy": 0.0}]}, "no .* mean 'weight_decay'"),
        ("AdamW", {"groups": [{"match": "*", "params": 0.0}]}, "has no option 'params'"),
        ("AdamW", {"groups": [{"match": "bias"}]}, r"groups\[0\]\.match: 'bias' matches no "),
        ("AdamW", {"kwargs": {"rate": 1.0}}, r"^optimizer\.factory: torch\.optim:AdamW: raised "),
        ("Muon", {}, r"^optimizer: Muon .* 1\.weight and 2 more.* optimizer\.groups"),
        ("LBFGS", {}, r"^optimizer: LBFGS\.step\(\) needs a closure"),
        ("Closing", {}, r"^optimizer: Closing\.step\(\) needs a closure"),
        ("Modal", {}, r"^optimizer: Modal has modes, train\(\) and eval\(\)"),
        ("Broken", {}, r"^optimizer: raised KeyError: 'beta3' \(at .*test_optimizer"),
        ("Hooking", {}, r"^model: parameter 0\.weight has a hook"),
        ("Counting", {}, "Counting keeps 'k' in its parameter groups"),
        ("Shared", {"kwargs": {"kept": "tensor"}}, "Shared keeps 'k' in its state for all param"),
        ("Shared", {"kwargs": {"kept": "number"}}, "keeps 'k' in .*self.state.parameter..'k'."),
        ("Keeping", {"kwargs": {"kept": "set"}}, "the state of 0.weight/kept is a set, which"),
        ("Keeping", {"kwargs": {"kept": "complex"}}, "kept is a Tensor of torch.complex128"),
        ("Replacing", {"kwargs": {"how": "copies"}}, "put other tensors into its parameter groups"),
        ("Replacing", {"kwargs": {"how": "half"}}, "replaced '0.weight' by a tensor of another"),
        ("Replacing", {"kwargs": {"how": "state"}}, "keeps '0.weight' itself in its state"),
        ("AdamW", {"lr_scheduler": f"{HERE}:failing"}, r"^lr_scheduler: raised KeyError: 1 \(at "),
        ("AdamW", {"lr_scheduler": f"{HERE}:two_rates"}, "ValueError.*each rank makes the optim"),
        ("AdamW", {"lr_scheduler": "builtins:id"}, "returned a int, not a schedule of learning"),
        ("returning", {}, "^optimizer.factory: .*returned a list, not an optimizer.*return an opt"),
        ("returning", {"groups": [{"match": "*"}]}, "^optimizer.factory: .*returned a list, not a"),
        ("StepOnly", {}, "returned a StepOnly, not an optimizer with param_groups and state"),
        (
            "of_model",
            {},
            "'list' object has no attribute 'parameters'.*gets the list of parameters",
        ),
        (
            "AdamW",
            {"lr_scheduler": timed("epoch")},
            r"Timed.step\(\) needs 'epoch', and .*LambdaLR",
        ),
        (
            "AdamW",
            {"lr_scheduler": timed("steps"), "evaluation": OFTEN},
            "needs 'num_updates', and",
        ),
        ("AdamW", {"lr_scheduler": timed("both"), "evaluation": OFTEN}, "needs 'epoch' and 'val_l"),
        ("AdamW", {"lr_scheduler": timed("keyword"), "evaluation": OFTEN}, "needs 'score', and"),
        ("AdamW", {"lr_scheduler": RISING, "evaluation": OFTEN}, r"rises \(mode='max'\), and pipe"),
        ("AdamW", {"lr_scheduler": PLATEAU}, NEEDS_EVALUATIONS),
        ("AdamW", {"lr_scheduler": PLATEAU, "evaluation": HELD_OUT}, NEEDS_EVALUATIONS),
    ],
)
def test_what_is_wrong_with_an_optimizer_or_a_schedule_is_named(
    job: Maker, name: str, how: dict[str, Any], words: str
) -> None:
    with pytest.raises((CaptureError, WorkerError)) as caught:
        first_step_of(job(name, **how))
    assert caught.value.exit_code == (1 if "raised KeyError" in words else 3)
    assert re.search(words, f"{caught.value.message} {caught.value.hint}")


def test_an_update_that_lacks_memory_is_no_fault_of_the_optimizer(job: Maker) -> None:
    """What to do about it is said where the rank fails."""
    with pytest.raises(RuntimeError, match="can't allocate memory"):
        first_step_of(job("Large"))


CYCLE = {
    "factory": "torch.optim.lr_scheduler:OneCycleLR",
    "kwargs": {"max_lr": 0.1, "total_steps": 9},
}
MOMENTA: dict[str, Any] = {"SGD": {"momentum": 0.9}, "AdamW": {"betas": [0.9, 0.99]}}
OTHERS = "Adadelta Adagrad Adam Adamax ASGD NAdam RAdam RMSprop Rprop Adafactor"


@pytest.mark.parametrize("name", [*MOMENTA, *OTHERS.split()])
def test_optimizers_of_torch_may_be_shared_out_and_keep_nothing_in_their_groups(
    job: Maker, name: str
) -> None:
    """What a schedule changes there, momentum too, is none of theirs."""
    momentum = MOMENTA.get(name, {})
    schedule = {"lr_scheduler": CYCLE} if momentum else {}
    for way in ({}, {"foreach": True}, {"fused": True}):
        made = job(name, {"lr": 0.1, **momentum, **way}, **schedule)
        made.states["model.empty"] = empty = nn.Parameter(torch.empty(0, 2, 2))
        made.sizes["model.empty"] = empty.shape
        refuse_coupled_updates(made, torch.device("cpu"))
        if not way:
            assert first_step_of(made).updates == 1
            assert not loses_state(made, torch.device("cpu"))


def test_an_optimizer_that_keeps_the_memory_of_parameters_has_no_older_weights(job: Maker) -> None:
    for name in ("AdamW", "Keeping"):
        kwargs = {"kept": "complex"} if name == "Keeping" else {}
        refuse_own_memory(job(name, kwargs), torch.device("cpu"))
    with pytest.raises(CaptureError, match=r":Flat keeps the memory of parameters"):
        refuse_own_memory(job("Flat"), torch.device("cpu"))
    assert first_step_of(job("Flat")).updates == 1


@pytest.mark.parametrize("name", ["AdamW", "SGD", "Adagrad"])
def test_states_come_back_in_the_order_of_their_parameters_in_memory(job: Maker, name: str) -> None:
    """Fused kernels go over the memory of parameters and states without looking at strides."""
    kwargs = {**MOMENTA.get(name, {}), "lr": 0.1, "fused": True}
    made = job(name, kwargs, model=f"{HERE}:turned")
    assert not any(p.is_contiguous() for p in made.states.values() if p.dim() > 1)
    assert not loses_state(made, torch.device("cpu"))


@pytest.mark.parametrize(
    ("name", "kwargs", "loses"),
    [
        ("Ahead", {}, True),
        ("Wrapping", {"inner": "AdamW"}, True),
        ("Wrapping", {"inner": "SGD"}, False),
        ("Flat", {}, False),
        ("Shared", {}, False),
        ("Attached", {}, True),
    ],
)
def test_state_that_no_checkpoint_has_is_found(
    job: Maker, name: str, kwargs: dict[str, Any], loses: bool
) -> None:
    assert loses_state(job(name, kwargs), torch.device("cpu")) is loses


@pytest.mark.parametrize(
    ("name", "kwargs"),
    [
        *(("Coupled", {"kind": kind}) for kind in ("all", "groups", "noise")),
        *(("Late", {"how": how}) for how in ("estimates", "clips", "pulls", "float32")),
        *(("Stirring", {"how": how}) for how in ("python", "numpy", "torch", "generator")),
    ],
)
def test_an_optimizer_that_looks_at_all_parameters_is_refused(
    job: Maker, name: str, kwargs: dict[str, Any]
) -> None:
    file = PARTS if name == "Coupled" else HERE
    optimizer = {"factory": f"{file}:{name}", "kwargs": kwargs}
    for groups in ([], [{"match": "1.*", "lr": 0.02}]):
        made = job(optimizer={**optimizer, "groups": groups})
        with pytest.raises(CaptureError, match=rf"\.py:{name} updates a parameter differently"):
            refuse_coupled_updates(made, torch.device("cpu"))


def test_an_optimizer_may_draw_numbers_that_follow_from_the_step_alone(job: Maker) -> None:
    refuse_coupled_updates(job("Stirring", {"how": "seeded"}), torch.device("cpu"))


@pytest.mark.parametrize("where", ["class", "module"])
def test_an_optimizer_that_goes_on_where_another_one_was_is_refused(job: Maker, where: str) -> None:
    """All trials would count as steps of the training."""
    before = random.getstate()
    for allowed in ("AdamW", "Ahead", "Attached", "Drawing", "Late"):
        kwargs = {"how": "estimates"} if allowed == "Late" else {}
        refuse_outer_state(job(allowed, kwargs), torch.device("cpu"))
    assert random.getstate() == before
    with pytest.raises(CaptureError, match=r":Warming keeps something in its class, or in a var"):
        refuse_outer_state(job("Warming", {"where": where}), torch.device("cpu"))


def test_groups_that_are_in_another_order_on_other_ranks_need_one_schedule(job: Maker) -> None:
    own = {"lr_scheduler": f"{HERE}:by_group"}
    for kwargs, schedule in (({"fixed": True}, own), ({}, {}), ({}, {"lr_scheduler": CYCLE})):
        made = job("by_kind", kwargs, **schedule)
        refuse_options(made, torch.device("cpu"), divides=True)
        refuse_coupled_updates(made, torch.device("cpu"))
    with pytest.raises(CaptureError, match=r"^lr_scheduler: .*:by_group has other rates") as caught:
        refuse_options(job("by_kind", **own), torch.device("cpu"), divides=True)
    assert "write them under optimizer.groups" in str(caught.value.hint)


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("replaces", "replaced '0.weight' by a tensor of another type"),
        ("swaps", r"or has swapped it \(swap_tensors\)"),
        ("groups", "keeps 'lr' in"),
    ],
)
def test_what_ranks_refuse_is_found_if_it_comes_late(job: Maker, how: str, words: str) -> None:
    for allowed in ("Ahead", "Around"):
        refuse_late_changes(job(allowed), torch.device("cpu"))
    with pytest.raises(CaptureError, match=words):
        refuse_late_changes(job("Late", {"how": how}), torch.device("cpu"))


def test_a_checkpoint_notes_the_options_of_each_parameter_by_itself(job: Maker) -> None:
    """Those of the rank that loads its state may make other groups."""
    made = job("by_kind", {})
    whole = updater_of(made)
    for name in whole.parameters:
        assert updater_of(made, name).origin(name) == whole.origin(name)
    assert len({updater_of(job(f, {})).origin(name) for f in ("by_kind", "SGD")}) == 2


@pytest.mark.parametrize(
    ("before", "after", "kept", "told"),
    [
        (("AdamW", {}), ("AdamW", {"lr": 0.5, "weight_decay": 0.1}), True, ""),
        (("AdamW", {"amsgrad": True}), ("AdamW", {"fused": True}), True, ""),
        (
            ("Adam", {}),
            ("Adam", {"amsgrad": True, "weight_decay": 0.1}),
            True,
            "'max_exp_avg_sq', ",
        ),
        (
            ("RMSprop", {}),
            ("RMSprop", {"momentum": 0.9, "centered": True}),
            True,
            "buffer' and 'gr",
        ),
        (("SGD", {}), ("SGD", {"momentum": 0.9}), True, ""),
        (("SGD", {"momentum": 0.9}), ("AdamW", {}), False, "AdamW begins with new .* torch.SGD$"),
        (("Adam", {}), ("RAdam", {}), False, "torch.RAdam begins with new state; .* torch.Adam$"),
        (
            ("Following", {}),
            ("Following", {"mean": True}),
            False,
            "'mean', so that all its state b",
        ),
    ],
)
def test_a_run_may_go_on_with_other_options_or_another_optimizer(
    job: Maker, tmp_path: Path, before: Any, after: Any, kept: bool, told: str
) -> None:
    first = first_step_of(job(*before))
    writer = Saver(MPI.COMM_SELF, tmp_path, Keep(1), 1, print)
    states = first.parameters
    writer.start(Manifest(1, 1, {}), take_snapshot(states, {n: n for n in states}, first, states))
    writer.finish()
    made = job(*after)
    again = updater_of(made)
    said = restore_optimizer(Stored(tmp_path / "step-000001"), made, again, again.parameters)
    assert [bool(re.search(told, words)) for words in said] == [True] * bool(told), said
    for name, parameter in first.parameters.items():
        old, new = (dict(u.optimizer.state.get(u.parameters[name], {})) for u in (first, again))
        found = {key: new.get(key) for key in old}
        assert str(found) == str(old) if kept else not new, parameter
    for parameter in again.parameters.values():
        parameter.grad = torch.ones_like(parameter)
    again.step()
