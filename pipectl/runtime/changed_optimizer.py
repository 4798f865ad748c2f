"""The optimizer's state from a checkpoint, if the job has changed its optimizer since.

An optimizer of another class begins with new state: what the other kept under the same names may
mean something else to it. New options may need state that the checkpoint has not (`amsgrad`). It
begins with zeros if that is so in a new optimizer; otherwise all state of the parameter is new.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn

from pipectl.capture import CapturedJob
from pipectl.runtime.checkpoint import Stored
from pipectl.runtime.optimizer import Updater, make_optimizer
from pipectl.runtime.trial_parameters import lent, same_draws


def restore_optimizer(
    stored: Stored, job: CapturedJob, updater: Updater, parameters: Mapping[str, nn.Parameter]
) -> set[str]:
    """Restore the optimizer state of parameters.

    Returns:
        What to tell about state that is not that of the checkpoint.
    """
    optimizer: Any = updater.optimizer
    told = set[str]()
    kept, changed = dict[str, nn.Parameter](), dict[str, nn.Parameter]()
    for name, parameter in parameters.items():
        origin, now = stored.origin(name), updater.origin(name)
        if origin is not None and origin.kind != now.kind:
            told.add(
                f"optimizer: {now.kind} begins with new state; that of the checkpoint is of "
                f"{origin.kind}"
            )
            continue
        kept[name] = parameter
        if origin is not None and origin.options != now.options:
            changed[name] = parameter
    stored.restore_optimizer(optimizer, kept)
    return told | _complete(job, optimizer, changed)


def _complete(job: CapturedJob, optimizer: Any, parameters: Mapping[str, nn.Parameter]) -> set[str]:
    """Give parameters the state that new options need; of those alike, the smallest is tried."""
    groups, told = job.parameter_groups(), set[str]()
    alike = defaultdict[tuple[int, int], list[str]](list)
    for name, parameter in parameters.items():
        if isinstance(optimizer.state.get(parameter), dict):
            alike[groups.get(name, -1), parameter.dim()].append(name)
    for names in alike.values():
        smallest = min(names, key=lambda name: parameters[name].numel())
        usual = _first_state(job, smallest, parameters[smallest])
        for name in names:
            parameter = parameters[name]
            state = optimizer.state[parameter]
            if usual.keys() <= state.keys():
                continue
            first = _first_state(job, name, parameter)
            lacking = {key: value for key, value in first.items() if key not in state}
            needed = " and ".join(map(repr, lacking))
            if all(isinstance(each, Tensor) and not each.any() for each in lacking.values()):
                state.update(lacking)
                words = f"{needed}, which begins with zeros"
            else:
                del optimizer.state[parameter]
                words = f"{needed}, so that all its state begins anew"
            if lacking:
                told.add(f"optimizer: its new options need {words}")
    return told


def _first_state(job: CapturedJob, name: str, like: nn.Parameter) -> dict[Any, Any]:
    """The state of a copy of a parameter after a step that follows nothing; empty if that fails."""
    value = like.detach().clone()
    with same_draws(), lent(job, {name: value}) as sample, suppress(Exception):
        # The real step will show an error.
        parameter = sample[name]
        parameter.grad = torch.zeros_like(parameter)
        optimizer: Any = make_optimizer(job, sample)
        for group in optimizer.param_groups:
            group.update({"weight_decay": 0.0} if "weight_decay" in group else {})
        optimizer.step()
        return dict(optimizer.state.get(parameter, {}))
    return {}
