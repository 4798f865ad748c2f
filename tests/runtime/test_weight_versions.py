"""Versions of the weights: what autograd needs, not a copy more."""

import pytest
import torch
from torch import nn

from pipectl.errors import CaptureError, MismatchError
from pipectl.runtime.asynchronous import refuse
from pipectl.runtime.step import Step, StepRun
from pipectl.runtime.versions import Versions
from pipectl.schedule.actions import EMPTY
from pipectl.spec.models import Training


def forward(versions, age, inputs, weight, bias):
    version = versions.of_age(age)
    leaves = [version.leaves[id(each)] for each in (weight, bias)]
    return version, torch.nn.functional.linear(inputs, *leaves).tanh().square().sum()


def step(versions, optimizer, in_use):
    versions.before_update(in_use)
    optimizer.step()
    versions.after_update()


def test_nothing_is_copied_where_nothing_waits():
    layer = nn.Linear(3, 2)
    versions, optimizer = (
        Versions(list(layer.parameters()), kept=1),
        torch.optim.SGD(layer.parameters(), lr=0.1),
    )
    address = layer.weight.data_ptr()
    version, loss = forward(versions, 0, torch.ones(1, 3), layer.weight, layer.bias)
    loss.backward()
    versions.collect(version)
    step(versions, optimizer, [])
    assert layer.weight.data_ptr() == address
    version, _ = forward(versions, 0, torch.ones(1, 3), layer.weight, layer.bias)
    step(versions, optimizer, [version])
    assert layer.weight.data_ptr() != address
    assert version.leaves[id(layer.weight)].data_ptr() == address


def test_seeds_are_those_of_flushed_steps():
    rows = Step(EMPTY, (), 0, ())
    stretch = StepRun(rows, seed=(7, 4), per_step=2)
    flushed = [StepRun(rows, seed=(7, step)) for step in (4, 5)]
    seeds = [stretch.seed_of(index) for index in range(4)]
    assert seeds == [step.seed_of(index) for step in flushed for index in range(2)]
    assert len(set(seeds)) == 4


@pytest.mark.parametrize(
    ("training", "message"),
    [({"clip_grad_norm": 1.0}, "training.clip_grad_norm needs"),
     ({"precision": "float16"}, "training.precision: float16 needs")],
)  # fmt: skip
def test_what_needs_all_stages_at_once_is_refused(training, message):
    with pytest.raises(MismatchError, match=message):
        refuse(Training(steps=1, batch_size=1, **training), "pipedream", {})


def test_weights_with_several_uses_are_refused():
    with pytest.raises(CaptureError, match=r"'head\.weight' is used by several operators"):
        refuse(Training(steps=1, batch_size=1), "pipedream", {"model.head.weight": ()})
