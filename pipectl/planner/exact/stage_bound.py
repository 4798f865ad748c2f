"""A lower bound on the largest load: some stage must hold each block, whatever else it holds.

The smallest load of any set of blocks with a given one is a minimum cut, because compute and
crossing values are a submodular function of the set::

    block ──compute──► sink      blocks of a value ──∞──► in ──transfer──► out ──∞──► all of them

A cut pays the compute of a block on the source's side, and a value's transfer if the source's side
has some, but not all of its blocks. That the set is convex, or fits into memory, is not asked, so
the bound holds with and without. Where transfers weigh more than compute it often equals the
optimum.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from pipectl.arrays import Floats
from pipectl.planner.exact.flow_kernel import maximum_flow
from pipectl.planner.exact.load_model import LoadModel
from pipectl.planner.exact.request import TOLERANCE


class StageBound:
    """Minimum cuts in one model."""

    def __init__(self, model: LoadModel) -> None:
        self._model = model
        blocks, values = len(model), len(model.transfer_s)
        value_of = np.repeat(np.arange(values), np.diff(model.users.starts))
        into, out = blocks + 2 * value_of, blocks + 2 * value_of + 1
        self._sink = blocks + 2 * values
        every, users = np.arange(blocks), model.users.items
        inner = blocks + 2 * np.arange(values)
        source = np.concatenate([every, users, out, inner])
        target = np.concatenate([np.full(blocks, self._sink), into, users, inner + 1])
        finite = np.isfinite(model.accelerator_s)
        endless_s = 1.0 + model.accelerator_s[finite].sum() + model.transfer_s.sum()
        endless = np.full(len(users), endless_s)
        compute = np.where(finite, model.accelerator_s, endless_s)
        forth = np.concatenate([compute, endless, endless, model.transfer_s])
        self._room = np.stack([forth, np.zeros_like(forth)], axis=1).ravel()
        self._target = np.stack([target, source], axis=1).ravel().astype(np.int64)
        tails = np.stack([source, target], axis=1).ravel()
        self._arcs = np.argsort(tails, kind="stable").astype(np.int64)
        self._heads = np.searchsorted(tails[self._arcs], np.arange(self._sink + 2)).astype(np.int64)
        self._least = endless_s * 1e-15

    def of(self, block: int) -> float:
        """Seconds that no accelerator stage with this block is below."""
        flow = maximum_flow(
            block,
            self._sink,
            self._heads,
            self._arcs,
            self._target,
            self._room.copy(),
            self._least,
        )
        return flow * (1 - TOLERANCE / 10)

    def largest(self, enough_s: float, expired: Callable[[], bool]) -> float:
        """Seconds that the largest load of any partition is not below.

        Blocks that alone would be a large stage come first; the search ends with those that alone
        are below what was found, once ``enough_s`` is reached, or when time is up.
        """
        alone = self._alone()
        found = 0.0
        for block in np.argsort(-alone, kind="stable"):
            if alone[block] <= found or found >= enough_s or expired():
                break
            found = max(found, min(self.of(int(block)), float(self._model.cpu_s[block])))
        return found

    def _alone(self) -> Floats:
        """Load of every block as a stage of its own, on the device that it suits."""
        model = self._model
        moved = np.zeros(len(model))
        np.add.at(
            moved, model.users.items, np.repeat(model.transfer_s, np.diff(model.users.starts))
        )
        return np.minimum(model.accelerator_s + moved, model.cpu_s)
