"""What a script does, as ``pipectl init --script`` tells it, and the values for the job file."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.data import DataLoader, IterableDataset

from pipectl.errors import CaptureError
from pipectl.script.halves import Kind, kind_of_loss, refusal_of_half
from pipectl.script.later import Compared
from pipectl.script.loops import (
    batches_in,
    freezes,
    hand_set,
    is_over_data,
    loops_around,
)
from pipectl.script.optimizers import follows_evaluations
from pipectl.script.order import SharedGenerators, described, draws_samples
from pipectl.script.parts import Modules, Parts
from pipectl.script.program import Place, name_of
from pipectl.script.recorder import at
from pipectl.script.some_epochs import draws_at_times
from pipectl.script.steps import loops_of_job, steps_of, unread_jumps
from pipectl.script.trainings import later_trainings
from pipectl.spec.types import SAMPLES, SCRIPT
from pipectl.units import plural

_DEFAULT_STEPS = 100
_NAMED = 3
"""Later trainings."""
_PRECISIONS = {torch.bfloat16: "bf16", torch.float16: "float16"}


class Finding(NamedTuple):
    """A line of the table.

    Args:
        what: such as ``optimizer``.
        value: in words.
        place: of the script; None if there is none to name.
    """

    what: str
    value: str
    place: Place | None = None


@dataclass
class Findings:
    """What was found.

    Attributes:
        taken: what the job takes.
        left: what the script does and the job does not.
        differs: what is not as in the script.
        training: values of the section ``training``.
        data: values of the section ``data``.
        loss: values of the section ``loss``.
        evaluation: values of the section ``evaluation``.
        drawn_between_epochs: see :class:`~pipectl.script.run.Command`.
        micro_batches: of a step, where only these give the script's losses.
        guessed: keys of ``training`` that the script does not say.
    """

    taken: list[Finding] = field(default_factory=list)
    left: list[Finding] = field(default_factory=list)
    differs: list[Finding] = field(default_factory=list)
    training: dict[str, Any] = field(default_factory=dict)
    data: dict[str, Any] = field(default_factory=dict)
    loss: dict[str, Any] = field(default_factory=dict)
    evaluation: dict[str, Any] = field(default_factory=dict)
    drawn_between_epochs: int = 0
    micro_batches: int | None = None
    guessed: list[str] = field(default_factory=list)


def findings_of(parts: Parts, compared: Compared) -> Findings:
    """Return what a script does.

    Args:
        compared: its first steps with what was recorded.
    """
    found = Findings()
    _add_model(parts, found)
    _add_data(parts, found, compared)
    _add_evaluation(parts, found, compared)
    _add_optimizer(parts, found)
    _add_steps(parts, found)
    _add_precision(parts, found)
    _add_rest(parts, found, compared)
    line = Finding("comparison", compared.sentence, compared.place)
    (found.differs if compared.reason else found.taken).append(line)
    return found


def values_of(parts: Parts, compared: Compared) -> dict[str, Any]:
    """Return the values that a job of a script should have, by key; without those that the script
    does not say.
    """
    found = findings_of(parts, compared)
    training = {"clip_grad_norm": None, **found.training}
    if not parts.seen.autocasts:
        training["precision"] = "float32"
    sections = {
        "training": {k: v for k, v in training.items() if k not in (*found.guessed, "batch_size")},
        "data": {"drop_last": False} | found.data,
        "loss": {"weight": SAMPLES} | found.loss,
        "evaluation": {k: v for k, v in found.evaluation.items() if k == "every"},
        "script": {"drawn_between_epochs": found.drawn_between_epochs},
    }
    pairs = (
        (f"{name}.{key}", value) for name, own in sections.items() for key, value in own.items()
    )
    return {key: value for key, value in pairs if key != "data.workers"}


def _add_model(parts: Parts, found: Findings) -> None:
    model, program = parts.model, parts.program
    count = sum(parameter.numel() for parameter in model.parameters())
    kind = type(model).__name__
    if isinstance(model, Modules):
        kind = " and ".join(name for name, _ in model.named_children())
    calls = [program.entries[index] for index in program.modules]
    found.taken.append(Finding("model", f"{kind}, {count:,} parameters", calls[0].place))
    functions = [program.entries[index].name for index in program.loss_part]
    last = program.place if functions else parts.seen.recorder.recordings[0].place
    words = ", ".join(dict.fromkeys(functions)) or "what the model returns"
    kind_of = kind_of_loss(parts)
    if kind_of is Kind.SUM:
        words += ": a sum over samples"
        found.loss["weight"] = kind_of.value
    found.taken.append(Finding("loss", words, last))
    if kind_of is Kind.OTHER:
        words = "of a batch is no mean of those of its parts, and each micro-batch has its own"
        _keep_whole(parts, found, "loss", words, last, " or loss.weight")
    if kind_of is Kind.UNKNOWN and (refusal := refusal_of_half(parts)) is not None:
        words = f"cannot be computed of a half of a batch ({refusal[0]})"
        more = ", if the number of samples is taken from the batch (x.size(0))"
        _keep_whole(parts, found, "loss", words, refusal[1], more)
    if names := list(_batch_norms(parts)):
        words = f"{names[0]}" + (f" and {len(names) - 1} more" if names[1:] else "")
        words += ": the statistics of a batch norm are those of a micro-batch"
        _keep_whole(parts, found, "batch norm", words, calls[0].place)


def _keep_whole(
    parts: Parts, found: Findings, what: str, why: str, place: Place, more: str = ""
) -> None:
    """Let the job divide batches as the script does, and say why.

    Args:
        more: what other numbers of micro-batches need, in words.
    """
    found.micro_batches = parts.accumulation
    words = f"{why}: the job has pipeline.micro_batches: {parts.accumulation}, as the script; "
    words += f"set more for speed, with other losses{more}"
    found.differs.append(Finding(what, words, place))


def _batch_norms(parts: Parts) -> Iterator[str]:
    """Yield the names of the batch norms that compute with the samples of a batch."""
    for name, module in parts.model.named_modules():
        if isinstance(module, _BatchNorm) and (module.training or not module.track_running_stats):
            yield name


def _add_data(parts: Parts, found: Findings, compared: Compared) -> None:
    loader, place = parts.loader, parts.loading.place
    found.taken.append(Finding("data", described(loader.dataset), place))
    inputs, targets = parts.program.batch_leaves()
    words = f"{', '.join(map(name_of, inputs)) or 'nothing'} to the model"
    words += f"; {', '.join(map(name_of, targets)) or 'nothing'} to the loss"
    found.taken.append(Finding("batch", words, place))
    sampler = getattr(loader.batch_sampler, "sampler", loader.sampler)
    order = "as the dataset gives them"
    if not isinstance(loader.dataset, IterableDataset):
        order = f"{type(sampler).__name__}, in the order of the script"
    if not compared.others:
        found.taken.append(Finding("order", order, place))
    if parts.leaves_rest or (loader.drop_last and not parts.batches_left):
        found.data["drop_last"] = True
    if loader.num_workers:
        found.data["workers"] = loader.num_workers
    accumulated = parts.accumulation
    found.training["batch_size"] = parts.samples_per_step
    words = f"{parts.batch_size} samples"
    if accumulated > 1:
        words += f", of {accumulated} batches a step: {parts.samples_per_step}"
    found.taken.append(Finding("batch size", words, place))


def _add_optimizer(parts: Parts, found: Findings) -> None:
    optimizer = parts.optimizer
    place = parts.seen.made.get(id(optimizer), (None, None))[1]
    groups = optimizer.param_groups
    rates = ", ".join(dict.fromkeys(map(_rate_of, groups)))
    words = f"{type(optimizer).__name__}, lr {rates}"
    if len(groups) > 1:
        words += f", {len(groups)} groups"
    found.taken.append(Finding("optimizer", words, place))
    for schedule in parts.schedules:
        if follows_evaluations(schedule):
            is_taken = schedule.mode == "min" and found.evaluation
            (found.taken if is_taken else found.left).append(
                _follower(parts, schedule, taken=bool(is_taken))
            )
            continue
        every = parts.steps_between(schedule)
        when = "after every step" if every == 1 else f"every {every} steps (an epoch)"
        place = parts.seen.made[id(schedule)][1]
        found.taken.append(Finding("schedule", f"{type(schedule).__name__}, {when}", place))


def _rate_of(group: dict[str, Any]) -> str:
    """The learning rate of a group in the first step, and the one that its schedule begins with."""
    first, initial = (float(group.get(key, group["lr"])) for key in ("lr", "initial_lr"))
    return f"{first:g}" if first == initial else f"{first:g} (initial_lr {initial:g})"


def unfollowed(parts: Parts, found: Findings, compared: Compared) -> CaptureError | None:
    """Return why no run of the job could read all batches, or make the steps of a schedule; None if
    one can.
    """
    if compared.shapes:
        return CaptureError(
            f"{at(parts.loading.place)}: {compared.shapes}, and a job has one shape",
            hint="pad all samples to one length in the dataset or the collate_fn, and let model "
            "and loss leave out the padding (a mask, ignore_index)",
        )
    for schedule in filter(follows_evaluations, parts.schedules):
        try:
            parts.make_schedules(parts.optimizer)
        except CaptureError as error:
            return error
        if not found.evaluation:
            place = parts.seen.made[id(schedule)][1]
            return CaptureError(
                f"{at(place)}: {type(schedule).__name__} needs the loss of "
                "evaluations, and the job has none that it may follow",
                hint="set evaluation.data and evaluation.every, with a DataLoader of the script "
                "(evaluation: {data: {factory: script, kwargs: {loader: val_loader}}, every: 50}); "
                "or a schedule that follows no loss under lr_scheduler",
            )
    return None


def _follower(parts: Parts, schedule: Any, *, taken: bool) -> Finding:
    """What to do about a schedule that follows a metric."""
    if schedule.mode == "min":
        words = "follows the loss of evaluations"
        words += "" if taken else ": set evaluation.data and evaluation.every"
    else:
        words = "follows a metric that rises: name another one under lr_scheduler in the job"
    place = parts.seen.made[id(schedule)][1]
    return Finding("schedule", f"{type(schedule).__name__} {words}", place)


def _add_steps(parts: Parts, found: Findings) -> None:
    steps, words, place = steps_of(parts)
    if steps is None:
        found.training["steps"] = _DEFAULT_STEPS
        found.guessed.append("steps")
        words += f": training.steps, {_DEFAULT_STEPS}, is a guess; set it"
        found.differs.append(Finding("steps", words, place))
        return
    found.training["steps"] = steps
    found.taken.append(Finding("steps", words, place))


def _add_evaluation(parts: Parts, found: Findings, compared: Compared) -> None:
    """Take the data that the script evaluates with after an epoch, if there are one."""
    for data, place, name in compared.evaluated:
        every = parts.known_steps_per_epoch
        if len(compared.evaluated) == 1 and every is not None and _is_alike(parts, name):
            source = {"factory": SCRIPT, "kwargs": {"loader": name}}
            found.evaluation.update(data=source, every=every)
            words = f"{data} ({name}) every {every} steps (an epoch), by the script's loss"
            found.taken.append(Finding("evaluation", words, place))
        else:
            words = f"{data} after an epoch: set evaluation.data and evaluation.every"
            found.left.append(Finding("evaluation", words, place))
    if not compared.evaluated and compared.epochs == 1:
        for name in _other_loaders(parts)[:1]:
            every = parts.known_steps_per_epoch or _DEFAULT_STEPS
            words = "none, since no DataLoader was read between two epochs; for one: evaluation: "
            words += f"{{data: {{factory: script, kwargs: {{loader: {name}}}}}, every: {every}}}"
            found.left.append(Finding("evaluation", words))


def _other_loaders(parts: Parts) -> list[str]:
    """The variables of a script that are loaders of held-out data."""
    names = {
        name: each
        for _, scope, own, _ in parts.seen.frames
        for name, each in {**scope, **own}.items()
    }
    others = (
        name
        for name, each in names.items()
        if isinstance(each, DataLoader) and each.dataset is not parts.loader.dataset
    )
    return [name for name in others if _is_alike(parts, name)]


def _is_alike(parts: Parts, name: str) -> bool:
    """Whether the batches of another loader have what model and loss read."""
    generators = SharedGenerators()
    try:
        data = parts.held_out(name)
        sample, other = (each.collate_fn([each[0]]) for each in (data, parts.dataset()))
    except Exception:  # of the script's code
        return False
    finally:
        generators.restore()
    shapes = [
        {(part, key): leaf.shape[1:] for part in batch for key, leaf in batch[part].items()}
        for batch in (sample, other)
    ]
    return shapes[0] == shapes[1]


def _add_precision(parts: Parts, found: Findings) -> None:
    kind = parts.seen.recorder.recordings[0].autocast
    if kind in _PRECISIONS:
        found.training["precision"] = _PRECISIONS[kind]
        place = parts.seen.autocasts[0][2] if parts.seen.autocasts else None
        found.taken.append(Finding("precision", f"autocast to {_PRECISIONS[kind]}", place))
        words = "gradients of 16 bits are rounded by micro-batches: set pipeline.micro_batches "
        words += f"({parts.accumulation}: as in the script)"
        found.differs.append(Finding("rounding", words, place))
    else:
        for device, dtype, line in parts.seen.autocasts[:1]:
            if device != "cpu":
                wanted = _PRECISIONS.get(dtype, "float16")
                words = f"autocast on {device}: set training.precision: {wanted}"
                found.left.append(Finding("precision", words, line))
    for clip in parts.seen.clips[:1]:
        if clip.kind == "norm":
            found.training["clip_grad_norm"] = clip.limit
        found.taken.append(Finding(f"clip of the {clip.kind}", f"at {clip.limit:g}", clip.place))
    if parts.seen.scaler is not None:
        place = parts.seen.scaler[1]
        words = "a GradScaler; training.precision: float16 scales the loss"
        found.left.append(Finding("loss scale", words, place))


def _add_rest(parts: Parts, found: Findings, compared: Compared) -> None:
    seen = parts.seen
    if seen.compiled is not None:
        words = "torch.compile; set training.compile: true"
        found.left.append(Finding("compile", words, seen.compiled))
    words = "what follows in the loop: logs, saving"
    words += "" if found.evaluation else ", evaluation"
    found.left.append(Finding("after the step", words, seen.stepped))
    for place in list(dict.fromkeys(seen.recorder.decisions))[:3]:
        words = "looks at values of tensors; what it decides by them is as in the first step"
        found.left.append(Finding("values", words, place))
    program = parts.program
    drawn = [program.entries[index] for index in program.needed if program.entries[index].is_random]
    random = any(
        isinstance(m, nn.Dropout) and m.p > 0 and m.training for m in parts.model.modules()
    )
    if random or drawn or compared.draws:
        where = drawn[0].place if drawn else None
        words = "random numbers of model and loss (dropout) follow from training.seed"
        found.differs.append(Finding("random numbers", words, where))
    if compared.samples_draw or draws_samples(parts.dataset()):
        words = "that samples draw (augmentation, the order of a stream) follow from training.seed"
        found.differs.append(Finding("random numbers", words))
    for place in hand_set(Path(parts.command.file)):
        words = "set by hand: give the job an lr_scheduler, if this line changes it at any time"
        found.left.append(Finding("learning rate", words, place))
    found.differs.extend(_jumps(parts))
    found.differs.extend(_batches(parts, compared))
    _add_order(parts, found, compared)
    for place in freezes(seen.frames):
        words = "set in the loop: in the job, what is frozen at the first step stays frozen, and "
        words += "nothing else is frozen later"
        found.differs.append(Finding("requires_grad", words, place))
    if words := _words_of_rest(parts, found):
        found.differs.append(Finding("accumulation", words, seen.stepped))


def _words_of_rest(parts: Parts, found: Findings) -> str:
    """What becomes of the last batches of an epoch, if they make a step otherwise than in the
    script; empty if they do not.
    """
    if parts.accumulation == 1 or isinstance(parts.loader.dataset, IterableDataset):
        return ""
    left, words = parts.batches_left, list[str]()
    if left:
        words.append(f"an epoch has {parts.batches} batches, no multiple of {parts.accumulation}")
    if parts.leaves_rest:
        words[0] += ": the script makes no step of those that are left, and the job leaves them "
        words[0] += "out (data.drop_last: true); gradients of them that the script does not drop "
        return f"{words[0]}are in its next step, and not in that of the job"
    if left and _fills_from_next_epoch(parts):
        words[0] += ": the script fills the last step of an epoch from the next one, and the job "
        words[0] += "does not: all later batches are others than in the script; let an epoch have "
        words[0] += "a multiple (by a torch.utils.data.Subset of the dataset, say)"
    elif left:
        words[0] += ": the last step of an epoch takes those that are left, by their mean, and its "
        words[0] += "loss may be another one than in the script"
        if parts.steps_rest is None:
            words[0] += "; if the script makes no step of them, set data.drop_last: true, and "
            words[0] += "training.steps"
    size = _samples_of_last(parts)
    if left != 1 and size < parts.batch_size and "weight" not in found.loss:
        words.append(
            f"the last batch of an epoch has {plural(size, 'sample')}: in its step each sample has "
            "the same weight in the job, and each batch in the script; set drop_last=True in the "
            "DataLoader"
        )
    return "; and ".join(words)


def _fills_from_next_epoch(parts: Parts) -> bool:
    """Whether the script takes the batches of a step one by one, as ``next(batches)`` does."""
    loops, data = loops_around(parts.seen.frames), parts.loading.places
    return parts.steps_rest is None and not any(is_over_data(each, data) for each in loops)


def _samples_of_last(parts: Parts) -> int:
    """The samples of the last batch of an epoch."""
    count = len(parts.dataset().order(0))
    return count % parts.batch_size or parts.batch_size


def _add_order(parts: Parts, found: Findings, compared: Compared) -> None:
    """Say what later epochs, and later trainings of the script, have of their own."""
    found.drawn_between_epochs = compared.drawn_between_epochs
    if compared.reorders:
        words = f"of later epochs is another one than in the script: {compared.reorders}"
        found.differs.append(Finding("order", words, parts.loading.place))
    elif not _has_second_epoch(parts, found, compared):
        pass
    elif (place := _draws_at_times(parts)) is not None:
        words = "of later epochs may be another one than in the script: this line is run in some "
        words += "epochs, or after some steps, only, and to read data or to sample draws random "
        words += "numbers; give the DataLoader a generator of its own "
        words += "(generator=torch.Generator().manual_seed(0))"
        found.differs.append(Finding("order", words, place))
    elif compared.epochs == 1 and _follows_shared(parts):
        words = "of later epochs is another one than in the script if that draws random numbers in "
        words += "between, by reading other data say: its second epoch could not be compared; give "
        words += "the DataLoader a generator of its own "
        words += "(generator=torch.Generator().manual_seed(0))"
        found.differs.append(Finding("order", words, parts.loading.place))
    made = parts.seen.made_by.get(id(parts.optimizer), ())
    for place in later_trainings(parts.seen.frames, made)[:_NAMED]:
        words = "trains after this training, and the job is the first training alone: give what "
        words += "comes later a script of its own that begins with the weights of this job"
        found.left.append(Finding("a later training", words, place))


def _has_second_epoch(parts: Parts, found: Findings, compared: Compared) -> bool:
    """Whether the job has, as far as its steps tell."""
    of_epoch = parts.known_steps_per_epoch
    return compared.epochs > 1 or (of_epoch is not None and found.training["steps"] > of_epoch)


def _draws_at_times(parts: Parts) -> Place | None:
    """The line that may draw random numbers in some epochs only, where the order follows them."""
    place = draws_at_times(loops_of_job(parts), parts.loader)
    return None if place is None or not _follows_shared(parts) else place


def _follows_shared(parts: Parts) -> bool:
    """Whether the order of each epoch follows the random numbers that all share."""
    if isinstance(parts.loader.dataset, IterableDataset) or id(parts.loader) in parts.seen.cycled:
        return False
    return bool(parts.dataset().order.follows_shared_generators())


def _batches(parts: Parts, compared: Compared) -> Iterator[Finding]:
    """How batches of the job differ from those of the script."""
    if compared.others:
        yield Finding("samples", compared.others, parts.loading.place)
    if compared.rest or (compared.rest is None and compared.epochs > 1):
        words = f"if the samples of an epoch are no multiple of {parts.samples_per_step}"
        if compared.rest:
            words = f"an epoch ends with {plural(compared.rest, 'sample')} that fill no step"
        words += ": the job fills it from the next epoch, and later batches are others than in the "
        words += "script; set drop_last=True in the DataLoader, or give its dataset __len__ and "
        words += "__getitem__"
        yield Finding("batches", words, parts.loading.place)
    if compared.shapes:
        words = f"{compared.shapes}, and a job has one shape: pad all samples to one length in the "
        words += "dataset or the collate_fn"
        yield Finding("batch", words, parts.loading.place)


def _jumps(parts: Parts) -> Iterator[Finding]:
    """What ends loops of the script early, and not the job; and a loop that begins anew."""
    frames, data = parts.seen.frames, parts.loading.places
    for loop, line, statement, over_data in unread_jumps(parts):
        words = f"`{statement}` ends a loop early, and not the job: set training.steps, or "
        words += "evaluation.early_stopping"
        if over_data:
            words = f"`{statement}` in the loop over the data: the job trains on every batch of an "
            words += "epoch; leave samples out by the dataset, and set training.steps"
        yield Finding("batches" if over_data else "steps", words, (loop.file, line))
    for loop in loops_around(frames):
        place = loop.file, loop.node.lineno
        batches = batches_in(loop, data, parts.batches) if is_over_data(loop, data) else None
        if batches is not None and batches < (parts.batches or batches):
            words = f"`{ast.unparse(loop.node.iter)}` gives a part of the data: the job trains on "
            words += "every batch of an epoch; leave samples out by the dataset, and set "
            words += "training.steps"
            yield Finding("batches", words, place)
    own = len(list(loops_of_job(parts)))
    for loop in islice(loops_around(frames), own, own + 1):
        words = "every round of this loop makes an optimizer: the job is the first round; make "
        words += "what differs an argument of the script, for a job of each"
        yield Finding("steps", words, (loop.file, loop.node.lineno))
