"""The contexts in which operators run: mixed precision, and parts of a model with their own.

Exported under autocast, a graph holds no casts: autocast makes them when an operator runs. So the
graph can be cut anywhere, and every stage runs its part in the same context. What the model itself
asks of a dtype (``x.to(y.dtype)``) is answered while it is captured, which therefore happens in
this context too.

Parts of a model may run under an autocast of their own, or without gradients. While it traces,
``torch.export`` marks where such a part begins and ends. Its own passes then wrap the part in one
operator, which no cut could divide, and forget a ``torch.no_grad()`` inside an autocast. Here every
operator carries instead what holds for it, and a stage enters and leaves.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch.amp import autocast_mode
from torch.utils import _pytree as pytree

from pipectl.errors import CaptureError

_KEY = "pipectl_region"
_SET_GRADIENTS = torch._C._set_grad_enabled
_ENTER, _EXIT = autocast_mode._enter_autocast, autocast_mode._exit_autocast


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
        autocasts: one per device, in the order of their names.
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
    argument_ids = {id(leaf) for leaf in pytree.tree_leaves(arguments)}
    return pytree.tree_map_only(
        Tensor, lambda leaf: leaf if id(leaf) in argument_ids else leaf.detach(), result
    )


def region_of(node: fx.Node) -> Region:
    """The region of an operator of a captured graph."""
    region: Region = node.meta.get(_KEY, WHOLE)
    return region


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


def mark_regions(module: fx.GraphModule, signature: Any, passes: list[Any]) -> tuple[Any, Any]:
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


def _mark_subgraph(module: fx.GraphModule, node: fx.Node, passes: list[Any]) -> None:
    inner = getattr(module, str(node.target), None) if node.op == "get_attr" else None
    if isinstance(inner, fx.GraphModule):
        for apply in reversed(passes):
            inner, _ = apply(inner, None)
        setattr(module, str(node.target), inner)


def _devices(captured: str) -> Iterator[str]:
    """Where an autocast holds: what was captured on the CPU may run on an accelerator."""
    if captured == "cpu":
        yield captured
    used = accelerator_in_use()
    if used is not None and captured in ("cpu", used):
        yield used


_DTYPES = {"bf16": torch.bfloat16, "float16": torch.float16}
_MISSING = re.compile("not implemented for|could not create a primitive|not supported|Half")


_NOTHING = nullcontext()


def arithmetic(precision: str, device: torch.device) -> AbstractContextManager[object]:
    """The context for forwards; backwards follow what their forward did, and need none.

    Args:
        precision: as in the spec.
        device: where the operators run.
    """
    dtype = _DTYPES.get(precision)
    return _NOTHING if dtype is None else torch.autocast(device.type, dtype=dtype)


@contextmanager
def missing_kernels(operator: str, precision: str, device: torch.device) -> Iterator[None]:
    """Say which operator it is that has no kernel for ``float16``; CPUs lack some.

    Raises:
        CaptureError: what ran inside failed as torch does if a kernel is missing.
    """
    try:
        yield
    except RuntimeError as error:
        first = str(error).partition("\n")[0]
        if precision != "float16" or not _MISSING.search(first):
            raise
        raise CaptureError(
            f"model: {operator} cannot run in float16 on {device.type}: {first}",
            cure="use training.precision: bf16, or run it under "
            f"torch.autocast({device.type!r}, enabled=False) on .float() values",
        ) from error


@cache
def accelerator() -> tuple[str, Any]:
    """The type of the machine's accelerators and torch's module for them; None without one."""
    device = torch.accelerator.current_accelerator()
    return ("cpu", None) if device is None else (device.type, torch.get_device_module(device))


def accelerator_in_use() -> str | None:
    """The type of the accelerator (``cuda``, ``xpu``, ...); None while nothing has run on one."""
    kind, module = accelerator()
    used = module is not None and getattr(module, "is_initialized", lambda: True)()
    return kind if used else None
