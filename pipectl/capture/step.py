"""The wrapper that is exported: ``(inputs, targets) -> loss, outputs`` around model and loss."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from pipectl.capture.refusals import kept_parameters
from pipectl.errors import CaptureError

Loss = Callable[[Any, Any], Tensor]
# No strings: among the outputs of a graph they name operators.
_PLAIN = (Tensor, int, float, bool, torch.SymInt, torch.SymFloat, torch.SymBool)


class Step(nn.Module):
    """One micro-batch through model and loss.

    Args:
        model: the user's, unchanged.
        loss: called with (outputs, targets); None where the model returns its own loss.
        with_outputs: whether the outputs are wanted beside the loss, for metrics.
    """

    def __init__(self, model: nn.Module, loss: Loss | None, *, with_outputs: bool) -> None:
        super().__init__()
        self.model = model
        self.loss = _LossFunction(loss) if callable(loss) and not _is_module(loss) else loss
        self.with_outputs = with_outputs

    def forward(self, inputs: Any, targets: Any) -> Any:
        """The loss, and the outputs where they are wanted."""
        before = _buffers(self)
        shapes = {place: tensor.shape for place, tensor in before.items()}
        with kept_parameters(self):
            outputs = self.model(**inputs) if isinstance(inputs, Mapping) else self.model(inputs)
        loss = loss_of_outputs(outputs) if self.loss is None else self.loss(outputs, targets)
        check_loss(loss, outputs if self.loss is None else None)
        _write_assigned(before, shapes)
        return (loss, exportable(outputs)) if self.with_outputs else loss


class _LossFunction(nn.Module):
    """A loss that is no module, as one: it has a place in the step like any part of the model."""

    def __init__(self, function: Loss) -> None:
        super().__init__()
        self._function = function

    def forward(self, outputs: Any, targets: Any) -> Tensor:
        """The loss."""
        return self._function(outputs, targets)


def as_module(model: Any, factory: str) -> nn.Module:
    """The model; a list of layers is one that calls them in order."""
    layers = list(model) if isinstance(model, list | tuple | nn.ModuleList) else []
    wrong = next((layer for layer in layers if not isinstance(layer, nn.Module)), None)
    if layers and wrong is None:
        return nn.Sequential(*layers)
    if isinstance(model, nn.Module) and not isinstance(model, nn.ModuleList):
        return model
    found = f"a {type(model).__name__}" + (f" with a {type(wrong).__name__}" if layers else "")
    raise CaptureError(
        f"{factory}: returned {found}, not a torch.nn.Module",
        cure="return the model, or a list of layers, from this function",
    )


def _is_module(value: Any) -> bool:
    return isinstance(value, nn.Module)


_Buffers = dict[tuple[nn.Module, str], Tensor]


def _buffers(root: nn.Module) -> _Buffers:
    modules = root.modules()
    return {(m, n): t for m in modules for n, t in m._buffers.items() if t is not None}


def _write_assigned(before: _Buffers, shapes: Mapping[tuple[nn.Module, str], torch.Size]) -> None:
    """Write buffers that were assigned (``self.mean = ...``) into the memory of the old ones.

    An export keeps writes alone: torch drops what is assigned, outside the outermost module.
    """
    for (module, name), old in before.items():
        new = module._buffers[name]
        if new is not None and new.shape != shapes[module, name]:
            raise resized(name, shapes[module, name], new.shape)
        if new is not old and new is not None:
            old.copy_(new.detach())
            module._buffers[name] = old


def resized(name: str, before: torch.Size, after: torch.Size) -> CaptureError:
    """The error that a forward gives a buffer another shape."""
    return CaptureError(
        f"model: changes the shape of buffer {name!r} from {list(before)} to {list(after)}",
        cure="give it its final shape in the factory; observers of quantisation get it there when "
        "the prepared model runs once on a batch",
    )


def loss_of_outputs(outputs: Any) -> Any:
    """The loss in what a model returned: ``.loss``, ``["loss"]``, the first item, or itself."""
    if isinstance(outputs, Mapping):
        return outputs.get("loss")
    if isinstance(outputs, Tensor):
        return outputs
    if isinstance(outputs, tuple | list) and outputs:
        return outputs[0]
    return getattr(outputs, "loss", None)


def exportable(outputs: Any) -> Any:
    """What a model returned, in a form that export takes.

    Dataclasses are made known to torch; objects that hold no plain data (caches, say) become None.
    """
    known = make_known(outputs)
    return pytree.tree_map(lambda leaf: leaf if isinstance(leaf, _PLAIN) else None, known)


def make_known(value: Any) -> Any:
    """The value, whose dataclasses torch can take apart from now on."""
    for leaf in pytree.tree_leaves(value):
        if dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
            torch.export.register_dataclass(type(leaf))
            return make_known(value)
    return value


def check_loss(loss: Any, outputs: Any = None) -> None:
    """Refuse what cannot be trained on.

    Args:
        outputs: what the model returned, if the loss is a part of it.

    Raises:
        CaptureError: the loss is no floating-point scalar.
    """
    if loss is None and isinstance(outputs, Mapping):
        keys = ", ".join(map(repr, outputs))
        raise CaptureError(
            f"loss: the model returned a mapping with {keys or 'nothing'}, but no 'loss'",
            cure="return under 'loss' what is to be minimised: one scalar for one optimizer. What "
            "is trained by several in turns (a GAN) is not supported",
        )
    if not isinstance(loss, Tensor):
        found = f"a {type(loss).__name__}"
    elif loss.dim() != 0:
        sizes = [str(size) if type(size) is int else "batch" for size in loss.shape]
        found = f"a tensor of shape [{', '.join(sizes)}]"
    elif not loss.is_floating_point():
        found = f"a scalar of {loss.dtype}"
    else:
        return
    raise CaptureError(
        f"loss: must be a floating-point scalar tensor, but is {found}",
        cure="reduce it, for example with .mean(), or name a loss: function in the spec",
    )


def split_sample(batch: Any) -> tuple[Any, Any]:
    """A collated batch as (inputs, targets).

    A pair is taken as such, ``{"inputs": ..., "targets": ...}`` likewise; any other mapping goes
    to the model as keywords and, whole, to the loss.
    """
    if isinstance(batch, Mapping):
        if set(batch) == {"inputs", "targets"}:
            return batch["inputs"], batch["targets"]
        return dict(batch), dict(batch)
    if isinstance(batch, tuple | list) and len(batch) == 2:
        return batch[0], batch[1]
    raise CaptureError(
        f"data: a sample must be (inputs, targets) or a mapping, not {_describe(batch)}",
        cure="let the data set return pairs: several inputs or targets are a tuple or a dictionary "
        "in one, as in (inputs, (targets, weights))",
    )


def _describe(batch: Any) -> str:
    if isinstance(batch, tuple | list):
        return f"a {type(batch).__name__} of {len(batch)}"
    return f"a {type(batch).__name__}"


def seed_everything(seed: int) -> None:
    """Seed python, numpy and torch, so that a factory makes the same object on every rank."""
    import random

    import numpy as np

    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
