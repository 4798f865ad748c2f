"""A lower bound on the largest load from the amount of work alone."""

from __future__ import annotations

import numpy as np

from pipectl.arrays import Floats, Integers
from pipectl.planner.exact.load_model import LoadModel
from pipectl.planner.exact.request import BalanceRequest


def cpu_share_s(model: LoadModel, cpus: int, bound_s: float) -> Floats:
    """What 0, 1, 2… CPUs can take off the accelerators within a bound.

    The most that fits, if blocks could be divided: those that suit a CPU best come first.
    """
    share = np.zeros(cpus + 1)
    if cpus:
        order = _suiting(model)
        spent = np.cumsum(model.cpu_s[order])
        taken = np.clip(1 - (spent - bound_s) / np.maximum(model.cpu_s[order], 1e-300), 0.0, 1.0)
        share[1:] = np.arange(1, cpus + 1) * (taken * model.work_s[order]).sum()
    return share


def _suiting(model: LoadModel) -> Integers:
    """Blocks a CPU can run, by falling work of an accelerator per second of its own."""
    order = np.argsort(-model.work_s / np.maximum(model.cpu_s, 1e-300), kind="stable")
    return order[np.isfinite(model.cpu_s[order])]


def work_bound_s(model: LoadModel, request: BalanceRequest) -> float:
    """Seconds that the largest load is not below, by bisection where there are CPUs."""
    total = float(model.work_s.sum())
    low, high = 0.0, total / max(request.devices, 1)
    if not request.cpus:
        return high
    for _ in range(60):
        middle = (low + high) / 2
        share = cpu_share_s(model, request.cpus, middle)[-1]
        if share + request.devices * middle < total:
            low = middle
        else:
            high = middle
    return low
