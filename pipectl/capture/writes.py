"""What no run of a captured graph may write, and no backward of it may give."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from torch import Tensor, nn

from pipectl.capture.graph import CapturedGraph
from pipectl.capture.model_with_loss import own_name
from pipectl.capture.operators import arguments_by_name, with_inner
from pipectl.capture.refusals import Refusal, RefusedError, overlaps, place_of_node


def refuse_writes(graph: CapturedGraph, *, training: bool) -> None:
    """Raise if a run of the graph writes a parameter, a tensor that is not a state of the model, or
    what the backward needs as it was.

    Several operators, replicas and recomputed forwards each have their own copy of a parameter,
    which a write in one of them would not reach. No checkpoint contains other tensors.

    Raises:
        CaptureError: naming what is written, and the line that writes it.
    """
    for placeholder, writer in graph.written.items():
        state = graph.states.get(placeholder)
        if state is not None and state.kind != "buffer":
            is_constant = state.kind == "constant"
            refusal = Refusal.TENSOR_WRITTEN if is_constant else Refusal.PARAMETER_WRITTEN
            place = place_of_node(graph.operators[graph.position[writer]])
            raise refusal.error(place, name=own_name(state.name))
    for value, (saved_at, written_at) in graph.spoilt.items() if training else ():
        state = graph.states.get(value)
        name = repr(value if state is None else own_name(state.name))
        need = place_of_node(saved_at)
        raise Refusal.SAVED_WRITTEN.error(place_of_node(written_at), name=name, need=need)


def refuse_aliases(
    graph: CapturedGraph, states: Mapping[str, Tensor], written: Collection[str]
) -> None:
    """Raise if the graph reads a constant in the memory of a state that changes.

    Args:
        states: parameters and buffers by full name.
        written: full names of the buffers that forwards write.

    Raises:
        CaptureError: naming the state, and the line that reads.
    """
    constants = {
        n: graph.constants[s.name] for n, s in graph.states.items() if s.kind == "constant"
    }
    tensors: dict[tuple[bool, str], Tensor] = {
        (True, placeholder): tensor
        for placeholder, tensor in constants.items()
        if placeholder in graph.users and isinstance(tensor, Tensor)
    }
    for name, tensor in states.items():
        if name in written or (isinstance(tensor, nn.Parameter) and tensor.requires_grad):
            tensors[False, name] = tensor
    for pair in overlaps(tensors, lambda one, other: one[0] is not other[0]):
        (_, name), (_, placeholder) = sorted(pair)
        place = place_of_node(graph.operators[graph.position[graph.users[placeholder][0]]])
        raise Refusal.ALIAS.error(place, name=own_name(name))


def refuse_reads(read: Mapping[str, RefusedError], graphs: Iterable[CapturedGraph]) -> None:
    """Raise if an operator reads a buffer that it does not get, and that a run of a graph changes.

    Args:
        read: such buffers by full name, each with its refusal.

    Raises:
        RefusedError: the first of these.
    """
    changed = {name for graph in graphs for name in graph.changed_buffers}
    for name, refusal in read.items():
        if name in changed:
            raise refusal


def refuse_sparse(graph: CapturedGraph) -> None:
    """Raise if the backward of an operator gives sparse gradients.

    Raises:
        CaptureError: naming the operator and its line.
    """
    for node in graph.operators:
        for inner in with_inner(node, graph.root) if graph.requires_grad[node.name] else ():
            schema = getattr(inner.target, "_schema", None)
            given = {} if schema is None else arguments_by_name(schema, inner.args, inner.kwargs)
            flag = next((name for name in ("sparse", "sparse_grad") if given.get(name) is True), "")
            if flag:
                place = place_of_node(inner) or place_of_node(node)
                raise Refusal.SPARSE.error(place, name=repr(node.name), how=f" ({flag}=True)")
