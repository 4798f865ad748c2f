"""Trials of an optimizer's factory and of a learning-rate schedule: the options of each parameter.

A rank calls the factory with the parameters of its own stages, and again when a run resumes. So the
options of a parameter must not depend on others (on its position among them, or on their number),
nor on values of weights. Here parameters have their real sizes and order, but no memory of that
size, and nothing is updated.
"""

from __future__ import annotations

import warnings
from collections.abc import Container, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from pipectl.capture import CapturedJob
from pipectl.capture.model_with_loss import own_name
from pipectl.capture.tensors import is_deferred
from pipectl.errors import CaptureError
from pipectl.runtime.optimizer import is_option, make_optimizer, make_updater
from pipectl.runtime.trial_parameters import lent, put, same_draws
from pipectl.torch_api import pytree

_STEPS = 60
"""Of the schedule."""
_PARTS = 8
"""In which the parameters are divided, in a row or in turn."""
_PLAIN = (bool, int, float, str, type(None))


class _Options(NamedTuple):
    """The options of all parameters.

    Args:
        groups: of each parameter group.
        members: the index of its group, by parameter.
    """

    groups: list[dict[str, str]]
    members: dict[str, int]


class _Difference(NamedTuple):
    """An option that is another one.

    Args:
        what: the option, and of which parameter.
        values: both.
        steps: of the schedule before it; -1 without a schedule.
    """

    what: str
    values: str
    steps: int


def refuse_options(job: CapturedJob, device: torch.device, *, divides: bool) -> None:
    """Raise if options depend on values of weights or gradients, or on numbers drawn at random.

    Args:
        divides: whether ranks update different parameters, so that options must not depend on
            other parameters either.

    Raises:
        CaptureError: naming the option and the parameter.
    """
    trials = _Trials(job, device)
    found = trials.difference(trials.names, changes=True)
    if found is not None:
        raise _refusal_of_values(job, found)
    if divides and not job.spec.optimizer.is_of_script:
        _refuse_parts(job, trials, _parts(trials.names))


def refuse_options_of_rank(job: CapturedJob, device: torch.device, updated: Container[str]) -> None:
    """Raise if the parameters of a rank by themselves get other options than among all.

    Args:
        updated: those that the rank updates, by full name.

    Raises:
        CaptureError: naming the option and the parameter.
    """
    trials = _Trials(job, device)
    part = [name for name in trials.names if name in updated]
    if part != trials.names and not job.spec.optimizer.is_of_script:
        _refuse_parts(job, trials, [part])


def _refuse_parts(job: CapturedJob, trials: _Trials, parts: Sequence[Sequence[str]]) -> None:
    for part in parts:
        found = trials.difference(part)
        if found is not None:
            raise _refusal_of_parts(job, found)


def _refusal_of_values(job: CapturedJob, found: _Difference) -> CaptureError:
    factory, schedule = job.spec.optimizer.factory, job.spec.lr_scheduler
    if found.steps < 0 or schedule is None:
        return CaptureError(
            f"optimizer: {factory} computes {found.what} from weights or random "
            f"numbers ({found.values}), and every rank calls it, and again when a run resumes",
            hint="write numbers into its kwargs, or under optimizer.groups",
        )
    return CaptureError(
        f"lr_scheduler: {schedule.factory} computes rates from weights, gradients or random "
        f"numbers ({found.what} is {found.values} after {found.steps} steps), which are others on "
        "each rank, and when a run resumes",
        hint="compute rates from the number of steps alone; draw from a generator of the "
        "schedule's own with a seed, such as random.Random(0)",
    )


def _refusal_of_parts(job: CapturedJob, found: _Difference) -> CaptureError:
    factory, schedule = job.spec.optimizer.factory, job.spec.lr_scheduler
    if found.steps < 0 or schedule is None:
        return CaptureError(
            f"optimizer: {factory} gives another {found.what} if it gets only some of the "
            f"parameters ({found.values}), so it goes by their positions, number or total size; "
            "each rank has only those of its stages",
            hint="write the groups under optimizer.groups (match: '*.bias', for example), or let "
            "the factory look at each parameter by itself",
        )
    return CaptureError(
        f"lr_scheduler: {schedule.factory} has other rates for a parameter if {factory} gets only "
        f"some of the parameters ({found.what} is {found.values} after {found.steps} steps), "
        "because its groups are in another order then, or because it counts parameters; each rank "
        "has only those of its stages",
        hint="let the optimizer's factory make all groups in one order, also those without "
        "parameters; or write them under optimizer.groups; and compute rates from the number of "
        "steps alone",
    )


def _parts(names: Sequence[str]) -> list[Sequence[str]]:
    """Parts as ranks have them: in a row, or, with ``shard_optimizer``, in turn."""
    half, size = len(names) // 2, -(-len(names) // _PARTS)
    rows = [names[first : first + size] for first in range(0, len(names), size or 1)]
    turns = [names[first::_PARTS] for first in range(min(len(names), _PARTS))]
    return [each for each in (names[:half], names[half:], *rows, *turns) if each]


class _Trials:
    """Trials on the device ``meta``, where neither the state that an optimizer makes at once nor a
    norm costs anything; if they fail there, as those of a script do, on the device of the training.

    Attributes:
        names: of all trained parameters.
    """

    def __init__(self, job: CapturedJob, device: torch.device) -> None:
        self.names = [name for name, tensor in job.states.items() if tensor.requires_grad]
        self._job = job
        meta = [] if job.spec.optimizer.is_of_script else [torch.device("meta")]
        self._devices = [*meta, device]
        self._usual: dict[torch.device, list[_Options]] = {}

    def difference(self, part: Sequence[str], *, changes: bool = False) -> _Difference | None:
        """The first option of a part of the parameters that is another one than among all.

        Args:
            changes: see :func:`_course`.
        """
        scheduled = self._job.spec.lr_scheduler is not None
        whole = 2 + _steps(self._job) if scheduled else 1
        for device in self._devices:
            if device not in self._usual:
                self._usual[device] = _course(self._job, self.names, device)
            usual = self._usual[device]
            found = _course(self._job, part, device, changes=changes)
            if len(usual) == len(found) == whole:
                break
        return _difference(usual, found, part)


def _steps(job: CapturedJob) -> int:
    return min(_STEPS, job.spec.training.steps)


def _course(
    job: CapturedJob, names: Sequence[str], device: torch.device, *, changes: bool = False
) -> list[_Options]:
    """The options without a schedule, with a new one, and after each of its steps, until one fails.

    Args:
        changes: whether there are gradients, other random numbers, and other weights in each step.
    """
    found: list[_Options] = []
    elements = {name: _element(job.states[name], i, device) for i, name in enumerate(names, 1)}
    values = {name: each.expand(job.sizes[name]) for name, each in elements.items()}
    changing: list[Tensor] = []
    with same_draws(int(changes)), lent(job, values) as parameters, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that the optimizer did not step
        if changes:
            changing = [*elements.values(), *_change_model(job, parameters)]
        with suppress(Exception):  # it may need other values; the real parameters will show errors
            _write(changing)
            found.append(_options_of(make_optimizer(job, parameters), parameters))
            updater = make_updater(job, parameters)
            for _ in range(0 if updater.lr_scheduler is None else 1 + _steps(job)):
                found.append(_options_of(updater.optimizer, parameters))
                _write(changing)
                updater.step_schedule()
                updater.watch(1.0)
    return found


def _element(like: Tensor, value: float, device: torch.device) -> Tensor:
    """The memory of a parameter whose elements are all the same."""
    return torch.full((), value, dtype=like.dtype, device=device)


def _change_model(job: CapturedJob, parameters: Mapping[str, nn.Parameter]) -> list[Tensor]:
    """Give gradients to parameters, and values to those of the model; return memory of these."""
    elements = []
    for name, parameter in parameters.items():
        own = job.states[name]
        if own is not parameter and not is_deferred(own):
            elements.append(_element(own, 1.0, own.device))
            put(own, elements[-1].expand(parameter.shape))
            own.grad = _element(own, 1.0, own.device).expand(own.shape)
        parameter.grad = _element(parameter, 1.0, parameter.device).expand(parameter.shape)
    return elements


def _write(elements: Sequence[Tensor]) -> None:
    for each in elements:
        each += 1


def _options_of(optimizer: Any, parameters: Mapping[str, nn.Parameter]) -> _Options:
    names = {id(parameter): name for name, parameter in parameters.items()}
    groups = [
        {key: _text(value) for key, value in group.items() if is_option(optimizer, key, value)}
        for group in optimizer.param_groups
    ]
    members = {
        names[id(each)]: index
        for index, group in enumerate(optimizer.param_groups)
        for each in group["params"]
        if id(each) in names
    }
    return _Options(groups, members)


def _text(option: Any) -> str:
    """The values of an option; of objects, which each call may make anew, only their types."""
    if isinstance(option, _PLAIN):
        return repr(option)
    leaves = [
        str(leaf.tolist())
        if isinstance(leaf, Tensor)
        else repr(leaf)
        if isinstance(leaf, _PLAIN)
        else type(leaf).__name__
        for leaf in pytree.tree_leaves(option)
    ]
    return ", ".join(leaves)


def _difference(
    usual: Sequence[_Options], others: Sequence[_Options], names: Sequence[str]
) -> _Difference | None:
    """The first option of some parameters that is not as usual; None if there is none."""
    for steps, (one, other) in enumerate(zip(usual, others, strict=False), -1):
        pairs = {(one.members.get(name), other.members.get(name)): name for name in names[::-1]}
        for indices, name in pairs.items():
            options = [
                {"group": "none"} if index is None else each.groups[index]
                for each, index in zip((one, other), indices, strict=True)
            ]
            if options[0] != options[1]:
                keys = sorted(options[0].keys() | options[1].keys(), key=lambda k: k != "group")
                key = next(k for k in keys if options[0].get(k) != options[1].get(k))
                values = f"{options[1].get(key, 'one')} instead of {options[0].get(key, 'one')}"
                return _Difference(f"{key} for {own_name(name)!r}", values, steps)
    return None
