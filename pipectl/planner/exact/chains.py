"""Good partitions in little time: the best ones along several topological orders."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from pipectl.arrays import Integers
from pipectl.planner.exact.chain_kernel import Cuts, cut_order
from pipectl.planner.exact.load_model import LoadModel
from pipectl.planner.exact.request import BalanceRequest, DeviceKind


@dataclass(frozen=True)
class Stages:
    """A partition.

    Args:
        blocks: of every stage, in the order of the pipeline.
        devices: of every stage.
    """

    blocks: tuple[tuple[int, ...], ...]
    devices: tuple[DeviceKind, ...]

    def loads_s(self, model: LoadModel) -> list[float]:
        """The load of every stage."""
        return [model.load_s(b, d) for b, d in zip(self.blocks, self.devices, strict=True)]

    def value_s(self, model: LoadModel) -> float:
        """The largest load."""
        return max(self.loads_s(model))


def best_of_orders(
    model: LoadModel,
    request: BalanceRequest,
    orders: Sequence[Sequence[int]],
    bound_s: float,
    expired: Callable[[], bool],
) -> Stages | None:
    """The best partition below a bound whose stages are parts of one of the orders."""
    found = None
    for order in orders:
        if found is not None and expired():
            break
        stages = _cut(model, request, order, bound_s)
        if stages is not None:
            found, bound_s = stages, stages.value_s(model)
    return found


def _cut(
    model: LoadModel, request: BalanceRequest, order: Sequence[int], bound_s: float
) -> Stages | None:
    """The best partition below a bound along one order."""
    shape = (len(order) + 1, request.devices + 1, request.cpus + 1)
    cuts = Cuts(np.empty(shape), np.zeros(shape, dtype=np.int64))
    blocks = np.array(order, dtype=np.int64)
    cut_order(blocks, bound_s, model.costs, model.limit_bytes, model.moves, cuts)
    if not np.isfinite(cuts.best_s[-1].min()):
        return None
    accelerators, cpus = np.unravel_index(cuts.best_s[-1].argmin(), shape[1:])
    return _followed(order, cuts.before, int(accelerators), int(cpus))


def _followed(order: Sequence[int], before: Integers, accelerators: int, cpus: int) -> Stages:
    """The stages behind a figure of the table."""
    end = len(order)
    blocks: list[tuple[int, ...]] = []
    devices: list[DeviceKind] = []
    while end:
        start = int(before[end, accelerators, cpus])
        device = DeviceKind.CPU if start < 0 else DeviceKind.ACCELERATOR
        start = -1 - start if start < 0 else start
        accelerators -= device is DeviceKind.ACCELERATOR
        cpus -= device is DeviceKind.CPU
        blocks.append(tuple(sorted(order[start:end])))
        devices.append(device)
        end = start
    return Stages(tuple(reversed(blocks)), tuple(reversed(devices)))
