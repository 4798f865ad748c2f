"""Compares the recorded first step of a script with what the script does in its next steps.

A job runs the program that was recorded in the first step for every batch. What the script decides
in Python by a step's number or by values of a batch (a weight that is annealed, a state that is
carried on, an ``if``) is in the program as it was in the first step. So the script runs on for some
steps, with weights that stay as they are, and its losses are compared with those of the program for
the same batches, random numbers and buffers.

Nothing is written meanwhile: ``torch.save`` does nothing, and the comparison ends where the script
opens a file for writing.
"""

from __future__ import annotations

import builtins
import io
import math
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import torch
from torch import Tensor, nn

from pipectl.errors import CaptureError
from pipectl.script.hooks import Seen, Taken
from pipectl.script.parts import model_of, program_of
from pipectl.script.program import Entry, Outer, Place, Program, Ref, name_of, parts, reach
from pipectl.script.recorder import Recorder, Recording, at, script_place
from pipectl.script.run import Command, run_script

STEPS = 3
_RELATIVE = 1e-5
_ABSOLUTE = 1e-8
_ALIKE = (
    "compute it in every step in the same way, from the batch and the model alone, with functions "
    "of torch"
)
_OWN_LOSS = "; or give the job a loss of its own (key loss)"


@dataclass
class Compared:
    """What was compared.

    Args:
        steps: optimizer steps of the script whose losses are those of the program.
        reason: why it is no more; empty if nothing is missing.
        place: of the script that the reason is about.
    """

    steps: int
    reason: str = ""
    place: Place | None = None

    @property
    def sentence(self) -> str:
        """All this in words, without the place."""
        if not self.reason:
            return f"the losses of {self.steps} steps are those of the script"
        number = self.steps or "none"
        return f"{number} of the first {STEPS} steps were compared with the script: {self.reason}"


class _Difference(NamedTuple):
    """Where another step computes something else than the first.

    Args:
        place: of the script.
        words: what differs.
        is_number: whether it is a floating-point number of the script.
        leads_to_model: whether the model reads its result, so that another loss changes nothing.
    """

    place: Place
    words: str
    is_number: bool = False
    leads_to_model: bool = False


def compare_steps(command: Command) -> Compared:
    """Run a script for its first steps, with the weights it begins with, and compare them.

    Raises:
        CaptureError: a loss of the script is another one than that of the program.
    """
    seen = Seen(recorder=Recorder(follows=True), steps=STEPS)
    compared = Compared(STEPS)
    with _unwritten(seen, compared):
        try:
            run_script(command, seen)
        except CaptureError as error:
            compared.reason = error.message
    if not seen.ends:  # what is wrong is said where the parts are taken
        return Compared(0, compared.reason)
    for module, was_training in seen.recorder.training.items():
        module.training = was_training
    _compare(seen, compared)
    if compared.steps == STEPS:
        compared.reason = ""
    elif not compared.reason:
        compared.reason = f"the script ends after {compared.steps}"
    return compared


def _compare(seen: Seen, compared: Compared) -> None:
    recordings = seen.recorder.recordings[: seen.ends[-1]]
    first = recordings[0]
    model = model_of(seen, first)
    program = program_of(first, model)
    follows_random = True
    for index, recording in enumerate(recordings):
        step = 1 + sum(index >= end for end in seen.ends)
        which = f"step {step}" if step > 1 or index == 0 else f"batch {index + 1} of step 1"
        found = _difference(first, recording, which)
        if found is not None and found.is_number:
            raise _refusal(found)
        if len(recording.batches) != 1:
            words = f"{which} reads {len(recording.batches)} batches of the DataLoader"
            compared.steps, compared.reason, compared.place = step - 1, words, recording.place
            return
        own = float(recording.value)
        try:
            value = _replayed(program, model, recording)
        except (RuntimeError, ValueError, TypeError, IndexError, KeyError) as error:
            words = f"what the first step computes cannot be computed in {which}: {error}"
            raise _refusal(found or _Difference(program.place, words)) from error
        if _is_close(value, own) or not follows_random:
            continue
        if index == 0 and recording.draws:
            follows_random = False
            compared.reason = "draws random numbers in another order than pipectl does"
            compared.place = recording.place
            continue
        words = f"the loss of {which} is {own:.6g}, but computed as in the first step {value:.6g}"
        if found is not None:
            raise _refusal(found._replace(words=f"{found.words} ({words})"))
        raise _refusal(_Difference(recording.place, words))
    compared.steps = len(seen.ends) if follows_random else 0


def _refusal(found: _Difference) -> CaptureError:
    cure = _ALIKE if found.leads_to_model else _ALIKE + _OWN_LOSS
    return CaptureError(f"{at(found.place)}: {found.words}", cure=cure)


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
        return float(program.loss(model, program.forward(model, batch), batch).detach())


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
                return _Difference(b.place, words, is_number, leads_to_model)
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


# Nothing is written.


@contextmanager
def _unwritten(seen: Seen, compared: Compared) -> Iterator[None]:
    """Keep a script from writing files once it has made its first step."""
    save = torch.save

    def save_later(*args: Any, **kwargs: Any) -> None:
        if not seen.ends:
            save(*args, **kwargs)

    def opening(original: Callable[..., Any]) -> Callable[..., Any]:
        def opened(file: Any, mode: Any = "r", *args: Any, **kwargs: Any) -> Any:
            is_file = not isinstance(file, int) and file != os.devnull  # no pipe, say
            is_written = isinstance(mode, str) and is_file and set(mode) & set("wax+")
            if seen.ends and is_written and threading.current_thread() is threading.main_thread():
                compared.reason = "the script opens a file for writing after its first step"
                compared.place = script_place()
                raise Taken
            return original(file, mode, *args, **kwargs)

        return opened

    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(torch, "save", save_later))
        for module in (builtins, io):
            stack.enter_context(mock.patch.object(module, "open", opening(module.open)))
        yield
