"""Building a model without memory for its tensors, and making each of them later, alone.

While a factory runs under :meth:`Deferred.build`, tensors have shapes but no values, and every
operator that writes one is noted. :meth:`Deferred.make` runs the noted operators that one tensor
follows from again, this time on memory. So each parameter and buffer comes to be by its module's
own rule, whatever that is (``reset_parameters``, a function of ``nn.init`` applied afterwards, a
table computed in ``__init__``), and independently of which others are made in the same process.

A random draw is seeded by the name of the tensor it is made for and by its number in that tensor's
history, so layers that are added or moved leave the values of all others as they are. A draw that
reaches several tensors (copies of a block, two halves of one tensor) belongs to the first of them
in the order of the model. Where the factory looked at values, there were no names yet: the draws
that led to what it saw are seeded by their number in the whole factory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensor, FakeTensorMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from pipectl.capture.operators import written_tensors
from pipectl.capture.patches import copyable_without_values
from pipectl.capture.randomness import seed_of
from pipectl.capture.tensors import is_deferred
from pipectl.errors import CaptureError


class Deferred:
    """What a factory did to make its tensors.

    Args:
        seed: of the run, for random operators.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._writes: list[Write] = []
        self._writes_of: dict[int, list[int]] = {}
        self._filled: set[int] = set()
        self._alive: list[Any] = []
        self._draws = 0
        self._origins: dict[int, tuple[str | int, ...]] = {}

    def build(self, factory: Callable[[], nn.Module]) -> nn.Module:
        """The model of a factory, whose parameters and buffers have no memory.

        What modules hold as plain attributes is made at once: every rank needs it.

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
                cure="try materialize: eager with a small model; if that works, use only torch "
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
                history = self._history(Place.of(tensor))
                draws = (write.draw for write in history if write.draw is not None)
                for number, draw in enumerate(draws):
                    self._origins.setdefault(draw, (full, number))
        for full, (module, name, tensor) in attributes.items():
            object.__setattr__(module, name, self.make(tensor, full))
        return model

    def make(self, tensor: Tensor, name: str) -> Tensor:
        """The values of a tensor that the factory created; a parameter stays one.

        Args:
            name: of the parameter or buffer, for messages.

        Raises:
            CaptureError: the factory never gave it values, or they cannot be computed again.
        """
        if tensor.untyped_storage()._cdata not in self._filled:
            raise CaptureError(
                f"model: {name} is created in the factory but never initialised there",
                cure="initialise it in the factory, or name a checkpoint: model.weights",
            )
        try:
            values = self.values(tensor)
        except Exception as error:
            raise CaptureError(
                f"model: {name} cannot be initialised on its own: {type(error).__name__}: {error}",
                cure="name a checkpoint that contains it (model.weights), or set materialize: "
                "eager",
            ) from error
        is_parameter = isinstance(tensor, nn.Parameter)
        return nn.Parameter(values, tensor.requires_grad) if is_parameter else values

    def values(self, tensor: Tensor) -> Tensor:
        """The tensor with the values it has by now."""
        storages: dict[int, torch.UntypedStorage] = {}

        def laid_out(place: Place) -> Tensor:
            empty = torch.empty(0, dtype=place.dtype)
            return empty.set_(storages[place.storage], place.offset, place.sizes, place.strides)

        def argument(leaf: Any) -> Any:
            if isinstance(leaf, torch.Generator):
                return None
            return leaf.clone() if isinstance(leaf, Tensor) else leaf

        target = Place.of(tensor)
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            for write in self._history(target):
                leaves = [
                    laid_out(leaf) if isinstance(leaf, Place) else argument(leaf)
                    for leaf in write.arguments
                ]
                args, kwargs = pytree.tree_unflatten(leaves, write.structure)
                if write.draw is not None:
                    origin = self._origins.setdefault(write.draw, (write.draw,))
                    seed = seed_of(self._seed, "initialise", *origin)
                    torch.default_generator.manual_seed(seed)
                results = pytree.tree_leaves(write.function(*args, **kwargs))
                for index, place in write.created.items():
                    storages[place.storage] = place.storage_of(results[index])
            return laid_out(target)

    def note(self, function: Any, arguments: Any, places: Sequence[Any], result: Any) -> None:
        """Note a call, if it wrote anything.

        Args:
            arguments: (args, kwargs).
            places: the same, flattened, with places for tensors, as they were before the call.
        """
        argument_storages = {place.storage for place in places if isinstance(place, Place)}
        leaves = pytree.tree_leaves(result)
        created = {
            index: Place.of(leaf)
            for index, leaf in enumerate(leaves)
            if isinstance(leaf, FakeTensor)
            and leaf.untyped_storage()._cdata not in argument_storages
        }
        written = {
            tensor.untyped_storage()._cdata
            for tensor in written_tensors(function, *arguments)
            if isinstance(tensor, FakeTensor)
        }
        if not created and not written:
            return
        self._alive += [leaf.untyped_storage() for leaf in leaves if isinstance(leaf, FakeTensor)]
        draw = None
        if torch.Tag.nondeterministic_seeded in getattr(function, "tags", ()):
            self._draws += 1
            draw = self._draws
        structure = pytree.tree_structure(arguments)
        self._writes.append(Write(function, places, structure, created, draw))
        storages = written | {place.storage for place in created.values()}
        for storage in storages:
            self._writes_of.setdefault(storage, []).append(len(self._writes) - 1)
        if "empty" not in str(function):
            self._filled |= storages

    def _history(self, target: Place) -> list[Write]:
        """The calls that the values of a tensor follow from, in order."""
        needed: set[int] = set()
        reached: dict[int, int] = {}
        open_ends = [(target.storage, len(self._writes))]
        while open_ends:
            storage, before = open_ends.pop()
            if before <= reached.get(storage, 0):
                continue
            reached[storage] = before
            for index in self._writes_of.get(storage, ()):
                if index < before and index not in needed:
                    needed.add(index)
                    open_ends += [(place.storage, index) for place in self._writes[index].places]
        return [self._writes[index] for index in sorted(needed)]


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees every operator the factory calls."""

    def __init__(self, deferred: Deferred) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._deferred = deferred

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        arguments = (args, kwargs or {})
        places = pytree.tree_map_only(FakeTensor, Place.of, pytree.tree_leaves(arguments))
        try:
            result = function(*arguments[0], **arguments[1])
        except DataDependentOutputException:  # item(), equal(): the factory looks at values
            with _disable_current_modes():
                args, kwargs = pytree.tree_map_only(FakeTensor, self._deferred.values, arguments)
                return function(*args, **kwargs)
        self._deferred.note(function, arguments, places, result)
        return result


@dataclass(frozen=True)
class Place:
    """A tensor without values: where it lies in which storage.

    Args:
        storage: identity of the storage.
        storage_bytes: size of the whole storage.
    """

    storage: int
    storage_bytes: int
    dtype: torch.dtype
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int

    @classmethod
    def of(cls, tensor: Tensor) -> Place:
        """Where the tensor lies."""
        storage = tensor.untyped_storage()
        sizes, strides = tuple(tensor.shape), tensor.stride()
        offset = int(tensor.storage_offset())
        return cls(storage._cdata, storage.nbytes(), tensor.dtype, sizes, strides, offset)

    def storage_of(self, tensor: Tensor) -> torch.UntypedStorage:
        """The storage of a tensor with memory, in the size and layout that were noted."""
        storage = tensor.untyped_storage()
        same = (tensor.stride(), tensor.storage_offset()) == (self.strides, self.offset)
        if not same or storage.nbytes() != self.storage_bytes:
            storage = torch.empty(self.storage_bytes, dtype=torch.uint8).untyped_storage()
            target = torch.empty(0, dtype=self.dtype)
            target.set_(storage, self.offset, self.sizes, self.strides).copy_(tensor)
        return storage


@dataclass(frozen=True)
class Write:
    """A call that created or changed storages.

    Args:
        arguments: (args, kwargs), flattened, with places for tensors without values.
        structure: how to put the arguments together again.
        created: place of every tensor of the result that has a storage of its own, by its index.
        draw: number of the random draw in the factory; None for operators that draw nothing.
    """

    function: Any
    arguments: Sequence[Any]
    structure: Any
    created: dict[int, Place]
    draw: int | None

    @property
    def places(self) -> list[Place]:
        """The tensors without values among the arguments."""
        return [argument for argument in self.arguments if isinstance(argument, Place)]
