"""Whether any partition is below a bound: reachability over all downsets.

A downset is reached with the fewest accelerators, for each number of CPUs. What it takes at least,
and what the rest takes at least, says whether it is worth a walk; see
:mod:`pipectl.planner.exact.walk_kernel`.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from pipectl.arrays import Floats, Integers
from pipectl.planner.exact.chains import Stages
from pipectl.planner.exact.lattice import Lattice
from pipectl.planner.exact.lattice_kernel import measure
from pipectl.planner.exact.load_model import LoadModel
from pipectl.planner.exact.request import TOLERANCE, BalanceRequest, DeviceKind
from pipectl.planner.exact.walk_kernel import NEVER, Limits, Reached, reach
from pipectl.planner.exact.work_bound import cpu_share_s

_STEPS = 1 << 23
"""Steps of a walk between two looks at the time: a third of a second."""


class Decider:
    """Answers for one model and any bound."""

    def __init__(self, model: LoadModel, request: BalanceRequest, lattice: Lattice) -> None:
        self._model = model
        self._request = request
        self._cpus = request.cpus
        self._lattice = lattice
        self._work_s, self._cut_s = _figures(model, lattice)

    def below(self, bound_s: float, expired: Callable[[], bool]) -> Stages | None:
        """Some partition whose stages are all below a bound, or None if there is none.

        Raises:
            TimeoutError: time was up before this was known.
        """
        reached = self._reached(bound_s, expired)
        if reached.fewest[-1].min() == NEVER:
            return None
        return self._followed(reached)

    def _reached(self, bound_s: float, expired: Callable[[], bool]) -> Reached:
        model, lattice = self._model, self._lattice
        allowed = self._allowed(bound_s)
        fewest = np.full_like(allowed, NEVER)
        fewest[0] = 0
        reached = Reached(fewest, np.zeros_like(allowed))
        limits = Limits(bound_s, model.limit_bytes, model.costs, self._cut_s, allowed)
        start = 0
        while start < len(lattice) - 1:
            if expired():
                raise TimeoutError
            start = reach(lattice.steps, model.moves, limits, reached, start, _STEPS)
        return reached

    def _allowed(self, bound_s: float) -> Integers:
        """Most accelerators for each downset, by CPUs, that leave enough for the rest.

        The rest needs accelerators for its work, two if it is no stage by itself. Where more are
        needed for the downset than are left, no walk need go on.
        """
        devices, share_s = self._request.devices, cpu_share_s(self._model, self._cpus, bound_s)
        rest_s = self._work_s[-1] - self._work_s
        allowed = np.empty((len(rest_s), self._cpus + 1), dtype=np.int64)
        for cpus in range(self._cpus + 1):
            rest = _accelerators(rest_s - share_s[self._cpus - cpus], bound_s)
            least = _accelerators(self._work_s - share_s[cpus], bound_s)
            if cpus == self._cpus:
                rest = np.maximum(rest, np.where(rest_s + self._cut_s < bound_s, 1, 2))
            allowed[:, cpus] = np.where(least + rest <= devices, devices - rest, -1)
        allowed[-1] = devices
        return allowed

    def _followed(self, reached: Reached) -> Stages:
        """The stages of the way to the full downset."""
        lattice, end, cpus = self._lattice, len(self._lattice) - 1, int(reached.fewest[-1].argmin())
        blocks: list[tuple[int, ...]] = []
        devices: list[DeviceKind] = []
        while end:
            start = int(reached.before[end, cpus])
            device = DeviceKind.CPU if start < 0 else DeviceKind.ACCELERATOR
            start = -1 - start if start < 0 else start
            cpus -= device is DeviceKind.CPU
            inside = set(lattice.members(end)) - set(lattice.members(start))
            blocks.append(tuple(sorted(inside)))
            devices.append(device)
            end = start
        return Stages(tuple(reversed(blocks)), tuple(reversed(devices)))


def _accelerators(work_s: Floats, bound_s: float) -> Integers:
    """How many take some work at least."""
    return np.maximum(np.ceil(work_s / bound_s * (1 - TOLERANCE)), 0).astype(np.int64)


def _figures(model: LoadModel, lattice: Lattice) -> tuple[Floats, Floats]:
    """Compute of every downset, as far as accelerators can do it, and transfers across it."""
    work_s, cut_s = np.zeros(len(lattice)), np.zeros(len(lattice))
    parents, added = lattice.parents, lattice.last_added
    measure(lattice.steps.sets, parents, added, model.work_s, model.moves, work_s, cut_s)
    return work_s, cut_s
