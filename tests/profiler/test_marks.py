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


def code(graph: fx.Graph, last: fx.Node) -> StageCode:
    graph.output((last,))
    return StageCode(fx.GraphModule({}, graph), (), (), (), ())


def chain() -> StageCode:
    graph = fx.Graph()
    x = graph.placeholder("x")
    doubled = graph.call_function(torch.mul, (x, 2.0), name="double")
    graph.call_function(seed_operator, (1, 2))
    squared = graph.call_function(torch.square, (doubled,), name="square")
    again = graph.call_function(torch.add, (squared, doubled), name="add")
    return code(graph, again)


def test_marked_code_gives_the_same_and_knows_the_parts_of_the_forward() -> None:
    marked = MarkedCode(chain(), {"double", "square", "add"}, ticking(), Cost(0.0, 0.0))
    x = torch.tensor(3.0, requires_grad=True)
    (result,) = marked(x)
    assert result.item() == 42.0
    marked.watch_backward()
    result.backward()
    assert x.grad is not None
    assert x.grad.item() == 26.0
    forward = {name: forward_s for name, (forward_s, _) in marked.spent(100.0).items()}
    assert forward == {"double": 1.0, "square": 1.0, "add": 1.0}


def test_every_node_of_the_backward_belongs_to_the_operator_that_made_it() -> None:
    marked = MarkedCode(chain(), {"double", "square", "add"}, ticking(), Cost(0.0, 0.0))
    (result,) = marked(torch.tensor(3.0, requires_grad=True))
    marked.watch_backward()
    result.backward()
    backward = {name: backward_s for name, (_, backward_s) in marked.spent(100.0).items()}
    assert backward["add"] == backward["square"] == 1.0  # one node each, one look at the clock
    assert backward["double"] == 100.0 - 6.0  # the last: up to the end


def test_what_was_there_before_belongs_to_no_operator() -> None:
    marked = MarkedCode(chain(), {"double", "square", "add"}, ticking(), Cost(0.0, 0.0))
    x = torch.tensor(3.0, requires_grad=True)
    (result,) = marked(x.exp())
    marked.watch_backward()
    result.backward()
    assert (
        sum(backward_s for _, backward_s in marked.spent(7.0).values()) == 3.0
    )  # of exp's node nothing


def test_the_cost_of_measuring_is_taken_off_but_no_time_is_negative() -> None:
    marked = MarkedCode(chain(), {"double", "square", "add"}, ticking(), Cost(0.25, 5.0))
    (result,) = marked(torch.tensor(3.0, requires_grad=True))
    marked.watch_backward()
    result.backward()
    spent = marked.spent(100.0)
    assert {forward_s for forward_s, _ in spent.values()} == {0.75}
    assert spent["add"][1] == 0.0


def test_a_stage_without_gradients_spends_nothing_in_its_backward() -> None:
    marked = MarkedCode(chain(), {"double", "square", "add"}, ticking(), Cost(0.0, 0.0))
    marked(torch.tensor(3.0))
    marked.watch_backward()
    assert {backward_s for _, backward_s in marked.spent(100.0).values()} == {0.0}


def test_measuring_costs_something() -> None:
    cost = cost_of_measuring(ticking())
    assert cost.mark_s > 0
    assert cost.hook_s >= 0
