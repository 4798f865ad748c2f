"""What a script does, as ``pipectl init --script`` tells it, and the values for the job file."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.data import IterableDataset

from pipectl.faults import is_user_code
from pipectl.script.hooks import Seen
from pipectl.script.later import Compared
from pipectl.script.loops import steps_of_trainer
from pipectl.script.optimizers import read_source_of, value_of
from pipectl.script.order import Order
from pipectl.script.parts import Modules, Parts
from pipectl.script.program import Place, name_of

_DEFAULT_STEPS = 100
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


@dataclass(frozen=True)
class Findings:
    """What was found.

    Attributes:
        taken: what the job takes.
        left: what the script does and the job does not.
        differs: what is not as in the script.
        training: values of the section ``training``.
        data: values of the section ``data``.
        guessed: keys of ``training`` that the script does not say.
    """

    taken: list[Finding] = field(default_factory=list)
    left: list[Finding] = field(default_factory=list)
    differs: list[Finding] = field(default_factory=list)
    training: dict[str, Any] = field(default_factory=dict)
    data: dict[str, Any] = field(default_factory=dict)
    guessed: list[str] = field(default_factory=list)


def findings_of(parts: Parts, compared: Compared) -> Findings:
    """Return what a script does.

    Args:
        compared: its first steps with what was recorded.
    """
    found = Findings()
    _add_model(parts, found)
    _add_data(parts, found)
    _add_optimizer(parts, found)
    _add_steps(parts, found)
    _add_precision(parts, found)
    _add_rest(parts, found)
    line = Finding("comparison", compared.sentence, compared.place)
    (found.differs if compared.reason else found.taken).append(line)
    return found


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
    found.taken.append(Finding("loss", words, last))


def _add_data(parts: Parts, found: Findings) -> None:
    loader, place = parts.loader, parts.loading.place
    dataset = loader.dataset
    size = "" if isinstance(dataset, IterableDataset) else f" of {len(dataset):,} samples"  # type: ignore[arg-type]
    found.taken.append(Finding("data", f"{type(dataset).__name__}{size}", place))
    inputs, targets = parts.program.batch_leaves()
    words = f"{', '.join(map(name_of, inputs)) or 'nothing'} to the model"
    words += f"; {', '.join(map(name_of, targets)) or 'nothing'} to the loss"
    found.taken.append(Finding("batch", words, place))
    sampler = getattr(loader.batch_sampler, "sampler", loader.sampler)
    order = f"{type(sampler).__name__}, in the order of the script"
    found.taken.append(Finding("order", order, place))
    if loader.drop_last:
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
    initial = dict.fromkeys(float(group.get("initial_lr", group["lr"])) for group in groups)
    rates = ", ".join(f"{rate:g}" for rate in initial)
    words = f"{type(optimizer).__name__}, lr {rates}"
    if len(groups) > 1:
        words += f", {len(groups)} groups"
    found.taken.append(Finding("optimizer", words, place))
    for schedule in parts.schedules:
        every = parts.steps_between(schedule)
        when = "after every step" if every == 1 else f"every {every} steps (an epoch)"
        place = parts.seen.made[id(schedule)][1]
        found.taken.append(Finding("schedule", f"{type(schedule).__name__}, {when}", place))


def _add_steps(parts: Parts, found: Findings) -> None:
    known = steps_of(parts)
    if known is None:
        found.training["steps"] = _DEFAULT_STEPS
        found.guessed.append("steps")
        return
    steps, words, place = known
    found.training["steps"] = steps
    found.taken.append(Finding("steps", words, place))


def steps_of(parts: Parts) -> tuple[int, str, Place | None] | None:
    """Return the optimizer steps of the whole script, how they are counted, and where it says so.

    They follow from the loops around the step: those over a ``range``, and one over the loader.
    """
    total, words, place = 1, list[str](), parts.loading.place
    over_loader = False
    per_epoch = None
    if not isinstance(parts.loader.dataset, IterableDataset):
        per_epoch = parts.steps_per_epoch
    if (known := steps_of_trainer(parts.seen.frames, per_epoch)) is not None:
        return known, f"{known}, by the trainer", parts.seen.stepped
    for file, loop, names in loops_around(parts.seen):
        if isinstance(loop, ast.While):
            return None
        if (count := _range_of(loop, names)) is not None:
            total *= count
            words.append(f"{count} times ({ast.unparse(loop.iter)})")
            place = file, loop.lineno
        elif not over_loader and per_epoch is not None:
            over_loader = True
            words.append(f"{per_epoch} a time over the data")
    if not words:
        return None
    if over_loader and per_epoch is not None:
        total *= per_epoch
    elif parts.accumulation > 1:
        total = max(total // parts.accumulation, 1)
    return total, f"{total}: {', '.join(reversed(words))}", place


def loops_around(seen: Seen) -> Iterator[tuple[str, ast.For | ast.While, dict[str, Any]]]:
    """Yield the file of every loop around the step, the loop and its names, innermost
    first.
    """
    for code, scope, own, line in seen.frames:
        if is_user_code(code.co_filename):
            with suppress(OSError, SyntaxError, ValueError):
                tree = ast.parse(read_source_of(code.co_filename))
                for loop in _loops_of_function(tree, line):
                    yield code.co_filename, loop, {**scope, **own}


def _loops_of_function(tree: ast.AST, line: int) -> Iterator[ast.For | ast.While]:
    """Yield the loops of the innermost function that hold a line, innermost first."""
    inside = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.For | ast.While | ast.FunctionDef)
        and node.lineno <= line <= (node.end_lineno or node.lineno)
    ]
    for node in sorted(inside, key=lambda node: -node.lineno):
        if isinstance(node, ast.FunctionDef):
            return
        yield node


def _range_of(loop: ast.For, names: Mapping[str, Any]) -> int | None:
    """How often a loop over a range of known numbers runs."""
    call: ast.expr | None = loop.iter
    while isinstance(call, ast.Call) and ast.unparse(call.func) not in ("range", "builtins.range"):
        call = call.args[0] if call.args else None  # tqdm(range(n))
    if not isinstance(call, ast.Call):
        return None
    numbers = [_number(arg, names) for arg in call.args]
    if not numbers or any(number is None for number in numbers):
        return None
    return len(range(*map(int, numbers)))  # type: ignore[arg-type]


def _number(node: ast.expr, names: Mapping[str, Any]) -> int | None:
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Sub):
        left, right = _number(node.left, names), _number(node.right, names)
        if left is None or right is None:
            return None
        return left + right if isinstance(node.op, ast.Add) else left - right
    value = node.value if isinstance(node, ast.Constant) else value_of(node, names)
    return int(value) if isinstance(value, int | float) and value == int(value) else None


def _add_precision(parts: Parts, found: Findings) -> None:
    kind = parts.seen.recorder.recordings[0].autocast
    if kind in _PRECISIONS:
        found.training["precision"] = _PRECISIONS[kind]
        place = parts.seen.autocasts[0][2] if parts.seen.autocasts else None
        found.taken.append(Finding("precision", f"autocast to {_PRECISIONS[kind]}", place))
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


def _add_rest(parts: Parts, found: Findings) -> None:
    seen = parts.seen
    if seen.compiled is not None:
        words = "torch.compile; set training.compile: true"
        found.left.append(Finding("compile", words, seen.compiled))
    found.left.append(
        Finding(
            "after the step", "what follows in the loop: logs, evaluation, saving", seen.stepped
        )
    )
    for place in list(dict.fromkeys(seen.recorder.decisions))[:3]:
        words = "looks at values of tensors; what it decides by them is as in the first step"
        found.left.append(Finding("values", words, place))
    random = [m for m in parts.model.modules() if isinstance(m, nn.Dropout) and m.p > 0]
    program = parts.program
    drawn = [program.entries[index] for index in program.needed if program.entries[index].is_random]
    if random or drawn:
        where = drawn[0].place if drawn else None
        words = "random numbers of model and loss (dropout) follow from training.seed"
        found.differs.append(Finding("random numbers", words, where))
    if not isinstance(parts.loader.dataset, IterableDataset):
        dataset: Any = parts.dataset()
        if isinstance(getattr(dataset, "order", None), Order):
            words = "that a sample draws (augmentation) follow from training.seed"
            found.differs.append(Finding("random numbers", words))
