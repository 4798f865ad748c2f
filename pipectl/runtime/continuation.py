"""What a run needs besides its weights to go on exactly: saving it, and taking it up again."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import nn

from pipectl.cluster import Cluster
from pipectl.runs import Manifest, RunDirectory
from pipectl.runtime.checkpoint import Keep, Saver, Stored, plain_name, take_snapshot
from pipectl.runtime.failure import warn
from pipectl.runtime.loss_scale import LossScale
from pipectl.runtime.setup import Setup
from pipectl.runtime.stepper import Stepper
from pipectl.schedule.memory import room_bytes


class Continuation:
    """Checkpoints of one rank's share of a training; making one is collective.

    Where samples stand, and which random numbers come next, follows from the number of steps.

    Args:
        told: the parameters whose optimizer state is this rank's to save.
        attempt: number of the job's start, from 1.
        reported: whether the figures of all steps up to one are written (asked on rank 0).
    """

    def __init__(
        self,
        setup: Setup,
        run: RunDirectory,
        attempt: int,
        stepper: Stepper,
        loss_scale: LossScale | None,
        told: Mapping[str, nn.Parameter],
        reported: Callable[[int], bool],
    ) -> None:
        self._setup = setup
        self._stepper = stepper
        self._loss_scale = loss_scale
        self._told = told
        self._persistent = setup.persistent
        self._aliases = _plain_aliases(setup.saved_aliases)
        spec = setup.job.spec.checkpoint
        keep = Keep(spec.keep, spec.keep_every)
        communicator = setup.communicator.Dup()
        self._saver = Saver(communicator, run.checkpoints, keep, attempt, warn, reported)
        self._room_bytes = _room_bytes(setup, run)
        self.poll = self._saver.poll
        self.finish = self._saver.finish
        stepper.before_update = self._give_back

    def save(self, step: int) -> None:
        """Begin to write a checkpoint behind a step; collective."""
        setup, scale = self._setup, self._loss_scale
        own = take_snapshot(
            setup.saved_states,
            self._persistent,
            self._stepper,
            self._told,
            None if scale is None else scale.state,
            self._room_bytes,
        )
        manifest = Manifest(step, setup.plan.micro_batch_size, self._aliases)
        self._saver.start(manifest, own)

    def _give_back(self) -> None:
        """Before an update: what had no room for a copy must be written now."""
        if self._saver.borrows:
            self._setup.doing.action = "saving"
            self._saver.give_back()

    def take_up(self, stored: Stored, updated: Mapping[str, nn.Parameter]) -> None:
        """Put back what is not in the model.

        Args:
            updated: the parameters that this rank updates.
        """
        manifest, optimizer = stored.manifest, self._stepper.optimizer
        if optimizer is not None:
            stored.restore_optimizer(optimizer, updated)
        self._stepper.move_on(manifest.updates, manifest.losses)
        if self._loss_scale is not None and manifest.loss_scale is not None:
            self._loss_scale.restore(manifest.loss_scale)
        stored.close()


def _room_bytes(setup: Setup, run: RunDirectory) -> int | None:
    """For copies; beside an accelerator, whose memory the plan counts, the host has enough."""
    if setup.device.torch_device.type != "cpu":
        return None
    plan, rank = setup.plan, setup.communicator.rank
    limit_bytes: float | None = plan.memory_limit_bytes
    if run.cluster.exists():
        limit_bytes = Cluster.load(run.cluster).memory_of(rank, limit_bytes)
    return room_bytes(plan, rank, limit_bytes)


def _plain_aliases(aliases: Mapping[str, str]) -> dict[str, str]:
    """By the names in the user's model."""
    pairs = [(plain_name(alias), plain_name(name)) for alias, name in aliases.items()]
    return {alias: name for alias, name in pairs if alias is not None and name is not None}
