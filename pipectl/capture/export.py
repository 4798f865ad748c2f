"""From a model to a graph: ``torch.export`` of the wrapper, with a free batch dimension."""

from __future__ import annotations

import io
import logging
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, redirect_stderr
from typing import Any

import torch
from torch import Tensor
from torch.export import Dim, ExportedProgram
from torch.utils import _pytree as pytree

from pipectl.capture.carried import Attribute, assigned, refused_reads
from pipectl.capture.drawing import refused_draws
from pipectl.capture.explain import explain
from pipectl.capture.gradients import (
    call_functions,
    recorded_functions,
    refuse_backward_hooks,
)
from pipectl.capture.observe import UnsuitableError
from pipectl.capture.regions import marked_regions
from pipectl.capture.step import Step
from pipectl.capture.tracing import Kept, call_modules, traced
from pipectl.errors import CaptureError


def export_step(step: Step, inputs: Any, targets: Any, kept: Kept) -> ExportedProgram:
    """The graph of one micro-batch, in the step's current mode (training or evaluation).

    The batch dimension (0) of every tensor is left free where the model allows it; where it
    specialises the size, the graph holds for this size alone.

    Args:
        inputs, targets: a collated micro-batch of at least 2 samples: torch gives sizes 0 and 1
            a meaning of their own.
        kept: submodules that become one operator each.

    Raises:
        CaptureError: the model cannot be exported; names the user's line.
        UnsuitableError: a submodule of ``kept`` cannot be an operator.
    """
    refuse_backward_hooks(step, kept.modules.values())
    try:
        return _export(step, (inputs, targets), kept, free=not kept.fixed)
    except (CaptureError, UnsuitableError):
        raise
    except Exception as free_error:
        # Some models fix the batch size (a reshape to a constant, say): export for this one.
        try:
            return _export(step, (inputs, targets), kept, free=False)
        except (CaptureError, UnsuitableError):
            raise
        except Exception:
            raise explain(free_error) from free_error


def _export(step: Step, batch: tuple[Any, Any], kept: Kept, *, free: bool) -> ExportedProgram:
    program, attributes = _program(step, batch, kept, free=free)
    if attributes:  # only watching them shows whether the model reads what it kept
        with refused_reads(attributes):
            program, _ = _program(step, batch, kept, free=free)
    return program


def _program(
    step: Step, batch: tuple[Any, Any], kept: Kept, *, free: bool
) -> tuple[ExportedProgram, list[Attribute]]:
    """The program, and the attributes that every step assigns anew."""
    shapes = pytree.tree_map(_free_batch, batch) if free else None
    with ExitStack() as stack:
        stack.enter_context(_quiet())
        stack.enter_context(refused_draws())
        stack.enter_context(marked_regions())
        calls = stack.enter_context(traced(step, kept))
        functions = stack.enter_context(recorded_functions())
        attributes = stack.enter_context(assigned(step))
        program = torch.export.export(step, batch, dynamic_shapes=shapes, strict=False)
    call_functions(program, functions)
    call_modules(program, calls)
    return program, attributes


def _free_batch(leaf: Any) -> dict[int, Any] | None:
    return {0: Dim.AUTO} if isinstance(leaf, Tensor) and leaf.dim() > 0 else None


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep torch's advice about its own internals off the user's terminal."""
    logger = logging.getLogger("torch")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings(), redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)
