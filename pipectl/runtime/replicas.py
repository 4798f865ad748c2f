"""What the replicas of a stage do together: sum gradients, agree on buffers, compare weights.

Replicas sum the same gradients and make the same updates. If a node computes wrongly, or user code
behaves differently per rank, they drift apart unnoticed. So checksums over the bits of every
parameter are compared at intervals.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from functools import cache, partial

import numpy as np
import torch
from mpi4py import MPI
from torch import Tensor

from pipectl.capture.digests import checksum
from pipectl.capture.model_with_loss import own_name
from pipectl.errors import WorkerError
from pipectl.lanes import owners_of
from pipectl.plan import Plan, Replication
from pipectl.runtime.device import Device
from pipectl.runtime.reduction import StageReduction, group_of
from pipectl.runtime.stage import Stage
from pipectl.runtime.step import parts_of
from pipectl.runtime.transport import Progress, Wire
from pipectl.runtime.waiting import barrier, gather_all, wait
from pipectl.schedule import portion
from pipectl.schedule.sum_tree import Node, roots


class Replicas:
    """This rank's stages that have replicas, and the communicators of each.

    Args:
        communicator: of all ranks; the constructor is collective.
        written: full names of the buffers that forwards write.

    Attributes:
        reductions: the sums of the gradients of all these stages.
        sharded: by parameter of which only one replica has the optimizer state, whether that is
            this rank.
    """

    def __init__(
        self,
        communicator: MPI.Comm,
        plan: Plan,
        stages: Mapping[int, Stage],
        device: Device,
        progress: Progress,
        written: Iterable[str] = (),
    ) -> None:
        self._plan = plan
        self._stages = stages
        self._groups = {
            index: group_of(communicator, stage.updating_ranks, index)
            for index, stage in enumerate(plan.stages)
            if stage.replicas > 1 and communicator.rank in stage.updating_ranks
        }
        self._written = frozenset(written)
        self._before = {
            name: buffer.detach().cpu().clone().view(-1)
            for index in self._groups
            for name, buffer in self._written_in(index)
            if not (buffer.is_floating_point() or buffer.is_complex())
        }
        self.sharded: dict[str, bool] = {}
        self.reductions: dict[int, StageReduction] = {}
        for index, group in self._groups.items():
            stage = stages[index]
            several = {slot.value for slot in stage.uses}
            leaves: dict[str, Tensor] = {
                name: parameter
                for name, parameter in stage.parameters.items()
                if parameter.requires_grad and name not in several
            }
            owners: dict[str, int] = {}
            if plan.shard_optimizer:
                owners = owners_of({n: leaf.nbytes for n, leaf in leaves.items()}, group.size)
                self.sharded |= {name: owner == group.rank for name, owner in owners.items()}
            for slot, leaf in stage.uses.items():
                if leaf.requires_grad:
                    leaves[f"{slot.value} in {slot.use}"] = leaf
            self.reductions[index] = StageReduction(
                Wire(group, device, progress),
                leaves,
                owners,
                sums=stage.sums,
                roots_of=cache(partial(_roots, plan, index)) if plan.reproducible else None,
            )

    def close(self) -> None:
        """Let backwards start no more sums."""
        for reduction in self.reductions.values():
            reduction.close()

    def share_parameters(self) -> None:
        """Send all replicas the parameters that only one of them has updated."""
        if self._plan.shard_optimizer:
            for reduction in self.reductions.values():
                reduction.share()

    def check_weights(self, step: int) -> None:
        """Compare the weights of all replicas of this rank's stages after a step.

        Raises:
            WorkerError: they differ; see :func:`check_same_weights`.
        """
        for index, group in self._groups.items():
            ranks = self._plan.stages[index].updating_ranks
            check_same_weights(group, ranks, index, step, self._stages[index].parameters)

    def settle_writes(self) -> None:
        """Set the buffers of this rank's stages to their values after a reproducible step."""
        for index, stage in sorted(self._stages.items()):
            if stage.writes is not None:
                group = self._groups.get(index)
                stage.writes.settle(None if group is None else partial(gather_all, group))

    def agree_on_buffers(self, plan: Plan) -> None:
        """Make buffers equal on all replicas, from what each wrote in its part of a step.

        Floating-point and complex numbers are averaged over the replicas, weighted by the number of
        micro-batches of each, whole or in part. An integer that grows is a count: it gets the value
        that one replica would have counted. One that does not grow gets the value of the last
        micro-batch. A boolean changes if it changed on any replica.

        Args:
            plan: of the step.
        """
        split = self._plan.replication is Replication.SPLIT
        for index, group in self._groups.items():
            ranks = self._plan.stages[index].updating_ranks
            taken = [list(parts_of(plan, rank, index)) for rank in ranks]
            for name, buffer, values in _gather(group, self._written_in(index)):
                agreed = common_value(values, taken, self._before.get(name), split=split)
                self._set(name, buffer, agreed)

    def take_evaluated(self, names: Container[str]) -> None:
        """Copy the buffers of the first replica, which evaluates alone, to all replicas.

        Args:
            names: of the buffers that an evaluation writes.
        """
        for index, group in self._groups.items():
            evaluated = [(name, each) for name, each in self._written_in(index) if name in names]
            for name, buffer, values in _gather(group, evaluated):
                self._set(name, buffer, values[0])

    def _written_in(self, stage: int) -> list[tuple[str, Tensor]]:
        """The buffers of a stage that forwards write, in the same order on all replicas."""
        buffers = self._stages[stage].buffers
        return [(name, buffers[name]) for name in sorted(self._written & buffers.keys())]

    def _set(self, name: str, buffer: Tensor, values: Tensor) -> None:
        if name in self._before:
            self._before[name] = values
        buffer.data.copy_(values.view(buffer.shape))


def _roots(plan: Plan, stage: int, micro_batches: int) -> list[tuple[Node, ...]]:
    replicas = range(plan.stages[stage].replicas)
    taken = (portion(plan, stage, replica, micro_batches) for replica in replicas)
    return [roots(each.micro_batches.tolist()) for each in taken]


def check_same_weights(
    group: MPI.Comm, ranks: Sequence[int], stage: int, step: int, weights: Mapping[str, Tensor]
) -> None:
    """Compare the weights of one stage's replicas; collective among them.

    Args:
        group: of the replicas, in their order.
        ranks: of the replicas.
        weights: by full name, the same on all.

    Raises:
        WorkerError: on a replica that differs from the majority, naming all such replicas and the
            first parameter; the others wait until that has ended the job.
    """
    mine = np.array([checksum(tensor) for tensor in weights.values()], dtype=np.int64)
    everyone = np.empty((group.size, mine.size), dtype=np.int64)
    wait([group.Iallgather(mine, everyone)])
    differing = (everyone != everyone[0]).any(axis=0).nonzero()[0]
    if not len(differing):
        return
    first = int(differing[0])
    odd = odd_ones_out(everyone[:, first].tolist())
    if group.rank == odd[0]:
        name, all_ranks = own_name(list(weights)[first]), ", ".join(map(str, ranks))
        who = f"it is not known which of ranks {all_ranks} is right"
        if len(odd) < len(ranks):
            differ = ", ".join(str(ranks[index]) for index in odd)
            who = f"rank {differ} differs from the others of ranks {all_ranks}"
        raise WorkerError(
            f"step {step}: the replicas of stage {stage} no longer hold the same weights: "
            f"{name!r}; {who}",
            hint="the reason is a model, loss or optimizer that depends on the rank, or a faulty "
            "node; `pipectl resume RUN` continues from the last checkpoint, for which replicas "
            "were compared too",
        )
    barrier(group)


def odd_ones_out(values: Sequence[int]) -> list[int]:
    """The indices that differ from the most common value; all, if no value is the most common."""
    (common, count), *others = Counter(values).most_common()
    if others and others[0][1] == count:
        return list(range(len(values)))
    return [index for index, value in enumerate(values) if value != common]


def _gather(
    group: MPI.Comm, buffers: Sequence[tuple[str, Tensor]]
) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Each buffer with its values on all replicas, on the host, exchanged in one message.

    The values have shape [replicas, elements].
    """
    if not buffers:
        return
    mine = [buffer.detach().cpu().reshape(-1).view(torch.uint8) for _, buffer in buffers]
    sent = torch.cat(mine)
    everyone = sent.new_empty(group.size, sent.numel())
    wait([group.Iallgather(sent.numpy(), everyone.numpy())])
    parts = torch.split(everyone, [len(each) for each in mine], dim=1)
    for (name, buffer), values in zip(buffers, parts, strict=True):
        yield name, buffer, values.clone().view(buffer.dtype)


def common_value(
    values: Tensor, taken: Sequence[Sequence[int]], before: Tensor | None, *, split: bool
) -> Tensor:
    """The common value of a buffer after a step in which each replica wrote its own.

    Args:
        values: of every replica, after the step; shape [replicas, elements].
        taken: the micro-batches of each replica, whole or in part.
        before: the value before the step, equal on all replicas; for integers and booleans.
        split: whether the replicas took parts of the same micro-batches.
    """
    if before is None:
        shares = torch.tensor([len(each) for each in taken], dtype=torch.float64)
        values, shares = values[shares > 0], shares[shares > 0]
        wide = values.to(torch.complex128 if values.is_complex() else torch.float64)
        mean = (shares[:, None] * wide).sum(0) / shares.sum()
        # A mean of equal numbers may differ from them by rounding.
        return torch.where((values == values[0]).all(0), values[0], mean.to(values.dtype))
    if values.dtype == torch.bool:
        return before ^ (values ^ before).any(0)
    growth = values.to(torch.int64) - before
    if bool((growth < 0).any()):
        last = max(range(len(taken)), key=lambda replica: max(taken[replica], default=-1))
        return values[last]
    return (before + (growth.amax(0) if split else growth.sum(0))).to(values.dtype)
