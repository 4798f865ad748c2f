"""Facts about the operators of a graph: which module calls them, what they write and draw."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from pipectl.capture.draws import is_custom
from pipectl.capture.factories import module_of
from pipectl.capture.opaque import Opaque
from pipectl.capture.randomness import Seeder, seed_libraries, seed_operator
from pipectl.torch_api import HigherOrderOperator, pytree

_DRAWS, _DRAWS_BACKWARD = "pipectl_draws", "pipectl_draws_backward"


def calling_module(node: fx.Node) -> str:
    """Return the path of the module that calls an operator; empty if it is not known."""
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    return str(stack[-1][0]) if stack else ""


def arguments_by_name(
    schema: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the arguments of a call by their names in the schema."""
    names = (argument.name for argument in schema.arguments)
    return {**dict(zip(names, args, strict=False)), **kwargs}


def written_tensors(
    target: Any, args: Sequence[Any], kwargs: Mapping[str, Any], *, statistics: bool = False
) -> list[Tensor]:
    """Return the arguments whose memory an operator writes, by its schema.

    Args:
        statistics: whether to add the running statistics of norms, which no schema mentions.
    """
    schema = getattr(target, "_schema", None)
    if schema is None:
        return []
    arguments = arguments_by_name(schema, args, kwargs)
    names = [a.name for a in schema.arguments if a.alias_info and a.alias_info.is_write]
    flags = ("training", "use_input_stats", "train") if statistics else ()
    if any(arguments.get(flag) is True for flag in flags):
        names += ["running_mean", "running_var"]
    leaves = pytree.tree_leaves([arguments.get(name) for name in names])
    return [leaf for leaf in leaves if isinstance(leaf, Tensor)]


def gives_views(operator: Any) -> bool:
    """Return whether the result may be a view of an argument that is not written."""
    returns = getattr(getattr(operator, "_schema", None), "returns", ())
    return any(each.alias_info and not each.alias_info.is_write for each in returns)


@dataclass(frozen=True)
class FunctionCall:
    """An autograd function as an operator of a graph."""

    function: type[torch.autograd.Function]

    @property
    def __name__(self) -> str:
        return self.function.__name__.strip("_").lower()

    def __repr__(self) -> str:
        # A part of the graph's fingerprint, which must not tell where the user's file lies.
        return f"{module_of(self.function)}.{self.function.__qualname__}"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Apply the function, with its own backward."""
        return self.function.apply(*args, **kwargs)  # type: ignore[no-untyped-call]


def seeder_of(node: fx.Node, root: fx.GraphModule) -> Seeder | None:
    """Return what seeds an operator before it runs; None if it draws no random numbers."""
    if runs(node, root, Opaque):
        return seed_libraries  # whether it draws may depend on values
    drawing = [inner.target for inner in with_inner(node, root) if _draws(inner)]
    if any(map(is_custom, drawing)):
        return seed_libraries
    return seed_operator if drawing else None


def draws_backward(node: fx.Node, root: fx.GraphModule) -> bool:
    """Return whether the backward of an operator may draw random numbers: it is user code."""
    return any(
        isinstance(inner.target, Opaque | FunctionCall)
        or (is_custom(inner.target) and bool(inner.meta.get(_DRAWS_BACKWARD, True)))
        for inner in with_inner(node, root)
    )


def custom_operators(root: fx.GraphModule) -> list[fx.Node]:
    """Return the custom operators of a graph and of its subgraphs."""
    graphs = (each.graph for each in root.modules() if isinstance(each, fx.GraphModule))
    return [node for graph in graphs for node in graph.nodes if is_custom(node.target)]


def mark_draws(
    operators: Iterable[fx.Node], drawing: Container[Any], *, backward: bool = False
) -> None:
    """Note at custom operators whether they, or their backwards, draw random numbers."""
    for node in operators:
        node.meta[_DRAWS_BACKWARD if backward else _DRAWS] = node.target in drawing


def is_random(node: fx.Node, root: fx.GraphModule) -> bool:
    """Return whether an operator, or a subgraph that it runs, may draw random numbers.

    Dropout with probability 0 (attention without dropout, for example) draws none.
    """
    return any(_draws(inner) for inner in with_inner(node, root))


def runs_own_code(node: fx.Node) -> bool:
    """Return whether an operator runs code whose autograd graph may differ between micro-batches: a
    submodule that stays one operator, or a choice between branches.
    """
    return isinstance(node.target, Opaque | HigherOrderOperator)


def runs(node: fx.Node, root: fx.GraphModule, kind: type) -> bool:
    """Return whether an operator, or a subgraph that it runs, calls a target of type ``kind``."""
    return any(isinstance(inner.target, kind) for inner in with_inner(node, root))


def with_inner(node: fx.Node, root: fx.GraphModule) -> Iterator[fx.Node]:
    """Yield an operator and those of the subgraphs that it runs."""
    yield node
    for source in node.all_input_nodes:
        body = root.get_submodule(str(source.target)) if source.op == "get_attr" else None
        if isinstance(body, fx.GraphModule):
            for inner in body.graph.nodes:
                if inner.op == "call_function":
                    yield from with_inner(inner, body)


def _draws(node: fx.Node) -> bool:
    if isinstance(node.target, Opaque):
        return node.target.outline.draws
    if isinstance(node.target, FunctionCall):
        return True
    if is_custom(node.target):
        return bool(node.meta.get(_DRAWS, True))
    if torch.Tag.nondeterministic_seeded not in getattr(node.target, "tags", ()):
        return False
    schema = getattr(node.target, "_schema", None)
    if schema is None:
        return True
    defaults = {argument.name: argument.default_value for argument in schema.arguments}
    arguments = {**defaults, **arguments_by_name(schema, node.args, node.kwargs)}
    probabilities = [arguments[name] for name in ("p", "dropout_p", "dropout") if name in arguments]
    off = any(arguments.get(name) is False for name in ("train", "training"))
    return not (off or (probabilities and all(value == 0 for value in probabilities)))
