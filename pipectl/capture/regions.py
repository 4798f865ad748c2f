"""Contexts in which operators run: mixed precision, and parts of a model without gradients.

If a model is exported under autocast, the graph contains no casts: autocast makes them when an
operator runs. The graph can then be cut anywhere, and every stage runs in the same context. The
model is captured in this context too, because it may ask for a dtype (``x.to(y.dtype)``).

Parts of a model may have an autocast of their own, or run without gradients. ``torch.export`` marks
the beginning and the end of such a part, and its passes then wrap the part in one operator, which
no cut can divide, and lose a ``torch.no_grad()`` inside an autocast. Here every operator carries
its context instead, and the stage enters and leaves it. So it does where the model chooses kernels,
which torch does not mark.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn

from pipectl.capture.factories import known_hint
from pipectl.errors import CaptureError
from pipectl.torch_api import (
    ENTER_AUTOCAST,
    EXIT_AUTOCAST,
    SET_GRADIENTS,
    HigherOrderOperator,
    choose_kernels,
    current_accelerator,
    get_proxy_mode,
    keep_unread,
    kernels,
    pytree,
    untouched_by_modes,
)

_KEY = "pipectl_region"


class Autocast(NamedTuple):
    """An autocast inside the model. A trace does not say whether it caches casts.

    Args:
        device: type of the tensors that it applies to, as captured on the CPU.
    """

    device: str
    dtype: torch.dtype
    enabled: bool


class Region(NamedTuple):
    """The context of an operator, in addition to the context of the whole model.

    Args:
        autocasts: one per device type, sorted.
        gradients: False under ``torch.no_grad()``.
        kernels: what the model has changed in how torch chooses kernels (``sdpa_kernel``, flags of
            ``torch.backends``), by name.
    """

    autocasts: tuple[Autocast, ...]
    gradients: bool
    kernels: tuple[tuple[str, Any], ...] = ()

    def __repr__(self) -> str:
        """A part of the graph's fingerprint."""
        kernels = f", kernels={self.kernels}" if self.kernels else ""
        return f"Region(autocasts={self.autocasts}, gradients={self.gradients}{kernels})"

    def enter(self) -> ExitStack:
        """Enter the region; the result leaves it when it is closed."""
        stack = ExitStack()
        for device, dtype, enabled in self.autocasts:
            for kind in _devices(device):
                stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=enabled))
        if not self.gradients:
            stack.enter_context(torch.no_grad())
        if self.kernels:
            stack.callback(choose_kernels, kernels())
            choose_kernels(dict(self.kernels))
        return stack

    def run(self, target: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run an operator in this region."""
        with self.enter():
            result = target(*args, **kwargs)
        return result if self.gradients else without_gradient(result, (args, kwargs))


WHOLE = Region((), gradients=True)
"""Of operators for which nothing special holds."""


def without_gradient(result: Any, arguments: Any) -> Any:
    """Detach the result of an operator that ran under ``torch.no_grad()``, except for its
    arguments.

    Torch sets ``requires_grad`` on a view that was made there, although no gradient passes it.
    """
    argument_ids = {id(leaf) for leaf in pytree.tree_leaves(arguments)}
    return pytree.tree_map_only(
        Tensor, lambda leaf: leaf if id(leaf) in argument_ids else leaf.detach(), result
    )


def region_of(node: fx.Node) -> Region:
    """Return the region of an operator of a captured graph."""
    region: Region = node.meta.get(_KEY, WHOLE)
    return region


class _Mark(HigherOrderOperator):
    """Stands in a trace where the model changes how torch chooses kernels."""

    def __call__(self, *_: Any, **__: Any) -> Any:
        raise NotImplementedError


_MARK = _Mark("pipectl_kernels")  # type: ignore[no-untyped-call]
keep_unread(_MARK)


class KernelMarks:
    """Marks a trace wherever the model has changed how torch chooses kernels, of which it shows
    nothing.

    An export chooses some for itself (it switches off cuDNN, for example). The model sees what held
    before, but no operator that is traced does.
    """

    def __init__(self) -> None:
        self._before = self._now = kernels()
        self._of_export: dict[str, Any] = {}
        self._tracer: Any = None

    @contextmanager
    def watched(self, model: nn.Module) -> Iterator[None]:
        """Let the model see what held before, whenever it is called; undo what it has changed for
        good.
        """

        def begin(*_: Any) -> None:
            found = kernels().items()
            self._of_export = {n: v for n, v in found if self._before.get(n) != v}
            choose_kernels({name: self._before[name] for name in self._of_export})

        def end(*_: Any) -> None:
            choose_kernels({**self._before, **self._of_export})
            self._of_export = {}

        handles = (
            model.register_forward_pre_hook(begin, prepend=True),
            model.register_forward_hook(end, always_call=True),
        )
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    @contextmanager
    def traced(self) -> Iterator[None]:
        """Trace an operator; before it is a mark if the model has changed anything."""
        mode = get_proxy_mode()
        if mode is None:
            yield
            return
        found = kernels()
        self._tracer = self._tracer or mode.tracer
        if found != self._now and mode.tracer is self._tracer:  # not in the graph of a branch
            self._now = found
            changed = tuple(each for each in found.items() if self._before.get(each[0]) != each[1])
            with untouched_by_modes():
                mode.tracer.create_proxy("call_function", _MARK, (changed,), {})
        choose_kernels(self._of_export)
        try:
            yield
        finally:
            choose_kernels({name: found[name] for name in self._of_export})


class Switch:
    """Adds calls to a graph that enter and leave regions between its operators."""

    def __init__(self, graph: fx.Graph) -> None:
        self._graph = graph
        self._region = WHOLE
        self._open: fx.Node | None = None

    def to(self, region: Region) -> None:
        """Run the operators that are appended from now on in ``region``."""
        if region == self._region:
            return
        if self._open is not None:
            self._graph.call_function(ExitStack.close, (self._open,))
        self._open = None if region == WHOLE else self._graph.call_function(region.enter)
        self._region = region


def mark_regions(module: fx.GraphModule, signature: Any, passes: list[Any]) -> tuple[Any, Any]:
    """Store the region of every operator in the operator, and remove torch's marks.

    Subgraphs (branches, for example) belong to one operator and keep torch's own passes.
    """
    autocasts: dict[fx.Node, Autocast] = {}
    gradients, marks = True, []
    chosen: tuple[tuple[str, Any], ...] = ()
    for node in module.graph.nodes:
        if node.target is ENTER_AUTOCAST:
            device, dtype, enabled, _ = node.args
            autocasts[node] = Autocast(device, dtype, enabled)
        elif node.target is EXIT_AUTOCAST:
            autocasts.pop(node.args[0])
        elif node.target is SET_GRADIENTS:
            gradients = node.args[0]
        elif node.target is _MARK:
            chosen = tuple((name, _plain(value)) for name, value in node.args[0])
        else:
            innermost = {autocast.device: autocast for autocast in autocasts.values()}
            region = Region(tuple(sorted(innermost.values())), gradients)
            node.meta[_KEY] = region._replace(kernels=chosen)
            inner = getattr(module, str(node.target), None) if node.op == "get_attr" else None
            if isinstance(inner, fx.GraphModule):
                for apply in reversed(passes):
                    inner, _ = apply(inner, None)
                setattr(module, str(node.target), inner)
            continue
        marks.append(node)
    for node in reversed(marks):
        module.graph.erase_node(node)
    module.recompile()
    return module, signature


def _plain(value: Any) -> Any:
    """Return a value without the lists of a graph's own kind."""
    return tuple(value) if isinstance(value, tuple | list) else value


def _devices(captured: str) -> Iterator[str]:
    """Yield the device types of an autocast; what was captured on the CPU may run elsewhere."""
    if captured == "cpu":
        yield captured
    used = accelerator_in_use()
    if used is not None and captured in ("cpu", used):
        yield used


_DTYPES = {"bf16": torch.bfloat16, "float16": torch.float16}
_MISSING = re.compile("not implemented for|could not create a primitive|not supported|Half")
_NOT_DETERMINISTIC = "does not have a deterministic implementation"
_NOTHING = nullcontext()


def arithmetic(precision: str, device: torch.device) -> AbstractContextManager[object]:
    """Return the context for forwards; backwards need none.

    Args:
        precision: as in the spec.
        device: where the operators run.
    """
    dtype = _DTYPES.get(precision)
    return _NOTHING if dtype is None else torch.autocast(device.type, dtype=dtype)


def casts(precision: str) -> bool:
    """Return whether operators run under an autocast for the whole model."""
    return precision in _DTYPES


@contextmanager
def missing_kernels(operator: str, precision: str, device: torch.device) -> Iterator[None]:
    """Name the operator that has no ``float16`` kernel, of which CPUs lack some, or no kernel that
    is deterministic.

    Raises:
        CaptureError: the code inside failed as torch does if a kernel is missing.
    """
    try:
        yield
    except RuntimeError as error:
        first = str(error).partition("\n")[0]
        if _NOT_DETERMINISTIC in first:
            raise CaptureError(
                f"model: {operator} has no deterministic variant on {device.type}",
                hint=known_hint(error),
            ) from error
        if precision != "float16" or not _MISSING.search(first):
            raise
        raise CaptureError(
            f"model: {operator} cannot run in float16 on {device.type}: {first}",
            hint="use training.precision: bf16, or run it under "
            f"torch.autocast({device.type!r}, enabled=False) on .float() values",
        ) from error


@cache
def accelerator() -> tuple[str, Any]:
    """Return the type of the accelerators of this machine and torch's module for them, or None."""
    device = current_accelerator()
    return ("cpu", None) if device is None else (device.type, torch.get_device_module(device))


def accelerator_in_use() -> str | None:
    """Return the type of the accelerator (``cuda``, for example); None if none is in use."""
    kind, module = accelerator()
    used = module is not None and getattr(module, "is_initialized", lambda: True)()
    return kind if used else None
