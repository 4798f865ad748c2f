"""Compiled stages: the same masks, gradients within rounding, and no new code for a new seed."""

from __future__ import annotations

import shutil
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx

from pipectl.capture import Slot
from pipectl.capture.randomness import seed_operator
from pipectl.capture.regions import WHOLE, Autocast, Region, Switch
from pipectl.capture.stage import StageCode
from pipectl.runtime.stage_code import compile_stage

WEIGHT, INPUT = torch.linspace(-1, 1, 48).view(6, 8), torch.linspace(-2, 2, 24).view(3, 8)


def stage() -> StageCode:
    """A layer and a dropout, as the builder of stages writes them."""
    graph = fx.Graph()
    seed, weight, x = (graph.placeholder(name) for name in ("seed", "weight", "x"))
    layer = graph.call_function(F.gelu, (graph.call_function(F.linear, (x, weight)),))
    graph.call_function(seed_operator, (seed, 7))
    dropped = graph.call_function(F.dropout, (layer, 0.5))
    graph.output((graph.call_function(torch.sin, (dropped,)),))
    module = fx.GraphModule(torch.nn.Module(), graph)
    return StageCode(module, (Slot("weight"),), ("x",), (), (Slot("sin"),))


def trained(code: StageCode, seed: int) -> tuple[Tensor, Tensor]:
    weight = WEIGHT.clone().requires_grad_()
    (result,) = code.module(seed, weight, INPUT)
    result.sum().backward()
    assert weight.grad is not None
    return result.detach(), weight.grad


@pytest.mark.skipif(not shutil.which("g++"), reason="needs a C++ compiler")
def test_compiled_stages_draw_the_same_masks_and_agree_within_rounding() -> None:
    compiled = compile_stage(stage())
    for seed in (1, 2, 3):
        expected, found = trained(stage(), seed), trained(compiled, seed)
        assert torch.equal(found[0] == 0, expected[0] == 0)
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other)
    assert not torch.equal(trained(compiled, 1)[0], trained(compiled, 2)[0])


def test_compiled_stages_follow_an_autocast_inside_the_model() -> None:
    graph = fx.Graph()
    _, weight, x = (graph.placeholder(name) for name in ("seed", "weight", "x"))
    switch = Switch(graph)
    switch.to(Region((Autocast("cpu", torch.bfloat16, enabled=True),), gradients=True))
    half = graph.call_function(F.linear, (x, weight))
    switch.to(WHOLE)
    whole = graph.call_function(F.linear, (x, weight))
    graph.output((graph.call_function(torch.add, (whole, half)),))
    module = fx.GraphModule(torch.nn.Module(), graph)
    code = StageCode(module, (Slot("weight"),), ("x",), (), (Slot("add"),))
    compiled = compile_stage(code, "eager")
    for _ in range(2):
        for one, other in zip(trained(compiled, 1), trained(code, 1), strict=True):
            assert one.dtype == other.dtype
            torch.testing.assert_close(one, other)


def test_a_new_seed_compiles_nothing_anew() -> None:
    compiled: list[int] = []

    def counting(module: fx.GraphModule, _: Any) -> Any:
        compiled.append(len(module.graph.nodes))
        return module

    code = compile_stage(stage(), counting)
    trained(code, 1)
    pieces = len(compiled)
    assert pieces == 2  # what is before the dropout, and what is behind it
    trained(code, 2)
    trained(code, 3)
    assert len(compiled) == pieces
