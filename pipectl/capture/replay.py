"""Making a tensor anew from the operators that its values follow from.

A factory that runs without memory leaves a list of calls (:mod:`pipectl.capture.deferred`). Those
that one tensor follows from run again here, on memory of their own, with random draws seeded by
what each draw was made for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from pipectl.capture.randomness import seed_of


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
        return cls(
            storage._cdata,
            storage.nbytes(),
            tensor.dtype,
            sizes,
            strides,
            int(tensor.storage_offset()),
        )


@dataclass(frozen=True)
class Write:
    """A call that made or changed storages.

    Args:
        arguments: (args, kwargs), flattened, with places for tensors without values.
        structure: how to put the arguments together again.
        made: place of every tensor of the result that has a storage of its own, by its index.
        draw: number of the random draw in the factory; None for operators that draw nothing.
    """

    function: Any
    arguments: Sequence[Any]
    structure: Any
    made: dict[int, Place]
    draw: int | None

    @property
    def places(self) -> list[Place]:
        """The tensors without values among the arguments."""
        return [argument for argument in self.arguments if isinstance(argument, Place)]


class Replay:
    """Runs noted calls on memory of its own."""

    def __init__(self, seed: int, origins: Mapping[int, tuple[str | int, ...]]) -> None:
        self._seed = seed
        self._origins = origins
        self._storages: dict[int, torch.UntypedStorage] = {}

    def result(self, history: Sequence[Write], target: Place) -> Tensor:
        """What the calls, run in this order, leave in the target."""
        for write in history:
            self._run(write)
        return self._tensor(target)

    def _run(self, write: Write) -> None:
        leaves = [self._argument(leaf) for leaf in write.arguments]
        args, kwargs = pytree.tree_unflatten(leaves, write.structure)
        if write.draw is not None:
            origin = self._origins[write.draw]
            torch.default_generator.manual_seed(seed_of(self._seed, "initialise", *origin))
        made = pytree.tree_leaves(write.function(*args, **kwargs))
        for index, place in write.made.items():
            self._storages[place.storage] = _laid_out(made[index], place).untyped_storage()

    def _argument(self, leaf: Any) -> Any:
        if isinstance(leaf, Place):
            return self._tensor(leaf)
        if isinstance(leaf, torch.Generator):
            return None
        return leaf.clone() if isinstance(leaf, Tensor) else leaf

    def _tensor(self, place: Place) -> Tensor:
        storage = self._storages[place.storage]
        empty = torch.empty(0, dtype=place.dtype)
        return empty.set_(storage, place.offset, place.sizes, place.strides)


def _laid_out(tensor: Tensor, place: Place) -> Tensor:
    """The tensor in a storage of the noted size and layout."""
    same = (tensor.stride(), tensor.storage_offset()) == (place.strides, place.offset)
    if same and tensor.untyped_storage().nbytes() == place.storage_bytes:
        return tensor
    storage = torch.empty(place.storage_bytes, dtype=torch.uint8).untyped_storage()
    target = torch.empty(0, dtype=place.dtype)
    target.set_(storage, place.offset, place.sizes, place.strides)
    return target.copy_(tensor)
