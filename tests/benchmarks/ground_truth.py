"""Predicted against published step times: GPTs on up to 8 A100 of one node, measured by others.

The directory holds `vtrain_single_node.csv` (VIA Research Group at KAIST, with vTrain). What a
layer, the ends of the model and an update take is fitted to the rows without a pipeline or tensor
parallelism. The rows with a pipeline, which the fit has not seen, are then simulated: equal numbers
of layers in every stage, 1F1B. vTrain reports 8.4 %, but predicts from operators alone, without any
measured step, so that the two figures say different things.
"""

from __future__ import annotations

import csv
import statistics
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from pipectl.cluster import Cluster, Device, Node
from pipectl.lanes import TransferKind
from pipectl.link import Link
from pipectl.plan import Plan, Stage, StageCost, Transfer
from pipectl.schedule import default_warm_up
from pipectl.simulate import simulate

MICRO_BATCHES = (1, 2, 4, 8)
"""Samples."""
NVLINK = Link(10e-6, 2e11)
FORWARD = 1 / 3
"""Of forward and backward together; only their sum is measured."""


class Row(NamedTuple):
    """One measured step; seconds."""

    gpus: int
    batch: int
    micro_batch: int
    hidden: int
    heads: int
    layers: int
    sequence: int
    tensor: int
    data: int
    pipeline: int
    step_s: float

    @property
    def micro_batches(self) -> int:
        return self.batch // (self.micro_batch * self.data)


def parts_of(row: Row, layers: float, ends: float) -> tuple[list[float], list[float]]:
    """How often each figure of the fit counts in so many layers, and ends of the model.

    In a micro-batch: what a layer and both ends take, by its samples. In an update: the same, and
    again for all that replicas send and receive to sum the gradients.
    """
    sent = 2 * (row.data - 1) / row.data
    own = [float(row.micro_batch == size) for size in MICRO_BATCHES]
    update = [layers, layers * sent, ends, ends * sent]
    return [count * each for count in (layers, ends) for each in own], update


def read(path: Path) -> list[Row]:
    with path.open(encoding="utf-8-sig", newline="") as file:
        _, *lines = csv.reader(file)
    return [Row(*map(int, line[:-1]), float(line[-1]) / 1e3) for line in lines]


def fit(rows: Sequence[Row]) -> np.ndarray:
    """Seconds of the parts by least squares of relative errors; none is negative."""
    matrix = []
    for row in rows:
        work, update = parts_of(row, row.layers, 1)
        matrix.append([*(row.micro_batches * each for each in work), *update])
    scaled = np.array(matrix) / np.array([row.step_s for row in rows])[:, None]
    columns = list(range(scaled.shape[1]))
    found = np.zeros(scaled.shape[1])
    while columns:
        solution = np.linalg.lstsq(scaled[:, columns], np.ones(len(rows)), rcond=None)[0]
        if solution.min() >= 0:
            found[columns] = solution
            break
        del columns[int(solution.argmin())]
    return found


def predict(row: Row, seconds: np.ndarray) -> float:
    """Simulated step; the pipelines of all replicas are alike, so that one of them is simulated."""
    stages = []
    for index in range(row.pipeline):
        ends = float(index == row.pipeline - 1)
        work, update = parts_of(row, row.layers / row.pipeline, ends)
        work_s = float(np.dot(work, seconds[: len(work)]))
        update_s = float(np.dot(update, seconds[len(work) :]))
        cost = StageCost(work_s * FORWARD, work_s * (1 - FORWARD), update_s, 0, 0, 0)
        stages.append(Stage((f"stage{index}",), (index,), cost))
    size = 2 * row.micro_batch * row.sequence * row.hidden
    between = range(row.pipeline - 1)
    plan = Plan(
        name="published",
        fingerprint=None,
        schedule="1f1b",
        warm_up=default_warm_up("1f1b", row.pipeline, row.micro_batches),
        batch_size=row.micro_batches * row.micro_batch,
        micro_batch_size=row.micro_batch,
        micro_batches=row.micro_batches,
        stages=tuple(stages),
        transfers=(
            *(Transfer(TransferKind.ACTIVATION, i, i + 1, size) for i in between),
            *(Transfer(TransferKind.GRADIENT, i + 1, i, size) for i in between),
        ),
        node_of_rank=(0,) * row.pipeline,
    )
    node = Node("node", row.pipeline, row.pipeline, Device("a100"))
    return simulate(plan, Cluster("node", "published", (node,), NVLINK, NVLINK)).step_time_s


def comparison(folder: Path) -> tuple[Sequence[str], list[Sequence[object]]]:
    """Heads and rows of the table: errors of predictions by kind of row."""
    rows = [row for row in read(folder / "vtrain_single_node.csv") if row.tensor == 1]
    plain = [row for row in rows if row.pipeline == 1]
    seconds = {h: fit([r for r in plain if r.hidden == h]) for h in {r.hidden for r in rows}}
    errors: dict[str, list[float]] = defaultdict(list)
    for row in rows:
        kind = "without a pipeline (fitted)"
        if row.pipeline > 1:
            kind = f"{row.pipeline} stages" + ", with replicas" * (row.data > 1)
        errors[kind].append(predict(row, seconds[row.hidden]) / row.step_s - 1)
    lines: list[Sequence[object]] = []
    for kind, signed in sorted(errors.items()):
        sizes = sorted(map(abs, signed))
        p90 = sizes[int(0.9 * (len(sizes) - 1))]
        figures = statistics.median(sizes), p90, sizes[-1]
        bias = f"{statistics.mean(signed):+.1%}"
        lines.append((kind, len(sizes), *(f"{each:.1%}" for each in figures), bias))
    return ("steps", "count", "median error", "90% within", "worst", "bias"), lines
