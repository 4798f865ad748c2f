"""The weights of one stage at several ages, each where autograd needs it.

Forwards run on leaves that share the memory of a parameter, made anew for every version. Before an
update changes a parameter whose version is still used, the parameter moves to memory of its own and
leaves the old to those leaves: the autograd graphs hold it until their backwards. So a version is
copied once, by the update that outdates it, whatever number of micro-batches uses it, and is freed
with the last of them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor, nn


@dataclass(frozen=True, eq=False)
class Version:
    """One version of the weights.

    Args:
        leaves: what forwards use in place of each parameter, by the parameter's ``id``.
    """

    leaves: Mapping[int, Tensor]

    def among(self, states: Sequence[Tensor]) -> list[Tensor]:
        """States with the leaves in place of parameters."""
        return [self.leaves.get(id(state), state) for state in states]


class Versions:
    """The versions of a stage's trained weights that forwards may still ask for.

    Args:
        parameters: of the stage; frozen ones have one version.
        kept: how many of the newest there are.
    """

    def __init__(self, parameters: Collection[nn.Parameter], kept: int) -> None:
        self._parameters = [each for each in parameters if each.requires_grad]
        self._max_versions = kept
        self._newest_first = [self._new_version()]
        self._with_gradients: Version | None = None

    def of_age(self, age: int) -> Version:
        """The weights before so many updates; 0 gives the newest."""
        return self._newest_first[age]

    def collect(self, version: Version) -> None:
        """Give the parameters the gradients that backwards of a version have added up."""
        for parameter in self._parameters:
            parameter.grad = version.leaves[id(parameter)].grad
        self._with_gradients = version

    def before_update(self, in_use: Collection[Version]) -> None:
        """Leave the newest version to those that use it still.

        Args:
            in_use: versions whose backwards are to come.
        """
        newest = self._newest_first[0]
        self._newest_first = self._newest_first[: self._max_versions - 1]
        if self._newest_first or newest in in_use:
            for parameter in self._parameters:
                parameter.data = parameter.data.clone()

    def after_update(self) -> None:
        """Make what the parameters are now the newest version; drops gradients."""
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

    def _new_version(self) -> Version:
        # ``data`` counts changes of its own: an update of the parameter is none of the leaf.
        return Version({id(each): each.data.requires_grad_() for each in self._parameters})
