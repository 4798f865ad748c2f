"""A stage that recomputes its forward block by block.

Its operators, in graph order, are cut into blocks, which compute what stages of one rank would::

    forward     block 0 -> block 1 -> block 2     each keeps what it starts from
    recompute                         block 2
    backward                          block 2
                           block 1                forward once more, then backward
                block 0                           forward once more, then backward

So while the backward of one block runs, nothing of the others is in memory but their inputs. Only
the last block's forward can run before the gradients of the stage's results are there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager

from torch import Tensor

from pipectl.capture import Cut, Slot
from pipectl.capture.slices import Samples
from pipectl.graph import TransferKind
from pipectl.runtime.device import Device
from pipectl.runtime.layout import Tensors
from pipectl.runtime.offload import Pool, StageOffload
from pipectl.runtime.stage import StageRuntime
from pipectl.runtime.versions import Version

Cuts = Mapping[tuple[bool, Samples], Cut]


class BlockedStage(StageRuntime):
    """See :class:`StageRuntime`.

    Args:
        firsts: the first operator of every block but the first one.
    """

    def __init__(
        self,
        index: int,
        cuts: Cuts,
        firsts: Sequence[str],
        states: Mapping[str, Tensor],
        device: Device,
        precision: str = "float32",
        *,
        offload: StageOffload | None = None,
    ) -> None:
        evaluating = {key: cut for key, cut in cuts.items() if not key[0]}
        super().__init__(index, evaluating, states, device, precision, offload=offload)
        inner = {key: cut_blocks(cut, index, firsts) for key, cut in cuts.items() if key[0]}
        numbers = range(index, index + len(firsts) + 1)
        self._blocks = [_Block(number, inner, states, device, precision) for number in numbers]
        self._sent = {key: _sent(cuts[key], index) for key in inner}
        self._sizes: dict[int, Samples] = {}
        for block in self._blocks:
            self.parameters.update(block.parameters)
            self.buffers.update(block.buffers)
            self.uses.update(block.uses)

    def inputs(self, training: bool, size: Samples) -> tuple[str, ...]:
        """Names of the batch tensors this stage reads."""
        if not training:
            return super().inputs(training, size)
        found = (name for block in self._blocks for name in block.inputs(training, size))
        return tuple(dict.fromkeys(found))

    @property
    def reads(self) -> bool:
        """Whether it reads the batch in training."""
        return any(block.reads for block in self._blocks)

    def forward(
        self,
        micro_batch: int,
        size: Samples,
        seed: int,
        inputs: Mapping[str, Tensor],
        arrived: Tensors,
        age: int = 0,
    ) -> Tensors:
        """Run the blocks' forwards; each keeps what it starts from. See the base class."""
        self._sizes[micro_batch] = size
        pool, there = self._pool_of_blocks(micro_batch), dict(arrived)
        for block in self._blocks:
            block.pool = pool
            batch = {name: inputs[name] for name in block.inputs(True, size)}
            entering = {slot: there[slot] for slot in block.entering(size)}
            there |= block.forward(micro_batch, size, seed, batch, entering, age)
        return {slot: there[slot] for slot in self._sent[True, size] if slot in there}

    def recompute(self, micro_batch: int, age: int = 0) -> None:
        """Run the last block's forward once more; the others' come within the backward."""
        self._blocks[-1].recompute(micro_batch, age)

    def backward(
        self,
        micro_batch: int,
        gradients: Tensors,
        loss: Slot,
        weight: float,
        scale: float = 1.0,
        age: int = 0,
    ) -> Tensors:
        """Run the blocks' backwards, last first, and forwards before them. See the base class."""
        if self.offload is not None:
            self.offload.end(micro_batch)
        size, there = self._sizes.pop(micro_batch), dict(gradients)
        for block in reversed(self._blocks):
            if block is not self._blocks[-1]:
                block.recompute(micro_batch, age)
            given = {slot: there.pop(slot, None) for slot in block.returning(size)}
            there |= block.backward(micro_batch, given, loss, weight, scale, age)
        return there

    def finish_backward(self, micro_batch: int) -> None:
        """Run the second half of a backward, of all blocks."""
        for block in reversed(self._blocks):
            block.finish_backward(micro_batch)

    def split_backwards(self) -> None:
        """Have every backward leave work for :meth:`finish_backward`."""
        for block in self._blocks:
            block.split_backwards()

    def compile(self) -> None:
        """Have ``torch.compile`` compile the training code, block by block."""
        for block in self._blocks:
            block.compile()

    def keep_versions(self, kept: int) -> None:
        """From now on, forwards can use the weights of up to ``kept`` - 1 updates ago."""
        for block in self._blocks:
            block.keep_versions(kept)

    def restart_versions(self) -> None:
        """Drop all versions of the weights but the newest, between stretches."""
        for block in self._blocks:
            block.restart_versions()

    @contextmanager
    def updating(self) -> Iterator[None]:
        """Around an update of the parameters, while backwards of older versions are to come."""
        with ExitStack() as entered:
            for block in self._blocks:
                entered.enter_context(block.updating())
            yield

    def let_advance(self, advance: Callable[[], None]) -> None:
        """Have ``advance`` called between operators, forward and backward."""
        super().let_advance(advance)
        for block in self._blocks:
            block.let_advance(advance)

    def forget(self) -> None:
        """Drop gradients and unfinished micro-batches."""
        super().forget()
        self._sizes.clear()
        for block in self._blocks:
            block.forget()

    def _pool_of_blocks(self, micro_batch: int) -> Pool | None:
        """What takes what the blocks start from."""
        if self.offload is None:
            return None
        return self.offload.pool(micro_batch, [*self.parameters.values(), *self.buffers.values()])


class _Block(StageRuntime):
    """One block.

    Attributes:
        pool: takes what the next forward starts from.
    """

    def __init__(
        self,
        number: int,
        cuts: Cuts,
        states: Mapping[str, Tensor],
        device: Device,
        precision: str,
    ) -> None:
        super().__init__(number, cuts, states, device, precision, recompute=True)
        self.pool: Pool | None = None
        self._returning = {size: _returning(cut, number) for (_, size), cut in cuts.items()}

    def entering(self, size: Samples) -> set[Slot]:
        """Values that it reads of other blocks and stages."""
        return {Slot(slot.value) for slot in self.codes[True, size].received}

    def returning(self, size: Samples) -> list[Slot]:
        """Gradients that its backward begins with, in the order in which autograd adds them."""
        return self._returning[size]

    def _pool(self, micro_batch: int, size: Samples, version: Version | None) -> Pool | None:  # noqa: ARG002
        return self.pool


def cut_blocks(cut: Cut, stage: int, firsts: Sequence[str]) -> Cut:
    """A cut with the blocks of one stage as stages, from its number on; later ones move up.

    Args:
        firsts: the first operator of every block but the first one.
    """
    stage_of, block = {}, stage
    for node in cut.graph.operators:
        home = cut.stage_of[node.name]
        if home == stage:
            block += node.name in firsts
            stage_of[node.name] = block
        else:
            stage_of[node.name] = home + len(firsts) * (home > stage)
    return Cut(cut.graph, stage_of, training=cut.training)


def _sent(cut: Cut, stage: int) -> list[Slot]:
    """What leaves a stage in a forward: the loss, and what other stages read."""
    found = {Slot(cut.graph.loss): None}
    for lane, slots in cut.lanes.items():
        if lane.kind is TransferKind.ACTIVATION and lane.source == stage:
            found.update(dict.fromkeys(slots))
    return list(found)


def _returning(cut: Cut, stage: int) -> list[Slot]:
    """Gradients that come to a stage, those of values that are used last first."""
    found: dict[Slot, None] = {}
    for lane, slots in cut.lanes.items():
        if lane.kind is TransferKind.GRADIENT and lane.target == stage:
            found.update(dict.fromkeys(slots))
    return sorted(found, key=lambda slot: cut.graph.last_use(slot.value), reverse=True)
