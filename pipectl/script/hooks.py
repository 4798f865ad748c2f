"""All that is replaced in torch while a script runs, and what each tells the recorder.

- ``nn.Module.__call__``: which module is called with what.
- ``torch.autograd.backward`` (``Tensor.backward`` calls it): the loss. No gradients are computed;
  parameters get zeros that nobody can write to, so that what changes gradients by hand raises.
  They are there again after a step, so that the next one shows whether the script drops them.
- ``clip_grad_norm_`` and ``clip_grad_value_``: the largest norm or value.
- ``DataLoader.__iter__``: the loader, its batches, and the random numbers it draws from.
- ``itertools.cycle``: a loader whose first epoch is repeated.
- ``len`` in modules of the user: the size of a batch (`Recorder.length`).
- ``DataLoader.__init__``: its samplers and datasets; ``set_epoch`` of these: the first number.
- ``GradScaler.scale``, ``unscale_``, ``step``, ``update``: the loss is recorded without a scale.
- ``torch.autocast.__init__``: what is asked for, also where it is not available.
- ``Optimizer.__init__``, ``LRScheduler.__init__``: which ones there are.
- ``torch.compile``: changes nothing, since stages are compiled by ``training.compile``.
- ``torch.set_num_threads``, ``torch.set_num_interop_threads`` (possible once in a process): do
  nothing; ``torch.set_default_device``: no accelerator.
- ``torch.cuda.is_available`` and its like: no accelerator, because pipectl places the model itself.
- variables of libraries: no tracking service is told, no window is opened.
- ``init_process_group``, ``DistributedDataParallel``, ``torch.multiprocessing.spawn``: refused.

The first step of an optimizer calls a hook of torch's own
(``register_optimizer_step_pre_hook``), which ends the script with :class:`Taken`.
"""

from __future__ import annotations

import gc
import itertools
import math
import os
import sys
import time
import weakref
from collections.abc import Callable, Iterator, Sized
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils.data import DataLoader, IterableDataset

from pipectl.errors import CaptureError
from pipectl.faults import is_user_code
from pipectl.objects import Kept
from pipectl.script import loops
from pipectl.script.order import (
    Generators,
    SharedGenerators,
    Told,
    datasets_of,
    draws_when_read,
    samplers_of,
)
from pipectl.script.program import Place
from pipectl.script.recorder import (
    Recorder,
    Recording,
    at,
    memory_of,
    plain_device,
    script_place,
    script_places,
)
from pipectl.torch_api import draw_rest

_RANK_VARIABLES = (
    "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "NODE_RANK",
    "MASTER_ADDR", "MASTER_PORT", "OMPI_COMM_WORLD_", "PMI_", "PMIX_", "MPI_LOCAL",
    "MV2_COMM_WORLD",
    "SLURM_PROCID", "SLURM_LOCALID", "SLURM_NTASKS", "SLURM_NODEID", "SLURM_JOB_NUM_NODES",
    "SLURM_STEP", "PALS_", "CROSS_RANK", "CROSS_SIZE",
)  # fmt: skip
"""How the names of variables begin by which libraries find that they are one of several ranks."""
_OF_PIPECTL = (
    *_RANK_VARIABLES, "PIPECTL_", "PYTHONHASHSEED", "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER",
    "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "ZE_AFFINITY_MASK", "ONEAPI_DEVICE_SELECTOR",
)  # fmt: skip
"""How the names of variables begin that say what pipectl decides: ranks, their devices and how they
hash."""
_QUIET = {"WANDB_MODE": "disabled", "MPLBACKEND": "Agg"}
_SCHEDULED = ("lr", "momentum", "betas", "weight_decay")
"""Options of optimizers; some optimizers keep counters among the others."""
_OUTSIDE = str(Path(__file__).with_name("run.py"))
"""What runs the script."""
_IGNORED_STOPS = 20
_PATIENCE_S = 20.0
"""For what a script does between two epochs."""
_MOST_BATCHES = 1_000_000
"""Whose samples are drawn at the end of an epoch that is cut short."""
_FEW = 2
"""Batches of an evaluation."""


class Taken(BaseException):
    """Ends a script whose parts have been taken."""


@dataclass
class Clip:
    """A call that clips gradients.

    Args:
        kind: ``norm`` or ``value``.
        limit: the largest norm or value.
        norm_type: of the norm.
        parameters: that are clipped.
        steps, backwards: how many there were before it.
    """

    kind: str
    limit: float
    norm_type: float
    parameters: list[Tensor]
    place: Place
    steps: int
    backwards: int


@dataclass
class Loading:
    """One iteration over a loader.

    Args:
        loader: of the script.
        start: the random numbers when it began to draw the order of the samples.
        data: an iterable dataset as it was before this iteration.
        first: number of its first batch.
        begun_after: so many steps of the optimizer.
        places: all lines of the script that were being run when its first batch was read, innermost
            first.
        is_over: whether all batches have been read.
    """

    loader: DataLoader[Any]
    start: Generators
    data: Kept
    first: int
    place: Place
    begun_after: int = 0
    places: list[Place] = field(default_factory=list)
    is_over: bool = False


@dataclass
class Seen:
    """What the hooks have seen.

    Attributes:
        recorder: of the steps.
        loadings: iterations over loaders that batches were read from, by the number of a batch.
        positions: of batches in their iterations, by the numbers of batches.
        made: places where optimizers and schedules were made.
        made_by: all lines of the script that were being run then, by the id of what was made.
        clips: of gradients that were there.
        autocasts: arguments of autocast, with their places.
        optimizer: that stepped.
        frames: of the stack at that time, innermost first: code, globals, locals and line.
        leaves: tensors that the first step has gradients of, by their ids.
        zeros: the gradients of parameters, by the ids of these.
        held: parameters that had gradients after the last backward or step.
        kept: parameters that still have those of a step at the first backward of the next one, and
            the number of this.
        dropped: parameters that no longer have those of a backward at the next one or at the step,
            and the line of this.
        steps: of the optimizer until the script ends; they change no weights.
        ends: of every step so far: the number of recordings.
        options: of the optimizer's groups, before every step.
        at_first: called before the first step.
        shortened: steps after which the first iteration over the training data ends, and others
            after a few batches; 0 for none.
        evaluated: iterations over other data between two epochs.
        patience_until: time of the monotonic clock until which a script may run on after that.
        epochs: how the script has told samplers and datasets the number of its first epoch, by the
            ids of these.
        is_telling: whether one is being told; what it tells others follows from that.
        draws_between_batches: whether an iteration that was cut short drew random numbers after its
            first batch, as it does by dropout.
        cycled: loaders, by their ids, that ``itertools.cycle`` reads once and then repeats.
        followed_values: what the script has given to schedules that follow a metric, after steps.
        place: the working directory at the first step.
    """

    recorder: Recorder = field(default_factory=Recorder)
    loadings: dict[int, Loading] = field(default_factory=dict)
    positions: dict[int, int] = field(default_factory=dict)
    made: dict[int, tuple[Any, Place]] = field(default_factory=dict)
    made_by: dict[int, list[Place]] = field(default_factory=dict)
    clips: list[Clip] = field(default_factory=list)
    autocasts: list[tuple[str, Any, Place]] = field(default_factory=list)
    scaler: tuple[GradScaler, Place] | None = None
    compiled: Place | None = None
    optimizer: Optimizer | None = None
    stepped: Place = ("", 0)
    frames: list[loops.Frame] = field(default_factory=list)
    leaves: dict[int, Tensor] = field(default_factory=dict)
    zeros: dict[int, Tensor] = field(default_factory=dict)
    held: list[Tensor] = field(default_factory=list)
    kept: list[tuple[Tensor, int]] = field(default_factory=list)
    dropped: list[tuple[Tensor, Place]] = field(default_factory=list)
    stops: int = 0
    steps: int = 1
    ends: list[int] = field(default_factory=list)
    options: list[list[dict[str, Any]]] = field(default_factory=list)
    at_first: Callable[[Seen], None] = lambda _: None
    shortened: int = 0
    evaluated: dict[int, Loading] = field(default_factory=dict)
    patience_until: float = math.inf
    epochs: dict[int, Told] = field(default_factory=dict)
    is_telling: bool = False
    draws_between_batches: bool = False
    cycled: dict[int, Any] = field(default_factory=dict)
    followed_values: list[tuple[float, Place]] = field(default_factory=list)
    place: str = ""
    followed: ExitStack = field(default_factory=ExitStack)
    adapted: ExitStack = field(default_factory=ExitStack)

    def has_gradient(self, parameter: Tensor) -> bool:
        """Whether a parameter has a gradient that is not set to zero."""
        gradient = parameter.grad
        if gradient is None or gradient is not self.zeros.get(id(parameter)):
            return False
        return memory_of(gradient) not in self.recorder.zeroed

    @property
    def is_over(self) -> bool:
        """Whether the last step has been reached."""
        if len(self.ends) >= self.steps:
            return True
        return self.is_shortened and not self.is_of_first_epoch(self.recorder.recordings[-1])

    def is_of_first_epoch(self, recording: Recording) -> bool:
        """Whether the batch of a recording is of a first epoch that is cut short."""
        loading = self.loading_of(recording)
        return not self.shortened or loading is None or loading.begun_after < self.shortened

    @property
    def is_shortened(self) -> bool:
        """Whether iterations over data are to end by now."""
        return 0 < self.shortened <= len(self.ends)

    def loading_of(self, recording: Recording) -> Loading | None:
        """The iteration that gave the batch of a recording."""
        return self.loadings[recording.batches[0]] if recording.batches else None

    def follow_epochs(self, loader: DataLoader[Any]) -> None:
        """Note which epochs the samplers and datasets of a loader are told."""
        for kind in {type(each) for each in (*samplers_of(loader), *datasets_of(loader))}:
            told = getattr(kind, "set_epoch", None)
            if told is not None and not hasattr(told, "notes"):
                new = _telling(self, told)
                self.followed.enter_context(mock.patch.object(kind, "set_epoch", new))

    def follow_lengths(self) -> None:
        """Let ``len`` in modules of the user that are imported by now tell the size of a batch."""
        for module in list(sys.modules.values()):
            own = getattr(module, "__dict__", {})
            file = own.get("__file__")
            if isinstance(file, str) and "len" not in own and is_user_code(file):
                own["len"] = self.recorder.length
                self.followed.callback(own.pop, "len", None)

    def forget_dropped(self) -> None:
        """Forget optimizers and schedules that the script has replaced by others."""
        own, kept = id(self.optimizer), dict[int, tuple[Any, Place]]()
        others = [(weakref.ref(each), place) for each, place in self.made.values()]
        kept.update((key, each) for key, each in self.made.items() if key == own)
        self.made.clear()
        gc.collect()  # a schedule and its optimizer refer to each other
        for other, place in others:
            if (alive := other()) is not None:
                kept.setdefault(id(alive), (alive, place))
        self.made.update(kept)

    def adapt(self) -> None:
        """Replace what is to be replaced in libraries that the script has imported."""
        self.adapted.close()
        for target, name, new in loops.replacements():
            self.adapted.enter_context(mock.patch.object(target, name, new))


@contextmanager
def hooked(seen: Seen) -> Iterator[None]:
    """Replace all this, and record; the script runs within."""
    with ExitStack() as stack:
        stack.callback(seen.adapted.close)
        stack.callback(seen.followed.close)
        for target, name, new in _replacements(seen):
            if hasattr(target, name):
                stack.enter_context(mock.patch.object(target, name, new))
        for handle in (
            register_optimizer_step_pre_hook(lambda *call: _stop(seen, *call)),
            register_optimizer_step_post_hook(lambda *_: _give_gradients(seen, seen.held)),
        ):
            stack.callback(handle.remove)
        stack.enter_context(one_process())
        stack.enter_context(no_accelerator())
        stack.enter_context(seen.recorder)
        yield


@contextmanager
def one_process() -> Iterator[None]:
    """Hide the variables that say that this process is a rank of several, and let libraries tell
    nothing to tracking services and open no windows. Other variables stay as a script sets them.
    """
    for name, (old, new) in _of_script.items():
        if os.environ.get(name) == new:
            _set_variable(name, old)
    _of_script.clear()
    before = dict(os.environ)
    for name in filter(lambda name: name.startswith(_RANK_VARIABLES), before):
        del os.environ[name]
    os.environ.update(_QUIET)
    try:
        yield
    finally:
        for name in before.keys() | os.environ.keys():
            old, new = before.get(name), os.environ.get(name)
            if name.startswith(_OF_PIPECTL) or name in _QUIET:
                _set_variable(name, old)
            elif new != old:
                _of_script[name] = old, new


_of_script: dict[str, tuple[str | None, str | None]] = {}
"""Variables that the last script of this process has set, before and after: its dataset may read
them, and another script does not find them."""


def _set_variable(name: str, value: str | None) -> None:
    if value is None:
        os.environ.pop(name, None)
    else:
        os.environ[name] = value


@contextmanager
def no_accelerator() -> Iterator[None]:
    """Let torch say that there is no accelerator: pipectl places the model itself."""
    names = ("cuda", "xpu", "accelerator")
    modules = [getattr(torch, name, None) for name in names]
    with ExitStack() as stack:
        for module in [torch.backends.mps, *modules]:
            if hasattr(module, "is_available"):
                stack.enter_context(mock.patch.object(module, "is_available", return_value=False))
        stack.enter_context(mock.patch.object(torch.cuda, "device_count", return_value=0))
        yield


def _replacements(seen: Seen) -> Iterator[tuple[Any, str, Any]]:
    call, clip = nn.Module.__call__, torch.nn.utils.clip_grad
    yield nn.Module, "__call__", _calling(seen, call)
    yield torch.autograd, "backward", lambda tensors, *a, **k: _backward(seen, tensors, a, k)
    for place in (torch.nn.utils, clip):
        yield place, "clip_grad_norm_", _clipper(seen, "norm")
        yield place, "clip_grad_value_", _clipper(seen, "value")
    yield DataLoader, "__init__", _loading(seen, DataLoader.__init__)
    yield DataLoader, "__iter__", _iterating(seen, DataLoader.__iter__)
    kinds: tuple[Any, ...] = (Optimizer, ReduceLROnPlateau, *_kinds_of(LRScheduler))
    for owner in kinds:
        yield owner, "__init__", _noting(seen, owner.__init__)
    yield ReduceLROnPlateau, "step", _following(seen, ReduceLROnPlateau.step)
    yield itertools, "cycle", _cycling(seen)
    yield torch.autocast, "__init__", _autocasting(seen, torch.autocast.__init__)
    yield GradScaler, "scale", lambda self, outputs: _scale(seen, self, outputs)
    yield GradScaler, "unscale_", lambda *_: None
    yield GradScaler, "step", lambda *call, **k: call[1].step(*call[2:], **k)
    yield GradScaler, "update", lambda *_, **__: None
    yield torch, "set_num_threads", lambda _: None
    yield torch, "set_num_interop_threads", lambda _: None
    yield torch, "set_default_device", _set_default_device(torch.set_default_device)
    yield torch, "compile", lambda model=None, **_: _uncompiled(seen, model)
    if torch.distributed.is_available():
        yield torch.distributed, "init_process_group", _refuse_process_group
        yield nn.parallel.DistributedDataParallel, "__init__", _refuse_process_group
    for name in ("spawn", "start_processes"):
        yield torch.multiprocessing, name, _refuse_processes


def _kinds_of(kind: type) -> Iterator[type]:
    """Yield a class and its subclasses that have an ``__init__`` of their own.

    Those of SequentialLR and ChainedScheduler do not call that of LRScheduler.
    """
    if "__init__" in vars(kind):
        yield kind
    below: list[type] = kind.__subclasses__()
    for each in below:
        yield from _kinds_of(each)


def _calling(seen: Seen, original: Callable[..., Any]) -> Callable[..., Any]:
    def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if seen.is_shortened:
            _be_patient(seen)
        return seen.recorder.call_module(original, module, args, kwargs)

    return call


def _set_default_device(original: Callable[..., None]) -> Callable[..., None]:
    return lambda device: original(plain_device(device))


def _clipper(seen: Seen, kind: str) -> Callable[..., Any]:
    def clip(parameters: Any, limit: Any = None, norm_type: float = 2.0, *_: Any, **k: Any) -> Any:
        limit = k.get("max_norm", k.get("clip_value", limit))
        own = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        steps, backwards = len(seen.ends), len(seen.recorder.recordings)
        if backwards > (seen.ends[-1] if steps else 0):  # otherwise there are no gradients
            place = script_place()
            seen.clips.append(
                Clip(kind, float(limit), float(norm_type), own, place, steps, backwards)
            )
        return torch.zeros(()) if kind == "norm" else None

    return clip


def _loading(seen: Seen, original: Callable[..., None]) -> Callable[..., None]:
    def make(loader: DataLoader[Any], *args: Any, **kwargs: Any) -> None:
        original(loader, *args, **kwargs)
        seen.follow_epochs(loader)

    return make


def _telling(seen: Seen, original: Callable[..., Any]) -> Callable[..., Any]:
    def set_epoch(owner: Any, *args: Any, **kwargs: Any) -> Any:
        outer = seen.is_telling
        # Later ones are of other epochs, or of pipectl; those within another one follow from it.
        if seen.optimizer is None and not outer:
            told = Told.of(original, owner, args, kwargs)
            seen.epochs.update({} if told is None else {id(owner): told})
        seen.is_telling = True
        try:
            return original(owner, *args, **kwargs)
        finally:
            seen.is_telling = outer

    vars(set_epoch)["notes"] = True
    return set_epoch


def _cycling(seen: Seen) -> type:
    class Cycle(itertools.cycle):  # type: ignore[type-arg]
        """Notes the loader that it repeats."""

        def __new__(cls, iterable: Any) -> Cycle:
            if isinstance(iterable, DataLoader):
                seen.cycled[id(iterable)] = iterable
            return super().__new__(cls, iterable)

    return Cycle


def _following(seen: Seen, original: Callable[..., None]) -> Callable[..., None]:
    def step(self: Any, metrics: Any, *args: Any, **kwargs: Any) -> None:
        if seen.ends:
            with suppress(TypeError, ValueError, RuntimeError):
                seen.followed_values.append((float(metrics), script_place()))
        original(self, metrics, *args, **kwargs)

    return step


def _iterating(seen: Seen, original: Callable[..., Any]) -> Callable[..., Any]:
    def iterate(loader: DataLoader[Any]) -> Any:
        seen.follow_lengths()
        start = Generators(loader)
        data = Kept(loader.dataset) if isinstance(loader.dataset, IterableDataset) else Kept()
        place, begun_after = script_place(), len(seen.ends)
        loading = Loading(loader, start, data, len(seen.loadings), place, begun_after)
        return _Batches(seen, loading, original(loader))

    return iterate


class _Batches:
    """The iterator of a loader, which tells the recorder of each batch."""

    def __init__(self, seen: Seen, loading: Loading, batches: Any) -> None:
        self._seen, self._loading, self._batches = seen, loading, batches
        self._given = 0
        self._drawn = SharedGenerators()

    def __iter__(self) -> Iterator[Any]:
        return self

    def __len__(self) -> int:
        return len(self._batches)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._batches, name)

    def __next__(self) -> Any:
        if self._seen.is_shortened:
            self._end_soon()
        if not self._given and draws_when_read(self._loading.loader):
            self._loading.start = Generators(self._loading.loader, is_iterated=True)
        if not self._given:
            self._loading.places = list(script_places())
        try:
            batch = next(self._batches)
        except StopIteration:
            self._loading.is_over = True
            raise
        if not self._given:  # the order has been drawn by now
            self._drawn = SharedGenerators()
        self._given += 1
        number = len(self._seen.loadings)
        self._seen.loadings[number] = self._loading
        self._seen.positions[number] = self._given - 1
        self._seen.recorder.batch(number, batch, self._loading)
        return batch

    def _end_soon(self) -> None:
        """End the first epoch, and evaluations after a few batches."""
        _be_patient(self._seen)
        loading, is_training = self._seen.loading_of(self._seen.recorder.recordings[0]), False
        if loading is not None and loading.loader is self._loading.loader:
            is_over, is_training = self._loading.begun_after < self._seen.shortened, True
        else:
            is_over = self._given >= _FEW
            self._seen.evaluated.setdefault(id(self._loading.loader), self._loading)
        if is_over:
            self._seen.draws_between_batches |= bool(self._given) and self._drawn.have_drawn()
            sampler: Any = self._loading.loader.batch_sampler
            if is_training and isinstance(sampler, Sized):  # as at the end of a whole epoch
                with suppress(TypeError, NotImplementedError):  # a stream has no length
                    draw_rest(self._batches, min(len(sampler) + 1, _MOST_BATCHES))
            raise StopIteration


def _be_patient(seen: Seen) -> None:
    """End the script if it has run on for long enough."""
    if time.monotonic() > seen.patience_until:
        raise Taken


def _noting(seen: Seen, original: Callable[..., None]) -> Callable[..., None]:
    def make(self: Any, *args: Any, **kwargs: Any) -> None:
        seen.adapt()  # loops of libraries make optimizers before they read data
        if id(self) not in seen.made:
            seen.made[id(self)] = self, script_place()
            seen.made_by[id(self)] = list(script_places())
        original(self, *args, **kwargs)

    return make


def _autocasting(seen: Seen, original: Callable[..., None]) -> Callable[..., None]:
    def make(self: Any, device_type: str, *args: Any, **kwargs: Any) -> None:
        original(self, device_type, *args, **kwargs)
        dtype = args[0] if args else kwargs.get("dtype")
        asked = args[1] if len(args) > 1 else kwargs.get("enabled", True)
        if asked:
            seen.autocasts.append((device_type, dtype, script_place()))

    return make


def _scale(seen: Seen, scaler: GradScaler, outputs: Any) -> Any:
    seen.scaler = scaler, script_place()
    return outputs


def _uncompiled(seen: Seen, model: Any) -> Any:
    seen.compiled = script_place()
    return (lambda function: function) if model is None else model


def _refuse_process_group(*_: Any, **__: Any) -> None:
    raise CaptureError(
        f"{at(script_place())}: starts torch.distributed",
        hint="leave it out unless RANK is set (if 'RANK' in os.environ: ...), or for one process: "
        "pipectl starts the ranks, divides batches and adds gradients",
    )


def _refuse_processes(function: Any, *_: Any, **__: Any) -> None:
    name = getattr(function, "__name__", "main")
    raise CaptureError(
        f"{at(script_place())}: starts processes that train",
        hint=f"unless there are several accelerators, call the function itself: {name}(0, ...); "
        "pipectl starts the ranks",
    )


def _backward(seen: Seen, tensors: Any, args: Any, kwargs: Any) -> None:
    several = [tensors] if isinstance(tensors, Tensor) else list(tensors)
    gradients = args[0] if args else kwargs.get("grad_tensors")
    given = [g for g in (gradients or ()) if g is not None] if isinstance(gradients, tuple) else []
    if len(several) != 1 or several[0].numel() != 1 or any(not _is_one(g) for g in given):
        raise CaptureError(
            f"{at(script_place())}: backward() of {len(several)} tensors, or of one that is not a "
            "single number, or with gradients of its own",
            hint="call backward() without arguments on one loss",
        )
    _note_gradients(seen)
    seen.recorder.backward(several[0])
    if not seen.ends:
        seen.leaves.update((id(leaf), leaf) for leaf in _leaves_behind(several[0]))
    own = (p for module in seen.recorder.training for p in module.parameters(recurse=False))
    trained = {id(each): each for each in own if each.requires_grad}
    zero = torch.zeros(())
    for key in trained.keys() - seen.zeros.keys():
        one = zero.to(trained[key].dtype, copy=True)
        seen.zeros[key] = one.expand(trained[key].shape)
        seen.recorder.gradients.add(memory_of(one))
    _give_gradients(seen, list(trained.values()))


def _give_gradients(seen: Seen, parameters: list[Tensor]) -> None:
    """Let parameters have gradients, whether they were dropped or set to zero."""
    seen.recorder.zeroed.clear()
    seen.held = parameters
    for parameter in parameters:
        parameter.grad = seen.zeros[id(parameter)]


def _note_gradients(seen: Seen) -> None:
    """Note what a backward finds: gradients of the step before, or none of an earlier backward."""
    ends, number = seen.ends, len(seen.recorder.recordings)
    if number == (ends[-1] if ends else 0):
        step = len(ends) + 1
        seen.kept += [(each, step) for each in seen.held if seen.has_gradient(each)]
    else:
        _note_dropped(seen)


def _note_dropped(seen: Seen) -> None:
    place = script_place()
    seen.dropped += [(each, place) for each in seen.held if not seen.has_gradient(each)]


def _leaves_behind(loss: Tensor) -> Iterator[Tensor]:
    """Yield the tensors that a backward of a loss would give gradients."""
    waiting, known = [loss.grad_fn], set[Any]()
    while waiting:
        node = waiting.pop()
        if node is None or node in known:
            continue
        known.add(node)
        if (leaf := getattr(node, "variable", None)) is not None:
            yield leaf
        waiting += [later for later, _ in node.next_functions]


def _is_one(gradient: Any) -> bool:
    return isinstance(gradient, Tensor) and gradient.numel() == 1 and float(gradient) == 1.0


def _stop(seen: Seen, optimizer: Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Before a step of an optimizer: end the script, or let the step do nothing.

    Args:
        args, kwargs: of ``step``; the optimizer itself is the first one.

    Returns:
        Arguments for a step that does not call the closure again.
    """
    closure, value = kwargs.get("closure", args[1] if len(args) > 1 else None), None
    if callable(closure):
        with torch.enable_grad():
            value = closure()
    if not seen.recorder.recordings:
        raise CaptureError(
            f"{at(script_place())}: the optimizer steps before any backward()",
            hint="remove this step, or call backward() on a loss before",
        )
    if seen.optimizer is None:
        seen.optimizer, seen.stepped = optimizer, script_place()
        seen.place = str(Path.cwd())
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and frame.f_code.co_filename != _OUTSIDE:
            own = dict(frame.f_locals)
            seen.frames.append((frame.f_code, frame.f_globals, own, frame.f_lineno))
            frame = frame.f_back
        _refuse_changed_gradients(seen)
        seen.at_first(seen)
    _note_dropped(seen)
    seen.options.append(options_of(optimizer))
    seen.ends.append(len(seen.recorder.recordings))
    if len(seen.ends) == seen.shortened:
        seen.patience_until = time.monotonic() + _PATIENCE_S
    if not seen.is_over:
        trained: list[Tensor] = [
            each for group in optimizer.param_groups for each in group["params"]
        ]
        seen.held = [each for each in trained if seen.has_gradient(each)]
        for parameter in trained:
            parameter.grad = None  # so the optimizer leaves it as it is
        return ((args[0], lambda: value), {}) if callable(closure) else (args, kwargs)
    seen.stops += 1
    if seen.stops > _IGNORED_STOPS:
        os.write(2, b"pipectl: a bare `except:` of the script keeps it running; name exceptions\n")
        os._exit(3)
    raise Taken


def options_of(optimizer: Optimizer) -> list[dict[str, Any]]:
    """The options of every group that schedules change, as they are now."""
    return [
        {k: float(v) if isinstance(v, Tensor) else v for k, v in group.items() if k in _SCHEDULED}
        for group in optimizer.param_groups
    ]


def _refuse_changed_gradients(seen: Seen) -> None:
    assert seen.optimizer is not None
    groups = (group["params"] for group in seen.optimizer.param_groups)
    held = {id(each) for each in seen.held}
    for parameter in itertools.chain.from_iterable(groups):
        given = seen.zeros.get(id(parameter)) if id(parameter) in held else None
        if parameter.grad is not given or memory_of(given) in seen.recorder.zeroed:
            raise CaptureError(
                f"{at(seen.stepped)}: the gradients are changed between backward() and step()",
                hint="pipectl can clip gradients (clip_grad_norm_), and nothing else",
            )


__all__ = ["Clip", "Loading", "Seen", "Taken", "hooked", "one_process", "options_of"]
