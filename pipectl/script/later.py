"""Compares the recorded first step of a script with what the script does in its next steps.

A job runs the program that was recorded in the first step for every batch. What the script decides
in Python by a step's number or by values of a batch (a weight that is annealed, a state that is
carried on, an ``if``) is in the program as it was in the first step. So the script runs on for some
steps, with weights that stay as they are, and its losses are compared with those of the program for
the same batches, random numbers and buffers. Learning rates are compared with those that the
script's schedules make.

After these steps the first epoch is cut short: the iteration over the training data ends, and so do
evaluations. The first step of the second epoch is compared, too.

Nothing is written meanwhile: ``torch.save`` does nothing, and the comparison ends where the script
opens a file for writing, for example (`unwritten.py`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from pipectl.errors import CaptureError
from pipectl.script.hooks import Clip, Seen, Taken, options_of
from pipectl.script.loops import comes_again, hand_set, names_of
from pipectl.script.optimizers import Schedules, cut_down, follows_evaluations
from pipectl.script.order import described
from pipectl.script.parts import Parts, model_of, program_of
from pipectl.script.program import (
    Entry,
    Outer,
    Place,
    Program,
    Ref,
    leaves_of,
    name_of,
    parts,
    reach,
)
from pipectl.script.read_again import Step, drawn_between_epochs, read_again
from pipectl.script.recorder import Recorder, Recording, at, memory_of, script_place
from pipectl.script.run import Command, run_script
from pipectl.script.second_epoch import FirstEpoch
from pipectl.script.unwritten import unwritten
from pipectl.units import plural

STEPS = 3
"""Of the first epoch."""
_AHEAD = 4
"""Steps that a script may make in its first epoch with batches that it has read ahead."""
_RELATIVE = 1e-5
_ABSOLUTE = 1e-8
_ALIKE = (
    "compute it in every step in the same way, from the batch and the model alone, with functions "
    "of torch"
)
_DRAWN = (
    "; draw random numbers with torch, such as torch.rand(()) and torch.randperm(n); numbers made "
    "of texts and the like belong into the dataset or the collate_fn"
)
_MADE = "; make tensors of texts or values in the Dataset or the collate_fn, not in the loop"
_STATE = (
    "; begin each batch with a state of its own (zeros, say) instead of what an earlier one left; "
    "let one DataLoader give all that a step reads"
)
_FROM_VALUES = {"tensor", "as_tensor", "from_numpy"}
_OWN_LOSS = "; or give the job a loss of its own (key loss)"
_FOLLOWS_TRAINING = (
    "ReduceLROnPlateau follows the loss of training, and in a job it follows that of evaluations"
)
_FOLLOWS_HINT = (
    "compute the loss of held-out data of a DataLoader after each epoch, and give it to step(); or "
    "take a schedule that follows no loss (CosineAnnealingLR, say); or write a job with `script:` "
    "and a schedule of its own (key lr_scheduler)"
)
_OPTION = (
    "let get_lr() of a schedule of your own set it (a class that derives from "
    "torch.optim.lr_scheduler.LRScheduler: `for group in self.optimizer.param_groups: "
    "group['{0}'] = values[self.last_epoch]`, and `return [group['lr'] for group in "
    "self.optimizer.param_groups]`), with step() after every step of the optimizer or after every "
    "epoch; or leave it as it is"
)
_SCHEDULE = (
    "let a schedule of torch.optim.lr_scheduler set it, by step() without arguments (LambdaLR "
    "takes any function of the step), once after every step of the optimizer or after every epoch "
    "and under no condition; or write a job with `script:` and a schedule of its own (key "
    "lr_scheduler)"
)


@dataclass
class Compared:
    """What was compared.

    Args:
        steps: optimizer steps of the first epoch whose losses are those of the program.
        reason: why it is no more; empty if nothing is missing.
        place: of the script that the reason is about.
        epochs: the epochs that these steps and the last one are of: 1 or 2.
        draws: whether the first step draws random numbers.
        shapes: which tensor of a later batch has another shape than in the first one, if one has.
        evaluated: other data that the script reads after an epoch: in words, with their places and
            the names of their loaders.
        others: which steps of the first epoch train on other samples than the job, in words.
        reorders: why later epochs have other samples than in the job, or in another order; empty
            if they were not seen to.
        samples_draw: whether samples draw random numbers, so that they were not compared.
        rest: samples of the last batches of an epoch of a stream that fill no step; None if these
            are not known.
        drawn_between_epochs: random numbers that the script draws before the second epoch.
    """

    steps: int
    reason: str = ""
    place: Place | None = None
    epochs: int = 1
    draws: bool = False
    shapes: str = ""
    evaluated: tuple[tuple[str, Place, str], ...] = ()
    others: str = ""
    reorders: str = ""
    samples_draw: bool = False
    rest: int | None = 0
    drawn_between_epochs: int = 0

    @property
    def sentence(self) -> str:
        """All this in words, without the place."""
        if not self.reason:
            more = ", and of the first one of a second epoch," if self.epochs > 1 else ""
            return f"the losses of {self.steps} steps{more} are those of the script"
        number = self.steps or "none"
        return f"{number} of the first {STEPS} steps were compared with the script: {self.reason}"


class _Difference(NamedTuple):
    """Where another step computes something else than the first.

    Args:
        place: of the script.
        words: what differs.
        is_number: whether it is a floating-point number of the script.
        leads_to_model: whether the model reads its result, so that another loss changes nothing.
        hint: besides the usual one.
    """

    place: Place
    words: str
    is_number: bool = False
    leads_to_model: bool = False
    hint: str = ""


class _Rates:
    """What the options of the optimizer will be by the script's schedules alone.

    Args:
        parts: of the script, before its first step.
    """

    def __init__(self, parts: Parts) -> None:
        groups = parts.optimizer.param_groups
        self._optimizer = cut_down(parts.optimizer, {id(p): p for g in groups for p in g["params"]})
        self._schedules: Schedules | None = parts.make_schedules(self._optimizer)

    def step(self, *, of_epoch: bool) -> list[dict[str, Any]]:
        """Return the options after another step; ``of_epoch`` if it is the last of an epoch."""
        if self._schedules is not None:
            (self._schedules.step_of_epoch if of_epoch else self._schedules.step)()
        return options_of(self._optimizer)


def compare_steps(command: Command, *, own_schedule: bool = False) -> Compared:
    """Run a script for its first steps, with the weights it begins with, and compare them.

    Args:
        own_schedule: whether the job has a schedule of its own, so that those of the script do not
            matter.

    Raises:
        CaptureError: a loss of the script is another one than that of the program; or it sets
            learning rates or weights by hand.
    """
    seen = Seen(recorder=Recorder(follows=True), steps=STEPS)
    rates: list[_Rates] = []
    taken: list[Parts] = []
    data: list[FirstEpoch] = []

    def begin(seen: Seen) -> None:
        parts = Parts.taken(command, seen)
        taken.append(parts)
        data.append(FirstEpoch(parts))
        if not own_schedule and not any(map(follows_evaluations, parts.schedules)):
            rates.append(_Rates(parts))
        if comes_again(seen.frames, seen.made_by.get(id(seen.optimizer), ())):
            seen.shortened, seen.steps = STEPS, STEPS + _AHEAD

    seen.at_first = begin
    compared = Compared(STEPS)

    def end(words: str) -> None:
        compared.reason, compared.place = f"the script {words} after its first step", script_place()
        raise Taken

    with unwritten(lambda: bool(seen.ends), end):
        try:
            run_script(command, seen)
        except CaptureError as error:
            compared.reason = error.message
    if not seen.ends:  # what is wrong is said where the parts are taken
        return Compared(0, compared.reason)
    _set_modes(seen)
    steps = _steps_of(seen)
    model = model_of(seen, steps[0].recordings[0])
    _refuse_written(seen, model)
    _compare(seen, steps, compared)
    _refuse_kept_gradients(seen, steps, model)
    found = (seen.loading_of(each) for step in steps for each in step.recordings)
    loadings = {id(each): each for each in found if each is not None}  # of many batches each
    data[0].refuse_other(taken[0], [*loadings.values()])
    _refuse_other_clips(seen, steps)
    _refuse_changed_options(command, seen, steps, rates)
    compared.epochs = steps[-1].epoch
    _refuse_loss_of_training(seen, steps, own_schedule=own_schedule)
    compared.evaluated = tuple(_evaluated(seen))
    drawn = compared.drawn_between_epochs = drawn_between_epochs(taken[0], steps)
    own = replace(taken[0], command=replace(command, drawn_between_epochs=drawn))
    read = read_again(own, steps)
    compared.others, compared.reorders, compared.samples_draw, compared.rest = read
    if compared.reorders:  # what was counted is of an epoch that was cut short
        compared.drawn_between_epochs = 0
    compared.shapes = _other_shape([each for step in steps for each in step.recordings])
    compared.draws = steps[0].recordings[0].draws
    if compared.steps >= STEPS:
        compared.reason, compared.place = "", None
    elif not compared.reason:
        compared.reason = f"the script ends after {compared.steps}"
    return compared


def _set_modes(seen: Seen) -> None:
    """Let modules be in training or not as they were when the first step called them."""
    for module, was_training in seen.recorder.training.items():
        module.training = was_training


def _steps_of(seen: Seen) -> list[Step]:
    """Return the steps that the script has made."""
    steps, begin, recordings = list[Step](), 0, seen.recorder.recordings
    for number, end in enumerate(seen.ends, 1):
        own, begin = recordings[begin:end], end
        steps.append(Step(number, own, 1 if seen.is_of_first_epoch(own[-1]) else 2))
    return steps


def _compare(seen: Seen, steps: list[Step], compared: Compared) -> None:
    first = steps[0].recordings[0]
    model = model_of(seen, first)
    program = program_of(first, model)
    follows_random = True
    for step in steps:
        for index, recording in enumerate(step.recordings):
            is_later = step.number > 1 or index == 0
            which = step.name if is_later else f"batch {index + 1} of step 1"
            found = _difference(first, recording, which)
            if found is not None and found.is_number:
                raise _refusal(found)
            if not recording.batches and _reads(recording, first.batch):
                raise CaptureError(
                    f"{at(recording.place)}: {which} trains on the batch of step 1 again",
                    hint="train on each batch once, and over the data more often",
                )
            if len(recording.batches) != 1:
                words = f"{which} reads {len(recording.batches)} batches of the DataLoader"
                compared.steps = step.number - 1
                compared.reason, compared.place = words, recording.place
                return
            own = float(recording.value)
            try:
                value = _replayed(program, model, recording)
            except (RuntimeError, ValueError, TypeError, IndexError, KeyError) as error:
                words = f"what the first step computes cannot be computed in {which}: {error}"
                raise _refusal(found or _Difference(program.place, words)) from error
            if _is_close(value, own) or not follows_random:
                continue
            if recording is first and recording.draws:
                follows_random = False
                compared.reason = "draws random numbers in another order than pipectl does"
                compared.place = recording.place
                continue
            words = f"the loss of {which} is {own:.6g}, but computed as in the first step "
            words += f"{value:.6g}"
            if found is not None:
                raise _refusal(found._replace(words=f"{found.words} ({words})"))
            raise _refusal(_Difference(recording.place, words))
    compared.steps = sum(step.epoch == 1 for step in steps) if follows_random else 0
    _refuse_other_accumulation(seen, steps)


def _refuse_other_accumulation(seen: Seen, steps: list[Step]) -> None:
    """Refuse steps of more or fewer batches than the first one, besides the last of an epoch, which
    may have been cut short.
    """
    count = len(steps[0].recordings)
    for step in steps[1:STEPS]:
        last = step.recordings[-1]
        loading, number = seen.loading_of(last), len(step.recordings)
        if number == count or loading is None or step.epoch > 1:
            continue
        with suppress(TypeError):  # a stream has no length
            if seen.positions[last.batches[0]] == len(loading.loader) - 1:
                continue
        raise CaptureError(
            f"{at(last.place)}: {step.name} has {plural(number, 'batch')}, and the "
            f"first step {count}",
            hint="accumulate as many batches in every step: `if (i + 1) % n == 0:` with i from 0, "
            "and no remainder of another epoch",
        )


def _other_shape(recordings: list[Recording]) -> str:
    """Say which tensor of a batch has other sizes than in the first one, besides the samples."""
    first, *others = recordings
    inputs, targets = Program(first.entries, first.loss).batch_leaves()
    for path in (*inputs, *targets):
        for other in others:
            if len(other.batches) == 1:
                was, now = (list(reach(each.batch, path).shape) for each in (first, other))
                if was[1:] != now[1:]:
                    return f"{name_of(path)} is {was} in the first batch and {now} in a later one"
    return ""


def _evaluated(seen: Seen) -> Iterator[tuple[str, Place, str]]:
    """Yield what is read between two epochs and no step has trained on; see :class:`Compared`."""
    loadings = map(seen.loading_of, seen.recorder.recordings)
    trained = {id(each.loader) for each in loadings if each is not None}
    for key, each in seen.evaluated.items():
        if key not in trained:
            name = next(names_of(each.loader, seen.frames), "")
            yield described(each.loader.dataset), each.place, name


def _refuse_loss_of_training(seen: Seen, steps: list[Step], *, own_schedule: bool) -> None:
    """Refuse a schedule that follows the loss of training: a job gives it that of evaluations."""
    losses = [float(each.value) for step in steps if step.epoch == 1 for each in step.recordings]
    loading = seen.loading_of(steps[0].recordings[0])
    counts = {1, len(losses)}
    with suppress(TypeError):  # without a length
        counts |= {len(loading.loader), len(loading.loader.dataset)} if loading else set()  # type: ignore[arg-type]
    size = (loading and loading.loader.batch_size) or 1
    known = [losses[-1], *(sum(losses) * n / count for n in (1, size) for count in counts)]
    for value, place in () if own_schedule else seen.followed_values:
        if any(math.isclose(value, each, rel_tol=1e-6) for each in known):
            raise CaptureError(f"{at(place)}: {_FOLLOWS_TRAINING}", hint=_FOLLOWS_HINT)


def _refuse_written(seen: Seen, model: nn.Module) -> None:
    """Refuse a script that writes weights or buffers of the model besides its optimizer."""
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        place = seen.recorder.written.get(memory_of(tensor))
        if place is not None and tensor.numel():
            raise CaptureError(
                f"{at(place)}: writes {name} of the model outside of its forward and the optimizer",
                hint="pipectl runs nothing of the loop but the step: let the forward do it "
                "(torch.nn.utils.parametrize, for weights within limits), or leave it out; what "
                "computes gradients twice in a step (SAM) is no pipeline",
            )


def _refuse_kept_gradients(seen: Seen, steps: list[Step], model: nn.Module) -> None:
    """Refuse a script whose steps do not update by the gradients of their own batches."""
    assert seen.optimizer is not None
    names = {id(tensor): name for name, tensor in model.named_parameters()}
    trained = {id(each) for group in seen.optimizer.param_groups for each in group["params"]}
    for parameter, number in seen.kept[:1]:
        step = next((each.name for each in steps if each.number == number), f"step {number}")
        raise CaptureError(
            f"{at(seen.stepped)}: {step} adds to the gradient of {names.get(id(parameter), '')} "
            "that the step before has left, and a job drops all gradients after a step",
            hint="call optimizer.zero_grad() once for every step, before its first backward() or "
            "after the step",
        )
    for parameter, place in (each for each in seen.dropped if id(each[0]) in trained):
        raise CaptureError(
            f"{at(place)}: the gradient of {names.get(id(parameter), '')} by an earlier "
            "backward() of this step is dropped before this line",
            hint="call optimizer.zero_grad() once for every step, before its first backward() or "
            "after the step, and backward() for what it trains on alone",
        )


def _refuse_other_clips(seen: Seen, steps: list[Step]) -> None:
    """Refuse a script that clips in another way in a later step than in the first one."""
    first = {_how(clip, seen): clip for clip in seen.clips if not clip.steps}
    for step in steps[1:]:
        clips = {_how(clip, seen): clip for clip in seen.clips if clip.steps == step.number - 1}
        for how, clip in (*clips.items(), *first.items()):
            if how in clips and how in first:
                continue
            alone, other = (
                (step.name, "the first step") if how in clips else ("the first step", step.name)
            )
            raise CaptureError(
                f"{at(clip.place)}: only {alone} clips gradients so (by {clip.kind}, at "
                f"{clip.limit:g}), and {other} does not",
                hint="clip in every step to the same limit, once after its last backward()",
            )


def _how(clip: Clip, seen: Seen) -> tuple[Any, ...]:
    """What a clip does, to which gradients, and how many backwards of the step come after it."""
    after = seen.ends[clip.steps] - clip.backwards if clip.steps < len(seen.ends) else 0
    own = frozenset(id(p) for p in clip.parameters if id(p) in seen.zeros)
    return clip.kind, clip.limit, clip.norm_type, after, own


def _refuse_changed_options(
    command: Command, seen: Seen, steps: list[Step], rates: list[_Rates]
) -> None:
    """Refuse a script that sets options of its optimizer by hand."""
    for expected in rates:
        for before, step in pairwise(steps):
            made = expected.step(of_epoch=before.epoch < step.epoch)
            for key, own, other in _changed_options(seen.options[step.number - 1], made):
                place = next(iter(hand_set(Path(command.file), key)), seen.stepped)
                words = f"{key} of the optimizer is {own} in {step.name}, and {other} by the "
                hint = _SCHEDULE if key == "lr" else _OPTION.format(key)
                raise CaptureError(f"{at(place)}: {words}script's schedules", hint=hint)


def _changed_options(
    own: list[dict[str, Any]], made: list[dict[str, Any]]
) -> Iterator[tuple[str, str, str]]:
    """Yield the options of groups that differ, with both values in words."""
    for group, other in zip(own, made, strict=False):
        for key, value in group.items():
            if not _is_option(value, other.get(key)):
                yield key, _words(value), _words(other.get(key))


def _is_option(own: Any, made: Any) -> bool:
    """Whether the value of an option is what it should be; true of what is no number."""
    kinds = int, float
    if isinstance(own, list | tuple) and isinstance(made, list | tuple):
        return all(map(_is_option, own, made))
    if not isinstance(own, kinds) or not isinstance(made, kinds):
        return True
    return math.isclose(own, made, rel_tol=1e-9, abs_tol=1e-15)


def _refusal(found: _Difference) -> CaptureError:
    hint = _ALIKE + (_DRAWN if found.is_number else "") + found.hint
    hint += "" if found.leads_to_model else _OWN_LOSS
    return CaptureError(f"{at(found.place)}: {found.words}", hint=hint)


def _is_close(value: float, own: float) -> bool:
    if math.isnan(value) or math.isnan(own):
        return math.isnan(value) and math.isnan(own)
    return math.isclose(value, own, rel_tol=_RELATIVE, abs_tol=_ABSOLUTE)


def _replayed(program: Program, model: nn.Module, recording: Recording) -> float:
    """Return the loss that the program computes for the batch of a recording."""
    assert recording.before is not None
    recording.before.restore()
    inputs, targets = program.batch_leaves()
    batch = {name_of(path): reach(recording.batch, path) for path in (*inputs, *targets)}
    kind = recording.autocast
    with torch.autocast("cpu", dtype=kind) if kind is not None else nullcontext():
        return float(program.loss(model, 1, program.forward(model, batch), batch).detach())


def _reads(recording: Recording, batch: Any) -> bool:
    """Whether the loss of a recording reads tensors of a batch that an earlier one has read."""
    memory = {memory_of(tensor) for _, tensor in leaves_of(batch)}
    return any(
        isinstance(argument, Outer) and memory_of(argument.tensor) in memory
        for _, arguments, _ in _numbered(recording)
        for argument in arguments
    )


# Where two recordings differ.


def _difference(first: Recording, other: Recording, which: str) -> _Difference | None:
    """Return the first call of another step that is not one of the first."""
    mine, others = (_numbered(each) for each in (first, other))
    for (a, was, _), (b, now, leads_to_model) in zip(mine, others, strict=False):
        if a.name != b.name or len(was) != len(now):
            words = f"{which} computes {b.name}, the first step {a.name}"
            return _Difference(b.place, words, leads_to_model=leads_to_model)
        for x, y in zip(was, now, strict=True):
            if not _is_same(x, y):
                words = f"{b.name} reads {_words(y)} in {which}, and {_words(x)} in the first"
                if _words(x) == _words(y):
                    words = f"{b.name} reads {_words(y)}, with other values in {which}"
                is_number = _is_number(x) and _is_number(y) and float in (type(x), type(y))
                hint = _MADE if b.name in _FROM_VALUES else _STATE if isinstance(y, Outer) else ""
                return _Difference(b.place, words, is_number, leads_to_model, hint)
    if len(mine) != len(others):
        longer, _, leads_to_model = max(mine, others, key=len)[min(len(mine), len(others))]
        where = which if len(others) > len(mine) else "the first step"
        words = f"only {where} computes {longer.name}"
        return _Difference(longer.place, words, leads_to_model=leads_to_model)
    return None


def _numbered(recording: Recording) -> list[tuple[Entry, list[Any], bool]]:
    """The calls that the loss needs, with their arguments, and whether they lead to the model.

    Results are numbered by these calls.
    """
    program = Program(recording.entries, recording.loss)
    number = {index: position for position, index in enumerate(program.needed)}
    found = []
    for index in program.needed:
        entry = recording.entries[index]
        arguments = [
            Ref(number.get(item.entry, item.entry), item.path) if isinstance(item, Ref) else item
            for item in parts((entry.args, entry.kwargs))
        ]
        found.append((entry, arguments, index in program.model_part))
    return found


def _is_same(x: Any, y: Any) -> bool:
    """Whether two arguments are equal, as far as they are values."""
    if isinstance(x, Outer) and isinstance(y, Outer):
        x, y = x.tensor, y.tensor
    if isinstance(x, Tensor) and isinstance(y, Tensor):
        return x is y or (x.shape == y.shape and bool((x == y).all()))
    if isinstance(x, np.ndarray | np.generic) or isinstance(y, np.ndarray | np.generic):
        return bool(np.array_equal(x, y))
    values = (Ref, Outer, int, float, complex, str, type(None))
    if isinstance(x, values) or isinstance(y, values):
        return type(x) is type(y) and bool(x == y or x != x)
    return True


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _words(value: Any) -> str:
    if isinstance(value, int | float | type(None)):
        return f"{value:.6g}" if isinstance(value, float) else repr(value)
    if isinstance(value, Ref):
        return "a result of this step"
    return "a tensor from outside the step" if isinstance(value, Outer) else "a value of Python"
