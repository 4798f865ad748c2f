"""Gradients that the user's own code forms, which ``torch.export`` drops without a word.

An autograd function is recorded as one operator, so that its backward survives. A hook on a
gradient cannot be: the graph has no place for it, and it is refused. So is one on a parameter.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._export.wrappers import allow_in_pre_dispatch_graph
from torch._functorch import eager_transforms
from torch._higher_order_ops.flat_apply import flat_apply
from torch.export import ExportedProgram
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import CheckpointFunction

from pipectl.capture.explain import EagerError, place_in
from pipectl.capture.factories import module_of
from pipectl.capture.names import own_path
from pipectl.errors import CaptureError


@dataclass(frozen=True)
class Applied:
    """An autograd function as an operator of a graph."""

    function: type[torch.autograd.Function]

    @property
    def __name__(self) -> str:
        return self.function.__name__.strip("_").lower()

    def __repr__(self) -> str:
        # A part of the graph's fingerprint, which must not tell where the user's file lies.
        return f"{module_of(self.function)}.{self.function.__qualname__}"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What the function gives, with its own backward."""
        return self.function.apply(*args, **kwargs)  # type: ignore[no-untyped-call]


Functions = dict[str, type[torch.autograd.Function]]
_PLAIN = (int, float, bool, str)
_NESTINGS = "grad_increment_nesting", "jvp_increment_nesting"
"""What ``torch.func`` enters to differentiate."""
_HOOK_CURE = "change the gradient by a torch.autograd.Function instead, or remove the hook"


def refuse_backward_hooks(model: nn.Module, kept: Iterable[nn.Module] = ()) -> None:
    """Raise if a module has a hook on its backward.

    Args:
        kept: modules that run as they are, with all their hooks.

    Raises:
        CaptureError: naming the module.
    """
    free = {inner for module in kept for inner in module.modules()}
    for name, module in model.named_modules():
        if module in free:
            continue
        if module._backward_hooks or module._backward_pre_hooks:
            path = own_path(name) or "the model"
            raise CaptureError(
                f"model: {path} has a backward hook, which no graph can hold", cure=_HOOK_CURE
            )


def has_hooks(parameter: nn.Parameter) -> bool:
    """Whether something is called with its gradient."""
    return bool(parameter._backward_hooks or parameter._post_accumulate_grad_hooks)


def refuse_parameter_hooks(parameters: Iterable[tuple[str, nn.Parameter]]) -> None:
    """Raise if a parameter that is trained has a hook on its gradient.

    It would run in some plans alone: others train leaves in the parameter's memory (one for each
    of several uses, or for each version of the weights), or add the gradients of replicas.

    Raises:
        CaptureError: naming the parameter.
    """
    for name, parameter in parameters:
        if parameter.requires_grad and has_hooks(parameter):
            raise CaptureError(
                f"model: parameter {own_path(name)} has a hook on its gradient, which would not "
                "run in every plan",
                cure=_HOOK_CURE,
            )


@contextmanager
def recorded_functions() -> Iterator[Functions]:
    """While a model is exported, record its autograd functions; yields them by the name used.

    Raises:
        CaptureError: from the export, where the model puts a hook on a gradient, or uses two
            functions of one name.
    """
    found: Functions = {}
    untouched: Any = vars(torch.autograd.Function)["apply"]

    def apply(function: type[torch.autograd.Function], *args: Any, **kwargs: Any) -> Any:
        # A Python class method in torch 2.13 and one of C from 2.14 on: both bind.
        return untouched.__get__(None, function)(*args, **kwargs)

    record: Callable[..., Any] = allow_in_pre_dispatch_graph(apply)  # type: ignore[no-untyped-call]

    def record_known(function: type[torch.autograd.Function], *args: Any, **kwargs: Any) -> Any:
        if function is CheckpointFunction:  # recomputation is planned, not captured
            body, _, *given = args
            return body(*given)
        name = f"{function.__module__}.{function.__qualname__}"
        if not _is_alike(found.setdefault(name, function), function):
            raise CaptureError(
                f"model: two autograd functions are named {name}, and a graph knows them by name",
                cure="define one function, which gets as arguments what tells them apart",
            )
        return record(function, *args, **kwargs)

    hook, autograd = Tensor.register_hook, vars(torch.autograd)
    engine = autograd["_engine_run_backward"]
    nestings = {name: getattr(eager_transforms, name) for name in _NESTINGS}
    torch.autograd.Function.apply = classmethod(record_known)  # type: ignore[assignment, method-assign]
    Tensor.register_hook = _refuse_hook  # type: ignore[method-assign]
    autograd["_engine_run_backward"] = _refuse_backward
    for name in nestings:
        setattr(eager_transforms, name, _refuse_backward)
    try:
        yield found
    finally:
        torch.autograd.Function.apply = untouched  # type: ignore[method-assign]
        Tensor.register_hook = hook  # type: ignore[method-assign]
        autograd["_engine_run_backward"] = engine
        for name, nesting in nestings.items():
            setattr(eager_transforms, name, nesting)


def refuse_sparse_gradients(model: nn.Module) -> None:
    """Raise if a module is to give sparse gradients.

    Raises:
        CaptureError: naming the module.
    """
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
            raise CaptureError(
                f"model: {own_path(name)} gives sparse gradients (sparse=True), which ranks cannot "
                "add up and send",
                cure="set sparse=False; in place of SparseAdam, use Adam or Adagrad",
            )


def _is_alike(one: type[torch.autograd.Function], other: type[torch.autograd.Function]) -> bool:
    """Whether two classes, made by one definition perhaps, do the same."""
    methods = "forward", "backward", "setup_context", "jvp"
    return all(_does_alike(getattr(one, m), getattr(other, m)) for m in methods)


def _does_alike(one: Any, other: Any) -> bool:
    if one is other:  # inherited by both, perhaps
        return True
    pairs = zip(_cells(one), _cells(other), strict=True)
    same_code = one.__code__ is other.__code__ and one.__defaults__ == other.__defaults__
    return same_code and all(a is b or (type(a) in _PLAIN and a == b) for a, b in pairs)


def _cells(function: Any) -> list[Any]:
    return [cell.cell_contents for cell in function.__closure__ or ()]


def call_functions(program: ExportedProgram, functions: Functions) -> None:
    """Let every recorded autograd function be an operator that calls it."""
    for module in program.graph_module.modules():
        if isinstance(module, fx.GraphModule):
            for node in module.graph.find_nodes(op="call_function", target=flat_apply):
                _call_function(module, node, functions)


def _call_function(module: fx.GraphModule, node: fx.Node, functions: Functions) -> None:
    applied, spec, *flat = node.args
    assert isinstance(applied, fx.Node)
    assert isinstance(spec, fx.Node)
    structure = getattr(module, str(spec.target))
    (name, *args), kwargs = pytree.tree_unflatten(flat, structure)
    target = Applied(functions[name])
    with module.graph.inserting_before(node):
        called = module.graph.create_node("call_function", target, tuple(args), kwargs)
    called.meta = dict(node.meta)
    node.replace_all_uses_with(called)
    for unused in (node, applied, spec):
        module.graph.erase_node(unused)


def _refuse_backward(*_: Any, **__: Any) -> None:
    place = place_in("".join(traceback.format_stack()))
    raise EagerError(f"model: cannot be captured{place}: it forms gradients in its forward")


def _refuse_hook(*_: Any) -> None:
    raise CaptureError(
        f"model: puts a hook on a gradient{place_in(''.join(traceback.format_stack()))}, "
        "which no graph can hold",
        cure=_HOOK_CURE,
    )
