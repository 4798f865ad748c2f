"""What a forward may not do, because a graph would drop or freeze it: refused at its line."""

from __future__ import annotations

import re
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import CodeType, FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from pipectl.capture.drawing import DrawError
from pipectl.capture.explain import AS_IT_IS, RefusedError, place_at, place_in
from pipectl.capture.factories import is_torch_code
from pipectl.capture.names import own_name
from pipectl.errors import CaptureError

MAX_REPEATS = 500
"""Of one line for one module. An operator takes some 10 ms to trace."""


class PackingError(Exception):
    """A model packs sequences; sizes then follow from values."""


class UnrolledError(CaptureError):
    """A loop repeats the same operators of one module so often that its capture takes minutes.

    Args:
        module: whose call runs the loop.
        place: the line of the loop.
    """

    def __init__(self, module: nn.Module | None, place: str) -> None:
        super().__init__(
            f"model: cannot be captured{place}: it repeats that line more than {MAX_REPEATS} "
            "times, and a graph holds each of them",
            cure=AS_IT_IS,
        )
        self.module = module
        self.place = place


class RefusedCalls(TorchFunctionMode):
    """While a model is exported: raise where it calls what no graph can hold.

    A read of ``.data``, of which a trace knows nothing, counts as ``.detach()``.

    Args:
        unrolls: whether loops may be as long as they like.

    Raises:
        RefusedError, DrawError, PackingError, UnrolledError: from the export.
    """

    def __init__(self, *, unrolls: bool = False) -> None:
        super().__init__()
        self._data: list[Tensor] = []
        self._repeats: Counter[tuple[CodeType, int, int]] | None = None if unrolls else Counter()
        self._frames: list[FrameType] = []

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Call a function of torch, unless it is one of those."""
        kwargs = kwargs or {}
        if torch.compiler.is_dynamo_compiling():  # a branch of torch.cond: it refuses them itself
            return func(*args, **kwargs)
        self._count()
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

    def _count(self) -> None:
        """Note that the module which is being called is at its line once more.

        Raises:
            UnrolledError: that was too often; the loop lies in the innermost of the frames that
                are the same in two such calls.
        """
        if self._repeats is None:
            return
        caller, module = _calling(sys._getframe(2))
        if caller is None:
            return
        key = (caller.f_code, caller.f_lineno, id(vars(module)))
        self._repeats[key] += 1
        if self._repeats[key] == MAX_REPEATS:
            self._frames = [frame for frame, _ in traceback.walk_stack(caller)]
        elif self._repeats[key] > MAX_REPEATS:
            loop, line = next(
                (f, line) for f, line in traceback.walk_stack(caller) if f in self._frames
            )
            raise UnrolledError(_calling(loop)[1], place_at(loop.f_code.co_filename, line))


def _calling(frame: FrameType | None) -> tuple[FrameType | None, nn.Module | None]:
    """The innermost call of a module that a frame lies in, and that module."""
    while frame is not None:
        module = frame.f_locals.get("self")
        if isinstance(module, nn.Module):
            return frame, module
        frame = frame.f_back
    return None, None


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
