"""Parts of a model that run under an autocast of their own, or without gradients.

While it traces, ``torch.export`` marks where such a part begins and ends. Its own passes then wrap
the part in one operator, which no cut could divide, and forget a ``torch.no_grad()`` inside an
autocast. Here every operator carries instead what holds for it, and a stage enters and leaves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch._export.passes import replace_autocast_with_hop_pass as _autocast_pass
from torch._export.passes import replace_set_grad_with_hop_pass as _gradient_pass
from torch.amp import autocast_mode
from torch.utils import _pytree as pytree

from pipectl.capture import accelerator

_KEY = "pipectl_region"
_SET_GRADIENTS = torch._C._set_grad_enabled
_ENTER, _EXIT = autocast_mode._enter_autocast, autocast_mode._exit_autocast
_Pass = Callable[[fx.GraphModule, Any], tuple[fx.GraphModule, Any]]


class Autocast(NamedTuple):
    """An autocast that the model asks for; whether it caches casts is not known of a trace.

    Args:
        device: type of the tensors it is for, as captured on the CPU.
    """

    device: str
    dtype: torch.dtype
    enabled: bool


class Region(NamedTuple):
    """What holds for an operator, beside what holds for the whole model.

    Args:
        autocasts: one a device, in the order of their names.
        gradients: False under ``torch.no_grad()``.
    """

    autocasts: tuple[Autocast, ...]
    gradients: bool

    def entered(self) -> AbstractContextManager[Any]:
        """The context in which operators of this region run."""
        stack = ExitStack()
        for device, dtype, enabled in self.autocasts:
            for kind in _devices(device):
                stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=enabled))
        if not self.gradients:
            stack.enter_context(torch.no_grad())
        return stack

    def run(self, target: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """What an operator gives in this region."""
        with self.entered():
            result = target(*args, **kwargs)
        return result if self.gradients else without_gradient(result, (args, kwargs))


WHOLE = Region((), gradients=True)
"""Of operators for which nothing special holds."""


def without_gradient(result: Any, arguments: Any) -> Any:
    """What an operator gave under ``torch.no_grad()``, but for arguments that it handed through.

    Torch says of a view made there that it requires a gradient, though it lets none through.
    """
    given = {id(leaf) for leaf in pytree.tree_leaves(arguments)}
    return pytree.tree_map_only(
        Tensor, lambda leaf: leaf if id(leaf) in given else leaf.detach(), result
    )


def region_of(node: fx.Node) -> Region:
    """The region of an operator of a captured graph."""
    found: Region = node.meta.get(_KEY, WHOLE)
    return found


@contextmanager
def marked_regions() -> Iterator[None]:
    """While a model is exported, note at every operator in which region it is.

    ``torch.inference_mode()``, of which a trace tells nothing, counts as ``torch.no_grad()``.
    """
    modules: tuple[Any, Any] = (_autocast_pass, _gradient_pass)
    names = tuple(module.__name__.rpartition(".")[2] for module in modules)
    passes = [getattr(m, name) for m, name in zip(modules, names, strict=True)]
    inference = torch.inference_mode
    enter, leave = inference.__enter__, inference.__exit__
    try:
        # The pass for gradients runs first, and leaves everything to the other.
        setattr(_gradient_pass, names[1], lambda module, signature: (module, signature))
        setattr(
            _autocast_pass, names[0], lambda module, signature: _mark(module, signature, passes)
        )
        inference.__enter__ = _enter_inference  # type: ignore[method-assign]
        inference.__exit__ = _leave_inference  # type: ignore[method-assign]
        yield
    finally:
        for module, name, untouched in zip(modules, names, passes, strict=True):
            setattr(module, name, untouched)
        inference.__enter__ = enter  # type: ignore[method-assign]
        inference.__exit__ = leave  # type: ignore[method-assign]


class Switch:
    """Writes into a graph where its operators, appended one by one, enter and leave regions."""

    def __init__(self, graph: fx.Graph) -> None:
        self._graph = graph
        self._region = WHOLE
        self._open: fx.Node | None = None

    def to(self, region: Region) -> None:
        """Let what is appended from here on run in ``region``."""
        if region == self._region:
            return
        if self._open is not None:
            self._graph.call_function(_leave, (self._open,))
        self._open = None if region == WHOLE else self._graph.call_function(_Enter(region))
        self._region = region


@dataclass(frozen=True)
class _Enter:
    """Entering a region, as a function of a graph."""

    region: Region

    @property
    def __name__(self) -> str:
        return "enter_region"

    def __call__(self) -> AbstractContextManager[Any]:
        return self.region.entered()


def _leave(entered: ExitStack) -> None:
    entered.close()


def _mark(module: fx.GraphModule, signature: Any, passes: list[_Pass]) -> tuple[Any, Any]:
    """Move the marks of a traced graph into its operators.

    Subgraphs (branches, say) are operators as a whole and go torch's own way.
    """
    autocasts: dict[fx.Node, Autocast] = {}
    gradients, marks = True, []
    for node in module.graph.nodes:
        if node.target is _ENTER:
            device, dtype, enabled, _ = node.args
            autocasts[node] = Autocast(device, dtype, enabled)
        elif node.target is _EXIT:
            autocasts.pop(node.args[0])
        elif node.target is _SET_GRADIENTS:
            gradients = node.args[0]
        else:
            node.meta[_KEY] = _region(autocasts, gradients)
            _mark_subgraph(module, node, passes)
            continue
        marks.append(node)
    for node in reversed(marks):
        module.graph.erase_node(node)
    module.recompile()
    return module, signature


def _region(autocasts: dict[fx.Node, Autocast], gradients: bool) -> Region:
    innermost = {autocast.device: autocast for autocast in autocasts.values()}
    return Region(tuple(sorted(innermost.values())), gradients)


def _mark_subgraph(module: fx.GraphModule, node: fx.Node, passes: list[_Pass]) -> None:
    inner = getattr(module, str(node.target), None) if node.op == "get_attr" else None
    if isinstance(inner, fx.GraphModule):
        for apply in reversed(passes):
            inner, _ = apply(inner, None)
        setattr(module, str(node.target), inner)


def _devices(captured: str) -> Iterator[str]:
    """Where an autocast holds: what was captured on the CPU may run on an accelerator."""
    if captured == "cpu":
        yield captured
    used = accelerator.in_use()
    if used is not None and captured in ("cpu", used):
        yield used


def _enter_inference(self: Any) -> None:
    self.pipectl_before = torch.is_grad_enabled()
    torch.set_grad_enabled(self.pipectl_before and not self.mode)


def _leave_inference(self: Any, *_: object) -> None:
    torch.set_grad_enabled(self.pipectl_before)
