"""Training loops of libraries, recognised by name when the script has imported them.

Most need nothing of their own: the ``Trainer`` of transformers and of TRL, accelerate and Lightning
call modules, ``DataLoader``, ``backward`` and optimizers like any script.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from types import CodeType
from typing import Any

Frame = tuple[CodeType, dict[str, Any], dict[str, Any], int]
"""Of the stack: its code, globals, locals and line."""

Replacement = tuple[Any, str, Any]
"""An object, the name of its attribute, and what replaces it."""


def replacements() -> Iterator[Replacement]:
    """Yield what is to be replaced in libraries that are loaded by now."""
    trainer = getattr(sys.modules.get("transformers.trainer"), "Trainer", None)
    if trainer is not None and hasattr(trainer, "get_batch_samples"):
        yield trainer, "get_batch_samples", _alone(trainer.get_batch_samples)


def _alone(original: Callable[..., Any]) -> Callable[..., Any]:
    """Let the loss of each accumulated batch depend on no other one.

    The trainer divides it by the number of tokens in all of them. That is the first one's times
    their number, if all have equally many.
    """

    def batches(self: Any, iterator: Any, count: int, *args: Any, **kwargs: Any) -> Any:
        found = original(self, iterator, count, *args, **kwargs)
        items = original(self, iter(found[0][:1]), 1, *args, **kwargs)[1]
        return found[0], items if items is None else items * len(found[0])

    return batches


def _trainer(frames: Iterable[Frame], module: str) -> Any:
    """Return the object that trains, of a class named Trainer in a module; None without one."""
    for _, _, own, _ in frames:
        for value in (own.get("self"), own.get("trainer")):
            kinds = ((kind.__module__, kind.__name__) for kind in type(value).__mro__)
            if any(name == "Trainer" and module in place for place, name in kinds):
                return value
    return None


def steps_of_trainer(frames: Iterable[Frame], per_epoch: int | None) -> int | None:
    """Return the optimizer steps of a trainer; None if there is none, or it does not end.

    Args:
        frames: of the stack at the first step.
        per_epoch: steps of an epoch, if that is known.
    """
    frames = list(frames)
    steps: Any = None
    if (trainer := _trainer(frames, "transformers.trainer")) is not None:
        steps = trainer.state.max_steps
    elif (trainer := _trainer(frames, "lightning")) is not None:
        steps, epochs = trainer.max_steps, trainer.max_epochs
        if steps < 0 and epochs is not None and epochs > 0 and per_epoch is not None:
            steps = epochs * per_epoch
    return steps if isinstance(steps, int) and steps > 0 else None


def interval_of_trainer(
    frames: Iterable[Frame], schedule: Any, per_epoch: Callable[[], int]
) -> int | None:
    """Return the optimizer steps between two steps of a schedule; None without a trainer."""
    frames = list(frames)
    if _trainer(frames, "transformers.trainer") is not None:
        return 1
    for config in getattr(_trainer(frames, "lightning"), "lr_scheduler_configs", ()):
        if config.scheduler is schedule:
            steps = 1 if config.interval == "step" else per_epoch()
            return steps * int(config.frequency)
    return None
