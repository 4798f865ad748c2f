"""Marks in a stage's code: whose time is whose, and that results stay the same."""

from __future__ import annotations

import itertools

import torch
from torch import fx

from pipectl.capture.randomness import seed_operator
from pipectl.capture.stage import StageCode
from pipectl.profiler.bench import Cost, MarkedCode, cost_of_measuring


def ticking():
    """A clock that shows one second more at every look."""
    count = itertools.count()
    return lambda: float(next(count))


FREE = Cost(0.0, 0.0)


def measured(x: torch.Tensor, cost: Cost = FREE) -> tuple[torch.Tensor, MarkedCode]:
    """The result of a chain of operators, after its backward if it has one."""
    graph = fx.Graph()
    given = graph.placeholder("x")
    doubled = graph.call_function(torch.mul, (given, 2.0), name="double")
    graph.call_function(seed_operator, (1, 2))
    squared = graph.call_function(torch.square, (doubled,), name="square")
    graph.output((graph.call_function(torch.add, (squared, doubled), name="add"),))
    code = StageCode(fx.GraphModule({}, graph), (), (), (), ())
    marked = MarkedCode(code, {"double", "square", "add"}, ticking(), cost)
    (result,) = marked(x)
    marked.watch_backward()
    if result.requires_grad:
        result.backward()
    return result, marked


def test_marked_code_gives_the_same_and_the_times_of_its_parts() -> None:
    x = torch.tensor(3.0, requires_grad=True)
    result, marked = measured(x)
    assert result.item() == 42.0
    assert x.grad is not None
    assert x.grad.item() == 26.0
    assert marked.spent(100.0) == {
        "double": (1.0, 100.0 - 6.0),  # its backward is the last: up to the end
        "square": (1.0, 1.0),
        "add": (1.0, 1.0),  # one node, one look at the clock
    }


def test_what_was_there_before_belongs_to_no_operator() -> None:
    _, marked = measured(torch.tensor(3.0, requires_grad=True).exp())
    assert sum(backward_s for _, backward_s in marked.spent(7.0).values()) == 3.0


def test_the_cost_of_measuring_is_taken_off_but_no_time_is_negative() -> None:
    _, marked = measured(torch.tensor(3.0, requires_grad=True), Cost(0.25, 5.0))
    spent = marked.spent(100.0)
    assert {forward_s for forward_s, _ in spent.values()} == {0.75}
    assert spent["add"][1] == 0.0


def test_a_stage_without_gradients_spends_nothing_in_its_backward() -> None:
    _, marked = measured(torch.tensor(3.0))
    assert {backward_s for _, backward_s in marked.spent(100.0).values()} == {0.0}


def test_measuring_costs_something() -> None:
    cost = cost_of_measuring(ticking())
    assert cost.mark_s > 0
    assert cost.hook_s >= 0
