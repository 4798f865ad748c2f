"""What the replicas of a stage do together: sum gradients, agree on buffers."""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence

import numpy as np
import torch
from mpi4py import MPI
from torch import Tensor

from pipectl.plan import Plan, Replication
from pipectl.runtime.device import Device
from pipectl.runtime.exchange import Exchange, group_of
from pipectl.runtime.likeness import check_alike
from pipectl.runtime.passes import parts_of
from pipectl.runtime.reduction import Reducer, StageReduction
from pipectl.runtime.sharding import Sharing, owners_of
from pipectl.runtime.stage import StageRuntime
from pipectl.runtime.transport import Progress
from pipectl.runtime.waiting import wait


class Replicas:
    """This rank's stages that have replicas, and how it reaches the others of each.

    Args:
        communicator: of all ranks. Making one of these is collective.
    """

    def __init__(
        self,
        communicator: MPI.Comm,
        plan: Plan,
        stages: Mapping[int, StageRuntime],
        device: Device,
        progress: Progress,
    ) -> None:
        self._plan = plan
        self._rank = communicator.rank
        self._device = device
        self._stages = stages
        self._groups = dict(self._make_groups(communicator))
        self._counts = {
            name: buffer.detach().to("cpu", torch.float64).view(-1)
            for index in self._groups
            for name, buffer in stages[index].buffers.items()
            if not buffer.is_floating_point()
        }
        self.exchanges = {
            stage: Exchange(group, device, progress) for stage, group in self._groups.items()
        }

    def reducer(self, branching: Container[int] = ()) -> Reducer:
        """Sums the gradients of all these stages.

        Args:
            branching: the stages of which a step may leave some gradients out.
        """
        return Reducer(
            StageReduction(
                index,
                exchange,
                self._leaves(index),
                self.owners(index),
                branches=index in branching,
            )
            for index, exchange in self.exchanges.items()
        )

    def owners(self, stage: int) -> dict[str, int]:
        """The replica that updates each parameter; empty where all replicas update all."""
        if not self._plan.shard_optimizer:
            return {}
        return owners_of(self._own_parameters(stage), self.exchanges[stage].replicas)

    def updates(self, name: str) -> bool:
        """Whether this rank updates one of its parameters."""
        return all(mine for mine in self._claims(name))

    def counts(self, name: str, *, first: bool) -> bool:
        """Whether the norm of a gradient is this rank's to tell.

        Args:
            first: whether it is the first of all ranks that hold the parameter.
        """
        return next(self._claims(name), first)

    def sharings(self) -> list[Sharing]:
        """How parameters that one replica updates reach the others; one a stage."""
        return [
            Sharing(exchange, self._stages[index].parameters, self.owners(index))
            for index, exchange in self.exchanges.items()
            if self._plan.shard_optimizer
        ]

    def check_weights(self, step: int) -> None:
        """Compare the weights of all these stages' replicas, behind a step.

        Raises:
            WorkerError: they differ; see :func:`pipectl.runtime.likeness.check_alike`.
        """
        for index, group in self._groups.items():
            ranks = self._plan.stages[index].updating_ranks
            check_alike(group, ranks, index, step, self._stages[index].parameters)

    def _claims(self, name: str) -> Iterator[bool]:
        """Whether a parameter is this replica's, where one replica alone updates it."""
        for index, exchange in self.exchanges.items():
            owner = self.owners(index).get(name)
            if owner is not None:
                yield owner == exchange.replica

    def agree_on_buffers(self, plan: Plan, names: Sequence[str]) -> None:
        """Give all replicas the same buffers, from what each made of its part of a step.

        A number is averaged over the replicas, weighted by how many micro-batches each took, whole
        or in part; a count is what it would be if one replica had counted for all.

        Args:
            plan: of the step.
            names: of the buffers that training changes.
        """
        for index, group in self._groups.items():
            ranks = self._plan.stages[index].updating_ranks
            taken = [len(parts_of(plan, rank, index)) for rank in ranks]
            buffers = self._stages[index].buffers
            for name in names:
                if name in buffers:
                    buffer = buffers[name]
                    found = _gathered(group, buffer)
                    if buffer.is_floating_point():
                        agreed = _mean(found, taken)
                    else:
                        agreed = self._count(name, found)
                        self._counts[name] = agreed
                    buffer.data.copy_(agreed.view(buffer.shape))

    def _count(self, name: str, found: Tensor) -> Tensor:
        """What one replica would have counted from all parts of a step."""
        before = self._counts[name]
        if self._plan.replication is Replication.SPLIT:
            return before + (found - before).amax(0)
        return before + (found - before).sum(0)

    def _make_groups(self, communicator: MPI.Comm) -> Iterator[tuple[int, MPI.Comm]]:
        for index, stage in enumerate(self._plan.stages):
            if stage.replicas > 1 and communicator.rank in stage.updating_ranks:
                yield index, group_of(communicator, stage.updating_ranks, index)

    def _leaves(self, stage: int) -> dict[str, Tensor]:
        """What a stage accumulates gradients in: parameters, or their single uses."""
        found: dict[str, Tensor] = dict(self._own_parameters(stage))
        for slot, leaf in self._stages[stage].uses.items():
            if leaf.requires_grad:
                found[f"{slot.value} in {slot.use}"] = leaf
        return found

    def _own_parameters(self, stage: int) -> dict[str, Tensor]:
        """Trained parameters with one accumulator."""
        runtime = self._stages[stage]
        several = {slot.value for slot in runtime.uses}
        return {
            name: parameter
            for name, parameter in runtime.parameters.items()
            if parameter.requires_grad and name not in several
        }


def _gathered(group: MPI.Comm, buffer: Tensor) -> Tensor:
    """The buffer of every replica; shape [replicas, elements]."""
    mine = buffer.detach().to("cpu", torch.float64).contiguous().numpy().reshape(-1)
    everyone = np.empty((group.size, mine.size))
    wait([group.Iallgather(mine, everyone)])
    return torch.from_numpy(everyone)


def _mean(found: Tensor, taken: Sequence[int]) -> Tensor:
    shares = torch.tensor(taken, dtype=torch.float64)
    return (shares[:, None] * found).sum(0) / shares.sum()
