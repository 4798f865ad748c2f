"""The names of torch that are private, or that not all supported releases have.

No other file of the package names them (``tests/test_torch_api.py`` checks that), so a new release
of torch is a change here. What differs between releases says since when; all else is the same in
torch 2.8 to 2.15.
"""

from __future__ import annotations

import threading
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, fx, nn
from torch._decomp import decompositions
from torch._export.passes import replace_autocast_with_hop_pass as _autocast_pass
from torch._export.passes import replace_set_grad_with_hop_pass as _gradient_pass
from torch._functorch import eager_transforms
from torch._guards import detect_fake_mode
from torch._library.custom_ops import CustomOpDef
from torch._ops import HigherOrderOperator, OpOverload
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.amp import autocast_mode
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge
from torch.fx.experimental.proxy_tensor import (
    PreDispatchTorchFunctionMode,
    disable_proxy_modes_tracing,
    get_proxy_mode,
    get_proxy_slot,
    track_tensor_tree,
)
from torch.fx.experimental.symbolic_shapes import (
    GuardOnDataDependentSymNode,
    ShapeEnv,
    free_unbacked_symbols,
)
from torch.fx.proxy import TracerBase
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.modules import transformer
from torch.nn.modules.batchnorm import _BatchNorm as BatchNorm
from torch.nn.modules.dropout import _DropoutNd as Dropout
from torch.utils import _pytree as pytree
from torch.utils import checkpoint
from torch.utils._foreach_utils import _group_tensors_by_device_and_dtype
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._traceback import CapturedTraceback
from torch.utils.data import get_worker_info
from torch.utils.data._utils import worker

__all__ = [
    "BatchNorm",
    "CustomOpDef",
    "DataDependentOutputException",
    "Dropout",
    "DynamicOutputShapeException",
    "FakeTensor",
    "FakeTensorMode",
    "GuardOnDataDependentSymNode",
    "HigherOrderOperator",
    "OpOverload",
    "ShapeEnv",
    "StorageWeakRef",
    "TorchDispatchMode",
    "detect_fake_mode",
    "disable_proxy_modes_tracing",
    "free_unbacked_symbols",
    "get_proxy_mode",
    "get_proxy_slot",
    "pytree",
    "track_tensor_tree",
]

_ATEN = torch.ops.aten
# Tensors and modules


def version_of(tensor: Tensor) -> int:
    """Return a number that grows with every write to a tensor or to a view of it."""
    return tensor._version


def identity_of(value: Tensor | torch.UntypedStorage) -> int:
    """Return a number that no other tensor, or storage, has while this one exists.

    It stays if a tensor gets other memory, and changes with ``torch.utils.swap_tensors``.
    """
    identity: int = value._cdata
    return identity


def is_zero_tensor(tensor: Tensor) -> bool:
    """Return whether a tensor stands for zeros and has no memory, as forward derivatives do."""
    return tensor._is_zerotensor()


def make_subclass(kind: type[Tensor], tensor: Tensor) -> Any:
    """Return a tensor of a subclass with the memory of another."""
    return Tensor._make_subclass(kind, tensor)


def takes_data_of(tensor: Tensor, other: Tensor) -> bool:
    """Return whether ``tensor.data = other`` is possible; devices outside of torch differ."""
    return bool(torch._has_compatible_shallow_copy_type(tensor, other))


def swap(tensor: Tensor, other: Tensor) -> None:
    """Exchange what two Python objects stand for."""
    torch._C._swap_tensor_impl(tensor, other)


def has_gradient_hooks(tensor: Tensor) -> bool:
    """Return whether a hook waits for the gradient of a tensor."""
    return bool(tensor._backward_hooks or tensor._post_accumulate_grad_hooks)


def parameters_of(module: nn.Module) -> dict[str, Any]:
    """Return the parameters that a module itself holds; changes of the table change the module."""
    return module._parameters


def buffers_of(module: nn.Module) -> dict[str, Any]:
    """Return the buffers that a module itself holds; changes of the table change the module."""
    return module._buffers


def persistent_names(module: nn.Module) -> set[str]:
    """Return the names of all parameters and buffers that belong in a state dict, each of those of
    a tensor with several; what hooks rename or leave out in a state dict is among them.
    """
    found = {name for name, _ in module.named_parameters(remove_duplicate=False)}
    for path, part in module.named_modules(remove_duplicate=False):
        own = part._buffers.items()
        names = [n for n, buffer in own if buffer is not None]
        prefix = f"{path}." if path else ""
        found |= {prefix + name for name in names if name not in part._non_persistent_buffers_set}
    return found


def forward_hooks_of(module: nn.Module) -> list[Callable[..., Any]]:
    """Return the hooks before and after the forward of a module."""
    return [*module._forward_pre_hooks.values(), *module._forward_hooks.values()]


def has_backward_hooks(module: nn.Module) -> bool:
    """Return whether a module has hooks on its backward."""
    return bool(module._backward_hooks or module._backward_pre_hooks)


CALL_OF_A_MODULE = nn.Module._call_impl.__name__
"""The function whose ``self`` is the module that is called."""
FILES_THAT_CALL = tuple(
    str(Path(torch.__file__).parent / name)
    for name in ("random.py", "_compile.py", "_dynamo/eval_frame.py")
)
"""Files of torch whose functions draw, seed or run code for whoever calls them."""
PACK_SEQUENCE = torch._VF._pack_padded_sequence.__name__
"""The function of torch behind ``pack_padded_sequence``."""


# Autograd


def run_engine(
    roots: Sequence[Tensor | GradientEdge],
    gradients: Sequence[Tensor],
    inputs: Sequence[Tensor | GradientEdge] = (),
    *,
    keep_graph: bool,
    accumulate: bool,
) -> tuple[Tensor | None, ...]:
    """Run autograd's engine without the checks of ``torch.autograd.backward``.

    Args:
        gradients: of the roots.
        inputs: the only ones that get gradients, if any are given.
        accumulate: whether gradients are added to ``.grad``; else they are returned.
    """
    engine = torch.autograd.Variable._execution_engine
    results: tuple[Tensor | None, ...] = engine.run_backward(
        tuple(roots),
        tuple(gradients),
        keep_graph,
        False,
        tuple(inputs),
        allow_unreachable=True,
        accumulate_grad=accumulate,
    )
    return results


def edge_of(value: Tensor) -> GradientEdge:
    """Return an edge at which a backward enters the graph of a value, which may then be dropped.

    Until torch 2.8, an edge does not keep the node of a function in Python, which ends with the
    value. The node of a view is one of C, and keeps what is behind it.
    """
    is_in_python = isinstance(value.grad_fn, torch.autograd.function.BackwardCFunction)
    if is_in_python and "ownership_token" not in GradientEdge._fields:
        with torch.enable_grad():
            value = value.view_as(value)
    return get_gradient_edge(value)


def edge_into(value: Tensor) -> GradientEdge:
    """Return the edge at which the gradient of a value arrives; its graph must be kept elsewhere.

    Unlike that of :func:`edge_of`, it is always the value's own, so a backward can end there.
    """
    return get_gradient_edge(value)


def count_nodes() -> int:
    """Return how many nodes of graphs this thread has made."""
    number: int = torch.autograd._get_sequence_nr()  # type: ignore[attr-defined]
    return number


def number_of(node: Node) -> int:
    """Return how many nodes of graphs the thread had made before this one."""
    return int(node._sequence_nr())


def function_of(node: Node) -> type[torch.autograd.Function] | None:
    """Return the function in Python to which a node belongs, if it is one."""
    return getattr(node, "_forward_cls", None)


def function_behind(operator: CustomOpDef) -> Callable[..., Any]:
    """Return the function in Python that ``torch.library.custom_op`` made an operator."""
    return operator._init_fn


def functions_since(results: Iterable[Tensor], count: int) -> list[Node]:
    """Return the nodes behind results that belong to functions in Python.

    Args:
        count: of the nodes that were there before them, which are left out.
    """
    found: list[Node] = []
    waiting = [result.grad_fn for result in results if result.grad_fn is not None]
    seen = set(waiting)
    while waiting:
        node = waiting.pop()
        if number_of(node) < count:
            continue
        if function_of(node) is not None:
            found.append(node)
        behind = {each for each, _ in node.next_functions if each is not None} - seen
        seen |= behind
        waiting += behind
    return found


def is_in_backward() -> bool:
    """Return whether this thread runs a backward."""
    return bool(torch._C._current_graph_task_id() != -1)


@contextmanager
def without_hooks(pack: Callable[[Tensor], Any]) -> Iterator[bool]:
    """Take off the innermost hooks on saved tensors if they are those that pack by ``pack``.

    Yields whether they are.
    """
    stack: Any = torch._C._autograd
    hooks = stack._top_saved_tensors_default_hooks(True)
    if hooks is None or hooks[0] is not pack:
        yield False
        return
    stack._pop_saved_tensors_default_hooks()
    try:
        yield True
    finally:
        stack._push_saved_tensors_default_hooks(*hooks)


@contextmanager
def refused_gradients(refuse: Callable[..., Any]) -> Iterator[None]:
    """Call ``refuse`` in place of a backward, and where ``torch.func`` begins to differentiate."""
    with (
        mock.patch.object(torch.autograd, "_engine_run_backward", refuse),
        mock.patch.object(eager_transforms, "grad_increment_nesting", refuse),
        mock.patch.object(eager_transforms, "jvp_increment_nesting", refuse),
    ):
        yield


# Operators

COPY_TO = _ATEN._to_copy.default
"""What casts become in a graph."""
ASSERT_METADATA = _ATEN._assert_tensor_metadata.default
CHECKS = (
    _ATEN._assert_scalar.default,
    ASSERT_METADATA,
    _ATEN.sym_constrain_range.default,
    _ATEN.sym_constrain_range_for_size.default,
)
"""Operators that check values and compute nothing. An export leaves them in its graph, and no
stage has them: the sizes that they check are fixed when it is built."""
ASSERT_ASYNC: Callable[..., Any] = torch._assert_async
"""The function by which torch checks its arguments from 2.15 on."""
ATTENTION_ON_CPU = _ATEN._scaled_dot_product_flash_attention_for_cpu
ATTENTION_ON_CPU_BACKWARD = _ATEN._scaled_dot_product_flash_attention_for_cpu_backward


def schema_of(target: OpOverload) -> Any:
    """Return what an operator takes and returns."""
    return target._schema


def norms(tensors: list[Tensor]) -> Sequence[Tensor]:
    """Return the norms of tensors of one device and type, by one kernel."""
    return torch._foreach_norm(tensors)


def unscale(gradients: list[Tensor], inverse: Tensor) -> Tensor:
    """Multiply gradients of one device and type; returns 1 if one is infinite or NaN, else 0."""
    overflow = torch.zeros((), device=gradients[0].device)
    torch._amp_foreach_non_finite_check_and_unscale_(gradients, overflow, inverse)
    return overflow


def update_scale(
    scale: Tensor, steps: Tensor, overflow: Tensor, growth: float, backoff: float, interval: int
) -> None:
    """Change a loss scale, and the steps since its last change, by torch's rule."""
    torch._amp_update_scale_(scale, steps, overflow, growth, backoff, interval)


def order_in_groups(columns: list[list[Tensor | None]]) -> list[int]:
    """Return the indices of tensors in the order in which torch sums their norms."""
    groups = _group_tensors_by_device_and_dtype(columns, with_indices=True)
    return [index for _, indices in groups.values() for index in indices]


# Exports

SET_GRADIENTS = torch._C._set_grad_enabled
"""Marks in a graph where gradients are switched on or off."""
ENTER_AUTOCAST: Callable[..., Any] = autocast_mode._enter_autocast
EXIT_AUTOCAST: Callable[..., Any] = autocast_mode._exit_autocast
"""Mark the beginning and the end of an autocast in a graph."""
_AUTOCAST_PASS, _GRADIENT_PASS = "replace_autocast_with_hop_pass", "replace_set_grad_with_hop_pass"
_KEEPS_INPUTS: Any = getattr(checkpoint, "_NoopSaveInputs", None)


@contextmanager
def replaced_region_passes(
    replace: Callable[[fx.GraphModule, Any, list[Any]], tuple[Any, Any]],
) -> Iterator[None]:
    """Let a function take the place of what an export does about autocast and ``no_grad``.

    Args:
        replace: is called with a module, a signature, and torch's passes for autocast and for
            gradients. It returns what these return: the new module and signature.
    """
    passes = [getattr(_autocast_pass, _AUTOCAST_PASS), getattr(_gradient_pass, _GRADIENT_PASS)]

    def run(module: fx.GraphModule, signature: Any) -> tuple[Any, Any]:
        return replace(module, signature, passes)

    with (  # The pass for gradients runs first, and leaves everything to the other.
        mock.patch.object(_gradient_pass, _GRADIENT_PASS, lambda *unchanged: unchanged),
        mock.patch.object(_autocast_pass, _AUTOCAST_PASS, run),
    ):
        yield


def autocast_kernels(kind: str) -> set[str]:
    """Return the operators that the autocast of a kind of device changes, as ``softmax.int``."""
    name = {"cpu": "CPU", "cuda": "CUDA"}.get(kind, kind.upper())
    if kind == torch._C._get_privateuse1_backend_name():
        name = "PrivateUse1"
    known = torch._C._dispatch_get_registrations_for_dispatch_key(f"Autocast{name}")
    return {each.removeprefix("aten::") for each in known if each.startswith("aten::")}


@contextmanager
def replaced_autocast(rules: Mapping[str, str]) -> Iterator[None]:
    """Replace what the CPU's autocast does with some operators.

    Args:
        rules: by operator: ``wide`` converts values in half precision to float32, ``narrow``
            converts float32 to the type of the autocast, ``none`` gives results in the types that
            they have without autocast, except that what the operator consists of is cast.
    """
    key = torch._C.DispatchKey.AutocastCPU
    rest = torch._C._dispatch_keyset_full_after(key)
    half = torch.bfloat16, torch.float16

    def widen(value: Any) -> Any:
        return value.float() if isinstance(value, Tensor) and value.dtype in half else value

    def narrow(value: Any) -> Any:
        is_wide = isinstance(value, Tensor) and value.dtype is torch.float32
        return value.to(torch.get_autocast_dtype("cpu")) if is_wide else value

    def kernel(name: str, rule: str) -> Callable[..., Any]:
        operator, _, overload = name.partition(".")
        target = getattr(getattr(_ATEN, operator), overload or "default")
        has_parts = torch._C._dispatch_has_kernel_for_dispatch_key(
            f"aten::{name}", "CompositeImplicitAutograd"
        )

        def run(keys: Any, *args: Any, **kwargs: Any) -> Any:
            if rule == "none" and has_parts:
                return target.redispatch(keys & rest, *args, **kwargs)
            with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(key)):
                convert = narrow if rule == "narrow" else widen
                changed, more = pytree.tree_map(convert, (args, kwargs))
                result = target(*changed, **more)
                if rule != "none":
                    return result
                types = {x.dtype for x in pytree.tree_leaves(args) if isinstance(x, Tensor)}
                if torch.float32 in types or len(types.intersection(half)) != 1:
                    return result
                (own,) = types.intersection(half)  # the CPU lacks kernels for it
                return pytree.tree_map_only(
                    Tensor, lambda x: x.to(own) if x.dtype is torch.float32 else x, result
                )

        return run

    library = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    try:
        with warnings.catch_warnings():  # of kernels that are replaced
            warnings.simplefilter("ignore")
            for name, rule in rules.items():
                library.impl(name, kernel(name, rule), "AutocastCPU", with_keyset=True)  # type: ignore[no-untyped-call]
        yield
    finally:
        library._destroy()  # type: ignore[no-untyped-call]


@contextmanager
def replaced_choice_of_lines(
    choose: Callable[[traceback.StackSummary], traceback.StackSummary],
) -> Iterator[None]:
    """Let a function choose the frames by which a trace names the line of an operator.

    Until torch 2.8, this is no function that another could take the place of.
    """
    name, create = "_filter_traceback_frames", TracerBase.create_node

    def create_node(self: TracerBase, kind: str, *args: Any, **kwargs: Any) -> fx.Node:
        node = create(self, kind, *args, **kwargs)
        if kind not in ("placeholder", "output") and "stack_trace" not in node.meta:
            frames = choose(CapturedTraceback.extract().summary())  # type: ignore[no-untyped-call]
            node.meta.update({"stack_trace": "".join(frames.format()).strip()} if frames else {})
        return node

    with (
        mock.patch.object(TracerBase, name, lambda _, frames: choose(frames))
        if hasattr(TracerBase, name)
        else mock.patch.object(TracerBase, "create_node", create_node)
    ):
        yield


@contextmanager
def switched_gradients() -> Iterator[None]:
    """Let a trace switch gradients on and off as it notes that the model does.

    Until torch 2.8, it only notes it: what ends an inner ``no_grad`` switches gradients on in the
    outer one, too, and a model that asks ``is_grad_enabled()`` or ``requires_grad`` is misled.
    """
    trace = PreDispatchTorchFunctionMode.__torch_function__

    def switch(
        self: Any, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = trace(self, func, types, args, kwargs)
        if func is SET_GRADIENTS:
            func(*args)
        return result

    with mock.patch.object(PreDispatchTorchFunctionMode, "__torch_function__", switch):
        yield


@contextmanager
def replaced_mask_check(check: Callable[..., bool]) -> Iterator[None]:
    """Let a function take the place of what finds out whether a mask is causal."""
    with mock.patch.object(transformer, "_detect_is_causal_mask", check):
        yield


@contextmanager
def states_of_lstms() -> Iterator[None]:
    """Let an LSTM return states of the sizes that it was given.

    Until torch 2.12, an export removes the wrong dimension of the last states of a layer, so they
    have one too many unless the batch is a single sample.
    """
    layer = decompositions.one_layer_lstm

    def one_layer_lstm(*args: Any, **kwargs: Any) -> Any:
        output, states = layer(*args, **kwargs)  # type: ignore[no-untyped-call]
        return output, tuple(last.squeeze(0) if last.dim() > 2 else last for last in states)

    with mock.patch.object(decompositions, "one_layer_lstm", one_layer_lstm):
        yield


def is_keeping_inputs(function: type[torch.autograd.Function]) -> bool:
    """Return whether a function only keeps the inputs of a part that a backward recomputes.

    Until torch 2.11, ``torch.utils.checkpoint`` calls it with an empty tensor, which nobody reads.
    """
    return function is _KEEPS_INPUTS


_SDP = ("cudnn", "flash", "mem_efficient", "math", "overrideable")


def _choices_of_kernels() -> dict[str, tuple[Callable[[], Any], Callable[[Any], None]]]:
    """Return what reads and what sets each choice; not all releases have all of them."""
    names = {
        **{f"sdp_{kind}": (f"_get_{kind}_sdp_enabled", f"_set_sdp_use_{kind}") for kind in _SDP},
        "sdp_order": ("_get_sdp_priority_order", "_set_sdp_priority_order"),
        "mkldnn": ("_get_mkldnn_enabled", "_set_mkldnn_enabled"),
        "mkldnn_deterministic": ("_get_mkldnn_deterministic", "_set_mkldnn_deterministic"),
        "cudnn": ("_get_cudnn_enabled", "_set_cudnn_enabled"),
        "cudnn_benchmark": ("_get_cudnn_benchmark", "_set_cudnn_benchmark"),
        "cudnn_deterministic": ("_get_cudnn_deterministic", "_set_cudnn_deterministic"),
        "cudnn_tf32": ("_get_cudnn_allow_tf32", "_set_cudnn_allow_tf32"),
        "matmul": ("_get_float32_matmul_precision", "_set_float32_matmul_precision"),
    }
    pairs = {n: [getattr(torch._C, each, None) for each in pair] for n, pair in names.items()}
    found: dict[str, tuple[Callable[[], Any], Callable[[Any], None]]]
    found = {name: (pair[0], pair[1]) for name, pair in pairs.items() if pair[0] and pair[1]}
    found["deterministic"] = (
        lambda: [
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
        ],
        lambda choice: torch._C._set_deterministic_algorithms(choice[0], warn_only=choice[1]),
    )
    return found


_KERNELS = _choices_of_kernels()


def kernels() -> dict[str, Any]:
    """Return how torch chooses kernels now, by name; without what it does not tell."""
    found = {}
    for name, (read, _) in _KERNELS.items():
        with suppress(RuntimeError):  # it was set in two ways
            value = read()
            found[name] = tuple(value) if isinstance(value, list) else value
    return found


def choose_kernels(choices: Mapping[str, Any]) -> None:
    """Let torch choose kernels in another way.

    Args:
        choices: by the names of :func:`kernels`.
    """
    for name, value in choices.items():
        _KERNELS[name][1](list(value) if isinstance(value, tuple) else value)


@contextmanager
def unused_checkpoints() -> Iterator[None]:
    """Let ``torch.utils.checkpoint`` call what it gets, and recompute nothing in the backward.

    With ``use_reentrant=True`` it would begin a backward of its own for every call, in which
    gradients of parameters arrive that nobody has asked for, and several times.

    It is quick, as it stands around calls of the user's code in every micro-batch, and holds for
    this thread alone.
    """
    _answer_checkpoints()
    before = _checkpoints.unused
    _checkpoints.unused = True
    try:
        yield
    finally:
        _checkpoints.unused = before


class _Checkpoints(threading.local):
    unused = False


_checkpoints = _Checkpoints()


@cache
def _answer_checkpoints() -> None:
    """Let functions of ``torch.utils.checkpoint`` ask from now on whether they are unused."""
    reentrant, recomputed = checkpoint.CheckpointFunction, "_checkpoint_without_reentrant_generator"
    untouched = getattr(checkpoint, recomputed)

    def apply(function: Any, body: Callable[..., Any], *given: Any) -> Any:
        if _checkpoints.unused:
            _, *args = given
            return body(*args)
        return super(reentrant, function).apply(body, *given)  # found anew: it may be patched

    def generate(*args: Any, **kwargs: Any) -> Iterator[None]:
        return keep_nothing() if _checkpoints.unused else untouched(*args, **kwargs)

    def keep_nothing() -> Iterator[None]:
        yield

    reentrant.apply = classmethod(apply)  # type: ignore[assignment,method-assign]
    setattr(checkpoint, recomputed, generate)


def keep_unread(operator: HigherOrderOperator) -> None:
    """Keep an operator in graphs even if nothing reads its result."""
    fx.node.has_side_effect(operator)


def rename(node: fx.Node) -> None:
    """Name a node after its target."""
    node._rename(node.graph._target_to_str(node.target))


def untouched_by_modes() -> AbstractContextManager[Any]:
    """Return a context in which calls of functions of torch reach no mode and no subclass."""
    context: AbstractContextManager[Any] = torch._C.DisableTorchFunction()
    return context


def without_modes() -> AbstractContextManager[Any]:
    """Return a context in which operators reach no mode."""
    context: AbstractContextManager[Any] = _disable_current_modes()
    return context


def uncompiled() -> AbstractContextManager[Any]:
    """Return a context in which ``torch.compile``, which ``torch.cond`` calls, compiles nothing.

    Where a mode sees the operators, it would give up its code for good: every later call of
    ``torch.cond`` in the process would fail.
    """
    context: AbstractContextManager[Any] = torch.compiler.set_stance("force_eager")
    return context


def is_edge_of_vmap(target: Any) -> bool:
    """Return whether a function stands where ``torch.func.vmap`` begins or ends in a graph.

    Before torch 2.9, no graph has such functions.
    """
    return getattr(target, "__module__", "") == "torch._functorch.predispatch"


def place_of_guard(guard: Any) -> str:
    """Return the file whose code has asked for a condition on sizes."""
    place = guard.sloc.framework_loc
    return str(getattr(place, "filename", place))


def part_of(spec: pytree.TreeSpec, index: int) -> pytree.TreeSpec:
    """Return the structure of one part of a value. ``child`` is new in torch 2.10."""
    part: pytree.TreeSpec = (
        spec.child(index) if hasattr(spec, "child") else spec.children_specs[index]
    )
    return part


def read_sample(dataset: Any, index: int) -> Any:
    """Return a sample, by the method that a ``DataLoader`` calls."""
    read_all = getattr(dataset, "__getitems__", None)
    found = read_all([index]) if read_all else None
    if isinstance(found, list | tuple) and len(found) == 1:
        return found[0]
    return dataset[index]  # else they are columns, perhaps


@contextmanager
def told_as_process(dataset: Any) -> Iterator[None]:
    """Let ``get_worker_info`` tell of a dataset, with the seed that torch has now.

    In a process of a loader it does so for good, elsewhere within the block, as the only process.
    """
    info, seed = get_worker_info(), torch.initial_seed()
    if info is not None:
        object.__setattr__(info, "dataset", dataset)
        object.__setattr__(info, "seed", seed)
        yield
        return
    alone = worker.WorkerInfo(id=0, num_workers=1, seed=seed, dataset=dataset)
    with mock.patch.object(worker, "_worker_info", alone):
        yield


def draw_rest(batches: Any, most: int) -> None:
    """Let the iterator of a ``DataLoader`` draw the samples that it has not drawn, up to so many
    batches, without reading them.
    """
    for _ in islice(getattr(batches, "_sampler_iter", ()), most):
        pass


def is_of_compiler(error: BaseException) -> bool:
    """Return whether ``torch.compile`` has raised an error."""
    return type(error).__module__.startswith(("torch._inductor", "torch._dynamo"))


# Accelerators and optimizers

MUON: Any = getattr(torch.optim, "Muon", None)
"""An optimizer that is new in torch 2.9; None before."""


def current_accelerator() -> torch.device | None:
    """Return the accelerator of this machine; None if there is none.

    A build for accelerators names their type where there is none, too.
    """
    return torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None


def allocated_bytes(device: torch.device) -> int:
    """Return the bytes that are allocated on an accelerator."""
    return int(_memory_of(device).memory_allocated(device))


def peak_bytes(device: torch.device) -> int:
    """Return the most bytes that were allocated since :func:`reset_peak`."""
    return int(_memory_of(device).max_memory_allocated(device))


def reset_peak(device: torch.device) -> None:
    """Begin anew with :func:`peak_bytes`."""
    _memory_of(device).reset_peak_memory_stats(device)


def free_bytes(device: torch.device) -> int:
    """Return the bytes of an accelerator that are free; ``get_memory_info`` is new in 2.10."""
    ask = getattr(torch.accelerator, "get_memory_info", None)
    free, _ = (ask or torch.get_device_module(device).mem_get_info)(device)
    return int(free)


def dump_memory(file: str) -> bool:
    """Write what the allocator of the accelerator holds, for torch's viewer of memory.

    Returns:
        Whether this kind of accelerator can do that.
    """
    device = current_accelerator()
    module = None if device is None else torch.get_device_module(device)
    dump = getattr(getattr(module, "memory", None), "_dump_snapshot", None)
    if dump is not None:
        dump(file)
    return dump is not None


def usable_bytes(device: torch.device) -> int:
    """Return the bytes that tensors of this process can have on an accelerator, if no other process
    takes more: not what the driver, kernels and libraries hold, nor what torch's allocator held
    besides the tensors when most were there.
    """
    memory = _memory_of(device)
    held, peak_held = memory.memory_reserved(device), memory.max_memory_reserved(device)
    unused = max(0, peak_held - memory.max_memory_allocated(device))
    return int(free_bytes(device) + held - unused)


def _memory_of(device: torch.device) -> Any:
    """Return the module that counts memory: that of the kind of accelerator before torch 2.9."""
    has_counts = hasattr(torch.accelerator, "memory_allocated")
    return torch.accelerator if has_counts else torch.get_device_module(device)


@contextmanager
def on_stream(stream: torch.Stream) -> Iterator[None]:
    """Queue the work of this thread on a stream.

    ``with stream`` cannot be entered by two threads at once before torch 2.12.
    """
    before = torch.accelerator.current_stream(stream.device)
    torch.accelerator.set_stream(stream)
    try:
        yield
    finally:
        torch.accelerator.set_stream(before)
