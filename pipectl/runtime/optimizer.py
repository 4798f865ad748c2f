"""The optimizer over a set of parameters, and its learning-rate schedule.

If each rank holds some of the parameters, an optimizer must update each parameter independently;
`update_trials.py` finds out whether it does.

Optimizer state is saved by parameter name, so that another cut of the model can load it. Each
parameter has a dictionary: mostly tensors and numbers, some inside lists and nested dictionaries.
It is saved as JSON in which tensors are named. Files hold tensors in the order of their indices;
in memory most have the strides of their parameter, and kernels go over both without looking at
these (`fused`). So strides come back, too.
"""

from __future__ import annotations

import inspect
import json
import math
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from pipectl.capture import CapturedJob
from pipectl.capture.factories import call, call_in_training, find, module_of
from pipectl.capture.model_with_loss import own_name
from pipectl.capture.refusals import refuse_parameter_hooks
from pipectl.capture.tensor_file import CODES
from pipectl.capture.tensors import storage_of, tensors_in
from pipectl.errors import CaptureError, WorkerError
from pipectl.plan import Plan
from pipectl.runtime.device import release_freed_memory
from pipectl.spec import JobSpec
from pipectl.torch_api import MUON, has_gradient_hooks, identity_of, version_of
from pipectl.units import did_you_mean

_TENSOR, _TUPLE, _DICT, _FLOAT = "tensor", "tuple", "dict", "float"
_PLAIN = (bool, int, str, type(None))
_COMPARED = (*_PLAIN, float)
_CALLS_CLOSURE = re.compile("closure|'NoneType' object is not callable")
_LOSSES = frozenset({"loss", "losses", "metric", "metrics"})
"""Words in the name of an argument that is the loss of an evaluation."""
_NEEDED = ("step", "param_groups", "state")
_COUNTERS = frozenset({"step", "mu_product"})
"""Keys of torch's optimizers that count steps; others are on the parameter's device."""


class StateOrigin(NamedTuple):
    """What has made the optimizer's state of a parameter.

    Args:
        kind: its class, with the package.
        options: of the job and of the parameter's group, as JSON.
    """

    kind: str
    options: str


@dataclass
class Updater:
    """Optimizer and learning-rate schedule of one rank; both None if it trains nothing.

    Attributes:
        updates: how many steps the optimizer and a per-step schedule have made.
        watches: whether the schedule follows the loss of evaluations, as ReduceLROnPlateau does.
        losses: of evaluations, which such a schedule has received.
        parameters: of the optimizer, by full name.
        options: of the job and of the parameter's group, as JSON, by full name.
    """

    optimizer: torch.optim.Optimizer | None
    lr_scheduler: Any | None
    watches: bool = False
    updates: int = 0
    losses: list[float] = field(default_factory=list)
    parameters: Mapping[str, nn.Parameter] = field(default_factory=dict)
    options: Mapping[str, str] = field(default_factory=dict)
    _has_stepped: bool = field(default=False, init=False)

    @property
    def learning_rate(self) -> float:
        """Of the first parameter group; NaN without one."""
        return float(self.optimizer.param_groups[0]["lr"]) if self.optimizer else float("nan")

    def origin(self, name: str) -> StateOrigin:
        """What a checkpoint notes of the optimizer of a parameter."""
        kind = type(self.optimizer)
        # Modules within a package may get other names.
        package = module_of(kind).partition(".")[0]
        return StateOrigin(f"{package}.{kind.__qualname__}", self.options.get(name, ""))

    def step(self) -> None:
        """Update the parameters, then the learning rate.

        Raises:
            WorkerError: the optimizer or the schedule raises.
            CaptureError: at the first update: a checkpoint could not hold the optimizer's state, or
                the optimizer trains other tensors than the model's parameters.
        """
        if self.optimizer is not None:
            before = None if self._has_stepped else of_groups(self.optimizer)
            forms = {} if before is None else forms_of(self.parameters)
            try:
                call_in_training(self.optimizer.step, "optimizer")
            except WorkerError as error:
                if before is not None and _CALLS_CLOSURE.search(error.message):
                    raise _needs_closure(self.optimizer) from error
                raise
            if before is not None:
                refuse_changes(self.optimizer, before)
                refuse_other_tensors(self.optimizer, self.parameters, forms)
                state_of(self.optimizer, self.parameters)
        self.drop_gradients()
        if not self._has_stepped:  # later steps use other parts of the heap
            release_freed_memory()
            self._has_stepped = True
        self.step_schedule()

    def step_schedule(self) -> None:
        """Update the learning rate alone, unless it follows evaluations."""
        self.updates += 1
        if self.lr_scheduler is not None and not self.watches:
            call_in_training(self.lr_scheduler.step, "lr_scheduler")

    def watch(self, loss: float) -> None:
        """Pass the loss of an evaluation to a schedule that follows it.

        Args:
            loss: the same on all ranks.
        """
        if self.watches:
            assert self.lr_scheduler is not None
            self.losses.append(loss)
            call_in_training(self.lr_scheduler.step, "lr_scheduler", loss)

    def forget_losses(self, count: int) -> None:
        """Drop the losses of evaluations but for the first ``count``, before the state is saved."""
        del self.losses[count:]

    def state(
        self, parameters: Mapping[str, nn.Parameter]
    ) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """The optimizer's state of some parameters; see :func:`state_of`."""
        return ({}, {}) if self.optimizer is None else state_of(self.optimizer, parameters)

    def restore(self, updates: int, losses: Sequence[float]) -> None:
        """Bring a new schedule to its state after some updates and evaluations.

        It is stepped once per update. The rates are those of the schedule that the job asks for
        now, equal to the bit.
        """
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns that the optimizer did not step
            for _ in range(updates):
                self.step_schedule()
            for loss in losses:
                self.watch(loss)

    def drop_gradients(self) -> None:
        """Drop the gradients and change nothing else.

        Raises:
            WorkerError: the optimizer raises.
        """
        # Of a wrapper, zero_grad may take no arguments, or not exist.
        if (zero := getattr(self.optimizer, "zero_grad", None)) is not None:
            call_in_training(zero, "optimizer")
        for parameter in self.parameters.values():
            parameter.grad = None


def make_updater(job: CapturedJob, parameters: Mapping[str, nn.Parameter]) -> Updater:
    """The optimizer and schedule of a job for some of its parameters.

    Args:
        parameters: by full name; frozen ones are ignored.

    Raises:
        CaptureError: a factory fails or puts hooks on parameters, or the schedule follows
            evaluations and the job has none.
    """
    trained = {name: each for name, each in parameters.items() if each.requires_grad}
    schedule = job.spec.lr_scheduler
    is_of_script = schedule is not None and schedule.is_of_script
    function = None if schedule is None or is_of_script else find(schedule.factory)
    if not trained:
        return Updater(None, None)
    # Its factory may set hooks; hooks of sums over replicas are of an earlier training of the job.
    unhooked = [(name, each) for name, each in trained.items() if not has_gradient_hooks(each)]
    optimizer = make_optimizer(job, trained)
    refuse_parameter_hooks(unhooked)
    options = _options_of(job, optimizer, trained)
    updater = Updater(optimizer, None, parameters=trained, options=options)
    if is_of_script:
        assert job.script is not None
        schedules = job.script.make_schedules(optimizer, lambda: _steps_of_epoch(job))
        watches = schedules is not None and _watches(schedules, job)
        return replace(updater, lr_scheduler=schedules, watches=watches)
    if schedule is None or function is None:
        return updater
    name = f"lr_scheduler.factory: {schedule.factory}"
    lr_scheduler = call(function, name, optimizer, **deepcopy(schedule.kwargs))
    _refuse_without(lr_scheduler, name, "a schedule of learning rates", "step")
    return replace(updater, lr_scheduler=lr_scheduler, watches=_watches(lr_scheduler, job))


def _options_of(
    job: CapturedJob, optimizer: Any, parameters: Mapping[str, nn.Parameter]
) -> dict[str, str]:
    """The options of each parameter: a script, or a function, may give others with the same job."""
    names = {id(parameter): name for name, parameter in parameters.items()}
    in_job, options = job.spec.optimizer.model_dump(mode="json"), dict[str, str]()
    for group in optimizer.param_groups:
        own = {
            key: value
            for key, value in group.items()
            if isinstance(value, _COMPARED) and is_option(optimizer, key, value)
        }
        text = json.dumps([in_job, own], sort_keys=True)
        options |= {names[id(each)]: text for each in group["params"] if id(each) in names}
    return options


def is_option(optimizer: Any, key: str, value: Any) -> bool:
    """Whether an entry of a group is neither its parameters nor a name for logs."""
    is_known = key in getattr(optimizer, "defaults", ())
    return key != "params" and (is_known or not isinstance(value, str))


def _steps_of_epoch(job: CapturedJob) -> int | None:
    """The steps of an epoch of a job, which may divide its samples otherwise than its script; None
    if its data are iterable.
    """
    return None if job.loader.samples is None else len(job.loader.epoch(0))


def make_optimizer(job: CapturedJob, parameters: Mapping[str, nn.Parameter]) -> Any:
    """The optimizer of a job for some of its parameters, in the spec's groups.

    Every rank has every group, even if it has none of its parameters, so that the groups' indices
    mean the same to a learning-rate schedule. The first group has the parameters that match no
    pattern.

    Raises:
        CaptureError: the factory fails, a group does not fit the model or the optimizer, or a step
            would compute the loss again.
    """
    spec = job.spec.optimizer
    if spec.is_of_script:
        assert job.script is not None
        sizes = {own_name(name): job.sizes[name] for name in parameters}
        own = {own_name(name): parameter for name, parameter in parameters.items()}
        optimizer = job.script.make_optimizer(own, sizes)
        if type(optimizer) is MUON:
            _refuse_all_but_matrices(parameters)
    else:
        if find(spec.factory) is MUON:
            _refuse_all_but_matrices(parameters)
        name = f"optimizer.factory: {spec.factory}"
        given = _groups_of(job, parameters) if spec.groups else list(parameters.values())
        optimizer = call(find(spec.factory), name, given, **deepcopy(spec.kwargs))
        _refuse_without(optimizer, name, "an optimizer", *_NEEDED)
        _check_options(optimizer, [group.options for group in spec.groups])
    _refuse_closure(optimizer)
    _refuse_modes(optimizer)
    return optimizer


def _groups_of(job: CapturedJob, parameters: Mapping[str, nn.Parameter]) -> list[dict[str, Any]]:
    """The parameter groups of the spec, after that of the parameters that match no pattern."""
    groups, index = job.spec.optimizer.groups, job.parameter_groups()
    members: list[list[nn.Parameter]] = [[] for _ in range(1 + len(groups))]
    for name, parameter in parameters.items():
        members[1 + index.get(name, -1)].append(parameter)
    options: list[dict[str, Any]] = [{}, *(deepcopy(group.options) for group in groups)]
    return [{**more, "params": own} for own, more in zip(members, options, strict=True)]


def _refuse_without(made: Any, name: str, kind: str, *attributes: str) -> None:
    missing = [each for each in attributes if not hasattr(made, each)]
    if missing:
        own = kind if "step" in missing else f"{kind} with {' and '.join(missing)}"
        raise CaptureError(
            f"{name}: returned a {type(made).__name__}, not {own}",
            hint=f"name a class, or return {own} from this function",
        )


def _refuse_closure(optimizer: Any) -> None:
    try:
        parameters = inspect.signature(optimizer.step).parameters.values()
    except (AttributeError, TypeError, ValueError):
        return
    positional = inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD
    if any(each.kind in positional and each.default is each.empty for each in parameters):
        raise _needs_closure(optimizer)


def _needs_closure(optimizer: Any) -> CaptureError:
    return CaptureError(
        f"optimizer: {type(optimizer).__name__}.step() needs a closure that computes the loss "
        "again, which no rank of a pipeline can do",
        hint="use an optimizer whose step() takes no arguments, such as SGD or AdamW",
    )


def _refuse_modes(optimizer: Any) -> None:
    """Refuse optimizers that exchange the weights for others between training and evaluation."""
    if all(callable(getattr(optimizer, mode, None)) for mode in ("train", "eval")):
        raise CaptureError(
            f"optimizer: {type(optimizer).__name__} has modes, train() and eval(), which give the "
            "model other weights; evaluations and exports would have the wrong ones",
            hint="use an optimizer without modes, such as AdamW, with a learning-rate schedule "
            "(lr_scheduler) if you like",
        )


def _refuse_all_but_matrices(parameters: Mapping[str, nn.Parameter]) -> None:
    """Refuse parameters that Muon cannot update; other options for their group would not help."""
    others = [own_name(name) for name, parameter in parameters.items() if parameter.dim() != 2]
    if others:
        more = f" and {len(others) - 1} more" if len(others) > 1 else ""
        raise CaptureError(
            f"optimizer: Muon updates only matrices, not {others[0]}{more}",
            hint="use an optimizer of your own that updates these by another rule, and mark them "
            "by optimizer.groups (match: '*.bias', for example)",
        )


def _check_options(optimizer: Any, options: Sequence[Mapping[str, Any]]) -> None:
    """Refuse options that torch would silently ignore."""
    known = getattr(optimizer, "defaults", {})
    for index, chosen in enumerate(options):
        unknown = next((name for name in chosen if name not in known), None)
        if known and unknown is not None:
            raise CaptureError(
                f"optimizer.groups[{index}]: {type(optimizer).__name__} has no option "
                f"{unknown!r}{did_you_mean(unknown, known)}",
                hint=f"its options are {', '.join(known)}",
            )


def _watches(lr_scheduler: Any, job: CapturedJob) -> bool:
    """Whether a step of the schedule takes a loss.

    Raises:
        CaptureError: it takes something else, or the job has no evaluations whose loss it may get.
    """
    needed = _needed_by_step(lr_scheduler)
    if not needed:
        return False
    kind = type(lr_scheduler).__name__
    if len(needed) > 1 or not _LOSSES & set(re.split("[^a-z]", needed[0].lower())):
        raise CaptureError(
            f"lr_scheduler: {kind}.step() needs {' and '.join(map(repr, needed))}, and pipectl "
            "steps a schedule after each step with nothing, or after each evaluation with its loss",
            hint="name a function that gives a schedule whose step() takes nothing, such as "
            "LambdaLR(optimizer, f) for any function f of the number of steps; if it takes the "
            "loss of evaluations, call that argument 'loss'",
        )
    if getattr(lr_scheduler, "mode", None) == "max":
        raise CaptureError(
            f"lr_scheduler: {kind} follows a metric that rises (mode='max'), and pipectl gives "
            "schedules the loss of evaluations",
            hint="let it follow the loss (mode='min'), or name another schedule",
        )
    if job.spec.evaluation is None or job.spec.evaluation.every is None:
        raise CaptureError(
            f"lr_scheduler: {kind} needs the loss of evaluations, but the job has none while it "
            "trains",
            hint="set evaluation.every: the schedule steps after each evaluation",
        )
    return True


def _needed_by_step(lr_scheduler: Any) -> list[str]:
    """The arguments without which a step of a schedule cannot be made."""
    try:
        parameters = inspect.signature(lr_scheduler.step).parameters.values()
    except (TypeError, ValueError):  # a function of C
        return []
    further = inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD
    return [p.name for p in parameters if p.default is p.empty and p.kind not in further]


def state_of(
    optimizer: torch.optim.Optimizer, parameters: Mapping[str, nn.Parameter]
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The optimizer's state of some of its parameters.

    Returns:
        Tensors by name, not copied; and by parameter, the JSON of its dictionary.

    Raises:
        CaptureError: it contains something that cannot be saved.
    """
    _refuse_shared_state(optimizer)
    tensors: dict[str, Tensor] = {}
    states = {
        name: _encoded(optimizer.state[parameter], name, parameter, tensors)
        for name, parameter in parameters.items()
        if parameter in optimizer.state
    }
    return tensors, states


def _refuse_shared_state(optimizer: torch.optim.Optimizer) -> None:
    """Refuse state that belongs to no parameter: no rank would know whose it is to load."""
    shared = [key for key in optimizer.state if not isinstance(key, Tensor)]
    if shared:
        raise CaptureError(
            f"optimizer: {type(optimizer).__name__} keeps {shared[0]!r} in its state for all "
            "parameters together, which a checkpoint cannot hold",
            hint="use an optimizer that keeps it in the state of each parameter: "
            f"self.state[parameter][{shared[0]!r}]",
        )


def restore_state(
    optimizer: torch.optim.Optimizer,
    parameter: nn.Parameter,
    state: Any,
    tensor: Callable[[str], Tensor],
) -> None:
    """Restore the optimizer's state of a parameter.

    Args:
        state: JSON of :func:`state_of`.
        tensor: returns one of its tensors by name, on the CPU.
    """

    def placed(name: str, strides: Sequence[int] | None) -> Tensor:
        stored, key = tensor(name), name.rpartition("/")[2]
        on_host = not stored.dim() and _counts_on_host(optimizer, parameter, key)
        device = stored.device if on_host else parameter.device
        strides = _usual_strides(stored, parameter) if strides is None else tuple(strides)
        if stored.stride() == strides:
            return stored.to(device)
        blank = torch.empty_strided(stored.shape, strides, dtype=stored.dtype, device=device)
        return blank.copy_(stored)

    optimizer.state[parameter] = _decoded(state, placed)


def of_groups(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """The values of the parameter groups other than parameters, for a later comparison."""
    return [
        {key: _mark(value) for key, value in group.items() if key != "params"}
        for group in optimizer.param_groups
    ]


def refuse_changes(optimizer: torch.optim.Optimizer, before: list[dict[str, Any]]) -> None:
    """Refuse an optimizer that has itself changed its groups in a step.

    Changes by a learning-rate schedule come back when the schedule is stepped again. A count of the
    optimizer's own would restart from its first value when a run resumes, since only the state of
    parameters is saved.

    Raises:
        CaptureError: naming what it has changed.
    """
    for now, then in zip(of_groups(optimizer), before, strict=False):
        changed = [key for key in now if key not in then or now[key] != then[key]]
        if changed:
            raise CaptureError(
                f"optimizer: {type(optimizer).__name__} keeps {changed[0]!r} in its parameter "
                "groups and changes it, which a checkpoint cannot hold",
                hint="use an optimizer that keeps its counters in the state of each parameter",
            )


def forms_of(parameters: Mapping[str, nn.Parameter]) -> dict[str, tuple[object, ...]]:
    """What an optimizer may not change of parameters."""
    return {
        name: (p.dtype, p.shape, p.device, p.requires_grad, identity_of(p))
        for name, p in parameters.items()
    }


def refuse_other_tensors(
    optimizer: torch.optim.Optimizer,
    parameters: Mapping[str, nn.Parameter],
    before: Mapping[str, tuple[object, ...]],
) -> None:
    """Refuse an optimizer that has replaced parameters, or keeps them in its state.

    It may give parameters other memory of the same form.

    Args:
        before: forms of the parameters before the update.

    Raises:
        CaptureError: naming the first such parameter.
    """
    kind, own = type(optimizer).__name__, {id(each) for each in parameters.values()}
    hint = "let it write into the parameters: parameter.add_(...) under torch.no_grad()"
    if any(id(each) not in own for group in optimizer.param_groups for each in group["params"]):
        raise CaptureError(
            f"optimizer: {kind} has put other tensors into its parameter groups, and would train "
            "these instead of the model's parameters",
            hint=hint,
        )
    changed = [name for name, form in forms_of(parameters).items() if form != before[name]]
    if changed:
        raise CaptureError(
            f"optimizer: {kind} has replaced {own_name(changed[0])!r} by a tensor of another type, "
            "size or device, or without a gradient, or has swapped it (swap_tensors)",
            hint=hint,
        )
    memories = {storage_of(each): name for name, each in parameters.items() if each.numel()}
    for tensor in tensors_in_state(optimizer):
        if tensor.numel() and storage_of(tensor) in memories:
            raise CaptureError(
                f"optimizer: {kind} keeps {own_name(memories[storage_of(tensor)])!r} itself in "
                "its state, which would be another tensor after a checkpoint",
                hint="keep a copy in the state: parameter.detach().clone()",
            )


def tensors_in_state(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """All tensors that an optimizer keeps; a state may be any mapping, or no mapping."""
    states = optimizer.state.values()
    return tensors_in([dict(each) if isinstance(each, Mapping) else each for each in states])


def _mark(value: Any) -> Any:
    """A value that shows a later change, read without waiting for a device."""
    if isinstance(value, Tensor):
        return id(value), version_of(value)
    if isinstance(value, tuple):
        return tuple(map(_mark, value))
    return value if isinstance(value, _COMPARED) else id(value)


def _counts_on_host(optimizer: torch.optim.Optimizer, parameter: nn.Parameter, key: str) -> bool:
    """Whether a state is a number of steps, which torch keeps on the CPU.

    Except if kernels need it on the device, and in ASGD.
    """
    if key not in _COUNTERS or isinstance(optimizer, torch.optim.ASGD):
        return False
    group = next(g for g in optimizer.param_groups if any(p is parameter for p in g["params"]))
    return not (group.get("capturable") or group.get("fused"))


def _encoded(value: Any, path: str, parameter: nn.Parameter, tensors: dict[str, Tensor]) -> Any:
    if isinstance(value, Tensor) and value.dtype in CODES:
        tensors[path] = value.detach()
        strides = _strides(value)
        is_usual = strides == _usual_strides(value, parameter)
        return {_TENSOR: path if is_usual else [path, *strides]}
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {_FLOAT: str(value)}
    if isinstance(value, list | tuple):
        items = [
            _encoded(item, f"{path}/{index}", parameter, tensors)
            for index, item in enumerate(value)
        ]
        return items if isinstance(value, list) else {_TUPLE: items}
    if isinstance(value, dict) and all(isinstance(key, str | int) for key in value):
        pairs = [
            [key, _encoded(item, f"{path}/{key}", parameter, tensors)]
            for key, item in value.items()
        ]
        return {_DICT: pairs}
    of = f" of {value.dtype}" if isinstance(value, Tensor) else ""
    raise CaptureError(
        f"optimizer: the state of {own_name(path)} is a {type(value).__name__}{of}, "
        "which a checkpoint cannot hold",
        hint="use an optimizer whose state is tensors, numbers, and lists and mappings of them",
    )


def _strides(tensor: Tensor) -> tuple[int, ...]:
    """Those of a copy of a tensor: in its order, without gaps or repeated elements."""
    return torch.empty_like(tensor, device="meta").stride()


def _usual_strides(tensor: Tensor, parameter: nn.Parameter) -> tuple[int, ...]:
    """Those of most states: as the parameter's, if the sizes are."""
    is_like = tensor.shape == parameter.shape
    return _strides(parameter if is_like else torch.empty(tensor.shape, device="meta"))


def _decoded(value: Any, tensor: Callable[[str, Sequence[int] | None], Tensor]) -> Any:
    if isinstance(value, list):
        return [_decoded(item, tensor) for item in value]
    if not isinstance(value, dict):
        return value
    ((kind, inner),) = value.items()
    if kind == _TENSOR:
        return tensor(inner, None) if isinstance(inner, str) else tensor(inner[0], inner[1:])
    if kind == _FLOAT:
        return float(inner)
    if kind == _TUPLE:
        return tuple(_decoded(item, tensor) for item in inner)
    return {key: _decoded(item, tensor) for key, item in inner}


def may_divide(spec: JobSpec) -> bool:
    """Whether some plan of a job gives ranks different parameters to update."""
    alone = spec.pipeline.stages == 1 and not spec.pipeline.shard_optimizer
    return spec.resources.ranks > 1 and not alone


def divides(plan: Plan) -> bool:
    """Whether ranks of a plan update different parameters."""
    held = [len(plan.stages_of_rank(rank)) for rank in range(plan.ranks)]
    return plan.shard_optimizer or min(held) < len(plan.stages)


def refuse_half_parameters(parameters: Mapping[str, nn.Parameter]) -> None:
    """Raise for parameters that are in float16 themselves, as torch does.

    Raises:
        CaptureError: naming the first.
    """
    half = next((n for n, p in parameters.items() if p.dtype == torch.float16), None)
    if half is not None:
        raise CaptureError(
            f"training.precision: float16 trains parameters in float32, but "
            f"{own_name(half)!r} is in float16",
            hint="build the model without .half(); autocast converts values if that helps",
        )
