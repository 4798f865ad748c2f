"""Trial updates of a few small parameters: what an optimizer does that no pipeline can follow.

A rank updates the parameters of its own stages. So the update of a parameter must not depend on
others, and must go on as before from the state of a checkpoint. A learning-rate schedule knows the
groups of an optimizer by their numbers, which must not depend on other parameters either. An
optimizer may break these rules only now and then: when gradients are large, after it has seen many
that point the same way, or every tenth step. Trials have all of these.
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from pipectl.capture import CapturedJob
from pipectl.capture.tensors import tensors_in
from pipectl.errors import CaptureError
from pipectl.runtime.optimizer import (
    Updater,
    forms_of,
    make_optimizer,
    make_updater,
    of_groups,
    refuse_changes,
    refuse_other_tensors,
    restore_state,
    state_of,
)
from pipectl.runtime.trial_parameters import lent, same_draws
from pipectl.torch_api import TorchDispatchMode, uncompiled

_MAX_ALIKE = 2
"""Parameters with the same number of dimensions that are in the same group."""
_MAX_SIZES = (3, 64)
"""Size of each dimension of a trial parameter; the larger one if the smaller one is not taken."""
_MAX_PARTS = 8
"""Parts of the trial parameters, each of which has an optimizer of its own."""
_TOLERANCE = 0.05
"""Relative; optimizers that update equal shapes together round differently."""


class _Phase(NamedTuple):
    """Some steps in a row.

    Args:
        spread: standard deviation of the decimal exponent of a gradient's size.
        size: of gradients.
        steadiness: share of a gradient that is the same in every step.
    """

    steps: int
    spread: float
    size: float
    steadiness: float


_PHASES = _Phase(12, 1.0, 1.0, 0.0), _Phase(40, 0.0, 0.1, 0.9), _Phase(8, 0.0, 1e4, 0.5)
_ROUNDING = 100.0
"""Of the sums of a phase, in units of the last place of 1."""
_DRAWN = 1e5
"""Rounding of an optimizer that draws random numbers, in units of the last place of a change."""
_Sample = Mapping[str, Tensor]
"""Trial parameters by the names of real ones: of their form, type and order in memory, without
values."""


def refuse_coupled_updates(job: CapturedJob, device: torch.device) -> None:
    """Raise if the update of a parameter depends on the optimizer's other parameters.

    Updates small parameters by random gradients, once together and once each alone (of many
    parameters, some together), without and with the learning-rate schedule. If the optimizer does
    not accept them, nothing is refused.

    Raises:
        CaptureError: some update differs.
    """
    if _depend(job, device):
        raise CaptureError(
            f"optimizer: {job.spec.optimizer.factory} updates a parameter differently if there are "
            "others (by a number that it computes of all of them, such as a norm or a step size, "
            "or random numbers drawn in turn), and each rank has only those of its stages",
            hint="take norms of each parameter by itself, let training.clip_grad_norm clip over "
            "all ranks, or set pipeline.stages: 1 without shard_optimizer",
        )
    if job.spec.lr_scheduler is not None and _depend(job, device, scheduled=True):
        raise CaptureError(
            f"lr_scheduler: {job.spec.lr_scheduler.factory} has other rates for a parameter if "
            "there are others (by a number that it computes of all of them, such as a norm), and "
            "each rank has only those of its stages",
            hint="compute rates from the number of steps alone, or set pipeline.stages: 1 without "
            "shard_optimizer",
        )


def _depend(job: CapturedJob, device: torch.device, *, scheduled: bool = False) -> bool:
    """Whether updates of some parameters differ from those of all together."""
    sample, together = _try(job, device, scheduled=scheduled)
    names = list(together)
    is_exact = bool(names) and _draws(job, sample, device)
    for place in range(min(len(names), _MAX_PARTS)):
        part = {name: sample[name] for name in names[place::_MAX_PARTS]}
        updates = _updates(job, part, device, scheduled=scheduled)
        if _some_differ(together, updates, is_exact=is_exact):
            return True
    return False


def refuse_outer_state(job: CapturedJob, device: torch.device) -> None:
    """Raise if an optimizer or a schedule goes on with what an earlier one has left elsewhere.

    A counter in its class or in a variable of its module has gone on in all trials when the
    training begins.

    Raises:
        CaptureError: a second one updates in another way than the first one.
    """
    schedule = job.spec.lr_scheduler
    sample, first = _try(job, device)
    with _same_options(job, sample, device):
        if _some_differ(first, _updates(job, sample, device)):
            raise CaptureError(
                f"optimizer: {job.spec.optimizer.factory} keeps something in its class, or in a "
                "variable of its module, with which a second optimizer goes on",
                hint="keep it in self.state[parameter], where checkpoints have it, too",
            )
        if schedule is None:
            return
        sample, first = _try(job, device, scheduled=True)
        if _some_differ(first, _updates(job, sample, device, scheduled=True)):
            raise CaptureError(
                f"lr_scheduler: {schedule.factory} keeps something in its class, in a variable of "
                "its module, or in a tensor that every optimizer gets as an option, with which a "
                "second schedule goes on",
                hint="keep it in self, or compute it from the number of steps; make a tensor of a "
                "rate within the optimizer's factory",
            )


@contextmanager
def _same_options(job: CapturedJob, sample: _Sample, device: torch.device) -> Iterator[None]:
    """Bring back options that are tensors, which may be those of all optimizers of the job."""
    kept: list[tuple[Tensor, Tensor]] = []
    values = {name: torch.zeros_like(like, device=device) for name, like in sample.items()}
    with suppress(Exception), same_draws(), lent(job, values) as parameters:
        groups = make_optimizer(job, parameters).param_groups
        options = [{k: v for k, v in group.items() if k != "params"} for group in groups]
        kept = [(each, each.detach().clone()) for each in tensors_in(options)]
    try:
        yield
    finally:
        for tensor, value in kept:
            tensor.data.copy_(value)


def refuse_late_changes(job: CapturedJob, device: torch.device) -> None:
    """Raise for what ranks refuse at their first update, if it comes later.

    Raises:
        CaptureError: the optimizer changes its groups or replaces parameters, or its state holds
            what a checkpoint cannot.
    """
    _try(job, device, checks=True)


def refuse_own_memory(job: CapturedJob, device: torch.device) -> None:
    """Raise if the optimizer does not follow a parameter that gets other memory between updates.

    That happens if older weights are kept. An optimizer that keeps views of the memory (a flat
    vector of all parameters, say) would go on writing into the older weights.

    Raises:
        CaptureError: some update differs.
    """
    sample, staying = _try(job, device)
    moving = _updates(job, sample, device, moves=True)
    pairs = [(moving[name], staying[name]) for name in moving.keys() & staying.keys()]
    if any(not torch.equal(*pair) for each in pairs for pair in zip(*each, strict=True)):
        raise CaptureError(
            f"optimizer: {job.spec.optimizer.factory} keeps the memory of parameters, and writes "
            "there after they have moved to other memory, as with this schedule",
            hint="let it read parameters from its param_groups in every step, or use a schedule "
            "that flushes",
        )


def loses_state(job: CapturedJob, device: torch.device) -> bool:
    """Whether the optimizer goes on in another way when it is made anew with its saved state.

    Checkpoints have the state of each parameter. What an optimizer keeps elsewhere (a counter of
    its own, another optimizer that it wraps) begins anew when a run resumes.
    """
    sample, whole = _try(job, device)
    resumed = _updates(job, sample, device, resumes=True)
    return _some_differ(whole, resumed)


def _try(
    job: CapturedJob, device: torch.device, *, checks: bool = False, scheduled: bool = False
) -> tuple[_Sample, dict[str, list[Tensor]]]:
    """The updates of all trial parameters by one optimizer; none if it fails."""
    sample: _Sample = {}
    # In float64 an optimizer's copy in float64 would be the parameter itself.
    for sample in _samples(job, (None, None) if checks else (torch.float64, None)):
        if updates := _updates(job, sample, device, checks=checks, scheduled=scheduled):
            return sample, updates
    return sample, {}


def _samples(job: CapturedJob, dtypes: Sequence[torch.dtype | None]) -> Iterator[_Sample]:
    """Trial parameters: tiny ones, and, for an optimizer that takes none of these, larger ones.

    Args:
        dtypes: of tiny ones and larger ones; None for their own. Rounding makes no difference to
            tiny ones in float64.
    """
    groups = job.parameter_groups()
    kinds: dict[tuple[int, int], int] = {}
    chosen: dict[str, Tensor] = {}
    for name, tensor in job.states.items():
        if not tensor.requires_grad or tensor.is_complex() or tensor.numel() == 0:
            continue
        kind = groups.get(name, -1), tensor.dim()
        kinds[kind] = kinds.get(kind, 0) + 1
        if kinds[kind] <= _MAX_ALIKE:
            chosen[name] = tensor
    for limit, dtype in zip(_MAX_SIZES, dtypes, strict=True):
        yield {
            name: torch.empty_like(_narrow(tensor, limit), dtype=dtype or tensor.dtype)
            for name, tensor in chosen.items()
        }


def _narrow(tensor: Tensor, limit: int) -> Tensor:
    """The first elements of a tensor in each dimension, without values."""
    whole = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
    return whole[tuple(slice(limit) for _ in tensor.shape)]


def _updates(
    job: CapturedJob,
    sample: _Sample,
    device: torch.device,
    *,
    moves: bool = False,
    resumes: bool = False,
    checks: bool = False,
    scheduled: bool = False,
) -> dict[str, list[Tensor]]:
    """The change of each parameter in each phase; empty if the optimizer fails.

    Args:
        moves: whether parameters get other memory before every step.
        resumes: whether parameters and optimizer are made anew before every step, with their saved
            state.
        checks: whether to raise in any step for what ranks refuse in the first one.
        scheduled: whether the learning-rate schedule of the job steps, too, until it fails.
    """
    gradients = {name: _Gradients(name, like, device) for name, like in sample.items()}
    values = {name: each.draw() for name, each in gradients.items()}
    changes: dict[str, list[Tensor]] = {name: [] for name in sample}
    updater: Updater | None = None
    with same_draws(), lent(job, values) as given:
        parameters: Mapping[str, nn.Parameter] = given
        for phase in _PHASES:
            before = {name: parameter.detach().clone() for name, parameter in parameters.items()}
            for _ in range(phase.steps):
                try:
                    if updater is None:
                        updater = _made(job, parameters, scheduled=scheduled)
                    elif resumes:
                        updater, parameters = _made_anew(job, updater.optimizer, parameters)
                    for name, parameter in parameters.items():
                        parameter.grad = gradients[name].of(phase)
                        if moves:
                            parameter.data = parameter.data.clone()
                    optimizer: Any = updater.optimizer
                    groups, forms = of_groups(optimizer), forms_of(parameters)
                    optimizer.step()
                except Exception:  # it may need other shapes; the real parameters will show errors
                    return {}
                if checks:
                    refuse_changes(optimizer, groups)
                    refuse_other_tensors(optimizer, parameters, forms)
                    state_of(optimizer, parameters)
                _step_schedule(updater)
            for name, parameter in parameters.items():
                changes[name].append(parameter.detach() - before[name])
    return changes


def _draws(job: CapturedJob, sample: _Sample, device: torch.device) -> bool:
    """Whether an optimizer draws random numbers, of which a little may be taken for rounding.

    What it draws by a generator of numpy of its own is not seen.
    """
    gradients = {name: _Gradients(name, like, device) for name, like in sample.items()}
    values = {name: each.draw() for name, each in gradients.items()}
    with same_draws(), lent(job, values) as parameters:
        watch = _Draws()  # type: ignore[no-untyped-call]
        before = _shared_generators()
        try:
            optimizer: Any = _made(job, parameters).optimizer
            for _ in range(_PHASES[0].steps):
                for name, parameter in parameters.items():
                    parameter.grad = gradients[name].of(_PHASES[0])
                with uncompiled(), watch:
                    optimizer.step()
        except Exception:  # it may not run in such a mode
            return False
        return bool(watch.seen or _shared_generators() != before)


class _Draws(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees whether operators of torch draw random numbers."""

    seen = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen |= torch.Tag.nondeterministic_seeded in func.tags
        return func(*args, **(kwargs or {}))


def _shared_generators() -> Any:
    """The states of the generators of Python and of numpy."""
    of_numpy: Any = np.random.get_state()
    return random.getstate(), of_numpy[1].tobytes(), of_numpy[2]


def _made(
    job: CapturedJob, parameters: Mapping[str, nn.Parameter], *, scheduled: bool = False
) -> Updater:
    if scheduled:
        return make_updater(job, parameters)
    optimizer = make_optimizer(job, parameters)
    for group in optimizer.param_groups:  # of a script, whose schedule may begin with 0
        group.update({"lr": group["initial_lr"]} if "initial_lr" in group else {})
    return Updater(optimizer, None)


def _step_schedule(updater: Updater) -> None:
    """Step the schedule, if there is one; it may be for fewer steps than those of a trial."""
    with warnings.catch_warnings(), suppress(Exception):
        warnings.simplefilter("ignore")
        updater.step_schedule()
        updater.watch(1.0)


class _Gradients:
    """The gradients of a trial parameter, which do not depend on other parameters."""

    def __init__(self, name: str, like: Tensor, device: torch.device) -> None:
        self._generator = torch.Generator().manual_seed(len(name) + sum(name.encode()))
        self._like, self._device = like, device
        self._steady = self.draw()

    def draw(self) -> Tensor:
        """Random values of the parameter's shape."""
        shape, dtype = self._like.shape, torch.float64
        values = torch.randn(shape, generator=self._generator, dtype=dtype)
        return torch.empty_like(self._like, device=self._device).copy_(values)

    def of(self, phase: _Phase) -> Tensor:
        """The gradient of the next step."""
        exponent = phase.spread * torch.randn((), generator=self._generator).item()
        values = phase.steadiness * self._steady + (1 - phase.steadiness) * self.draw()
        return phase.size * 10**exponent * values


def _some_differ(
    found: Mapping[str, list[Tensor]],
    others: Mapping[str, list[Tensor]],
    *,
    is_exact: bool = False,
) -> bool:
    """Whether a parameter changes in another way; one whose update failed tells nothing.

    Args:
        is_exact: whether to take less for rounding.
    """
    names = found.keys() & others.keys()
    return any(_differ(found[name], others[name], is_exact=is_exact) for name in names)


def _differ(one: list[Tensor], other: list[Tensor], *, is_exact: bool) -> bool:
    """Whether the changes of a parameter differ by more than rounding in some phase."""
    for a, b in zip(one, other, strict=True):
        difference = torch.where((a == b) | (a.isnan() & b.isnan()), 0, (a - b).abs())
        unit = torch.finfo(b.dtype).eps
        tolerance = min(_TOLERANCE, _DRAWN * unit) if is_exact else _TOLERANCE
        if not float(difference.max()) <= _ROUNDING * unit + tolerance * float(b.abs().max()):
            return True
    return False


def _made_anew(
    job: CapturedJob, optimizer: Any, parameters: Mapping[str, nn.Parameter]
) -> tuple[Updater, Mapping[str, nn.Parameter]]:
    """Parameters of the same values, and another optimizer with the state that a checkpoint of this
    one has. Those of a script stay, as its optimizer may have a list of them.
    """
    tensors, states = state_of(optimizer, parameters)
    in_order = torch.contiguous_format  # as in a file
    saved = {n: t.detach().cpu().clone(memory_format=in_order) for n, t in tensors.items()}
    others = parameters
    if not job.spec.optimizer.is_of_script:
        others = {name: nn.Parameter(each.detach().clone()) for name, each in parameters.items()}
    made = _made(job, others)
    new: Any = made.optimizer
    for name, state in states.items():
        restore_state(new, others[name], state, saved.__getitem__)
    return made, others
