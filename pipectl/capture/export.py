"""From a model to a graph: ``torch.export`` of the wrapper, with a free batch dimension."""

from __future__ import annotations

import io
import logging
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from typing import Any

import torch
from torch import Tensor
from torch.export import Dim, ExportedProgram
from torch.utils import _pytree as pytree

from pipectl.capture.factories import line_in, user_line
from pipectl.capture.gradients import (
    call_functions,
    recorded_functions,
    refuse_backward_hooks,
)
from pipectl.capture.regions import marked_regions
from pipectl.capture.step import Step
from pipectl.errors import CaptureError


def export_step(step: Step, inputs: Any, targets: Any) -> ExportedProgram:
    """The graph of one micro-batch, in the step's current mode (training or evaluation).

    The batch dimension (0) of every tensor is left free where the model allows it; where it
    specialises the size, the graph holds for this size alone.

    Args:
        inputs, targets: a collated micro-batch of at least 2 samples: torch gives sizes 0 and 1
            a meaning of their own.

    Raises:
        CaptureError: the model cannot be exported; names the user's line.
    """
    refuse_backward_hooks(step)
    try:
        return _export(step, (inputs, targets), free=True)
    except CaptureError:
        raise
    except Exception as free_error:
        # Some models fix the batch size (a reshape to a constant, say): export for this one.
        try:
            return _export(step, (inputs, targets), free=False)
        except CaptureError:
            raise
        except Exception:
            raise _explain(free_error) from free_error


def _export(step: Step, batch: tuple[Any, Any], *, free: bool) -> ExportedProgram:
    shapes = pytree.tree_map(_free_batch, batch) if free else None
    with _quiet(), marked_regions(), recorded_functions() as functions:
        program = torch.export.export(step, batch, dynamic_shapes=shapes, strict=False)
    call_functions(program, functions)
    return program


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


def _explain(error: Exception) -> CaptureError:
    """What a failed export means, in one line, with the line of the model that causes it."""
    first = next((line for line in str(error).splitlines() if line.strip()), "")
    first = re.sub(r"\s*\(unhinted:.*", "", first).strip()
    place = user_line(error.__traceback__) or line_in(str(error))
    if "data-dependent" in str(error).lower() or "unbacked" in str(error).lower():
        what = "its control flow depends on the values of tensors"
        cure = "express the choice with torch.where or torch.cond, or move it out of forward()"
    else:
        what = f"{type(error).__name__}: {first}"
        cure = "see whether torch.export.export(model, args, strict=False) takes it, and change it"
    return CaptureError(f"model: cannot be captured{place}: {what}", cure=cure)
