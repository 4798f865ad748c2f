"""The weights of one stage at several ages, each where autograd needs it.

Forwards run on leaves that share the memory of a parameter, with new leaves for every version.
Before an update changes a parameter whose version is still in use, the parameter moves to new
memory and leaves the old to those leaves; the autograd graphs hold it until their backwards. So a
version is copied once, by the update that outdates it, independently of the number of micro-batches
that use it, and is freed after the last of them.

An update by gradients that are one update old may be *corrected*. What update t computes, from
weights that update t - 1 made older at once, is what update t - 1 should have been, had its
gradients been there in time. So update t also makes up for the difference between the two::

    u(t) = change by update t        corrected: u(t) + (u(t) - u(t - 1))

After Zmushko et al., "One-Step Gradient Delay is Not a Barrier for Large-Scale Asynchronous
Pipeline Parallel LLM Pretraining", ICML 2026, whose abstract calls it error feedback on the level
of updates; the formula is a reading of that, and may differ from the paper's.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True, eq=False)
class Version:
    """One version of the weights.

    Args:
        leaves: used by forwards in place of each parameter, by the parameter's ``id``.
    """

    leaves: Mapping[int, Tensor]

    def replaced_in(self, states: Sequence[Tensor]) -> list[Tensor]:
        """``states`` with the leaves in place of parameters."""
        return [self.leaves.get(id(state), state) for state in states]


class Versions:
    """The versions of a stage's trained weights that forwards may still use.

    Args:
        parameters: of the stage; frozen ones have one version.
        kept: how many of the newest to keep.
        corrects: whether to correct updates; the gradients of all but the first after a
            :meth:`restart` are one update old.
    """

    def __init__(
        self, parameters: Collection[nn.Parameter], kept: int, *, corrects: bool = False
    ) -> None:
        self._corrects = corrects
        self._updates = 0
        self._changes: dict[int, Tensor] = {}
        """By the last update, without its correction; by the parameter's ``id``."""
        self._moving: list[nn.Parameter] = []
        self._parameters = [each for each in parameters if each.requires_grad]
        self._max_versions = kept
        self._newest_first = [self._new_version()]
        self._with_gradients: Version | None = None

    def of_age(self, age: int) -> Version:
        """The weights ``age`` updates ago; 0 gives the newest."""
        return self._newest_first[age]

    def collect(self, version: Version) -> None:
        """Give the parameters the gradients that backwards of a version have accumulated."""
        for parameter in self._parameters:
            parameter.grad = version.leaves[id(parameter)].grad
        self._with_gradients = version

    def before_update(self, in_use: Collection[Version]) -> None:
        """Move the parameters to new memory if the newest version is still in use.

        Args:
            in_use: versions whose backwards are still to come.
        """
        newest = self._newest_first[0]
        self._moving = [each for each in self._parameters if each.grad is not None]
        self._newest_first = self._newest_first[: self._max_versions - 1]
        if self._newest_first or newest in in_use:
            for parameter in self._parameters:
                parameter.data = parameter.data.clone()

    def after_update(self) -> None:
        """Make the current values of the parameters the newest version; drops gradients."""
        if self._corrects:
            self._correct()
        self.forget()
        self._newest_first.insert(0, self._new_version())

    def forget(self) -> None:
        """Drop gradients."""
        if self._with_gradients is not None:
            for leaf in self._with_gradients.leaves.values():
                leaf.grad = None
        self._with_gradients = None

    def restart(self) -> None:
        """Drop all versions but the newest, when the pipeline is empty."""
        del self._newest_first[1:]
        self._updates = 0
        self._changes.clear()

    def _correct(self) -> None:
        """Correct the update of the parameters that had a gradient."""
        self._updates += 1
        if self._updates == 1:  # its gradients are of the weights that it changes
            return
        before = self._newest_first[0].leaves
        with torch.no_grad():
            for parameter in self._moving:
                change = parameter.data - before[id(parameter)].data
                last = self._changes.get(id(parameter))
                if last is not None:
                    parameter.data += change - last
                self._changes[id(parameter)] = change

    def _new_version(self) -> Version:
        # ``data`` has its own version counter, which an update of the parameter does not raise.
        return Version({id(each): each.data.requires_grad_() for each in self._parameters})
