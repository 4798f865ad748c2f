"""Exporting a model with opaque submodules: an operator of torch stands for each of their calls."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.export import ExportedProgram
from torch.utils import _pytree as pytree

from pipectl.capture.masks import Mask
from pipectl.capture.observe import UnsuitableError
from pipectl.capture.opaque import Arguments, Opaque, States
from pipectl.capture.outline import Outline
from pipectl.capture.step import Step

_LIBRARY: Any = torch.library.Library("pipectl", "DEF")  # type: ignore[no-untyped-call]
_LIBRARY.define("opaque(str call, SymInt batch, Tensor[] tensors, SymInt[] numbers) -> Tensor[]")
_STAND_IN: Any = torch.ops.pipectl.opaque.default
fx.node.has_side_effect(_STAND_IN)  # it is kept where nothing reads its result

_calls: dict[str, Opaque] = {}
"""Calls of the export in progress, by the name that stands in the graph."""


def _blank(call: str, batch: Any, tensors: Sequence[Tensor], _: Sequence[Any]) -> list[Tensor]:
    device = next((tensor.device for tensor in tensors), None)
    return [form.at(batch).blank(device) for form in _calls[call].outline.forms]


torch.library.register_fake("pipectl::opaque", _blank, lib=_LIBRARY)


@dataclass(frozen=True)
class Kept:
    """Submodules that become operators, by path.

    Args:
        outlines: what each of their calls gives, in order.
        fixed: whether that is known for one batch size alone.
        unrolls: whether the others may have loops as long as they like.
    """

    modules: Mapping[str, nn.Module] = field(default_factory=dict)
    outlines: Mapping[str, Sequence[Outline]] = field(default_factory=dict)
    fixed: bool = False
    unrolls: bool = False


@contextmanager
def traced(step: Step, kept: Kept) -> Iterator[dict[str, Opaque]]:
    """While a step is exported: calls of opaque submodules become single operators.

    Yields:
        The operators, for :func:`call_modules`.

    Raises:
        UnsuitableError: from the export, if a submodule is called more often than is known.
    """
    _calls.clear()
    with ExitStack() as stack:
        for mask in _Trace(step, kept).masks if kept.modules else ():
            stack.enter_context(mask.worn())
        yield _calls


class _Trace:
    """Stands in for the submodules, and notes the batch size where the model is called."""

    def __init__(self, step: Step, kept: Kept) -> None:
        self._step = step
        self._batch: Any = None
        self.masks = [
            Mask(module, self._stand_in(path, module, kept.outlines[path]))
            for path, module in kept.modules.items()
        ]
        self.masks.append(self._noting(step.model))

    def _noting(self, model: nn.Module) -> Mask:
        def forward(*args: Any, **kwargs: Any) -> Any:
            leaves = pytree.tree_leaves((args, kwargs))
            self._batch = next(t.shape[0] for t in leaves if isinstance(t, Tensor) and t.dim())
            with mask.lifted():
                return model(*args, **kwargs)

        mask = Mask(model, forward)
        return mask

    def _stand_in(self, path: str, module: nn.Module, outlines: Sequence[Outline]) -> Any:
        states = States(module)
        own = states.buffers_apart(self._step) if module.training else frozenset[int]()
        waiting = iter(outlines)

        def forward(*args: Any, **kwargs: Any) -> Any:
            outline = next(waiting, None)
            if outline is None:
                raise UnsuitableError(path, "is called more often than when the model runs")
            arguments = Arguments(args, kwargs)
            # Another call may write a buffer that the observed ones did not.
            known = replace(outline, written=outline.written | own)
            call = Opaque(path, module, states, arguments, known)
            name = f"{path} {len(_calls)}"
            _calls[name] = call
            tensors = [*states.now(), *arguments.tensors]
            return outline.result(_STAND_IN(name, self._batch, tensors, arguments.numbers))

        return forward


def call_modules(program: ExportedProgram, calls: Mapping[str, Opaque]) -> None:
    """Let the operators of a program call the submodules."""
    for module in program.graph_module.modules():
        if isinstance(module, fx.GraphModule):
            for node in module.graph.find_nodes(op="call_function", target=_STAND_IN):
                _call_module(module.graph, node, calls)


def _call_module(graph: fx.Graph, node: fx.Node, calls: Mapping[str, Opaque]) -> None:
    name, batch, tensors, numbers = node.args
    target: Any = calls[str(name)]
    with graph.inserting_before(node):
        called = graph.create_node("call_function", target, (batch, *tensors, *numbers))  # type: ignore[misc]
    called.meta = dict(node.meta)
    if len(target.outline.forms) == 1:
        called.meta["val"] = node.meta["val"][0]
        for item in [user for user in node.users if user.target is operator.getitem]:
            item.replace_all_uses_with(called)
            graph.erase_node(item)
    node.replace_all_uses_with(called)
    graph.erase_node(node)
