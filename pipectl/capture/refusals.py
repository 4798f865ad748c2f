"""What a forward may not do, because a graph would drop or freeze it: refused at its line."""

from __future__ import annotations

import re
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from pipectl.capture.drawing import DrawError
from pipectl.capture.explain import RefusedError, place_in
from pipectl.capture.factories import is_torch_code
from pipectl.capture.names import own_name
from pipectl.errors import CaptureError


class PackingError(Exception):
    """A model packs sequences; sizes then follow from values."""


class RefusedCalls(TorchFunctionMode):
    """While a model is exported: raise where it calls what no graph can hold.

    A read of ``.data``, of which a trace knows nothing, counts as ``.detach()``.

    Raises:
        RefusedError, DrawError, PackingError: from the export.
    """

    def __init__(self) -> None:
        super().__init__()
        self._data: list[Tensor] = []

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Call a function of torch, unless it is one of those."""
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name == "backward":
            raise _refusal(
                "calls backward()",
                "return one scalar loss, which one optimizer minimises; models that several "
                "optimizers train in turns (a GAN) are not supported",
            )
        if name == "_pack_padded_sequence":
            raise PackingError
        if any(isinstance(given, torch.Generator) for given in (*args, *kwargs.values())):
            raise DrawError(f"{name}(generator=...)")
        if name == "__set__" and func == _SET_DATA and not _is_torch_calling():
            raise _refusal(
                "assigns to the .data of a tensor",
                "compute with the new values instead (torch.nn.functional.linear(x, weight), say), "
                "or copy them into a buffer: buffer.copy_(values)",
            )
        if name == "__get__" and func == _GET_DATA and not _is_torch_calling():
            self._data.append(args[0].detach())
            return self._data[-1]
        if args and _WRITES(name) and any(args[0] is known for known in self._data):
            raise _refusal(
                "writes to the .data of a tensor",
                "write a buffer itself under torch.no_grad() instead; parameters change at the end "
                "of a step only",
            )
        return func(*args, **kwargs)


_WRITES = re.compile(
    r"(?!__|requires_grad_$).*_|"
    r"__(setitem|i(add|sub|mul|(true|floor)?div|mod|pow|and|x?or|[lr]shift))__"
).fullmatch
"""Names of the functions of torch that write the tensor they are called with."""
_SET_DATA: Any = Tensor.data.__set__  # type: ignore[attr-defined]
_GET_DATA: Any = Tensor.data.__get__  # type: ignore[attr-defined]


def _is_torch_calling() -> bool:
    """Whether torch itself, other than by handing calls on, calls the function of torch."""
    frame = sys._getframe(2)
    while frame.f_back is not None and frame.f_code.co_name == "__torch_function__":
        frame = frame.f_back
    return is_torch_code(frame.f_code.co_filename)


def _refusal(what: str, cure: str) -> RefusedError:
    place = place_in("".join(traceback.format_stack()))
    return RefusedError(f"model: its forward {what}{place}, which no graph can hold", cure=cure)


@contextmanager
def kept_parameters(step: nn.Module) -> Iterator[None]:
    """Within a forward: refuse parameters that are replaced by others, which no optimizer knows.

    Raises:
        RefusedError: naming the parameter.
    """
    before = {path: dict(m._parameters) for path, m in step.named_modules()}
    yield
    for path, module in step.named_modules():
        for name, parameter in before.get(path, {}).items():
            if module._parameters.get(name) is not parameter:
                raise RefusedError(
                    f"model: its forward replaces the parameter {own_name(f'{path}.{name}')!r}, "
                    "and no optimizer would know the new one",
                    cure="compute with the new values instead: torch.nn.functional.linear(x, "
                    "weight), or torch.func.functional_call(module, weights, x)",
                )


def refuse_lazy(model: nn.Module, factory: str) -> None:
    """Raise if parameters have no shape before a first batch.

    Raises:
        CaptureError: naming the first one and the cure.
    """
    for name, parameter in (*model.named_parameters(), *model.named_buffers()):
        if nn.parameter.is_lazy(parameter):
            path = name.rpartition(".")[0]
            kind = type(model.get_submodule(path)).__name__
            raise CaptureError(
                f"model.factory: {factory}: {name!r} of a {kind} has no shape yet",
                cure="give its sizes (nn.Linear instead of nn.LazyLinear, say), or let the factory "
                "call the model with one batch before it returns it",
            )
