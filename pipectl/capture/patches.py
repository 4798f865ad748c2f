"""Patches of torch and Python, most of them during the construction and the export of a model.

Each patch says why it is needed; unless it names versions of torch, it is for all that pipectl
supports. Those of private names of torch are in ``torch_api.py``, that of an accelerator's autocast
is in ``accelerator_autocast.py``, and the hooks that stay on submodules are in ``opaque.py``.
"""

from __future__ import annotations

import inspect
import io
import logging
import re
import sys
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, redirect_stderr
from functools import cache, partial
from pathlib import Path
from types import CodeType, FrameType
from typing import Any
from unittest import mock

import torch
from torch import Tensor, fx, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.export import ExportedProgram
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import CheckpointFunction

from pipectl.capture.checks import is_caught, mark_condition, passing_answer
from pipectl.capture.draws import refused_draws
from pipectl.capture.factories import is_torch_code
from pipectl.capture.model_with_loss import ModelWithLoss, States
from pipectl.capture.operators import FunctionCall
from pipectl.capture.refusals import (
    Refusal,
    place_at,
)
from pipectl.capture.regions import KernelMarks, mark_regions
from pipectl.faults import is_user_code
from pipectl.torch_api import (
    ASSERT_ASYNC,
    CALL_OF_A_MODULE,
    PACK_SEQUENCE,
    FakeTensor,
    HigherOrderOperator,
    disable_proxy_modes_tracing,
    free_unbacked_symbols,
    get_proxy_mode,
    is_keeping_inputs,
    keep_unread,
    pytree,
    refused_gradients,
    rename,
    replaced_choice_of_lines,
    replaced_mask_check,
    replaced_region_passes,
    states_of_lstms,
    switched_gradients,
    track_tensor_tree,
    untouched_by_modes,
    without_hooks,
)

MAX_REPEATS = 500
"""Calls from one line of one module until a loop is too long. Tracing one takes some 10 ms."""
_ABSENT = object()


@contextmanager
def patched_export(
    wrapper: nn.Module, recorder: Recorder, *, unrolls: bool, locates_draws: bool = False
) -> Iterator[None]:
    """Apply all patches for an export.

    Args:
        recorder: gets the autograd functions that model and loss use.
        unrolls: whether loops may be of any length.
        locates_draws: see :func:`refused_draws`.

    Raises:
        RefusedError: from the export, if the model does what no graph can hold.
    """
    with ExitStack() as stack:
        stack.enter_context(quiet())
        stack.enter_context(refused_draws(wrapper, locates=locates_draws))
        stack.enter_context(left_out_checks())
        stack.enter_context(_masks_taken_as_given())
        stack.enter_context(_zeros_in_padding())
        stack.enter_context(recorder.kernels.watched(wrapper))
        registered = stack.enter_context(_parameters_everywhere(wrapper))
        stack.enter_context(_WatchedCalls(recorder.kernels, registered, unrolls=unrolls))
        stack.enter_context(_marked_regions())
        stack.enter_context(_recorded_functions(recorder, registered))
        stack.enter_context(_recorded_lines())
        stack.enter_context(states_of_lstms())
        yield


@contextmanager
def _recorded_lines() -> Iterator[None]:
    """Keep the line of every operator in functions of the user, too, such as a loss.

    Torch keeps the lines of functions that are called ``forward`` only.
    """

    is_users = cache(is_user_code)

    def keep(frames: traceback.StackSummary) -> traceback.StackSummary:
        first = next((i for i, frame in enumerate(frames) if frame.name == "forward"), len(frames))
        return traceback.StackSummary.from_list(
            [
                frame
                for frame in frames[first:]
                if frame.name == "forward" or is_users(frame.filename)
            ]
        )

    with replaced_choice_of_lines(keep):
        yield


@contextmanager
def quiet() -> Iterator[None]:
    """Suppress torch's advice about its internals."""
    logger = logging.getLogger("torch")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings(), redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)


@contextmanager
def left_out_checks(*, traced: bool = True) -> Iterator[None]:
    """Let ``if`` and ``assert`` on values continue if the other side only raises.

    ``torch.export`` refuses all branches on values, and tensors without values have no answer.

    Args:
        traced: whether only during a trace.
    """

    def passing(ask: Callable[[Any], bool]) -> Callable[[Any], bool]:
        def boolean(value: Any) -> bool:
            # Questions of sizes, which have an answer now, stay torch's.
            from_values = isinstance(value, Tensor) or free_unbacked_symbols(value)
            if from_values and not (traced and get_proxy_mode() is None):
                answer = passing_answer(sys._getframe(1))
                if answer is not None:
                    mark_condition(value)
                    return answer
            return ask(value)

        return boolean

    kinds: tuple[Any, ...] = (Tensor, torch.SymBool)
    with ExitStack() as stack:
        for kind in kinds:
            ask = passing(kind.__bool__)
            stack.enter_context(mock.patch.object(kind, "__bool__", ask))
        yield


@contextmanager
def _masks_taken_as_given() -> Iterator[None]:
    """Let ``nn.Transformer`` use a mask without asking whether it is causal.

    It asks for the values of the mask, which the export refuses, to give attention a hint in place
    of the mask. The results are the same, on CPUs to the bit. A hint of the model's own is kept.
    """

    def detect(
        _mask: Tensor | None, is_causal: bool | None = None, _size: int | None = None
    ) -> bool:
        return is_causal is True

    with replaced_mask_check(detect):
        yield


@contextmanager
def _zeros_in_padding() -> Iterator[None]:
    """Let ``nn.TransformerEncoder`` give zeros at padded positions where plain PyTorch does.

    In evaluation it takes the padding at the end of sequences out (nested tensors, whose sizes no
    graph can hold), and puts zeros in its place before its last norm.
    """
    forward: Any = nn.TransformerEncoder.forward

    def padded_forward(
        encoder: Any,
        src: Tensor,
        mask: Tensor | None = None,
        src_key_padding_mask: Tensor | None = None,
        is_causal: bool | None = None,
    ) -> Any:
        given = encoder, src, mask, src_key_padding_mask, is_causal
        is_nested = (
            src_key_padding_mask is not None
            and mask is None
            and src.dim() == 3
            and getattr(encoder, "use_nested_tensor", False)
            and torch.backends.mha.get_fastpath_enabled()
            and not (encoder.layers[0].training or torch.is_grad_enabled())
            and not (torch.is_autocast_enabled() or torch.is_autocast_enabled("cpu"))
        )
        if not is_nested or src_key_padding_mask is None:
            return forward(*given)
        padded = src_key_padding_mask.bool()
        if getattr(encoder, "mask_check", True):
            padded = padded & (padded[:, 1:] >= padded[:, :-1]).all()
        fill = partial(_filled, padded.unsqueeze(-1))
        handle = encoder.layers[-1].register_forward_hook(fill)
        try:
            return forward(*given)
        finally:
            handle.remove()

    with mock.patch.object(nn.TransformerEncoder, "forward", padded_forward):
        yield


def _filled(padded: Tensor, _module: Any, _args: Any, output: Tensor) -> Tensor:
    return output.masked_fill(padded, 0.0)


Registered = Callable[[Any], Any]
"""Returns the arguments of a call with the registered parameters of a trace among them."""


@contextmanager
def _parameters_everywhere(wrapper: nn.Module) -> Iterator[Registered]:
    """Let a parameter be the one of the trace wherever the model keeps it, as in a list.

    An export puts its parameters into the modules only, and takes others for constants.
    """
    states = States(wrapper)
    own = states.now()
    traced: dict[int, Tensor] = {}

    def note(*_: object) -> None:
        now = states.now()
        traced.update({id(own[index]): now[index] for index in states.parameters})

    def registered(arguments: Any) -> Any:
        if not any(id(leaf) in traced for leaf in pytree.tree_leaves(arguments)):
            return arguments
        return pytree.tree_map(lambda leaf: traced.get(id(leaf), leaf), arguments)

    hook = wrapper.register_forward_pre_hook(note)
    try:
        yield registered
    finally:
        hook.remove()


class _WatchedCalls(TorchFunctionMode):
    """Leaves asserts out, and refuses calls of functions that no graph can hold.

    An export drops ``backward()``, writes through ``.data`` and changes of a parameter's
    ``requires_grad`` silently. A read of ``.data`` counts as ``.detach()``. From 2.15 on, torch
    checks arguments by asynchronous asserts.
    """

    def __init__(self, kernels: KernelMarks, registered: Registered, *, unrolls: bool) -> None:
        super().__init__()
        self._kernels, self._registered = kernels, registered
        self._data: list[Tensor] = []
        self._repeats: Counter[tuple[CodeType, int, int]] | None = None if unrolls else Counter()
        self._frames: list[FrameType] = []

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if torch.compiler.is_dynamo_compiling():  # a branch of torch.cond: it refuses them itself,
            return func(*args, **(kwargs or {}))  # and torch.cond is called with their parameters
        args, kwargs = self._registered((args, kwargs or {}))
        if func is ASSERT_ASYNC and get_proxy_mode() is not None:
            condition = args[0] if args else kwargs["input"]
            if not is_caught(sys._getframe(1)):
                return mark_condition(condition)
            bool(condition)  # which no trace can answer: the module is kept whole
        self._count_repeats()
        name = getattr(func, "__name__", "")
        _refuse_call(func, name, args, kwargs)
        if name == "__get__" and func == _GET_DATA and not _is_torch_calling():
            self._data.append(args[0].detach())
            return self._data[-1]
        if name == "__get__" and func == _GET_NODE and not _is_torch_calling():
            return _hookless(func(*args))
        if args and _WRITES(name) and any(args[0] is known for known in self._data):
            raise Refusal.DATA_WRITTEN.error()
        try:
            with self._kernels.traced():
                return func(*args, **kwargs)
        except AssertionError as error:
            if not any(map(_is_computed, pytree.tree_leaves((args, kwargs)))):
                raise
            raise Refusal.COMPUTED.error() from error

    def _count_repeats(self) -> None:
        """Count the calls from the current line of the module that is being called.

        Raises:
            RefusedError: there were too many; the loop is in the innermost frame that two such
                calls share.
        """
        if self._repeats is None:
            return
        caller, module = _calling_module(sys._getframe(2))
        if caller is None or isinstance(module, ModelWithLoss):
            return  # pipectl's own, such as a look at every parameter
        key = (caller.f_code, caller.f_lineno, id(vars(module)))
        self._repeats[key] += 1
        if self._repeats[key] == MAX_REPEATS:
            self._frames = [frame for frame, _ in traceback.walk_stack(caller)]
        elif self._repeats[key] > MAX_REPEATS:
            loop, line = next(
                (f, line) for f, line in traceback.walk_stack(caller) if f in self._frames
            )
            place = place_at(loop.f_code.co_filename, line)
            part = _calling_module(loop)[1]
            raise Refusal.LOOP.error(place, part=part, repeats=MAX_REPEATS)


_WRITES = re.compile(
    r"(?!__|requires_grad_$).*_|"
    r"__(setitem|i(add|sub|mul|(true|floor)?div|mod|pow|and|x?or|[lr]shift))__"
).fullmatch
"""Names of the functions of torch that write the tensor they are called with."""
_SET_DATA: Any = Tensor.data.__set__  # type: ignore[attr-defined]
_GET_DATA: Any = Tensor.data.__get__  # type: ignore[attr-defined]
_GET_NODE: Any = Tensor.grad_fn.__get__  # type: ignore[union-attr]
_SET_TRAINED: tuple[Any, ...] = (
    Tensor.requires_grad_,
    Tensor.requires_grad.__set__,  # type: ignore[attr-defined]
)


def _refuse_hook(*_: Any) -> None:
    subject, why = "puts a hook on a gradient", "which no graph can hold"
    raise Refusal.GRADIENT_HOOK.error(subject=subject, why=why)


class _HooklessNode:
    """A node of autograd's graph (``grad_fn``), as the model sees it: it takes no hooks."""

    register_hook = register_prehook = _refuse_hook

    def __init__(self, node: Any) -> None:
        self._node = node

    def __getattr__(self, name: str) -> Any:
        return getattr(self._node, name)

    @property
    def next_functions(self) -> tuple[tuple[Any, int], ...]:
        return tuple((_hookless(node), place) for node, place in self._node.next_functions)


def _is_computed(value: Any) -> bool:
    """Return whether a value is a tensor that was computed from parameters before the trace."""
    is_real = isinstance(value, Tensor) and not isinstance(value, FakeTensor)
    return is_real and value.grad_fn is not None


def _hookless(node: Any) -> Any:
    return None if node is None else _HooklessNode(node)


def _refuse_call(function: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Refuse a call of torch that no graph can hold, whatever was called before."""
    if name == "backward":
        raise Refusal.BACKWARD.error()
    if name == PACK_SEQUENCE:
        raise Refusal.PACKING.error()
    if any(isinstance(given, torch.Generator) for given in (*args, *kwargs.values())):
        raise Refusal.DRAW.error()
    if name == "__set__" and function == _SET_DATA and not _is_torch_calling():
        raise Refusal.DATA_ASSIGNED.error()
    if function in _SET_TRAINED and isinstance(args[0], nn.Parameter):
        wanted = args[1] if len(args) > 1 else kwargs.get("requires_grad", True)
        if bool(wanted) != args[0].requires_grad:
            raise Refusal.FREEZES.error()


def _calling_module(frame: FrameType | None) -> tuple[FrameType | None, nn.Module | None]:
    """Return the innermost call of a module around a frame, and that module."""
    while frame is not None:
        # Only then, because Python makes a dictionary of all variables of the frame.
        if "self" in frame.f_code.co_varnames:
            module = frame.f_locals.get("self")
            if isinstance(module, nn.Module):
                return frame, module
        frame = frame.f_back
    return None, None


def _is_torch_calling() -> bool:
    """Return whether torch itself calls a function of torch, other than by dispatch."""
    frame = sys._getframe(2)
    while frame.f_back is not None and frame.f_code.co_name == "__torch_function__":
        frame = frame.f_back
    return is_torch_code(frame.f_code.co_filename)


@contextmanager
def _marked_regions() -> Iterator[None]:
    """Store in every operator its autocast, and whether it runs without gradients.

    The passes of ``torch.export`` wrap such parts in one operator, which no cut can divide.
    ``torch.inference_mode()``, which a trace does not show, counts as ``torch.no_grad()``.
    """

    def enter(self: Any) -> None:
        self.pipectl_before = torch.is_grad_enabled()
        torch.set_grad_enabled(self.pipectl_before and not self.mode)

    def leave(self: Any, *_: object) -> None:
        torch.set_grad_enabled(self.pipectl_before)

    with (
        switched_gradients(),
        replaced_region_passes(mark_regions),
        mock.patch.object(torch.inference_mode, "__enter__", enter),
        mock.patch.object(torch.inference_mode, "__exit__", leave),
    ):
        yield


class _Recorded(HigherOrderOperator):
    """Stands for a Python function in an exported graph, which accepts no others."""

    def __call__(self, *_: Any, **__: Any) -> Any:
        raise NotImplementedError


_RECORDED = _Recorded("pipectl_recorded")  # type: ignore[no-untyped-call]
keep_unread(_RECORDED)


class Recorder:
    """Records calls of Python functions as single operators of an export.

    Attributes:
        kernels: marks of where the model changes how torch chooses kernels.
    """

    def __init__(self) -> None:
        self.kernels = KernelMarks()
        self._targets: list[Any] = []

    def record(
        self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], give: Callable[[], Any]
    ) -> Any:
        """Append a call to the graph that is being traced.

        Args:
            give: returns the result; the trace sees nothing of how.
        """
        mode: Any = get_proxy_mode()
        with self.kernels.traced(), disable_proxy_modes_tracing():
            result = give()
        with untouched_by_modes():  # what follows is no call of the model's
            args, kwargs = pytree.tree_map(mode.tracer.unwrap_proxy, (args, kwargs))
            numbered = (len(self._targets), *args)
            proxy = mode.tracer.create_proxy("call_function", _RECORDED, numbered, kwargs)
            self._targets.append(target)
            return track_tensor_tree(result, proxy, constant=None, tracer=mode.tracer)

    def place_targets(self, program: ExportedProgram) -> None:
        """Let every recorded operator of a program call its function."""
        modules = [m for m in program.graph_module.modules() if isinstance(m, fx.GraphModule)]
        for module in modules:
            for node in module.graph.find_nodes(op="call_function", target=_RECORDED):
                number, *args = node.args
                node.target, node.args = self._targets[number], tuple(args)
                rename(node)
                if isinstance(node.target, FunctionCall) and not node.users:
                    module.graph.erase_node(node)


@contextmanager
def _recorded_functions(recorder: Recorder, registered: Registered) -> Iterator[None]:
    """Record autograd functions as operators, and refuse gradients inside a forward.

    An export drops the backward of an autograd function, and hooks on gradients, silently.

    Raises:
        CaptureError: from the export, if the model registers a hook on a gradient.
    """
    untouched: Any = vars(torch.autograd.Function)["apply"]

    def apply(function: type[torch.autograd.Function], *args: Any, **kwargs: Any) -> Any:
        if function is CheckpointFunction:  # recomputation is planned, not captured
            body, _, *given = args
            return body(*given)
        if is_keeping_inputs(function):
            mark_condition(args[0])
            return args[0]
        # A Python class method in torch 2.13 and one of C from 2.14 on: both bind.
        bound = untouched.__get__(None, function)
        if get_proxy_mode() is None:
            return bound(*args, **kwargs)
        args, kwargs = registered((args, kwargs))
        call = partial(_call_without_counts, function, partial(bound, *args, **kwargs))
        return recorder.record(FunctionCall(function), args, kwargs, call)

    def refuse_backward(*_: Any, **__: Any) -> None:
        raise Refusal.GRADIENTS.error()

    with (
        mock.patch.object(torch.autograd.Function, "apply", classmethod(apply)),
        mock.patch.object(Tensor, "register_hook", _refuse_hook),
        refused_gradients(refuse_backward),
    ):
        yield


def _call_without_counts(function: type[torch.autograd.Function], call: Callable[[], Any]) -> Any:
    """Call an autograd function, and refuse it if every call changes a number that it can reach.

    Each rank would count its own calls; and a forward that is recomputed counts twice.
    """
    before = _numbers_of(function)
    result = call()
    if (once := _numbers_of(function)) != before:
        call()  # what is set at the first call alone is no matter
        twice = _numbers_of(function)
        name = next((n for n, number in twice.items() if number != once.get(n)), None)
        if name is not None:
            raise Refusal.COUNTED.error(name=name)
    return result


def _numbers_of(function: type[torch.autograd.Function]) -> dict[str, float]:
    """Return the numbers in the class of an autograd function of the user, and in its file."""
    forward: Any = inspect.unwrap(function.forward)
    name = forward.__code__.co_filename if hasattr(forward, "__code__") else "<"
    if not is_user_code(name):
        return {}
    pairs = [(f"{Path(name).name}:{n}", value) for n, value in forward.__globals__.items()]
    for owner in function.__mro__[: function.__mro__.index(torch.autograd.Function)]:
        pairs += [(f"{owner.__qualname__}.{n}", value) for n, value in vars(owner).items()]
    return {n: value for n, value in pairs if isinstance(value, int | float)}


@contextmanager
def hooks_on_saved_tensors(
    pack: Callable[[Tensor], Any], unpack: Callable[[Any], Tensor]
) -> Iterator[list[str]]:
    """``saved_tensors_hooks`` within which ``torch.func`` may differentiate.

    It refuses hooks while it runs a function. So they are taken off meanwhile, and what autograd
    saves then stays where it is. Yields a list with what ``torch.func`` said each time.
    """
    refuse_hooks, transforms = torch.autograd.graph.disable_saved_tensors_hooks, list[str]()

    @contextmanager
    def take_off(message: str) -> Iterator[None]:
        with without_hooks(pack) as are_ours, refuse_hooks(message):
            if are_ours:
                transforms.append(message)
            yield

    with (
        mock.patch.object(torch.autograd.graph, "disable_saved_tensors_hooks", take_off),
        saved_tensors_hooks(pack, unpack),
    ):
        yield transforms


@contextmanager
def copyable_without_values() -> Iterator[None]:
    """Let ``copy.deepcopy`` clone a tensor without values; torch would access its memory."""

    def deepcopy(tensor: Tensor, memo: dict[int, Any]) -> Any:
        if id(tensor) not in memo:
            clone = tensor.detach().clone()
            parameter = isinstance(tensor, nn.Parameter)
            memo[id(tensor)] = nn.Parameter(clone, tensor.requires_grad) if parameter else clone
        return memo[id(tensor)]

    with mock.patch.object(FakeTensor, "__deepcopy__", deepcopy):
        yield


class Mask:
    """Redirects calls of a module, including its hooks, to a function with the same arguments."""

    def __init__(self, module: nn.Module, stand_in: Callable[..., Any]) -> None:
        self._own = vars(module)
        self._other: dict[str, Any] = {CALL_OF_A_MODULE: stand_in, "forward": stand_in}

    @contextmanager
    def put_on(self) -> Iterator[None]:
        """Redirect calls within the context."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    take_off = put_on  # within a context of the other, the module is itself for a while

    def _swap(self) -> None:
        for name, value in self._other.items():
            self._other[name] = self._own.pop(name, _ABSENT)
            if value is not _ABSENT:
                self._own[name] = value
