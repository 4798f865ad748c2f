"""Running a model to see what calls of its opaque submodules give."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch._guards import detect_fake_mode
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils import _pytree as pytree

from pipectl.capture.carried import extra_states, refuse_extra_states
from pipectl.capture.drawing import own_generators, states_of
from pipectl.capture.explain import place_of
from pipectl.capture.handing import anchored
from pipectl.capture.masks import Mask
from pipectl.capture.opaque import Arguments, States
from pipectl.capture.outline import Outline, UnpredictableError, outline_of, see
from pipectl.capture.python_state import undisturbed
from pipectl.capture.step import Step, make_known, resized, seed_everything

Make = Callable[[Tensor], Tensor]
"""The values of a parameter or buffer, which may have none yet."""


_NOT_CONNECTED = "appears to not have been used in the graph"


class UnsuitableError(Exception):
    """A submodule that cannot be an operator of its own; the text says why.

    Args:
        path: of the submodule.
        cure: what to change, if it is not what it returns.
    """

    def __init__(self, path: str, why: str, cure: str | None = None) -> None:
        super().__init__(why)
        self.path = path
        self.cure = cure


def outlines(
    step: Step,
    opaque: Mapping[str, nn.Module],
    batches: Sequence[tuple[int, Any]],
    make: Make,
) -> dict[str, list[Outline]]:
    """What every call of the opaque submodules gives, in order, by their paths.

    The model runs once for every batch, in its current mode, and is left as it was.

    Args:
        batches: numbers of samples, each with (inputs, targets).

    Raises:
        UnsuitableError: a result has no outline.
    """
    runs = [_run(step, opaque, batch, make, seed) for seed, (_, batch) in enumerate(batches)]
    sizes = [size for size, _ in batches]
    found: dict[str, list[Outline]] = {}
    for path in opaque:
        calls = [run[path] for run in runs]
        if len({len(some) for some in calls}) > 1:
            raise UnsuitableError(path, "is called more or less often, depending on the data")
        try:
            found[path] = [outline_of(sizes, same) for same in zip(*calls, strict=True)]
        except UnpredictableError as error:
            raise UnsuitableError(path, str(error)) from None
    return found


def _run(
    step: Step, opaque: Mapping[str, nn.Module], batch: tuple[Any, Any], make: Make, seed: int
) -> dict[str, list[Outline]]:
    """One run of the model: what it gave, with the sizes of this batch.

    Args:
        seed: of what the run draws; with another one it may give something else.
    """
    watches = [_Watch(path, module, make) for path, module in opaque.items()]
    buffers = [each for each in step.buffers() if not isinstance(each, FakeTensor)]
    with ExitStack() as stack:
        stack.enter_context(torch.enable_grad())
        stack.enter_context(undisturbed(step, buffers))
        for watch in watches:
            stack.enter_context(watch.mask.worn())
        before = extra_states(step)
        seed_everything(seed)
        step(*batch)
        refuse_extra_states(step, before)
    return {watch.path: watch.calls for watch in watches}


class _Watch:
    """Stands in for a submodule, calls it, and notes what it gave."""

    def __init__(self, path: str, module: nn.Module, make: Make) -> None:
        self.path = path
        self.calls: list[Outline] = []
        self.mask = Mask(module, self._call)
        self._module = module
        self._own = own_generators(module)
        self._states = States(module)
        self._make = make

    def _call(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return self._watched(Arguments(args, kwargs))
        except UnpredictableError as error:
            raise UnsuitableError(self.path, str(error)) from None

    def _watched(self, arguments: Arguments) -> Any:
        given = [*self._states.now(), *arguments.tensors]
        count = len(self._states.places)
        made = [self._make(state) for state in given[:count]]
        tensors = [*made, *map(_sample, given[count:])]
        shapes = [tensor.shape for tensor in made]
        versions = [tensor._version for tensor in tensors]
        generators = _generators(self._own)
        args, kwargs = arguments.filled(tensors[count:], [])
        with self.mask.lifted(), self._states.replaced(tensors[:count]):
            result = make_known(self._result(args, kwargs))
        self._refuse_resized(made, shapes)
        written = {i for i, tensor in enumerate(tensors) if tensor._version != versions[i]}
        leaves, structure = pytree.tree_flatten(result)
        draws = _generators(self._own) != generators
        self.calls.append(see(leaves, structure, tensors, frozenset(written), draws))
        mode = detect_fake_mode(given)
        return result if mode is None else pytree.tree_map_only(Tensor, _hollow(mode), result)

    def _refuse_resized(self, states: Sequence[Tensor], shapes: Sequence[torch.Size]) -> None:
        for state, shape, places in zip(states, shapes, self._states.places, strict=True):
            if state.shape != shape:
                raise resized(places[0][2], shape, state.shape)

    def _result(self, args: Any, kwargs: Any) -> Any:
        try:
            return self._module(*args, **kwargs)
        except RuntimeError as error:
            if _NOT_CONNECTED not in str(error):
                raise
            raise UnsuitableError(
                self.path,
                "differentiates what was computed outside of it" + place_of(error),
                "form the derivative in the module that computes what is differentiated",
            ) from error


def _sample(tensor: Tensor) -> Tensor:
    """A tensor with values: random, or 0, which is a valid index, where it has none."""
    if not isinstance(tensor, FakeTensor):  # not connected, as it will not be on a stage
        return anchored(tensor.detach()) if tensor.requires_grad else tensor.detach()
    made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
    if not tensor.is_floating_point():
        return made.fill_(tensor.dtype is torch.bool)
    made = made.normal_()
    return anchored(made) if tensor.requires_grad else made


def _hollow(mode: FakeTensorMode) -> Callable[[Tensor], Tensor]:
    def hollow(tensor: Tensor) -> Tensor:
        made = mode.from_tensor(tensor.detach())
        return anchored(made) if tensor.requires_grad else made

    return hollow


def _generators(further: Sequence[Any]) -> tuple[Any, ...]:
    """The states of all generators that a forward may draw from."""
    own = torch.random.get_rng_state().numpy().tobytes()
    state: Any = np.random.get_state()
    return own, random.getstate(), state[1].tobytes(), state[2:], states_of(further)
