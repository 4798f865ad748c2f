"""Building a model without memory for its tensors, and initialising each tensor later, on its own.

While a factory runs in :meth:`Deferred.build`, tensors have shapes but no values, and every
operator that writes one is recorded. :meth:`Deferred.make` runs the recorded operators on which one
tensor depends, this time on memory. So each parameter and buffer is initialised by its module's own
code (``reset_parameters``, a function of ``nn.init``, a table computed in ``__init__``),
independently of the others that are initialised in the same process.

A random draw is seeded by the name of the tensor that it is for and by its number in that tensor's
history, so adding or moving layers leaves the values of all others unchanged. A draw that reaches
several tensors (copies of a block, two halves of one tensor) belongs to the first of them in the
order of the model. If the factory looks at values, there are no names yet: the draws on which they
depend are seeded by their number in the whole factory.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from pipectl.capture.operators import written_tensors
from pipectl.capture.patches import copyable_without_values
from pipectl.capture.randomness import seed_of
from pipectl.capture.tensors import is_deferred, storage_of, storages_in
from pipectl.errors import CaptureError
from pipectl.torch_api import (
    DataDependentOutputException,
    FakeTensor,
    FakeTensorMode,
    TorchDispatchMode,
    pytree,
    without_modes,
)


class Write(NamedTuple):
    """A call that created or changed storages.

    Args:
        arguments: (args, kwargs).
        created: every tensor of the result that has a storage of its own, by its index.
        draw: number of the random draw in the factory; None for operators that draw nothing.
    """

    function: Any
    arguments: Any
    created: dict[int, Tensor]
    draw: int | None


class Deferred:
    """The operations by which a factory makes its tensors.

    Args:
        seed: of the run, for random operators.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._writes: list[Write] = []
        self._writes_of: dict[int, list[int]] = {}
        self._filled: set[int] = set()
        self._draws = 0
        self._origins: dict[int, tuple[str | int, ...]] = {}

    def build(self, factory: Callable[[], nn.Module]) -> nn.Module:
        """Return the model of a factory, whose parameters and buffers have no memory.

        Tensors in plain attributes of modules are made immediately: every rank needs them.

        Raises:
            CaptureError: the factory fails, perhaps because tensors have no values yet.
        """
        recorder = _Recorder(self)
        try:
            with copyable_without_values(), FakeTensorMode(allow_non_fake_inputs=True), recorder:
                model = factory()
        except CaptureError as error:
            raise CaptureError(
                f"{error.message}; with materialize: per_rank, tensors have no values until a "
                "rank needs them",
                hint="try materialize: eager with a small model; if that works, use only torch "
                "operators in the factory, and no .numpy() of a parameter",
            ) from error
        attributes = {
            f"{path}.{name}" if path else name: (module, name, value)
            for path, module in model.named_modules()
            for name, value in vars(module).items()
            if isinstance(value, FakeTensor)
        }
        plain = {full: value for full, (_, _, value) in attributes.items()}
        for full, tensor in (*model.named_parameters(), *model.named_buffers(), *plain.items()):
            if is_deferred(tensor):  # a draw belongs to the first tensor that follows from it
                history = self._history(storage_of(tensor))
                draws = (write.draw for write in history if write.draw is not None)
                for number, draw in enumerate(draws):
                    self._origins.setdefault(draw, (full, number))
        for full, (module, name, tensor) in attributes.items():
            object.__setattr__(module, name, self.make(tensor, full))
        return model

    def recording(self) -> AbstractContextManager[object]:
        """Let values that are computed from those of tensors without memory be made later, too."""
        return _Recorder(self)

    def make(self, tensor: Tensor, name: str) -> Tensor:
        """Return the values of a tensor that the factory created; a parameter stays a parameter.

        Args:
            name: of the parameter or buffer, for messages.

        Raises:
            CaptureError: the factory never gave it values, or they cannot be computed again.
        """
        if storage_of(tensor) not in self._filled:
            raise CaptureError(
                f"model: {name} is created in the factory but never initialised there",
                hint="initialise it in the factory, or name a checkpoint: model.weights",
            )
        try:
            values = self.values(tensor)
        except Exception as error:
            raise CaptureError(
                f"model: {name} cannot be initialised on its own: {type(error).__name__}: {error}",
                hint="name a checkpoint that contains it (model.weights), or set materialize: "
                "eager",
            ) from error
        is_parameter = isinstance(tensor, nn.Parameter)
        return nn.Parameter(values, tensor.requires_grad) if is_parameter else values

    def values(self, tensor: Tensor) -> Tensor:
        """Return the tensor with its present values."""
        storages: dict[int, torch.UntypedStorage] = {}

        def argument(leaf: Any) -> Any:
            if isinstance(leaf, FakeTensor):
                return _laid_out(leaf, storages[storage_of(leaf)])
            if isinstance(leaf, torch.Generator):
                return None
            return leaf.clone() if isinstance(leaf, Tensor) else leaf

        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            for write in self._history(storage_of(tensor)):
                args, kwargs = pytree.tree_map(argument, write.arguments)
                if write.draw is not None:
                    origin = self._origins.setdefault(write.draw, (write.draw,))
                    seed = seed_of(self._seed, "initialise", *origin)
                    torch.default_generator.manual_seed(seed)
                results = pytree.tree_leaves(write.function(*args, **kwargs))
                for index, outline in write.created.items():
                    storages[storage_of(outline)] = _storage_like(outline, results[index])
            return _laid_out(tensor, storages[storage_of(tensor)])

    def note(self, function: Any, arguments: Any, outlines: Any, result: Any) -> None:
        """Record a call if it wrote anything.

        Args:
            arguments: (args, kwargs).
            outlines: the same, with tensors as they were before the call.
        """
        known = set(storages_in(outlines))
        created = {
            index: leaf.detach()
            for index, leaf in enumerate(pytree.tree_leaves(result))
            if isinstance(leaf, FakeTensor) and storage_of(leaf) not in known
        }
        written = written_tensors(function, *arguments)
        storages = {storage_of(each) for each in written if isinstance(each, FakeTensor)}
        storages.update(map(storage_of, created.values()))
        if not storages:
            return
        draw = None
        if torch.Tag.nondeterministic_seeded in getattr(function, "tags", ()):
            self._draws += 1
            draw = self._draws
        self._writes.append(Write(function, outlines, created, draw))
        for storage in storages:
            self._writes_of.setdefault(storage, []).append(len(self._writes) - 1)
        if "empty" not in str(function):
            self._filled |= storages

    def _history(self, target: int) -> list[Write]:
        """Return the calls on which the values in a storage depend, in order."""
        needed: set[int] = set()
        reached: dict[int, int] = {}
        open_ends = [(target, len(self._writes))]
        while open_ends:
            storage, before = open_ends.pop()
            if before <= reached.get(storage, 0):
                continue
            reached[storage] = before
            for index in self._writes_of.get(storage, ()):
                if index < before and index not in needed:
                    needed.add(index)
                    read = self._writes[index].arguments
                    open_ends += [(each, index) for each in storages_in(read)]
        return [self._writes[index] for index in sorted(needed)]


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees every operator that the factory calls."""

    def __init__(self, deferred: Deferred) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._deferred = deferred

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        arguments = (args, kwargs or {})
        outlines = pytree.tree_map_only(FakeTensor, FakeTensor.detach, arguments)
        try:
            result = function(*arguments[0], **arguments[1])
        except DataDependentOutputException:  # item(), equal(): the factory looks at values
            with without_modes():
                args, kwargs = pytree.tree_map_only(FakeTensor, self._deferred.values, arguments)
                return function(*args, **kwargs)
        self._deferred.note(function, arguments, outlines, result)
        return result


def _laid_out(outline: Tensor, storage: torch.UntypedStorage) -> Tensor:
    """Return a tensor in ``storage`` with the layout of a tensor without values."""
    layout = int(outline.storage_offset()), tuple(outline.shape), outline.stride()
    return torch.empty(0, dtype=outline.dtype).set_(storage, *layout)


def _storage_like(outline: Tensor, tensor: Tensor) -> torch.UntypedStorage:
    """Return the storage of a tensor, in the size and layout of a tensor without values."""
    storage, size_bytes = tensor.untyped_storage(), outline.untyped_storage().nbytes()
    layout = outline.stride(), outline.storage_offset()
    if (tensor.stride(), tensor.storage_offset()) != layout or storage.nbytes() != size_bytes:
        storage = torch.empty(size_bytes, dtype=torch.uint8).untyped_storage()
        _laid_out(outline, storage).copy_(tensor)
    return storage
