"""Why a model cannot be captured: the line of the model that breaks, and what to change there."""

from __future__ import annotations

import linecache
import re
import traceback
from types import FrameType, TracebackType

import torch
from torch import fx, nn

from pipectl.errors import CaptureError
from pipectl.faults import is_user_code

AS_IT_IS = "put it into a submodule of its own, which then runs as it is, as one operator"
_KINDS = (
    (
        r"^DrawError",
        "it draws from a generator that is not torch's own, which a graph would freeze",
        f"draw with torch.rand, or {AS_IT_IS}",
    ),
    (
        r"^PackingError",
        "it packs sequences, so that sizes follow from their lengths",
        "compute on padded sequences, with a mask; or put packing, recurrent layer and unpacking "
        "together into a submodule of its own, which then runs as it is, as one operator",
    ),
    (
        r"^UnpredictableError: reads",
        "it reads a part of a submodule's result that has another structure from call to call",
        f"let the submodule return lists of fixed lengths, or {AS_IT_IS}",
    ),
    (
        r"data-dependent|unbacked|Eq\(u\d|_local_scalar_dense",
        "its control flow depends on the values of tensors",
        f"express the choice with torch.where or torch.cond, or {AS_IT_IS}",
    ),
    (
        r"numpy|data_ptr|data pointer|storage",
        "it hands tensors to code outside torch (numpy, say), which needs their values",
        f"compute it with operators of torch, or {AS_IT_IS}",
    ),
    (
        r"dynamic.{0,10}output.{0,5}shape|size that depends on the data",
        "a tensor has a size that depends on the data",
        f"give it a fixed size (padding and a mask, for example), or {AS_IT_IS}",
    ),
    (
        r"is not supported for tensor subclasses|to a Python|tolist",
        "it reads the values of tensors",
        f"keep them in tensors, with torch.where or torch.cond for choices, or {AS_IT_IS}",
    ),
)


class RefusedError(CaptureError):
    """What a model does, and no plan could do alike, in a submodule that is kept whole neither."""


class UnexplainedError(CaptureError):
    """An export or a run failed, and its error says nothing of the user's code that is known here.

    The cause is what torch or pipectl raised.
    """


class NodeError(CaptureError):
    """An operator of an exported graph that no stage could run.

    Args:
        node: the operator.
    """

    def __init__(self, node: fx.Node, message: str, *, cure: str) -> None:
        super().__init__(message, cure=cure)
        self.path = module_of(node)


def module_of(node: fx.Node) -> str:
    """The path of the module that calls an operator; empty if that is not known."""
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    return str(stack[-1][0]) if stack else ""


class EagerError(CaptureError):
    """A model differentiates or transforms functions itself: that works as it is, in no graph.

    The module that does it is kept whole, be it the model itself.

    Args:
        path: of the module, if it is known.
    """

    def __init__(self, message: str, *, path: str = "") -> None:
        super().__init__(message, cure=f"form no gradients there, or {AS_IT_IS}")
        self.path = path


def explain(error: BaseException) -> CaptureError:
    """What a failed export or run means, with the line of the model that causes it."""
    subject = f"{type(error).__name__}: {first_line(error)}"
    place = place_of(error)
    for pattern, what, cure in _KINDS:
        if re.search(pattern, subject, re.I):
            return CaptureError(f"model: cannot be captured{place}: {what}", cure=cure)
    return UnexplainedError(
        f"model: cannot be captured{place}: torch.export fails there: {subject}",
        cure=f"write it with other operators of torch, or {AS_IT_IS}",
    )


def first_line(error: BaseException) -> str:
    """The text of an error up to its first line break, without torch's own remarks."""
    first = next((line for line in str(error).splitlines() if line.strip()), "")
    return re.sub(r"\s*\(unhinted:.*", "", first).strip()


def place_of(error: BaseException) -> str:
    """``" (at model.py:12: if x.sum() > 0:)"``: the user's innermost line, or nothing.

    Of a model that a library brings, it is the library's line.
    """
    chain = _chain(error)
    traces = [[(f, line) for f, line in traceback.walk_tb(e.__traceback__)] for e in chain]
    for trace in traces:
        place = _user_place([(frame.f_code.co_filename, line) for frame, line in trace])
        if place:
            return place
    return place_in(str(error)) or next(filter(None, map(_library_place, traces)), "")


def _library_place(trace: list[tuple[FrameType, int]]) -> str:
    """The innermost line of the packages, other than torch, whose modules were being called."""
    modules = [frame.f_locals.get("self") for frame, _ in trace]
    packages = {_package(type(m).__module__) for m in modules if isinstance(m, nn.Module)}
    packages -= {_package(torch.__name__), _package(__name__)}
    lines = [
        (frame.f_code.co_filename, line)
        for frame, line in trace
        if _package(frame.f_globals.get("__name__", "")) in packages
    ]
    return place_at(*lines[-1]) if lines else ""


def _package(module: str) -> str:
    return module.partition(".")[0]


def place_in(text: str) -> str:
    """The same for a traceback that torch printed into ``text``."""
    printed = re.findall(r'File "([^"]+)", line (\d+)', text)
    return _user_place([(name, int(line)) for name, line in printed])


def _user_place(frames: list[tuple[str, int]]) -> str:
    own = [frame for frame in frames if is_user_code(frame[0])]
    return place_at(*own[-1]) if own else ""


def place_at(name: str, line: int) -> str:
    """The same for a line of a file."""
    source = linecache.getline(name, line).strip()
    return f" (at {name}:{line}: {source})" if source else f" (at {name}:{line})"


def culprit(error: BaseException) -> nn.Module | None:
    """The innermost module that was being called when an error arose."""
    for one in _chain(error):
        found = _innermost(one.__traceback__)
        if found is not None:
            return found
    return None


def _innermost(trace: TracebackType | None) -> nn.Module | None:
    found: nn.Module | None = None
    while trace is not None:
        caller = trace.tb_frame.f_locals.get("self")
        if trace.tb_frame.f_code.co_name == "_call_impl" and isinstance(caller, nn.Module):
            found = caller
        trace = trace.tb_next
    return found


def _chain(error: BaseException | None) -> list[BaseException]:
    """An error and what it was raised from, the first one first."""
    found: list[BaseException] = []
    while error is not None and error not in found:
        found.insert(0, error)
        error = error.__cause__ or error.__context__
    return found
