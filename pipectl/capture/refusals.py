"""What cannot be captured: the user's line, what is wrong with it, and what to do instead."""

from __future__ import annotations

import linecache
import re
import sys
import traceback
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from enum import Enum
from itertools import islice
from types import FrameType, SimpleNamespace
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
from torch import Tensor, fx, nn
from torch.nn.parameter import is_lazy

from pipectl.capture.factories import known_hint
from pipectl.capture.model_with_loss import ModelWithLoss, own_name, own_path
from pipectl.capture.tensor_file import CODES
from pipectl.capture.tensors import is_deferred
from pipectl.errors import CaptureError
from pipectl.faults import is_user_code, user_line
from pipectl.torch_api import CALL_OF_A_MODULE, has_backward_hooks, has_gradient_hooks, identity_of

if TYPE_CHECKING:
    from pipectl.spec import JobSpec

Trace = Sequence[tuple[FrameType, int]]
"""Frames, the innermost last, each with the line that it is at."""

STAND_IN = "StandIn"
"""The class of what takes the place of objects of a batch, as torch's errors name it."""
_SHOWN = 6
"""So many entries of a collection a message names."""
_MAPPING = (
    'return {"inputs": ..., "targets": ...}: "inputs" goes to the model (the entries of a mapping '
    'as keyword arguments), "targets" to the loss; any other mapping goes to both, whole'
)


AS_IT_IS = "put it into a submodule of its own, which then runs as it is, as one operator"
_CAPTURED = "model: cannot be captured{place}: "
_BUFFER = "make it a buffer with register_buffer()"


class Keep(Enum):
    """Which part of a model becomes one operator, if no graph can hold what it does."""

    INNERMOST = "the submodule that does it"
    WHOLE = "the module that does it, be it the model itself"
    NOTHING = "none: no plan could do alike"


class RefusedError(CaptureError):
    """What a model does and no graph can hold.

    Args:
        place: the line of the model.
        part: the module that does it, or its path; None for the innermost module that was being
            called.

    Attributes:
        keep: what may become one operator instead.
    """

    def __init__(
        self, refusal: Refusal, message: str, place: str, part: nn.Module | str | None
    ) -> None:
        super().__init__(message, hint=refusal.hint)
        self.refusal, self.keep, self.place, self.part = refusal, refusal.keep, place, part


class Refusal(Enum):
    """What a model may not do: message, hint, and what may be kept as one operator."""

    CONTROL_FLOW = (
        _CAPTURED + "its control flow depends on the values of tensors",
        f"express the choice with torch.where or torch.cond, or {AS_IT_IS}",
    )
    OUTSIDE = (
        _CAPTURED
        + "it hands tensors to code outside torch (such as numpy), which needs their values",
        f"compute it with operators of torch, or {AS_IT_IS}",
    )
    SIZE = (
        _CAPTURED + "a tensor has a size that depends on the data",
        f"give it a fixed size (padding and a mask, for example), or {AS_IT_IS}",
    )
    VALUES = (
        _CAPTURED + "it reads the values of tensors",
        f"keep them in tensors, with torch.where or torch.cond for choices, or {AS_IT_IS}",
    )
    OTHER = (
        _CAPTURED + "torch.export fails there: {error}",
        f"write it with other operators of torch, or {AS_IT_IS}",
    )
    OPERATOR_SIZE = (
        "model: {name!r} has a size that depends on the data{place}",
        f"give the tensor a fixed size (for example padding and a mask), or {AS_IT_IS}",
    )
    DRAW = (
        _CAPTURED + "it draws from a generator that is not torch's own, which a graph would freeze",
        f"draw with torch.rand, or {AS_IT_IS}",
    )
    SEED = (
        _CAPTURED + "it seeds torch's generator or sets its state, which a graph would leave out",
        f"draw such numbers once, into a buffer, where the model is built; or {AS_IT_IS}",
    )
    PACKING = (
        _CAPTURED + "it packs sequences, so that sizes follow from their lengths",
        "compute on padded sequences, with a mask; or put packing, recurrent layer and unpacking "
        "together into a submodule of its own, which then runs as it is, as one operator",
    )
    UNSTEADY = (
        _CAPTURED + "it reads a part of a submodule's result whose structure differs between calls",
        f"let the submodule return lists of fixed lengths, or {AS_IT_IS}",
    )
    LOOP = (
        _CAPTURED
        + "it repeats that line more than {repeats} times, and a graph holds each of them",
        AS_IT_IS,
    )
    GRADIENTS = (
        _CAPTURED + "it forms gradients in its forward",
        f"form no gradients there, or {AS_IT_IS}",
        Keep.WHOLE,
    )
    TRANSFORMS = (
        _CAPTURED + "it transforms functions (torch.func)",
        f"form no gradients there, or {AS_IT_IS}",
        Keep.WHOLE,
    )
    BACKWARD = (
        "model: its forward calls backward(){place}, which no graph can hold",
        "return one scalar loss, which one optimizer minimises; models that several optimizers "
        "train in turns (a GAN) are not supported",
        Keep.NOTHING,
    )
    DATA_ASSIGNED = (
        "model: its forward assigns to the .data of a tensor{place}, which no graph can hold",
        "compute with the new values instead (such as torch.nn.functional.linear(x, weight)), or "
        "copy them into a buffer: buffer.copy_(values)",
        Keep.NOTHING,
    )
    DATA_WRITTEN = (
        "model: its forward writes to the .data of a tensor{place}, which no graph can hold",
        "write a buffer itself under torch.no_grad() instead; parameters change at the end of a "
        "step only",
        Keep.NOTHING,
    )
    FREEZES = (
        "model: its forward changes requires_grad of a parameter{place}, which no graph can hold",
        "freeze parameters where the model is built; in the forward, use torch.no_grad() or detach "
        "the weight (such as torch.nn.functional.linear(x, weight.detach()))",
        Keep.NOTHING,
    )
    GRADIENT_HOOK = (
        "model: {subject}{place}, {why}",
        "change the gradient by a torch.autograd.Function instead, or remove the hook",
    )
    CARRIED = (  # no operator unasked: no checkpoint holds what a submodule keeps
        "model: keeps {name!r} from one step to the next{place}, which a graph would freeze",
        _BUFFER + ", or name the submodule that keeps it under model.opaque",
        Keep.NOTHING,
    )
    COUNTED = (
        "model: keeps {name!r} from one step to the next{place}, which a graph would freeze",
        "leave the count out, or pass what the function reads as an argument of its apply()",
        Keep.NOTHING,
    )
    KEPT = (  # unless the user has named it: see CARRIED
        "model: {name}, which runs as one operator, keeps {entry!r} from one step to the next"
        "{place}, which no checkpoint holds and a recomputed forward would change twice",
        _BUFFER + ", or name the submodule under model.opaque",
        Keep.NOTHING,
    )
    LEFT = (  # in no part of the model: it would be kept
        "model: {name}, which runs as one operator, sets {entry!r}, and it is read outside of it"
        "{place}, where the results of an operator arrive, and nothing else",
        "return it from the submodule, and compute with what was returned",
    )
    SET_OUTSIDE = (
        "model: {name}, which runs as one operator, reads {entry!r}{place}, which is set outside "
        "of it: an operator gets its arguments, and nothing else",
        "pass it to the submodule as an argument",
    )
    TEXT = (  # no operator either: it would get the texts of one batch, too
        "model: computes with the texts of a batch (or an Enum){place}, and a graph would hold "
        "those of one",
        "let the dataset give numbers in their place (tokens, or an index into a table)",
        Keep.NOTHING,
    )
    OBJECT = (
        "model: computes with an object of a batch{kind}{place}, and a graph would hold that of "
        "one",
        "let the dataset or its collate_fn give a tensor in its place, with an entry per sample",
        Keep.NOTHING,
    )
    MODE = (
        "model: its train() or eval() changes the tensor {name!r}{place}, but evaluation follows "
        "the weights of each step",
        "let eval() leave it (such as merge_weights=False of LoRA layers), and compute it in the "
        "forward where self.training is False",
        Keep.NOTHING,
    )
    EXTRA_STATE = (
        "model: {name} changes its extra state (get_extra_state) in its forward, which no "
        "checkpoint would hold",
        "keep what changes in a buffer, with register_buffer()",
        Keep.NOTHING,
    )
    TENSOR_WRITTEN = (
        "model: writes the tensor {name!r} in its forward{place}, which no checkpoint would hold",
        _BUFFER,
        Keep.NOTHING,
    )
    ALIAS = (
        "model: uses {name!r} by another tensor in its memory{place}, which would keep its first "
        "values",
        "read it from its module in the forward, such as self.linear.weight.detach().t() or "
        "self.mean; to compute with the first values, keep a copy (.clone())",
        Keep.NOTHING,
    )
    COMPUTED = (
        "model: uses a tensor{place} that was computed from parameters before the forward",
        "compute it in the forward from the parameters themselves",
        Keep.NOTHING,
    )
    OUTER_PARAMETER = (
        "model: {module}, which runs as one operator, uses the parameter {name!r}{place} through a "
        "list, another object or another module: an operator gets its own parameters by their "
        "names, and its arguments",
        "read it by its name in the forward (self.linear.weight), or pass it as an argument",
        Keep.NOTHING,
    )
    OUTER_BUFFER = (
        "model: {module}, which runs as one operator, {does} the buffer {name!r}{place}, which "
        "forwards change, through a list, another object or another module: an operator gets its "
        "own buffers by their names, and its arguments",
        "use it by its name in the module that has it (self.mean), or pass it as an argument and "
        "return its new value",
        Keep.NOTHING,
    )
    PARAMETER_WRITTEN = (
        "model: writes the parameter {name!r} in its forward{place}, which other uses, replicas "
        "and recomputed forwards of it would not see",
        "write a buffer instead, or change what is read of the parameter (for "
        "nn.Embedding(max_norm=...): leave it out, and scale the vectors that are looked up)",
        Keep.NOTHING,
    )
    SAVED_WRITTEN = (
        "model: writes {name} in place{place}, but PyTorch needs it unchanged for the backward"
        "{need}",
        "assign a new tensor (x = 0.9 * x instead of x.mul_(0.9)), or let what reads it before "
        "read a copy (x.clone())",
        Keep.NOTHING,
    )
    SPARSE = (
        "model: {name} gives sparse gradients{how}{place}, which ranks cannot add up and send",
        "set sparse=False (in gather: sparse_grad=False), or let a backward of your own return "
        "dense gradients; in place of SparseAdam, use Adam or Adagrad",
        Keep.NOTHING,
    )
    SINGLE_VALUE = (
        "model: a micro-batch{size} is too small for {name}{place}: {why}",
        "choose training.batch_size and pipeline.micro_batches so that no micro-batch is as small, "
        "the last one of an epoch included; data.drop_last: true leaves an incomplete last batch "
        "out",
        Keep.NOTHING,
    )
    ONE_SAMPLE = (
        "model: a micro-batch of 1 sample is too small{place}: {why}",
        "choose training.batch_size and pipeline.micro_batches so that no micro-batch is as small, "
        "the last one of an epoch included; data.drop_last: true leaves an incomplete last batch "
        "out; or let the model compute the same for one sample",
        Keep.NOTHING,
    )
    SINGLE_POSITION = (
        "model: {name} normalises one value per channel and sample{place}: {why}",
        "give it inputs with more than one position per channel (larger ones, or less striding and "
        "pooling before it), leave it out there, or use another norm (such as nn.GroupNorm)",
        Keep.NOTHING,
    )
    UNSUITABLE = (
        "model: {name} cannot be captured, not even as one operator: it {what}",
        "let it return tensors whose sizes follow from the batch size; or put it and what reads "
        "its results into a submodule of its own, or name such a part of the model under "
        "model.opaque",
    )
    DIFFERENTIATES = (
        "model: {name} cannot be captured, not even as one operator: it differentiates what was "
        "computed outside of it{place}",
        "form the derivative in the module that computes what is differentiated",
        Keep.WHOLE,
    )
    RESULT = (
        "model: {name} gave {result}, but was captured with {expected}",
        "let it return tensors of fixed sizes (for example padding and a mask), or name a larger "
        "part of the model under model.opaque",
    )
    RESULT_GRADIENT = (
        "model: {name} gave a tensor with a gradient, but was captured with one without: whether "
        "it uses its parameters depends on the values of its inputs",
        "let it return a tensor that has a gradient in every case (such as x + 0 * self.f(x)), or "
        "name a larger part of the model under model.opaque",
    )

    def __init__(self, message: str, hint: str, keep: Keep = Keep.INNERMOST) -> None:
        self.message, self.hint, self.keep = message, hint, keep

    def error(
        self, place: str | None = None, *, part: nn.Module | str | None = None, **words: Any
    ) -> RefusedError:
        """Return the error, with the line of the model.

        Args:
            place: the line, as from :func:`place_of`; by default the line that is running.
            part: as in :class:`RefusedError`.
            words: of the message.
        """
        place = running_line() if place is None else place
        return RefusedError(self, self.message.format(place=place, **words), place, part)


_KINDS = {
    # float(), int() or bool() of a tensor, not a comparison of its value
    r"data-dependent expression -?z?u[fd]?\d+(?= |$)": Refusal.VALUES,
    r"data-dependent|unbacked|Eq\(u\d|_local_scalar_dense": Refusal.CONTROL_FLOW,
    r"numpy|data_ptr|data pointer|storage": Refusal.OUTSIDE,
    r"dynamic.{0,10}output.{0,5}shape|size that depends on the data": Refusal.SIZE,
    r"is not supported for tensor subclasses|to a Python|tolist": Refusal.VALUES,
    r"(Sym|Fake)\w+\.__format__": Refusal.VALUES,
}
"""What a failed export means, by words of torch's error."""
_BRANCH = re.compile(r"\b(if|elif|while|for|assert|and|or|not)\b")
"""What decides by a value, in a line of Python."""
_SYMBOL = re.compile(r"\bs\d+\b")
"""Torch's name for a free size."""
_SINGLE_VALUE = re.compile(r"Expected more than 1 [\w ]+ when training\b.*")
"""How torch begins when it refuses a norm."""


def explain(error: BaseException) -> RefusedError:
    """Return the refusal for a failed export or run, with the line of the model that causes it."""
    if (single := _single_value(error)) is not None:
        return single
    subject, place = f"{type(error).__name__}: {first_line(error)}", place_of(error)
    if STAND_IN in subject:
        return Refusal.OBJECT.error(place, kind="")
    for pattern, refusal in _KINDS.items():
        if re.search(pattern, subject, re.I):
            branches = refusal is Refusal.VALUES and _BRANCH.search(place.partition(": ")[2])
            return (Refusal.CONTROL_FLOW if branches else refusal).error(place)
    return Refusal.OTHER.error(place, error=_without_symbols(subject))


def _without_symbols(text: str) -> str:
    """Return a text with words for torch's names of free sizes."""
    symbols = list(dict.fromkeys(_SYMBOL.findall(text)))
    words = dict(zip(symbols, ("batch", "length"), strict=False))
    return _SYMBOL.sub(lambda match: words.get(match[0], "size"), text)


def _single_value(error: BaseException) -> RefusedError | None:
    """Return the refusal if torch says that a norm has a single value per channel."""
    for one in _chain(error):
        if (said := _SINGLE_VALUE.match(str(one))) is not None:
            name = type(module).__name__ if (module := culprit(one)) else "the norm"
            why = _without_symbols(said[0])
            if "spatial" in why and why != said[0]:  # whatever the size of the batch
                return Refusal.SINGLE_POSITION.error(place_of(one), name=name, why=why)
            return Refusal.SINGLE_VALUE.error(place_of(one), size="", name=name, why=why)
    return None


def first_line(error: BaseException) -> str:
    """Return the first line of an error's text, without torch's remarks."""
    first = next((line for line in str(error).splitlines() if line.strip()), "")
    return re.sub(r"\s*\(unhinted:.*", "", first).strip()


def place_of(error: BaseException) -> str:
    """Return the user's innermost line, ``" (at model.py:12: if x.sum() > 0:)"``, or nothing.

    For a model from a library, it is the library's line.
    """
    traces = [list(traceback.walk_tb(each.__traceback__)) for each in _chain(error)]
    users = next(filter(None, map(_user_place, traces)), "")
    library = next(filter(None, map(_library_place, traces)), "")
    return users or place_in(str(error)) or library


def running_line() -> str:
    """Return the same for the line of the step that is running; nothing outside of a step."""
    trace: list[tuple[FrameType, int]] = []
    for frame, line in traceback.walk_stack(sys._getframe(1)):
        trace.insert(0, (frame, line))
        if frame.f_code is ModelWithLoss.forward.__code__:
            return _user_place(trace) or _library_place(trace)
    return ""


def _user_place(trace: Trace) -> str:
    user_frames = [
        (f.f_code.co_filename, line) for f, line in trace if is_user_code(f.f_code.co_filename)
    ]
    return place_at(*user_frames[-1]) if user_frames else ""


def _library_place(trace: Trace) -> str:
    """Return the innermost line of the packages, except torch, whose modules were being called."""

    def package(module: str) -> str:
        return module.partition(".")[0]

    modules = [frame.f_locals.get("self") for frame, _ in trace]
    packages = {package(type(m).__module__) for m in modules if isinstance(m, nn.Module)}
    packages -= {"torch", package(__name__)}
    lines = [
        (frame.f_code.co_filename, line)
        for frame, line in trace
        if package(frame.f_globals.get("__name__", "")) in packages
    ]
    return place_at(*lines[-1]) if lines else ""


def place_of_node(node: fx.Node) -> str:
    """Return the same for the line that calls an operator of a graph."""
    return place_in(node.meta.get("stack_trace") or "")


def place_in(text: str) -> str:
    """Return the same for a traceback that torch printed into ``text``."""
    printed = re.findall(r'File "([^"]+)", line (\d+)', text)
    user_frames = [
        (name, int(line))
        for name, line in printed
        if is_user_code(name) and not name.startswith("torch/")  # torch names some of its own so
    ]
    return place_at(*user_frames[-1]) if user_frames else ""


def place_at(name: str, line: int) -> str:
    """Return the same for a line of a file."""
    source = linecache.getline(name, line).strip()
    return f" (at {name}:{line}: {source})" if source else f" (at {name}:{line})"


def culprit(error: BaseException) -> nn.Module | None:
    """Return the innermost module that was being called when an error was raised."""
    for one in _chain(error):
        for frame, _ in reversed(list(traceback.walk_tb(one.__traceback__))):
            module = frame.f_locals.get("self")
            if frame.f_code.co_name == CALL_OF_A_MODULE and isinstance(module, nn.Module):
                return module
    return None


def _chain(error: BaseException | None) -> list[BaseException]:
    """Return an error and its causes, the first cause first."""
    errors: list[BaseException] = []
    while error is not None and error not in errors:
        errors.insert(0, error)
        error = error.__cause__ or error.__context__
    return errors


def refuse_parts(wrapper: ModelWithLoss, factory: str) -> None:
    """Raise if a parameter has no shape before a first batch, or a module gives sparse gradients or
    is a program of TorchScript.

    Raises:
        CaptureError: naming the first one and the hint.
    """
    for name, parameter in (*wrapper.named_parameters(), *wrapper.named_buffers()):
        if is_lazy(parameter):
            kind = type(wrapper.get_submodule(name.rpartition(".")[0])).__name__
            raise CaptureError(
                f"model.factory: {factory}: {own_name(name)!r} of a {kind} has no shape yet",
                hint="give its sizes (for example nn.Linear instead of nn.LazyLinear), or let the "
                "factory call the model with one batch before it returns it",
            )
    for name, module in wrapper.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
            raise Refusal.SPARSE.error("", name=own_path(name), how=" (sparse=True)")
        if isinstance(module, torch.jit.ScriptModule):
            raise CaptureError(
                f"model: {own_path(name) or 'it'} is a program of TorchScript, which no graph can "
                "hold",
                hint="use the module that it was made from, without torch.jit.script() or "
                "torch.jit.trace(); of a file of TorchScript, load the weights into such a module: "
                "load_state_dict(torch.jit.load(file).state_dict())",
            )


def refuse_backward_hooks(model: nn.Module, kept: Iterable[nn.Module] = ()) -> None:
    """Raise if a module has a hook on its backward.

    Args:
        kept: modules that run as they are, with all their hooks.

    Raises:
        CaptureError: naming the module.
    """
    free = {inner for module in kept for inner in module.modules()}
    for name, module in model.named_modules():
        if module not in free and has_backward_hooks(module):
            raise Refusal.GRADIENT_HOOK.error(
                "",
                subject=f"{own_path(name) or 'the model'} has a backward hook",
                why="which no graph can hold",
            )


def refuse_parameter_hooks(parameters: Iterable[tuple[str, nn.Parameter]]) -> None:
    """Raise if a trained parameter has a hook on its gradient.

    It would run in some plans only: others train leaves in the parameter's memory (one for each of
    several uses, or for each version of the weights), or add the gradients of replicas.

    Raises:
        CaptureError: naming the parameter.
    """
    for name, parameter in parameters:
        if parameter.requires_grad and has_gradient_hooks(parameter):
            raise Refusal.GRADIENT_HOOK.error(
                "",
                subject=f"parameter {own_path(name)} has a hook on its gradient",
                why="which would not run in every plan",
            )


def refuse_unsaved(states: Mapping[str, Tensor]) -> None:
    """Raise if a checkpoint cannot hold a state.

    Args:
        states: parameters and buffers by full name.

    Raises:
        CaptureError: naming it.
    """
    for name, tensor in states.items():
        if is_lazy(tensor):
            continue
        what = other = ""
        if tensor.is_nested or tensor.layout is not torch.strided:
            what = "is nested" if tensor.is_nested else f"has the layout {tensor.layout}"
            other = "a dense tensor"
        elif tensor.dtype not in CODES:
            what, other = f"has the type {tensor.dtype}", "another type"
            if tensor.dtype.is_complex:
                other = "torch.complex64, or its real and imaginary part (torch.view_as_real)"
        if what:
            kind = "parameter" if isinstance(tensor, nn.Parameter) else "buffer"
            raise CaptureError(
                f"model: {kind} {own_name(name)} {what}, which a checkpoint cannot hold",
                hint=f"keep it as {other}",
            )


def refuse_overlaps(states: Mapping[str, Tensor]) -> None:
    """Raise if a trained parameter shares memory with another state.

    Args:
        states: parameters and buffers by full name, tied ones once.

    Raises:
        CaptureError: naming both.
    """

    def is_trained(*names: str) -> bool:
        pair = [states[name] for name in names]
        return any(isinstance(each, nn.Parameter) and each.requires_grad for each in pair)

    for names in overlaps(states, is_trained):
        pair = sorted(names, key=list(states).index)
        tie = ""
        if all(isinstance(states[name], nn.Parameter) for name in pair):
            tie = "make both the same nn.Parameter (self.b.weight = self.a.weight), or "
        raise CaptureError(
            f"model: {own_name(pair[0])} and {own_name(pair[1])} share memory but are not one "
            "tensor, so ranks would train them separately",
            hint=f"{tie}give each memory of its own (.clone())",
        )


_Name = TypeVar("_Name", bound=Hashable)


def overlaps(
    tensors: Mapping[_Name, Tensor], matters: Callable[[_Name, _Name], bool]
) -> Iterator[tuple[_Name, _Name]]:
    """Yield each two tensors, by name, that have an element in one place.

    Args:
        matters: whether that of two is asked for.
    """
    memories: dict[object, list[tuple[np.ndarray[Any, Any], _Name]]] = {}
    for name, tensor in tensors.items():
        if (located := _locate(tensor)) is not None:
            memories.setdefault(located[0], []).append((located[1], name))
    for arrays in memories.values():
        before: list[tuple[np.ndarray[Any, Any], _Name]] = []
        for array, name in sorted(arrays, key=lambda item: item[0].ctypes.data):
            before = [item for item in before if np.may_share_memory(item[0], array)]
            for other_array, other in before:
                if matters(name, other) and np.shares_memory(other_array, array):
                    yield other, name
            before.append((array, name))


def _locate(tensor: Tensor) -> tuple[object, np.ndarray[Any, Any]] | None:
    """Return the memory of a tensor and an array with the same addresses, which must not be read.

    None if no other tensor can share its memory.
    """
    if is_lazy(tensor) or tensor.is_nested or tensor.layout is not torch.strided:
        return None
    item_bytes = tensor.element_size()
    if is_deferred(tensor) or tensor.is_meta:
        memory: object = identity_of(tensor.untyped_storage())
        start = (1 + int(tensor.storage_offset())) * item_bytes
    else:
        memory, start = tensor.device, tensor.data_ptr()
    if not start or not tensor.numel():  # a wrapper around other tensors, or nothing
        return None
    interface = {
        "version": 3,
        "data": (start, True),
        "shape": tuple(tensor.shape),
        "strides": tuple(stride * item_bytes for stride in tensor.stride()),
        "typestr": f"|V{item_bytes}",
    }
    return memory, np.asarray(SimpleNamespace(__array_interface__=interface))


def misfit(error: Exception, inputs: Any, targets: Any, spec: JobSpec) -> CaptureError:
    """Return the refusal of a model and a loss that fail on a batch of the data."""
    if (refusal := _single_value(error)) is not None:
        return refusal
    trace, frame_locals = error.__traceback__, dict[str, Any]()
    while trace is not None:  # whether the model had returned when the step failed, and what
        if trace.tb_frame.f_code is ModelWithLoss.forward.__code__:
            frame_locals = trace.tb_frame.f_locals
        trace = trace.tb_next
    if "outputs" in frame_locals:
        name = f"loss.factory: {spec.loss.factory}"
        call = f"outputs {_describe(frame_locals['outputs'])} and targets {_describe(targets)}"
        hint = (
            "a loss is called as loss(outputs, targets): give it further arguments under "
            "loss.kwargs; what differs by sample (such as weights) belongs to the targets, as a "
            "tuple or mapping"
        )
        if _are_one(inputs, targets):
            hint = "let the loss take what it needs from the mapping, or let the dataset "
            hint += _MAPPING
    else:
        name = f"model.factory: {spec.model.factory}"
        call = f"inputs {_describe(inputs)}"
        hint = "let data.factory give the inputs that the model's forward() takes"
        if isinstance(inputs, Mapping):
            call = f"keyword arguments {_describe(inputs)}"
            hint = f"let the model's forward() take these names, or let the dataset {_MAPPING}"
        elif isinstance(inputs, tuple | list) and isinstance(error, TypeError):
            hint = (
                "a tuple or list is one argument of forward(), as it is; for several arguments, "
                'let the dataset give a mapping with their names: ({"a": ..., "b": ...}, targets)'
            )
    if (known := known_hint(error)) is not None:
        hint = known
    elif user_line(error.__traceback__):
        hint = f"correct this line: PyTorch without pipectl fails there, too; or {hint}"
    return CaptureError(
        f"{name}: raised {type(error).__name__}: {first_line(error)}{place_of(error)}; "
        f"called with {call}",
        hint=hint,
    )


def _are_one(inputs: Any, targets: Any) -> bool:
    """Return whether a sample that is one mapping has become inputs and targets."""
    if not (isinstance(inputs, Mapping) and isinstance(targets, Mapping)):
        return False
    pairs = [(inputs[key], targets[key]) for key in inputs.keys() & targets.keys()]
    tensors = [pair for pair in pairs if all(isinstance(each, Tensor) for each in pair)]
    return inputs.keys() == targets.keys() and all(torch.equal(*pair) for pair in tensors)


def _describe(value: Any) -> str:
    """Describe a batch, or a part of one."""
    if isinstance(value, Tensor):
        return f"{list(value.shape)} of {str(value.dtype).removeprefix('torch.')}"
    if isinstance(value, Mapping):
        parts = [f"{key}: {_describe(item)}" for key, item in islice(value.items(), _SHOWN)]
    elif isinstance(value, tuple | list):
        parts = [_describe(item) for item in islice(value, _SHOWN)]
    else:
        return f"a {type(value).__name__}"
    words = ", ".join([*parts, "..."] if len(value) > _SHOWN else parts)
    return f"{{{words}}}" if isinstance(value, Mapping) else f"({words})"
