"""Calls between the operators of a stage, in which messages advance."""

import torch
from torch import fx

from pipectl.runtime.stage_code import TICK_EVERY, insert_ticks


def test_every_few_operators_there_is_a_call_forward_and_backward():
    graph = fx.Graph()
    value = graph.placeholder("x")
    for _ in range(2 * TICK_EVERY):
        value = graph.call_function(torch.sin, (value,))
    graph.output(value)
    module = fx.GraphModule(torch.nn.Module(), graph)
    calls = []
    insert_ticks(module, lambda: calls.append("call"))
    result = module(torch.ones(3, requires_grad=True))
    assert len(calls) == 2
    result.sum().backward()
    assert len(calls) == 4
