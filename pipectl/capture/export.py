"""From a model to a graph: ``torch.export`` of the wrapper, with a free batch dimension.

The sequence length is free too, if sequences are padded to several lengths.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from functools import cache, partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.export import Dim, ExportedProgram
from torch.export.graph_signature import InputKind

from pipectl.capture.buckets import field_of
from pipectl.capture.checks import drop_conditions
from pipectl.capture.compiling import answered_as_uncompiled
from pipectl.capture.fallback import KeptModules, recorded_calls
from pipectl.capture.leaves import (
    TURNS,
    Beside,
    exportable,
    is_choice,
    items_of,
    kind_of,
    other_choices,
    other_items,
    without_keys,
)
from pipectl.capture.model_with_loss import ModelWithLoss
from pipectl.capture.opaque import Opaque
from pipectl.capture.patches import Recorder, patched_export
from pipectl.capture.programs import difference
from pipectl.capture.python_state import (
    MANY_STEPS,
    Entry,
    Table,
    carried,
    name_of_state,
    watch_changes,
)
from pipectl.capture.refusals import (
    Refusal,
    RefusedError,
    explain,
    place_of,
    place_of_node,
    refuse_backward_hooks,
)
from pipectl.errors import CaptureError
from pipectl.torch_api import pytree

_SAMPLES, _POSITIONS = 0, 1
"""Dimensions of a batch that an export may leave free: the second one of padded fields only."""
_MAX_ITEMS = 8
"""Of a batch that are tried one by one."""


def export_model(
    wrapper: ModelWithLoss,
    inputs: Any,
    targets: Any,
    kept: KeptModules,
    padded: Collection[str] = (),
) -> tuple[ExportedProgram, Beside]:
    """Return the graph of one micro-batch, and on what else of the batch it depends, in the
    wrapper's current mode (training or evaluation).

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
    refuse_backward_hooks(wrapper, [each.module for each in kept.modules])
    batch = (inputs, targets)
    failure: Exception | None = None
    # Some models fix a size (by a reshape to a constant, say): exported for this one.
    waiting = [{_SAMPLES}, set[int]()][kept.fixed :]
    if padded and not kept.modules:
        waiting.insert(0, {_SAMPLES, _POSITIONS})
    while waiting:
        dimensions = waiting.pop(0)
        free = _free(batch, padded, dimensions)
        try:
            program, changes = _program(wrapper, batch, kept, free)
            if partly_free := _partly_free(program, batch, padded, dimensions):
                waiting.insert(0, dimensions - partly_free)
                continue
            if changes:
                _refuse_carried(wrapper, batch, kept, free, program, changes)
            _refuse_choices(wrapper, batch, kept, free, program)
            sizes = partial(_free, padded=padded, dimensions=dimensions)
            beside = _beside(wrapper, batch, kept, sizes, program)
        except CaptureError:
            raise
        except Exception as error:
            failure = failure or error
        else:
            return program, beside
    assert failure is not None
    raise explain(failure) from failure


def _refuse_choices(
    wrapper: ModelWithLoss,
    batch: tuple[Any, Any],
    kept: KeptModules,
    free: Any,
    program: ExportedProgram,
) -> None:
    """Refuse a model that computes with texts of the batch, or with members of enumerations: the
    program with other ones differs.

    Raises:
        RefusedError: naming the line.
    """
    choices = {leaf for leaf in pytree.tree_leaves(batch) if is_choice(leaf)}
    for node in program.graph.nodes if choices else ():
        if isinstance(node.target, Opaque) and choices & node.target.choices:
            raise Refusal.TEXT.error(place_of_node(node))
    for others in other_choices(batch):
        try:
            again, _ = _program(wrapper, others, kept, free)
        except Exception as error:  # no key of a table, for example
            raise Refusal.TEXT.error(place_of(error)) from error
        place = difference(program, again)
        if place is not None:
            raise Refusal.TEXT.error(place)


def _beside(
    wrapper: ModelWithLoss,
    batch: tuple[Any, Any],
    kept: KeptModules,
    free: Callable[[Any], Any],
    program: ExportedProgram,
) -> Beside:
    """Find on which items of a batch that are no tensors and numbers a program depends: it is
    another one, or none, with others.
    """
    kinds = {place: kind_of(item) for place, item in items_of(batch).items()}
    if not kinds:
        return Beside()

    def depends(others: Any) -> bool:
        try:
            again, _ = _program(wrapper, others, kept, free(others))
        except Exception:
            return True
        return difference(program, again) is not None

    fixed = set(kinds)
    if not any(depends(other_items(batch, turn, fixed)) for turn in range(TURNS)):
        fixed.clear()
    elif 1 < len(fixed) <= _MAX_ITEMS:
        alone = ((place, turn) for place in kinds for turn in range(TURNS))
        fixed = {place for place, turn in alone if depends(other_items(batch, turn, {place}))}
    return Beside(kinds, frozenset(fixed), depends(without_keys(batch)))


def _refuse_carried(
    wrapper: ModelWithLoss,
    batch: tuple[Any, Any],
    kept: KeptModules,
    free: Any,
    program: ExportedProgram,
    changes: Mapping[str, Entry],
) -> None:
    """Refuse what a step changes in Python objects, if the graph of a later step differs.

    Raises:
        RefusedError: naming the first tensor that a later step uses, or the first such number.
    """
    tables = {name: entry for name, entry in changes.items() if isinstance(entry.value, Table)}
    others = {name: entry for name, entry in changes.items() if name not in tables}

    def rerun(begin: Mapping[str, Entry]) -> tuple[str | None, Mapping[str, Entry]]:
        """Return the line of the model that makes the graph of a step with this beginning another
        one, None if it is the same; and what the step changes.
        """
        try:
            again, changes = _program(wrapper, batch, kept, free, {**tables, **begin})
        except RefusedError as error:
            if error.refusal is Refusal.CARRIED:
                raise
            known = error.refusal in (Refusal.LOOP, Refusal.FREEZES)
            return (error.place if known else None), {}
        except Exception:  # what else such a step needs is not known
            return None, {}
        left = map(name_of_state, tables.keys() - changes.keys())
        place = difference(program, again, {*left})
        if place is not None and tables and difference(with_tables(), again) is None:
            place = None  # the tables alone make that difference
        return place, changes

    @cache
    def with_tables() -> ExportedProgram:
        return _program(wrapper, batch, kept, free, tables)[0]

    place, changed_again = rerun(others) if others else (None, {})
    begin = others
    if place is None:  # a maximum stays where it is; a schedule may wait for many steps
        later = {name: others[name].after(MANY_STEPS) for name in others.keys() & changed_again}
        numbers = {name: entry for name in others if (entry := later.get(name)) is not None}
        place, _ = rerun(numbers) if numbers else (None, {})
        begin = numbers
    if place is not None:
        alone = (name for name, entry in begin.items() if rerun({name: entry})[0] is not None)
        name = next(alone, next(iter(begin)))
        raise carried(name, begin[name].value, place)


def _free(batch: Any, padded: Collection[str], dimensions: Collection[int]) -> Any:
    """Return the dimensions of every tensor of a batch that an export leaves free."""

    def of_leaf(place: pytree.KeyPath, leaf: Any) -> dict[int, Any] | None:
        sizes = _sizes(place, leaf, padded)
        return dict.fromkeys(sizes.keys() & dimensions, Dim.AUTO) or None

    return pytree.tree_map_with_path(of_leaf, batch) if dimensions else None


def _sizes(place: pytree.KeyPath, value: Any, padded: Collection[str]) -> dict[int, Any]:
    """Return the sizes of a leaf of a batch that may be free, by dimension."""
    if not isinstance(value, Tensor) or not value.dim():
        return {}
    is_padded = value.dim() > 1 and field_of(place) in padded
    return dict(enumerate(value.shape[: 1 + is_padded]))


def _partly_free(
    program: ExportedProgram, batch: Any, padded: Collection[str], dimensions: Collection[int]
) -> set[int]:
    """Return the dimensions that a program fixes in one tensor of the batch, but not in another.

    A model may list the samples of one input and take their number from another. The graph holds
    for one size then, and another export must fix it in all tensors. What nobody reads is free.
    """
    found: dict[int, set[bool]] = {dimension: set() for dimension in dimensions}
    entering = {node.name: node for node in program.graph.find_nodes(op="placeholder")}
    leaves, _ = pytree.tree_flatten_with_path(batch)
    specs = program.graph_signature.input_specs
    inputs = [spec.arg for spec in specs if spec.kind is InputKind.USER_INPUT]
    for (place, _), argument in zip(leaves, inputs, strict=True):
        node = entering.get(getattr(argument, "name", ""))
        if node is None or not node.users:
            continue
        for dimension, size in _sizes(place, node.meta.get("val"), padded).items():
            if dimension in found:
                is_free = isinstance(size, torch.SymInt) and size.node.expr.is_Symbol
                found[dimension].add(is_free)
    return {dimension for dimension, kinds in found.items() if len(kinds) > 1}


def _program(
    wrapper: ModelWithLoss,
    batch: tuple[Any, Any],
    kept: KeptModules,
    free: Any,
    begin: Mapping[str, Entry] = MappingProxyType({}),
) -> tuple[ExportedProgram, Mapping[str, Entry]]:
    """Return the program, and what the next step begins with; see :func:`watch_changes`.

    It is that of plain PyTorch; only if none can be exported, of what the model does for compilers.

    Args:
        free: sizes, as torch.export takes them.
    """
    given = wrapper, batch, kept, free, begin
    with answered_as_uncompiled() as asked:
        try:
            return _traced(*given)
        except Exception:
            if not asked:
                raise
    return _traced(*given)


def _traced(
    wrapper: ModelWithLoss,
    batch: tuple[Any, Any],
    kept: KeptModules,
    free: Any,
    begin: Mapping[str, Entry],
    *,
    locates_draws: bool = False,
) -> tuple[ExportedProgram, Mapping[str, Entry]]:
    """Return the same, of what the model computes as it is asked now.

    Args:
        locates_draws: see :func:`~pipectl.capture.draws.refused_draws`.
    """
    recorder = Recorder()
    try:
        with (
            watch_changes(wrapper, begin) as changes,
            patched_export(wrapper, recorder, unrolls=kept.unrolls, locates_draws=locates_draws),
            recorded_calls(wrapper, kept.modules, recorder),
            exportable(wrapper, batch) as exported,
        ):
            program = torch.export.export(wrapper, exported, dynamic_shapes=free, strict=False)
    except RefusedError as error:
        if error.refusal is not Refusal.DRAW or error.place or locates_draws:
            raise
        return _traced(wrapper, batch, kept, free, begin, locates_draws=True)
    recorder.place_targets(program)
    drop_conditions(program.graph)
    return program, changes
