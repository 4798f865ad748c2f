"""The script by itself: its own losses in its first steps, for ``verify`` and tests.

Started as ``python -m pipectl.script.plain JOB.yaml STEPS FILE``. The script runs as it is, with
its own backward passes and updates; pipectl only reads the losses, and ends it after some steps.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler
from torch.optim.optimizer import register_optimizer_step_post_hook

from pipectl.errors import CaptureError, PipectlError
from pipectl.files import write_json
from pipectl.script.hooks import Taken, no_accelerator, one_process
from pipectl.script.recorder import Here
from pipectl.script.run import Command, as_main
from pipectl.spec import load
from pipectl.units import printable

LOSSES = "losses"


def own_losses(command: Command, steps: int) -> list[float]:
    """Run a script for some optimizer steps and return its losses.

    If several backwards make a step, its loss is their sum: of what the script gives to
    ``backward()``, which it has divided by their number if it wants the mean.

    Raises:
        CaptureError: the script fails, or ends before.
    """
    losses: list[float] = []
    with _watched(losses, steps):
        try:
            with as_main(command) as (code, space):
                exec(code, space)  # noqa: S102
        except Taken:
            return losses
        except Exception as error:
            raise CaptureError(
                f"script: {command.file} raised {type(error).__name__}: {error}",
                hint="correct the script",
            ) from error
    return losses


@contextmanager
def _watched(losses: list[float], steps: int) -> Iterator[None]:
    backward, scale = torch.autograd.backward, GradScaler.scale
    parts: list[Tensor] = []
    scaled: list[Tensor] = []

    def note(tensors: Any, *args: Any, **kwargs: Any) -> None:
        one = tensors if isinstance(tensors, Tensor) else next(iter(tensors))
        parts.append(scaled.pop() if scaled else one.detach().clone())
        backward(tensors, *args, **kwargs)

    def note_unscaled(self: GradScaler, outputs: Any) -> Any:
        if isinstance(outputs, Tensor):
            scaled[:] = [outputs.detach().clone()]
        return scale(self, outputs)

    def step(*_: Any) -> None:
        if parts:
            losses.append(sum(float(part) for part in parts))
            parts.clear()
        if len(losses) >= steps:
            raise Taken

    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(torch.autograd, "backward", note))
        stack.enter_context(mock.patch.object(GradScaler, "scale", note_unscaled))
        stack.callback(register_optimizer_step_post_hook(step).remove)
        stack.enter_context(one_process())
        stack.enter_context(no_accelerator())
        stack.enter_context(Here())
        yield


def main(arguments: Sequence[str]) -> int:
    """Entry point; returns the exit code of a command."""
    job, steps, file = arguments
    try:
        spec = load(Path(job))
        torch.set_num_threads(spec.threads)
        write_json(Path(file), {LOSSES: own_losses(Command.of(spec), int(steps))})
    except PipectlError as error:
        sys.stderr.write(printable(f"{error}\n"))
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
