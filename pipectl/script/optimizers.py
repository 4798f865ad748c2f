"""The script's optimizer and learning-rate schedule, for some of its parameters.

A rank updates the parameters of its stages only. It uses the script's own optimizer and schedule,
whose groups are cut down to these parameters: whatever options they have, they keep.
"""

from __future__ import annotations

import ast
import copy
import warnings
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.optim.optimizer import Optimizer

from pipectl.faults import is_user_code
from pipectl.script.hooks import Seen
from pipectl.script.loops import Loop, part_around, tree_of
from pipectl.script.values import value_of
from pipectl.torch_api import pytree


def cut_down(
    optimizer: Optimizer,
    tensors: Mapping[int, nn.Parameter],
    sizes: Mapping[int, Sequence[int]] | None = None,
) -> Optimizer:
    """Return an optimizer with the same options for some of the parameters.

    Args:
        tensors: the parameters to update, by the ids of those that the script's optimizer holds.
        sizes: of the latter, if these have others for a while.
    """
    groups = [
        {
            **pytree.tree_map_only(Tensor, torch.clone, {**group, "params": ()}),  # such as lr
            "params": [tensors[id(p)] for p in group["params"] if id(p) in tensors],
        }
        for group in optimizer.param_groups
    ]
    every: Mapping[Any, Any] = optimizer.state
    state: dict[Any, Any] = {}
    for key, value in every.items():
        if not isinstance(key, Tensor):  # of all parameters
            state[key] = copy.copy(value)
        elif id(key) in tensors:
            state[tensors[id(key)]] = _fitting(
                value, key.shape if sizes is None else sizes[id(key)], tensors[id(key)]
            )
    other = type(optimizer).__new__(type(optimizer))
    vars(other).update({k: v for k, v in vars(optimizer).items() if k != "step"})
    vars(other).update(param_groups=groups, state=defaultdict(dict, state))
    vars(other)["defaults"] = dict(optimizer.defaults)
    return other


def _fitting(state: Any, sizes: Sequence[int], parameter: nn.Parameter) -> Any:
    """A copy of the state of a parameter of some sizes, for one that may have others in a trial."""
    if not isinstance(state, dict):
        return copy.copy(state)

    def copied(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        if parameter.shape == sizes or value.shape != sizes:
            return value.clone()
        return value.flatten()[:1].expand(parameter.shape).clone()

    return {key: copied(value) for key, value in state.items()}


class Schedules:
    """The script's learning-rate schedules, for another optimizer.

    Args:
        schedules: of the script, each with the optimizer steps between two of its steps.
        optimizer: to set the rates of.
    """

    def __init__(self, schedules: list[tuple[Any, int]], optimizer: Any) -> None:
        self._schedules = [(moved(each, optimizer), every) for each, every in schedules]
        self._steps = 0

    def step(self) -> None:
        """Change the rates, if it is time for it."""
        self._steps += 1
        self._step(lambda every: self._steps % every == 0)

    def step_of_epoch(self) -> None:
        """Change the rates as after the last step of an epoch, in which the script has made fewer
        steps than usual.
        """
        self._steps += 1
        self._step(lambda every: every > 1 or self._steps % every == 0)

    def _step(self, is_due: Callable[[int], bool]) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns that it saw no step of the optimizer
            for schedule, every in self._schedules:
                if is_due(every):
                    schedule.step()


def moved(schedule: Any, optimizer: Any) -> Any:
    """Return a copy of a schedule for another optimizer."""
    return _moved(schedule, optimizer, {})


def follows_evaluations(schedule: Any) -> bool:
    """Whether a step of a schedule takes a metric, as that of ``ReduceLROnPlateau`` does."""
    return isinstance(schedule, ReduceLROnPlateau)


def _moved(schedule: Any, optimizer: Any, known: dict[int, Any]) -> Any:
    """A copy of a schedule, and of those within it, for another optimizer."""
    if id(schedule) in known:
        return known[id(schedule)]
    other = known[id(schedule)] = copy.copy(schedule)
    for name, value in vars(schedule).items():
        if name == "optimizer":
            vars(other)[name] = optimizer
        elif _is_schedule(value):
            vars(other)[name] = _moved(value, optimizer, known)
        elif isinstance(value, list) and value and all(map(_is_schedule, value)):
            vars(other)[name] = [_moved(each, optimizer, known) for each in value]
        elif isinstance(value, list | dict):
            vars(other)[name] = copy.copy(value)
    return other


def _is_schedule(value: Any) -> bool:
    return hasattr(value, "step") and hasattr(value, "optimizer")


def schedules_of(seen: Seen) -> list[Any]:
    """Return the schedules of the optimizer, without those that are parts of others."""
    found = [
        made
        for made, _ in seen.made.values()
        if _is_schedule(made) and unwrapped(made.optimizer) is seen.optimizer
    ]
    inner = set[int]()
    for each in found:
        for value in vars(each).values():
            inner.update(id(part) for part in (value if isinstance(value, list) else [value]))
    return [each for each in found if id(each) not in inner]


def unwrapped(optimizer: Any) -> Any:
    """Return the optimizer of torch within a wrapper such as accelerate's."""
    while not isinstance(inner := getattr(optimizer, "optimizer", None), type(None)):
        optimizer = inner
    return optimizer


def steps_with_optimizer(seen: Seen, schedule: Any) -> bool | None:
    """Whether a schedule is stepped where the optimizer is: in the innermost loop around its step,
    or in a function that this loop calls.

    Returns:
        None if no line of the script steps it, as far as its text shows.
    """
    found, in_loop = None, False
    for code, scope, own, line in seen.frames:
        if not is_user_code(code.co_filename):
            continue
        part = part_around(code.co_filename, line, line)
        for node in ast.walk(tree_of(code.co_filename)):
            stepped = _stepped(node)
            target = None if stepped is None else value_of(stepped, {**scope, **own})
            if target is not None and schedule in (target, getattr(target, "scheduler", None)):
                found = bool(found) or (not in_loop and _contains(part, node))
        in_loop = in_loop or isinstance(part, Loop)
    return found


def _stepped(node: ast.AST) -> ast.expr | None:
    """What a call of ``.step()`` steps; None for any other node."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        return node.func.value if node.func.attr == "step" else None
    return None


def _contains(outer: ast.AST, inner: ast.AST) -> bool:
    return any(node is inner for node in ast.walk(outer))
