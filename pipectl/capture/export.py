"""From a model to a graph: ``torch.export`` of the wrapper, with a free batch dimension.

The sequence length is free too, if sequences are padded to several lengths.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, fx
from torch.export import Dim, ExportedProgram
from torch.utils import _pytree as pytree

from pipectl.capture.buckets import field_of
from pipectl.capture.checks import drop_conditions
from pipectl.capture.fallback import KeptModules, recorded_calls
from pipectl.capture.patches import Recorder, patched_export, refused_reads
from pipectl.capture.python_state import Assignments
from pipectl.capture.refusals import Refusal, explain, refuse_backward_hooks
from pipectl.capture.step import Step, own_name
from pipectl.capture.tensors import octets_of
from pipectl.errors import CaptureError

_MANY_STEPS = 2520
"""After which a count is a multiple of all up to ten, but no loop over it is too long to trace."""


def export_step(
    step: Step, inputs: Any, targets: Any, kept: KeptModules, padded: Collection[str] = ()
) -> ExportedProgram:
    """Return the graph of one micro-batch, in the step's current mode (training or evaluation).

    The batch dimension (0) of every tensor is free if the model allows it, and so is the sequence
    dimension (1) of padded fields; if the model specialises a size, the graph is valid for this
    size only.

    Args:
        inputs, targets: a collated micro-batch of at least 2 samples: sizes 0 and 1 are special in
            torch.
        kept: submodules that become one operator each; their results are known for this length
            only.
        padded: names of fields whose length is free.

    Raises:
        CaptureError: the model cannot be exported; names the user's line.
    """
    refuse_backward_hooks(step, map(step.get_submodule, kept.outlines))
    batch = (inputs, targets)
    failure: Exception | None = None
    # Some models fix a size (by a reshape to a constant, say): exported for this one.
    choices = [_free(batch, ()), None]
    if padded and not kept.outlines:
        choices.insert(0, _free(batch, padded))
    for free in choices[kept.fixed :]:
        try:
            program, assigned = _program(step, batch, kept, free)
            if assigned.tensors:  # only watching them shows whether the model reads what it kept
                with refused_reads(step, assigned.tensors):
                    program, _ = _program(step, batch, kept, free)
            if assigned.numbers:
                _refuse_counts(step, batch, kept, program, assigned.numbers, free)
        except CaptureError:
            raise
        except Exception as error:
            failure = failure or error
        else:
            return program
    assert failure is not None
    raise explain(failure) from failure


def _refuse_counts(
    step: Step,
    batch: tuple[Any, Any],
    kept: KeptModules,
    program: ExportedProgram,
    numbers: Mapping[str, tuple[Any, Any]],
    free: Any,
) -> None:
    """Refuse numbers that every step changes, if the graph of a later step differs.

    Raises:
        RefusedError: naming the first such number.
    """
    text = _text(program)

    def rerun(values: Mapping[str, Any]) -> tuple[bool, Mapping[str, Any]]:
        """Whether the step has another graph with other numbers, and which it then changes."""
        try:
            again, assignments = _program(step, batch, kept, free, values)
        except Exception as error:  # what else such a step needs is not known
            return getattr(error, "refusal", None) is Refusal.LOOP, {}
        return _text(again) != text, assignments.numbers

    values = {name: after for name, (_, after) in numbers.items()}
    matters, changed = rerun(values)
    if not matters:  # a maximum stays where it is; a schedule may wait for many steps
        counts = {n: pair for n, pair in numbers.items() if n in changed}
        values = {n: first + _MANY_STEPS * (then - first) for n, (first, then) in counts.items()}
        matters = bool(values) and rerun(values)[0]
    if not matters:
        return
    name = next((n for n in values if rerun({n: values[n]})[0]), next(iter(values)))
    path, _, attribute = name.rpartition(".")
    module = dict(step.named_modules()).get(path)
    if module is not None and attribute in vars(module):  # not something inside one
        with refused_reads(step, [name]):
            _program(step, batch, kept, free)
    raise Refusal.CARRIED.error("", name=own_name(name))


def _free(batch: Any, padded: Collection[str]) -> Any:
    """Return the dimensions of every tensor of a batch that an export leaves free."""

    def of_leaf(place: pytree.KeyPath, leaf: Any) -> dict[int, Any] | None:
        if not isinstance(leaf, Tensor) or not leaf.dim():
            return None
        is_padded = padded and leaf.dim() > 1 and field_of(place) in padded
        return dict.fromkeys((0, 1) if is_padded else (0,), Dim.AUTO)

    return pytree.tree_map_with_path(of_leaf, batch)


def _text(program: ExportedProgram) -> str:
    """Return all that a program computes, except for the values of parameters and buffers."""
    graphs = [m.graph for m in program.graph_module.modules() if isinstance(m, fx.GraphModule)]
    nodes = [
        f"{node.name} = {getattr(node.target, '__name__', node.target)}{node.args}{node.kwargs}"
        for graph in graphs
        for node in graph.nodes
    ]
    constants = program.constants.items()
    plain = ((name, t) for name, t in constants if type(t) is Tensor and not t.is_meta)
    values = [f"{name}: {hashlib.sha256(octets_of(t)).hexdigest()}" for name, t in plain]
    return "\n".join([*nodes, *values])


def _program(
    step: Step,
    batch: tuple[Any, Any],
    kept: KeptModules,
    free: Any,
    numbers: Mapping[str, Any] = MappingProxyType({}),
) -> tuple[ExportedProgram, Assignments]:
    """Return the program, and what every step assigns.

    Args:
        free: sizes, as torch.export takes them.
        numbers: as in :class:`Assignments`.
    """
    recorder = Recorder()
    with (
        patched_export(step, recorder, unrolls=kept.unrolls),
        recorded_calls(step, kept, recorder),
        Assignments(step, numbers) as assignments,
    ):
        program = torch.export.export(step, batch, dynamic_shapes=free, strict=False)
    recorder.place_targets(program)
    drop_conditions(program.graph)
    return program, assignments
