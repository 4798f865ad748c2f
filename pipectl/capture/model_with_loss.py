"""What is exported: ``(inputs, targets) -> loss, outputs``, a wrapper of the user's model and loss.

Names in the wrapper are full names (``model.blocks.0.weight``); own names are those in the user's
model (``blocks.0.weight``).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.autograd.graph import Node

from pipectl.capture.tensors import storage_of
from pipectl.errors import CaptureError
from pipectl.torch_api import (
    buffers_of,
    get_proxy_mode,
    get_proxy_slot,
    parameters_of,
    pytree,
    unused_checkpoints,
    version_of,
)

Loss = Callable[[Any, Any], Tensor]
Call = Callable[[nn.Module, Any], Any]
# No strings: among the outputs of a graph they name operators.
_PLAIN = (Tensor, int, float, bool, torch.SymInt, torch.SymFloat, torch.SymBool)
NORMS = (
    nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm,
    nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d,
)  # fmt: skip
_MODEL = "model"
_WITHIN = f"{_MODEL}."
_IN_LOSS = "loss."
_KEY = "pipectl_assigned"
_CLONE = torch.ops.aten.clone.default


def in_model(name: str) -> bool:
    """Return whether a parameter, buffer or submodule of the wrapper is one of the user's model."""
    return name.startswith(_WITHIN)


def full_name(name: str) -> str:
    """Return the name in the wrapper of a parameter, buffer or submodule of the user's model."""
    return f"{_WITHIN}{name}"


def own_name(name: str) -> str:
    """Return the name in the user's model."""
    return name.removeprefix(_WITHIN)


def name_in_loss(name: str) -> str | None:
    """Return the name of a parameter or buffer of the wrapper in the user's loss; None if the loss
    has none of it.
    """
    return name.removeprefix(_IN_LOSS) if name.startswith(_IN_LOSS) else None


def own_path(path: str) -> str:
    """Return the path of a module in the user's model; empty for the model itself."""
    return "" if path == _MODEL else own_name(path)


class ModelWithLoss(nn.Module):
    """A wrapper whose forward is one micro-batch through model and loss.

    Args:
        model: the user's, unchanged.
        loss: called with (outputs, targets); None if the model returns its own loss.
        with_outputs: whether to return the outputs too, for metrics.
        call: called with (model, inputs) for the outputs.

    Attributes:
        arithmetic: the type to which inputs in float32 are converted; outputs are converted back
            before the loss. None leaves both as they are. See :mod:`.half_weights`.
    """

    def __init__(
        self, model: nn.Module, loss: Loss | None, *, with_outputs: bool, call: Call | None = None
    ) -> None:
        super().__init__()
        self._call = _call_model if call is None else call
        self.model = model
        is_function = callable(loss) and not isinstance(loss, nn.Module)
        self.loss = _LossFunction(loss) if is_function else loss  # type: ignore[arg-type]
        self.with_outputs = with_outputs
        self.arithmetic: torch.dtype | None = None

    def forward(self, inputs: Any, targets: Any) -> Any:
        """Return the loss, and the outputs if they are wanted."""
        states = States(self)
        tensors = states.now()
        context: AbstractContextManager[dict[int, Tensor]] = nullcontext({})
        if get_proxy_mode() is not None:
            context = states.replaced(tensors)
        with context as assigned:
            if self.arithmetic is not None:
                inputs = _convert(inputs, torch.float32, self.arithmetic)
            outputs = self._call(self.model, inputs)
            if self.arithmetic is not None:
                outputs = _convert(register_dataclasses(outputs), self.arithmetic, torch.float32)
            loss = loss_of_outputs(outputs) if self.loss is None else self.loss(outputs, targets)
            check_loss(loss, outputs if self.loss is None else None)
        # An export drops what is assigned, outside the outermost module, but keeps writes. A value
        # may be another buffer, as in a swap: all are read before the first write.
        written = {storage_of(tensors[index]) for index in assigned}
        new = {
            index: value.detach().clone() if _is_within(value, written) else value.detach()
            for index, value in assigned.items()
        }
        for index, value in new.items():
            _trace_write(tensors[index], value)
        return (loss, make_exportable(outputs)) if self.with_outputs else loss


def _call_model(model: nn.Module, inputs: Any) -> Any:
    return model(**inputs) if isinstance(inputs, Mapping) else model(inputs)


def _convert(values: Any, source: torch.dtype, target: torch.dtype) -> Any:
    """Return values with tensors of one type in another."""
    return pytree.tree_map_only(
        Tensor, lambda tensor: tensor.to(target) if tensor.dtype is source else tensor, values
    )


class States:
    """The parameters and buffers of a module and its submodules, tied ones once.

    Args:
        path: of the module in the wrapper.

    Attributes:
        names: in the user's model.
        parameters, buffers: indices of each.
        statistics: indices of the running statistics of torch's norms.
    """

    def __init__(self, module: nn.Module, path: str = "") -> None:
        self._module = module
        self.names: list[str] = []
        self._places: list[list[tuple[dict[str, Any], str]]] = []
        self._all_names: list[list[str]] = []
        self._are_parameters: list[bool] = []
        index_of: dict[int, int] = {}
        for prefix, owner in module.named_modules(prefix=path):
            for entries in (parameters_of(owner), buffers_of(owner)):
                for name, tensor in entries.items():
                    if not isinstance(tensor, Tensor):
                        continue
                    index = index_of.setdefault(id(tensor), len(index_of))
                    if index == len(self.names):
                        self.names.append(own_name(f"{prefix}.{name}"))
                        self._places.append([])
                        self._all_names.append([])
                        self._are_parameters.append(entries is parameters_of(owner))
                    self._places[index].append((entries, name))
                    self._all_names[index].append(own_name(f"{prefix}.{name}"))
        self.parameters = [i for i, trained in enumerate(self._are_parameters) if trained]
        self.buffers = [i for i, trained in enumerate(self._are_parameters) if not trained]
        of_norms = {id(buffers_of(m)) for m in module.modules() if type(m) in NORMS}
        self.statistics = [i for i in self.buffers if id(self._places[i][0][0]) in of_norms]

    def now(self) -> list[Tensor]:
        """Return the tensors that are in the module at present."""
        return [entries[name] for (entries, name), *_ in self._places]

    @contextmanager
    def replaced(self, tensors: Sequence[Tensor]) -> Iterator[dict[int, Tensor]]:
        """Put other tensors into the module.

        The result has, when the context ends, what the module has assigned to buffers, by index;
        the caller writes it to the tensors. ``torch.func.functional_call`` puts tensors into a
        module, too, but looks up all names in every call.

        Raises:
            CaptureError: a parameter is replaced, or a buffer is cleared, or changes its shape, or
                its type to one whose values it cannot hold; or it gets the memory of a state that
                is written.
        """
        before, shapes = self.now(), [tensor.shape for tensor in tensors]
        versions = [version_of(tensor) for tensor in tensors]
        assigned: dict[int, Tensor] = {}
        self.assign(dict(enumerate(tensors)))
        try:
            yield assigned
            for index, (tensor, places) in enumerate(zip(tensors, self._places, strict=True)):
                for entries, name in places:
                    now = entries.get(name)
                    if now is not tensor or tensor.shape != shapes[index]:
                        assigned[index] = self._checked(index, tensor.dtype, shapes[index], now)
                self._check_tie(index)
            writes = zip(tensors, versions, strict=True)
            self._check_memory(
                assigned, {i for i, (t, old) in enumerate(writes) if version_of(t) != old}
            )
        finally:
            self.assign(dict(enumerate(before)))

    def call_module(
        self,
        tensors: Sequence[Tensor],
        args: Any,
        kwargs: Any,
        watch: AbstractContextManager[object] | None = None,
    ) -> tuple[Any, dict[int, Tensor], frozenset[int], frozenset[int]]:
        """Call the module with other tensors; it gets copies of buffers.

        What is recomputed is planned (``pipeline.recompute``), so it recomputes nothing by itself.

        Args:
            watch: a context for the code of the module alone.

        Returns:
            Its result; new values of its buffers by index, without gradients; which of these it has
            written in place, not assigned, so that all who hold the buffer see it; and which have a
            gradient in the module.
        """
        pairs = zip(tensors, self._are_parameters, strict=True)
        lent = [t if is_parameter else t.detach().clone() for t, is_parameter in pairs]
        with unused_checkpoints(), self.replaced(lent) as assigned, watch or nullcontext():
            result = self._module(*args, **kwargs)
        own = {index: lent[index] for index in self.buffers}
        written = frozenset(i for i in own.keys() - assigned.keys() if version_of(own[i]))
        trained = frozenset(i for i, b in {**own, **assigned}.items() if b.requires_grad)
        values = {index: buffer.detach() for index, buffer in own.items()}
        for index, value in assigned.items():
            values[index] = torch.empty_like(values[index]).copy_(value.detach())
        return result, values, written, trained

    def lend_to_backwards(
        self,
        nodes: Iterable[Node],
        tensors: Sequence[Tensor],
        context: Callable[[], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        """Put the tensors of a call into the module while some of its nodes run their backward.

        Functions of the user may run the module again there.

        Args:
            context: makes what each of these backwards runs in.
        """
        entered: list[tuple[list[Tensor], AbstractContextManager[object]]] = []

        def enter(*_: object) -> None:
            entered.append((self.now(), context()))
            entered[-1][1].__enter__()
            self.assign(dict(enumerate(tensors)))

        def leave(*_: object) -> None:
            before, own = entered.pop()
            self.assign(dict(enumerate(before)))
            own.__exit__(None, None, None)

        for node in nodes:
            node.register_prehook(enter)
            node.register_hook(leave)

    def _checked(
        self, index: int, dtype: torch.dtype, shape: torch.Size, now: Tensor | None
    ) -> Tensor:
        """Return what the module has assigned."""
        name = self.names[index]
        if self._are_parameters[index]:
            raise CaptureError(
                f"model: its forward replaces the parameter {name!r}, which no optimizer would "
                "update",
                hint="compute with the new values instead: torch.nn.functional.linear(x, weight), "
                "or torch.func.functional_call(module, weights, x)",
            )
        if now is None:
            raise CaptureError(
                f"model: its forward clears the buffer {name!r}, which each step of a pipeline "
                "would begin with again",
                hint="leave its values, and let a second buffer tell whether they count, to choose "
                "with torch.where",
            )
        if now.shape != shape:
            raise CaptureError(
                f"model: changes the shape of buffer {name!r} from {list(shape)} to "
                f"{list(now.shape)}",
                hint="give it its final shape in the factory; observers of quantisation get it "
                "there when the prepared model runs once on a batch",
            )
        if not torch.can_cast(now.dtype, dtype):
            raise CaptureError(
                f"model: changes the type of buffer {name!r} from {dtype} to {now.dtype}",
                hint="give it this type in the factory",
            )
        return now

    def _check_tie(self, index: int) -> None:
        """Raise if the places of a buffer no longer have one tensor."""
        first, *others = (entries.get(name) for entries, name in self._places[index])
        other = next((i for i, each in enumerate(others, 1) if each is not first), None)
        if other is not None:
            names = self._all_names[index]
            raise tie_error(names[0], repr(names[other]))

    def _check_memory(self, assigned: Iterable[int], written: Collection[int]) -> None:
        """Raise if the module has left two states in one memory, and a later step writes one.

        Args:
            assigned: indices of the buffers that it has assigned.
            written: indices of the states that it has written in place.
        """
        if not assigned:
            return
        now, sharing = self.now(), dict[int, list[int]]()
        for index, tensor in enumerate(now):
            if tensor.layout is torch.strided:
                sharing.setdefault(storage_of(tensor), []).append(index)
        for index in assigned:
            for other in sharing.get(storage_of(now[index]), ()):
                if other == index:
                    continue
                is_trained = self._are_parameters[other] and now[other].requires_grad
                if is_trained or not {index, other}.isdisjoint(written):
                    one, two = self.names[index], self.names[other]
                    raise CaptureError(
                        f"model: its forward lets the buffer {one!r} share the memory of {two!r}, "
                        "so that a later write in place would change both",
                        hint="assign a copy: value.detach().clone()",
                    )

    def assign(self, tensors: Mapping[int, Tensor]) -> None:
        """Put tensors into the module, by index."""
        for index, tensor in tensors.items():
            for entries, name in self._places[index]:
                entries[name] = tensor


def tie_error(name: str, other: str) -> CaptureError:
    """Return the refusal of a forward that assigns a buffer in one of its places alone."""
    return CaptureError(
        f"model: {name!r} and {other} are one buffer, and its forward assigns them different "
        "tensors, which parts them",
        hint="write it in place (buffer.copy_(value)) to keep both the same, or give each module a "
        "buffer of its own (.clone())",
    )


def _is_within(tensor: Tensor, memories: Collection[int]) -> bool:
    return tensor.layout is torch.strided and storage_of(tensor) in memories


def _trace_write(buffer: Tensor, value: Tensor) -> None:
    """Write what the forward has assigned to a buffer, by a marked operator."""
    mode: Any = get_proxy_mode()
    buffer.copy_(value)
    slot: Any = get_proxy_slot(buffer, mode.tracer)
    slot.proxy.node.meta[_KEY] = True


def is_assignment(node: fx.Node) -> bool:
    """Return whether an operator writes what the forward has assigned to a buffer."""
    return _KEY in node.meta


def copy_assigned(graph: fx.Graph) -> list[fx.Node]:
    """Let all that reads a buffer which the forward assigns read a copy, made before.

    An assignment leaves the earlier tensor as it was: autograd may have saved it, or another buffer
    may get it.

    Returns:
        The operators that copy, each with the buffer as its argument.
    """
    copies = []
    for write in filter(is_assignment, [*graph.nodes]):
        buffer, value = write.all_input_nodes
        while buffer.op != "placeholder":  # written in place before
            buffer = buffer.all_input_nodes[0]
        reader = next(node for node in graph.nodes if buffer in node.all_input_nodes)
        if reader is not write:
            with graph.inserting_before(reader):
                copy = graph.create_node("call_function", _CLONE, (buffer,), name="clone")
            copy.meta = {**reader.meta, "val": buffer.meta["val"]}
            for user in [user for user in buffer.users if user is not copy]:
                user.replace_input_with(buffer, copy)
            copies.append(copy)
        write.args = buffer, value
    return copies


class _LossFunction(nn.Module):
    """Makes a loss function a module of the wrapper."""

    def __init__(self, function: Loss) -> None:
        super().__init__()
        self._function = function

    def forward(self, outputs: Any, targets: Any) -> Tensor:
        return self._function(outputs, targets)


def as_module(model: Any, factory: str) -> nn.Module:
    """Return the model; a list of layers becomes a module that calls them in order."""
    layers = list(model) if isinstance(model, list | tuple | nn.ModuleList) else []
    wrong = next((layer for layer in layers if not isinstance(layer, nn.Module)), None)
    if layers and wrong is None:
        return nn.Sequential(*layers)
    if isinstance(model, nn.Module) and not isinstance(model, nn.ModuleList):
        return model
    kind = f"a {type(model).__name__}" + (f" with a {type(wrong).__name__}" if layers else "")
    raise CaptureError(
        f"model.factory: {factory}: returned {kind}, not a torch.nn.Module",
        hint="return the model, or a list of layers, from this function",
    )


def loss_of_outputs(outputs: Any) -> Any:
    """Return a model's loss: ``.loss``, ``["loss"]``, the first item, or the output itself."""
    if isinstance(outputs, Mapping):
        return outputs.get("loss")
    if isinstance(outputs, Tensor):
        return outputs
    if isinstance(outputs, tuple | list) and outputs and not hasattr(outputs, "loss"):
        return outputs[0]
    return getattr(outputs, "loss", None)


def make_exportable(outputs: Any) -> Any:
    """Return a model's output in a form that export accepts.

    Dataclasses are registered with torch; objects without plain data (caches, for example) become
    None.
    """
    known = register_dataclasses(outputs)
    return pytree.tree_map(lambda leaf: leaf if isinstance(leaf, _PLAIN) else None, known)


def register_dataclasses(value: Any) -> Any:
    """Register all dataclasses in a value with torch, so that it can be flattened."""
    for leaf in pytree.tree_leaves(value):
        if dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
            torch.export.register_dataclass(type(leaf))
            return register_dataclasses(value)
    return value


def check_loss(loss: Any, outputs: Any = None) -> None:
    """Raise unless the loss can be trained on.

    Args:
        outputs: what the model returned, if the loss is a part of it.

    Raises:
        CaptureError: the loss is not a floating-point scalar.
    """
    if loss is None and isinstance(outputs, Mapping):
        keys = ", ".join(map(repr, outputs))
        raise CaptureError(
            f"loss: the model returned a mapping with {keys or 'nothing'}, but no 'loss'",
            hint="return the scalar to be minimised under 'loss'; models with several optimizers "
            "(GANs) are not supported",
        )
    if loss is None and outputs is not None:
        raise CaptureError(
            f"loss: the model returned a {type(outputs).__name__} without a loss",
            hint="return the scalar to be minimised as its .loss, or alone, or first: "
            "return loss, logits",
        )
    if not isinstance(loss, Tensor):
        kind = f"a {type(loss).__name__}"
    elif loss.dim() != 0:
        sizes = [str(size) if type(size) is int else "batch" for size in loss.shape]
        kind = f"a tensor of shape [{', '.join(sizes)}]"
    elif not _is_loss(loss):
        kind = f"a scalar of {loss.dtype}"
    else:
        return
    hint = "reduce it, for example with .mean(), or name a loss: function in the spec"
    if isinstance(loss, tuple | Mapping):
        hint = "return the scalar to be minimised alone; evaluation.metrics may compute more"
    elif isinstance(outputs, tuple | list) and loss is outputs[0]:
        kind += ", the first item that the model returned"
        losses = [place for place, item in enumerate(outputs) if _is_loss(item)]
        hint = "let the model return its loss first: return loss, logits"
        if len(losses) == 1:
            hint += f"; item number {1 + losses[0]} is such a scalar"
    raise CaptureError(f"loss: must be a floating-point scalar tensor, but is {kind}", hint=hint)


def _is_loss(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dim() == 0 and value.is_floating_point()
