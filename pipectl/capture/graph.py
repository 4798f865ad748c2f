"""The captured graph: operators in order, what they read, and which must share a stage.

An in-place operator creates an order that no edge shows: some operators read before the write, some
after it. The graph runs once on fake tensors, which shows the operators that share a storage. All
operators that use a storage up to its last write stay in one stage, which keeps the graph order.
"""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, fx
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind

from pipectl.capture.buckets import field_of
from pipectl.capture.factories import is_torch_code
from pipectl.capture.fake_run import FakeRun
from pipectl.capture.leaves import Beside
from pipectl.capture.model_with_loss import copy_assigned
from pipectl.capture.operators import calling_module
from pipectl.capture.refusals import Refusal, place_of_node
from pipectl.capture.regions import WHOLE, region_of
from pipectl.capture.tensors import storage_of, storages_in, tensors_in
from pipectl.errors import CaptureError
from pipectl.torch_api import (
    CHECKS,
    part_of,
    place_of_guard,
    pytree,
    version_of,
)

_KEEP_POSITIONS = tuple(
    f"aten.{name}."
    for name in (
        "alias", "clamp", "clone", "contiguous", "detach", "lift_fresh_copy", "masked_fill",
        "reshape", "slice", "to", "_to_copy", "_unsafe_view", "view", "where",
    )
)  # fmt: skip
"""Operators that may lie between token ids and their embedding."""
Place = tuple[pytree.KeyEntry, ...]
"""Of a leaf in ``(inputs, targets)``: the keys, fields and indices that lead to it."""


@dataclass(frozen=True)
class State:
    """A parameter, buffer or constant that the graph reads.

    Args:
        name: full name within the wrapper, for example ``model.blocks.0.weight``.
        kind: ``parameter``, ``buffer`` or ``constant``.
    """

    name: str
    kind: str


class CapturedGraph:
    """An exported graph (training or evaluation) that can be cut.

    Args:
        states: parameters and buffers by full name, tied ones once.
        tied: further names of tied states to the name in ``states``.
        example: the ``(inputs, targets)`` that it was exported with.
        samples: their number in the example.
        length: padded length of its sequences; 0 without buckets.
        padded: names of the fields that are padded.

    Attributes:
        states: parameters, buffers and constants by placeholder name.
        inputs: contents of the batch by placeholder name, in pytree order of (inputs, targets):
            tensors without values, and everything else unchanged.
        places: the place of each of ``inputs`` in a batch.
        operators: nodes that compute, in graph order. Each is an operator of the profile; its name
            is the operator's id.
        loss: name of the node that computes the loss.
        outputs: what the model returned, flattened: names of tensors, nodes of sizes, or constants.
        output_spec: pytree structure of ``outputs``.
        groups: a group's id for every operator that must share a stage with others.
        requires_grad: whether the operator's value has a gradient after all its writes.
        last_writer: for values that are written after they are computed: the last operator that
            writes them.
        rewritten: placeholders of the buffers that are written by an operator other than a norm,
            without those that are assigned: the graph itself copies these.
        written: placeholders of all states and inputs that are written, with the operator of the
            last write.
        spoilt: operators that have saved for their backward what the model writes in place later:
            the first such operator, and the last that writes, by the value's name.
        changed_buffers: full names of the buffers that a run changes.
        carried: full names of those of them that the loss of later runs depends on, each with the
            operator of its last write; see :mod:`.carried`.
        beside: what else the exported micro-batch held, and what of it the graph depends on.
        samples: of the exported micro-batch; if ``fixed``, the only number for which the graph is
            valid.
        length: the exported sequence length; others are valid if the length is free.
        symbols: the symbols for the number of samples in sizes; none if ``fixed``.
    """

    def __init__(
        self,
        program: ExportedProgram,
        states: Mapping[str, Tensor],
        tied: Mapping[str, str],
        example: tuple[Any, Any],
        beside: Beside,
        samples: int,
        length: int = 0,
        padded: Collection[str] = (),
    ) -> None:
        self.root = program.graph_module
        self.graph = program.graph
        self.samples, self.length, self.beside = samples, length, beside
        self.states, self.inputs = _placeholders(program, tied)
        leaves, _ = pytree.tree_flatten_with_path(example)
        self.places: dict[str, Place] = {
            name: place for name, (place, _) in zip(self.inputs, leaves, strict=True)
        }
        self._merge_tied()
        copies = copy_assigned(self.graph)
        self.operators = tuple(n for n in self.graph.nodes if _computes(n))
        self.constants: dict[str, Any] = dict(program.constants)
        tensors = {n: v for n, v in self.inputs.items() if isinstance(v, Tensor) and v.dim()}
        self._sequences = {
            name: tensor
            for name, tensor in tensors.items()
            if length and tensor.dim() > 1 and field_of(self.places[name]) in padded
        }
        sequences = [tensor.shape[1] for tensor in self._sequences.values()]
        counts = [tensor.shape[0] for tensor in tensors.values()]
        self.symbols, self._lengths = _symbols(counts), _symbols(sequences)
        self._conditions = _conditions([*counts, *sequences], self.symbols | self._lengths)
        self.fixed = not self.symbols
        self.requires_grad: dict[str, bool] = {}
        self.last_writer: dict[str, str] = {}
        self.rewritten: set[str] = set()
        self.written: dict[str, str] = {}
        run = self._run_on_fake_tensors(states)
        self.groups = run.groups(copies)
        self._follow_writes(run)
        self.rewritten.difference_update(copy.all_input_nodes[0].name for copy in copies)
        loss, *outputs = next(n for n in program.graph.nodes if n.op == "output").args[0]
        self.loss: str = loss.name
        self.outputs = tuple(
            item.name
            if isinstance(item, fx.Node) and isinstance(item.meta.get("val"), Tensor)
            else item
            for item in outputs
        )
        self.spoilt = self._find_spoilt(run)
        of_loss = next(value for node, value in run.values.items() if node.name == self.loss)
        self.changed_buffers = {self.states[name].name for name in run.dependence.changed}
        carried = run.dependence.changed & run.dependence.of(of_loss)
        self.carried = {self.states[name].name: self.written[name] for name in sorted(carried)}
        spec = program.call_spec.out_spec
        self.output_spec: Any = part_of(spec, 1) if outputs and spec is not None else None

    @cached_property
    def used_constants(self) -> dict[str, Tensor]:
        """The tensors of the model that operators read and that are neither parameters nor buffers,
        by placeholder; those with values alone."""
        used = {n: state for n, state in self.states.items() if self.users.get(n)}
        constants = {n: self.constants[s.name] for n, s in used.items() if s.kind == "constant"}
        return {
            name: tensor
            for name, tensor in constants.items()
            if type(tensor) is Tensor and not tensor.is_meta and tensor.layout is torch.strided
        }

    @cached_property
    def tokens_per_sample(self) -> int:
        """Length of the sequences of token ids that the model reads; 0 if it reads none.

        These are its first input of integers with the two dimensions (samples, positions) that are
        padded, or the indices of an embedding. Others, such as columns of a table, are no tokens.
        """
        for name, value in self.inputs.items():
            is_input = self.places[name][0] == pytree.SequenceKey(0)
            if is_input and isinstance(value, Tensor) and value.dim() == 2:
                is_integer = not (value.is_floating_point() or value.is_complex())
                if not is_integer or value.dtype == torch.bool:
                    continue
                if name in self._sequences or self._has_embedding(name):
                    length = value.shape[1]
                    return length if isinstance(length, int) else self.length
        return 0

    def _has_embedding(self, name: str) -> bool:
        """Whether an input, or a view or copy of it, is the indices of an embedding."""
        values = [next(node for node in self.graph.nodes if node.name == name)]
        for value in values:  # grows
            for user in value.users:
                target = str(user.target)
                if target.startswith("aten.embedding.") and user.args[1] is value:
                    return True
                if target.startswith(_KEEP_POSITIONS) and user not in values:
                    values.append(user)
        return False

    def holds_for(self, samples: int, length: int = 0) -> bool:
        """Return whether the graph is valid for micro-batches of another size.

        Conditions on the size itself (``if len(x) > 8``) were decided when the model was captured.

        Args:
            samples: of the micro-batch.
            length: of its sequences.
        """
        if self.fixed and samples != self.samples:
            return False
        if not self._lengths and length != self.length:
            return False
        sizes = self._sizes(samples, length)
        return all(condition.xreplace(sizes) != False for condition in self._conditions)  # noqa: E712

    @cached_property
    def position(self) -> dict[str, int]:
        """Index of every operator by name."""
        return {node.name: index for index, node in enumerate(self.operators)}

    @property
    def written_buffers(self) -> set[str]:
        """Full names of the buffers that a run of the graph writes."""
        states = [self.states[name] for name in self.written if name in self.states]
        return {state.name for state in states if state.kind == "buffer"}

    @cached_property
    def users(self) -> dict[str, tuple[str, ...]]:
        """The operators that read each value, state and input, in graph order."""
        users: dict[str, list[str]] = {}
        for node in self.operators:
            for source in self.tensor_inputs(node):
                users.setdefault(source.name, []).append(node.name)
        return {name: tuple(readers) for name, readers in users.items()}

    def last_use(self, value: str) -> int:
        """Return the position of the last operator that reads a value; -1 if none does."""
        users = self.users.get(value, ("",))
        return self.position.get(users[-1], -1)

    @cached_property
    def edges(self) -> tuple[tuple[str, str], ...]:
        """(producer, consumer) pairs of operators, in the order of the producers."""
        return tuple(
            (node.name, user) for node in self.operators for user in self.users.get(node.name, ())
        )

    @cached_property
    def signatures(self) -> dict[str, str]:
        """A short digest of every operator: its name, target and arguments."""
        return {node.name: _digest(self._describe(node)) for node in self.operators}

    @cached_property
    def fingerprint(self) -> str:
        """Digest of the whole graph; equal for equal models with any weights."""
        states = [f"{name}={state}" for name, state in self.states.items()]
        entering = self.graph.find_nodes(op="placeholder")
        shapes = [self._describe(n) for n in entering if isinstance(n.meta["val"], Tensor)]
        return _digest("\n".join([*states, *shapes, *self.signatures.values(), self.loss]), 32)

    def tensor_inputs(self, node: fx.Node) -> list[fx.Node]:
        """Return the nodes whose tensors an operator reads, without sizes."""
        return [source for source in node.all_input_nodes if not self.has_no_tensor(source)]

    def states_of(self, node: fx.Node) -> list[State]:
        """Return the parameters, buffers and constants that an operator reads."""
        names = (source.name for source in node.all_input_nodes)
        return [self.states[name] for name in names if name in self.states]

    def sample_dimensions(self, value: Any) -> list[int]:
        """Return the dimensions of a captured value that count samples; none if no tensor."""
        sizes: Sequence[Any] = value.shape if isinstance(value, Tensor) else ()
        return [
            dim
            for dim, size in enumerate(sizes)
            if isinstance(size, torch.SymInt) and size.node.expr.free_symbols & self.symbols
        ]

    def has_no_tensor(self, node: fx.Node) -> bool:
        """Return whether a node is a number that follows from that of samples, a check of values,
        or a subgraph.
        """
        if node.op == "get_attr":
            return True
        return node.op == "call_function" and not _computes(node)

    def input_shape(self, name: str, samples: int, length: int = 0) -> tuple[int, ...]:
        """Return the shape of an input tensor in a micro-batch of ``samples``.

        Args:
            name: of its placeholder.
        """
        shape = self.inputs[name].shape
        return tuple(
            size if isinstance(size, int) else (samples, length)[dim]
            for dim, size in enumerate(shape)
        )

    def shape_of(self, value: Tensor, samples: int, length: int = 0) -> tuple[int, ...]:
        """Return the shape of a captured value for a micro-batch of ``samples``."""
        known, sizes = self._sizes(samples, length), list[int]()
        for size in value.shape:
            node = getattr(size, "node", None)
            if node is None:
                sizes.append(size)
            else:  # a graph may be fixed because of one tensor, while those of others are free
                others = dict.fromkeys(node.expr.free_symbols - known.keys(), samples)
                sizes.append(int(node.expr.xreplace({**known, **others})))
        return tuple(sizes)

    def size_of_node(self, node: fx.Node, samples: int, length: int = 0) -> Any:
        """Return the value of a node that has no tensor for a micro-batch of ``samples``.

        Raises:
            CaptureError: it depends on more than the size of the micro-batch.
        """
        try:
            return self.size_of(node.meta.get("val"), samples, length)
        except ValueError:
            place, part = place_of_node(node), calling_module(node)
            if node.target is torch.ops.aten.item.default:
                raise Refusal.VALUES.error(place, part=part) from None
            place = f", not on the batch size{place}"
            raise Refusal.OPERATOR_SIZE.error(place, part=part, name=node.name) from None

    def size_of(self, value: Any, samples: int, length: int = 0) -> Any:
        """Return a size of the captured graph for a micro-batch of ``samples``.

        Raises:
            ValueError: it depends on more than the size of the micro-batch.
        """
        if not isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
            return value
        expression = value.node.expr.xreplace(self._sizes(samples, length))
        if getattr(expression, "free_symbols", None):
            raise ValueError(f"{expression} depends on the data")
        if isinstance(value, torch.SymFloat):
            return float(expression)
        return bool(expression) if isinstance(value, torch.SymBool) else int(expression)

    def difference(self, fingerprint: str | None, signatures: Mapping[str, str]) -> str | None:
        """Return where this graph first differs from the one with ``fingerprint``; None if it does
        not.
        """
        if fingerprint == self.fingerprint:
            return None
        for index, (mine, other) in enumerate(
            zip(self.signatures.items(), signatures.items(), strict=False)
        ):
            if mine[0] == other[0] and mine[1] != other[1]:
                return f"operator {index}, {mine[0]!r}, has other arguments here than there"
            if mine != other:
                return f"operator {index} is {mine[0]!r} here and {other[0]!r} there"
        if len(self.signatures) != len(signatures):
            return f"{len(self.signatures)} operators here and {len(signatures)} there"
        return "the operators agree, but parameters, inputs or the loss do not"

    def _sizes(self, samples: int, length: int) -> dict[Any, int]:
        return {**dict.fromkeys(self.symbols, samples), **dict.fromkeys(self._lengths, length)}

    def _describe(self, node: fx.Node) -> str:
        if node.op == "placeholder":
            value = node.meta["val"]
            shape = [str(size) if type(size) is int else "b" for size in value.shape]
            return f"{node.name}:{value.dtype}{shape[self.fixed :]}"
        region = region_of(node)
        target = f"{node.target}" if region == WHOLE else f"{node.target} in {region}"
        if self.fixed:  # sizes stand in the arguments, and another size is still the same model
            return f"{node.name}={target}"
        arguments = [_describe_argument(arg, self.root) for arg in (node.args, node.kwargs)]
        return f"{node.name}={target}{arguments}"

    def _merge_tied(self) -> None:
        """Use one placeholder for a state that has several names."""
        first: dict[State, fx.Node] = {}
        for node in self.graph.nodes:
            state = self.states.get(node.name) if node.op == "placeholder" else None
            if state is not None and first.setdefault(state, node) is not node:
                node.replace_all_uses_with(first[state])
                del self.states[node.name]

    def _run_on_fake_tensors(self, states: Mapping[str, Tensor]) -> FakeRun:
        """Run the graph for the exported number of samples."""
        tensors = {
            name: (self.constants if state.kind == "constant" else states)[state.name]
            for name, state in self.states.items()
        }
        buffers = [name for name, state in self.states.items() if state.kind == "buffer"]
        read = [node.name for node in self.graph.find_nodes(op="placeholder") if node.users]
        inputs = {name: value for name, value in self.inputs.items() if name in read}
        for name, value in inputs.items():
            if isinstance(value, Tensor):
                shape = self.input_shape(name, self.samples, self.length)
                inputs[name] = torch.empty(shape, dtype=value.dtype, device="meta")
        size_of_node = partial(self.size_of_node, samples=self.samples, length=self.length)
        return FakeRun(self.root, self.operators, tensors, buffers, inputs, size_of_node)

    def _follow_writes(self, run: FakeRun) -> None:
        """Set gradients, and the last operator that writes each value.

        ``y = relu_(x)`` returns ``x`` itself. Operators that read ``x`` later read ``y`` in an
        exported graph, so the edges show the order of the write and of later reads.
        """
        for node, value in run.values.items():
            last = max((run.last_write.get(s, -1) for s in storages_in(value)), default=-1)
            if node.op == "placeholder":
                if node.name in self.states and version_of(value) != run.first_version[node]:
                    self.rewritten.add(node.name)
                if last >= 0:
                    self.written[node.name] = self.operators[last].name
            elif node in run.index:
                # Only now: a write through a view may have given a value its gradient.
                self.requires_grad[node.name] = any(t.requires_grad for t in tensors_in(value))
                if last > run.index[node]:
                    self.last_writer[node.name] = self.operators[last].name

    def _find_spoilt(self, run: FakeRun) -> dict[str, tuple[fx.Node, fx.Node]]:
        in_backward = {self.loss}
        for node in reversed(self.operators):
            if node.name in in_backward:
                names = (source.name for source in node.all_input_nodes)
                in_backward.update(name for name in names if self.requires_grad.get(name))
        spoilt: dict[str, tuple[fx.Node, fx.Node]] = {}
        for reader, tensor, version in run.saved:
            storage = storage_of(tensor)
            if version_of(tensor) == version or reader.name not in in_backward:
                continue
            writer = self.operators[run.last_write[storage]]
            value = next(n for n, v in run.values.items() if storage in storages_in(v))
            spoilt.setdefault(value.name, (reader, writer))
        return spoilt


def _computes(node: fx.Node) -> bool:
    """Return whether a node is an operator: not a guard, and not only arithmetic on sizes."""
    if node.op != "call_function" or node.target in CHECKS:
        return False
    value = node.meta.get("val")
    if node.target is operator.getitem and isinstance(node.args[0], fx.Node):
        return _computes(node.args[0]) and isinstance(value, Tensor)
    return not isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool | int | float)


def _placeholders(
    program: ExportedProgram, tied: Mapping[str, str]
) -> tuple[dict[str, State], dict[str, Any]]:
    kinds = {
        InputKind.PARAMETER: "parameter",
        InputKind.BUFFER: "buffer",
        InputKind.CONSTANT_TENSOR: "constant",
    }
    states: dict[str, State] = {}
    inputs: dict[str, Any] = {}
    values = {
        node.name: node.meta.get("val") for node in program.graph.find_nodes(op="placeholder")
    }
    for spec in program.graph_signature.input_specs:
        name = getattr(spec.arg, "name", None)
        if spec.kind is InputKind.USER_INPUT:
            inputs[str(name)] = values.get(name)
        elif spec.kind in kinds and name is not None:
            full_name = str(spec.target)
            states[name] = State(tied.get(full_name, full_name), kinds[spec.kind])
        else:
            raise CaptureError(
                f"model: uses a {spec.kind.name.lower()}, which cannot be split over processes",
                hint="keep only tensors, parameters and buffers in the model's forward()",
            )
    return states, inputs


def _symbols(sizes: Sequence[Any]) -> frozenset[Any]:
    """Return the symbols of a size that is free in all tensors; none if it is a number in one.

    A tensor that nobody reads has its own symbol, even if all others have numbers.
    """
    if not all(isinstance(size, torch.SymInt) and size.node.expr.is_Symbol for size in sizes):
        return frozenset()
    return frozenset(size.node.expr for size in sizes)


def _conditions(sizes: Sequence[Any], symbols: frozenset[Any]) -> tuple[Any, ...]:
    """Return the conditions on free sizes that code outside torch asked for.

    The answers must be the same for other sizes. Torch itself asks again for every size.
    """
    free = [size for size in sizes if isinstance(size, torch.SymInt)]
    environments = {id(size.node.shape_env): size.node.shape_env for size in free}
    asked = []
    for environment in environments.values():
        guards = [each for each in environment.guards if not is_torch_code(place_of_guard(each))]
        # Symbols that turned out to be equal have one name.
        asked += [environment.replace(guard.expr) for guard in guards]
    return tuple(each for each in asked if each.free_symbols <= symbols)


def _describe_argument(argument: Any, root: fx.GraphModule) -> str:
    if isinstance(argument, fx.Node):
        if argument.op == "get_attr":
            return str(getattr(root.get_submodule(str(argument.target)), "code", argument.target))
        if isinstance(argument.meta.get("val"), torch.SymInt | torch.SymFloat | torch.SymBool):
            return "size"
        return f"%{argument.name}"
    if isinstance(argument, list | tuple):
        return "[" + ",".join(_describe_argument(item, root) for item in argument) + "]"
    if isinstance(argument, dict):
        return ",".join(f"{k}={_describe_argument(v, root)}" for k, v in argument.items())
    return str(argument)


def _digest(text: str, length: int = 12) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:length]
