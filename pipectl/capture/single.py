"""Models that compute something else for a single sample.

torch.export takes every batch size for larger than one, and follows the branches of larger ones
(``if len(x) > 1``, ``x.squeeze()``) without a condition. So before a graph for any batch size
computes a micro-batch of one sample, the functions of torch that the model's Python code calls for
one sample are compared with those for two and three, and so are the numbers that it gives them, but
for those that count samples.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from functools import partial
from itertools import zip_longest
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from pipectl.capture.patches import left_out_checks, quiet
from pipectl.capture.python_state import preserve_state
from pipectl.capture.refusals import Refusal, first_line, place_of, running_line
from pipectl.torch_api import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    GuardOnDataDependentSymNode,
    ShapeEnv,
    pytree,
)

_NEED_VALUES = (
    DataDependentOutputException,
    DynamicOutputShapeException,
    GuardOnDataDependentSymNode,
)
_PLAIN = (bool, int, float, str)
_SHAPING = {
    "__get__", "__len__", "broadcast_to", "clone", "contiguous", "detach", "dim", "expand",
    "expand_as", "flatten", "is_contiguous", "numel", "permute", "repeat", "reshape", "size",
    "squeeze", "stride", "to", "transpose", "unflatten", "unsqueeze", "view", "view_as",
}  # fmt: skip
"""What computes no values: one sample may need fewer of these, to be broadcast for example."""


class _Call(NamedTuple):
    """A call of a function of torch.

    Args:
        plain: its arguments that are no tensors.
        line: the user's line.
    """

    name: str
    plain: tuple[Any, ...]
    line: str


def refuse_other_branch(wrapper: nn.Module, example: Callable[[int], tuple[Any, Any]]) -> None:
    """Raise if model or loss compute something else for one sample than for several.

    Nothing is raised for a model that does not run without values. The same functions of other
    shapes (after ``x.squeeze()``, for example) are no difference unless torch refuses them.

    Args:
        wrapper: the model with its loss, which stays as it is.
        example: returns a batch of some samples.

    Raises:
        RefusedError: naming the first line that differs, or that fails.
    """
    try:
        two, three = _calls(wrapper, example(2)), _calls(wrapper, example(3))
    except Exception:  # it needs values, or cannot be copied
        return
    try:
        one = _calls(wrapper, example(1))
    except _NEED_VALUES:
        return
    except Exception as error:
        why = f"{type(error).__name__}: {first_line(error)}"
        raise Refusal.ONE_SAMPLE.error(place_of(error), why=why) from error
    if [call.name for call in two] != [call.name for call in three]:
        return  # it computes something else for any number
    for mine, its, other in zip_longest(one, two, three):
        differs = mine is None or its is None or mine.name != its.name
        if differs or (its.plain == other.plain and mine.plain != its.plain):
            why = "the model computes something else for it than for several"
            raise Refusal.ONE_SAMPLE.error((mine or its).line, why=why)


def _calls(wrapper: nn.Module, batch: tuple[Any, Any]) -> list[_Call]:
    """Return what a forward calls, without values and without memory for them."""
    # Sizes are known; a value that the model reads is a symbol.
    recorder, mode = _Recorder(), FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv())
    fake = partial(mode.from_tensor, static_shapes=True)
    tensors = (*wrapper.parameters(), *wrapper.buffers())
    trial = copy.deepcopy(wrapper, {id(each): fake(each) for each in tensors})
    inputs, targets = pytree.tree_map_only(Tensor, fake, batch)
    with quiet(), preserve_state(trial, ()):
        random.seed(0)
        np.random.seed(0)
        with mode, left_out_checks(traced=False), recorder:
            trial(inputs, targets)
    return recorder.calls


class _Recorder(TorchFunctionMode):
    """Notes what Python code calls to compute values."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[_Call] = []

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        name = getattr(function, "__name__", "")
        if name not in _SHAPING:
            leaves = pytree.tree_leaves((args, kwargs))
            plain = tuple(leaf for leaf in leaves if isinstance(leaf, _PLAIN))
            self.calls.append(_Call(name, plain, running_line()))
        return function(*args, **(kwargs or {}))
