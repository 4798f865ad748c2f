"""Tensors that autograd saves in a forward, each storage once, so that they can be moved.

    forward     saved tensors  ->  handles (layout, offset)  ->  blocks (one per storage)
    leaving     the blocks' storages are copied elsewhere and dropped
    backward    handle + the block's storage, fetched  ->  tensor

Storages are identified through weak references, which keep an identity from being reused while they
exist. Memory addresses would not do: a freed one is soon another tensor's.

The gradient of a parameter that is used through a view is a view of another gradient's memory. The
first gradient of a parameter becomes its ``grad``, and later backwards add to it in place: if two
parameters are used in this way, to both at once (torch 2.13 compares only tensors, not memory). A
message, or the weight half of a backward, may also still read that memory. So such gradients are
copied to memory of their own.
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager
from typing import Any, ClassVar, NamedTuple
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node

from pipectl.capture.patches import hooks_on_saved_tensors
from pipectl.capture.refusals import Refusal, RefusedError
from pipectl.capture.tensors import storage_of
from pipectl.runtime.layout import Layout
from pipectl.runtime.offload import Mover, Place
from pipectl.schedule import Kind
from pipectl.torch_api import StorageWeakRef, is_zero_tensor, pytree, run_engine

_PLAIN = (int, float, str, type(None), torch.dtype, torch.device)
"""Types of attributes that an autograd function may have: their values agree on both ranks."""


def run_backward(
    roots: Sequence[Tensor | GradientEdge],
    gradients: Sequence[Tensor],
    leaves: Iterable[Tensor],
    others: Iterable[Tensor | None] = (),
    *,
    inputs: Sequence[Tensor] = (),
    retain_graph: bool = False,
) -> None:
    """Run a backward; leaves without a gradient get theirs in memory that nothing else uses.

    It calls autograd's engine without ``torch.autograd.backward``, whose checks of roots and
    gradients take longer than the backward of a few small operators; the engine has its own.

    Args:
        gradients: of the roots.
        leaves: to which it may add gradients.
        others: gradients that are read later; evaluated after the backward.
        inputs: the only leaves that get gradients, if any are given.
        retain_graph: whether to keep the graph for further backwards.

    Raises:
        CaptureError: a submodule that runs as one operator has written what its backward needs.
    """
    fresh = [leaf for leaf in leaves if leaf.grad is None]
    try:
        run_engine(roots, gradients, inputs, keep_graph=retain_graph, accumulate=True)
    except RuntimeError as error:
        written = re.search(r"modified by an inplace operation: \[(.*?\])\]", str(error))
        if written is None:
            raise
        name = f"a {written[1]} of a submodule that runs as one operator"
        raise Refusal.SAVED_WRITTEN.error("", name=name, need="") from error
    if fresh:
        clone_shared(fresh, others)


def gradients_of(
    root: GradientEdge, gradient: Tensor, inputs: Sequence[GradientEdge]
) -> tuple[Tensor | None, ...]:
    """Return the gradients of ``inputs``, and keep the graph for further backwards."""
    return run_engine([root], [gradient], inputs, keep_graph=True, accumulate=False)


def nodes_behind(edges: Iterable[GradientEdge]) -> list[Node]:
    """All nodes of an autograd graph, each once, in an order that depends on its edges alone."""
    nodes: dict[Node, None] = {}
    waiting = [edge.node for edge in edges]
    while waiting:
        node = waiting.pop()
        if node not in nodes:
            nodes[node] = None
            waiting += [after for after, _ in node.next_functions if after is not None]
    return list(nodes)


@contextmanager
def zeros_behind(edges: Iterable[GradientEdge]) -> Iterator[None]:
    """Within the block, backwards from these edges give zeros.

    Those of a loss without weight are zeros times what may be infinite or NaN, such as one over the
    number of its valid targets.
    """
    hooks = [node.register_prehook(_zeros) for node in nodes_behind(edges)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _zeros(gradients: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
    return tuple(None if each is None else torch.zeros_like(each) for each in gradients)


def hides_values(node: Node) -> bool:
    """Whether a node is an autograd function that keeps more than numbers in attributes.

    Tensors there are no saved tensors, so that no other rank gets them.
    """
    kept: dict[str, Any] = getattr(node, "__dict__", {})
    return not all(isinstance(leaf, _PLAIN) for leaf in pytree.tree_leaves(kept))


def clone_shared(leaves: Iterable[Tensor], others: Iterable[Tensor | None]) -> None:
    """Copy gradients of leaves that share memory with each other or with other tensors.

    Raises:
        CaptureError: code that a graph holds as one operator gives a sparse gradient.
    """
    memories = {storage_of(other) for other in others if other is not None}
    for leaf in leaves:
        gradient = leaf.grad
        if gradient is None:
            continue
        if gradient.layout is not torch.strided:
            raise sparse_error()
        if storage_of(gradient) in memories:
            leaf.grad = gradient.clone()
        else:
            memories.add(storage_of(gradient))


def sparse_error(parameter: str = "") -> RefusedError:
    """Return the error that code gives a sparse gradient, of this parameter if it is known."""
    name = "a submodule or autograd function that runs as one operator"
    return Refusal.SPARSE.error("", name=name, how=f" of {parameter!r}" if parameter else "")


class Block:
    """One storage.

    Attributes:
        memory: all its bytes, as a vector; None while it is elsewhere.
    """

    __slots__ = ("__weakref__", "memory")

    def __init__(self, memory: Tensor) -> None:
        self.memory: Tensor | None = memory


class Handle(NamedTuple):
    """A tensor in a block; the offset counts elements."""

    block: Block
    layout: Layout
    offset: int


class SavedTensors:
    """The blocks of one micro-batch. Only offloaded blocks are kept alive here; others by handles.

    Args:
        staying: tensors whose memory is not moved, such as parameters.
        device: storages on other devices are not moved.
        mover: takes blocks away and brings them back.
        shared: storages that are not moved either, because other micro-batches use them.

    Attributes:
        min_bytes: smaller storages are not moved: statistics of norms, and other vectors.
    """

    min_bytes: ClassVar[int] = 16 << 10

    def __init__(
        self,
        staying: Iterable[Tensor],
        device: torch.device,
        mover: Mover,
        shared: Container[StorageWeakRef] = (),
    ) -> None:
        self._staying = {_identity(tensor) for tensor in staying}
        self._shared = shared
        self._device = device
        self._mover = mover
        self._blocks: WeakValueDictionary[StorageWeakRef, Block] = WeakValueDictionary()
        self._away: list[Block] = []
        self._sizes: list[int] = []
        self._leaving: Future[Place] | None = None
        self._coming: Future[list[Tensor]] | None = None

    @property
    def blocks(self) -> list[Block]:
        """The blocks that are still in use."""
        return list(self._blocks.values())

    def hooks(self) -> AbstractContextManager[Any]:
        """Hooks for a forward, which take the tensors that autograd saves; those that it saves
        while ``torch.func`` differentiates stay.
        """
        return hooks_on_saved_tensors(self.pack, unpack)

    def pack(self, tensor: Tensor) -> Tensor | Handle:
        """A handle for a tensor, or the tensor itself if it stays."""
        if not self._may_leave(tensor):
            return tensor
        key = _identity(tensor)
        if key in self._staying or key in self._shared:
            return tensor
        block = self._blocks.get(key)
        if block is None:
            block = Block(self._mover.housed(bytes_of(tensor.untyped_storage())))
            self._blocks[key] = block
        layout = Layout.exactly(tensor)
        return Handle(block, layout, int(tensor.storage_offset()))

    def move(self, kind: Kind) -> None:
        """Execute one of the four kinds of offload rows.

        Raises:
            WorkerError: the store is full, or fails.
        """
        if kind is Kind.OFFLOAD_START:
            self._away = self.blocks
            vectors = [block.memory for block in self._away if block.memory is not None]
            self._sizes = [vector.numel() for vector in vectors]
            self._leaving = self._mover.leave(vectors)
        elif kind is Kind.OFFLOAD_WAIT:
            assert self._leaving is not None
            self._leaving.result()
            for block in self._away:
                block.memory = None
        elif kind is Kind.FETCH_START:
            assert self._leaving is not None
            self._coming = self._mover.fetch(self._leaving.result(), self._sizes)
            self._leaving = None
        else:
            assert self._coming is not None
            for block, memory in zip(self._away, self._coming.result(), strict=True):
                block.memory = memory
            self._away, self._coming = [], None

    def _may_leave(self, tensor: Tensor) -> bool:
        plain = type(tensor) is Tensor and tensor.layout is torch.strided
        if not plain or tensor.device != self._device or tensor.is_quantized:
            return False
        if tensor.is_conj() or tensor.is_neg():  # flags that are not part of the storage
            return False
        if is_zero_tensor(tensor):
            return False
        return tensor.untyped_storage().nbytes() >= self.min_bytes


def _identity(tensor: Tensor) -> StorageWeakRef:
    return StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]


def unpack(packed: Tensor | Handle) -> Tensor:
    """The tensor that was packed; its block must be in the device's memory."""
    if isinstance(packed, Tensor):
        return packed
    memory = packed.block.memory
    assert memory is not None
    return packed.layout.view(memory, packed.offset)


def bytes_of(storage: torch.UntypedStorage) -> Tensor:
    """A vector of all bytes of a storage."""
    empty = torch.empty(0, dtype=torch.uint8, device=storage.device)
    return empty.set_(storage)
