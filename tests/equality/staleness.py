"""What training without flushes should give: one process, deep copies of the weights, no pipeline.

Steps are computed one after the other. Each uses, for the parameters of stage s, the version that
the papers say; all versions are kept. An evaluation starts the count anew.

With ``training.correct_delay``, an update is followed by its difference from the one before, unless
the gradients of one of them had the newest weights, as the first ones have.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from functools import cache, partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from pipectl.capture import CapturedGraph, CapturedJob, Cut, build_stage
from pipectl.capture.data import split_batch
from pipectl.capture.randomness import seed_of
from pipectl.capture.regions import arithmetic
from pipectl.capture.slices import Span
from pipectl.capture.stage import StageCode
from pipectl.runtime.optimizer import make_updater
from pipectl.spec import load
from tests.equality import cell_jobs
from tests.equality.cells import Cell

Weights = dict[str, Tensor]


def pipedream(stage: int, stages: int, step: int) -> int:
    """Updates since the pipeline was empty: as many as were made before the forward began."""
    return max(0, step - (stages - 1 - stage))


def two_versions(stage: int, stages: int, step: int) -> int:
    return max(0, step - 1)


def ranks_in_pairs(stage: int, ranks: int, step: int) -> int:
    """Two ranks a stage. A step comes back after one forward and one backward of every stage from
    here to the end; then weights travel for as long as one forward takes. Of an odd number of
    ranks, the last has a stage of its own, whose weights need not travel."""
    behind = ranks - 2 * stage
    in_flight = behind + 1 if behind > 1 else 1
    return max(0, step - (in_flight - 1))


VERSIONS = {
    "pipedream": pipedream,
    "pipedream-2bw": two_versions,
    "pipedream-apart": ranks_in_pairs,
    "pipedream-2bw-apart": two_versions,
}


def simulate(run: Path, cell: Cell, ranks: int) -> tuple[Weights, list[float]]:
    """Weights by the names of the model, and the losses of all steps."""
    stage_of = json.loads((run / "notes.json").read_text())["stages"]
    job = cell_jobs.captured(cell.model, plain=False).of(load(run / "job.yaml"))
    newest = {n: p for n, p in job.wrapper.named_parameters() if p.requires_grad}
    updater = make_updater(job, newest)
    loss_of = partial(loss_of_graph, job)
    weigh = job.weight() or (lambda targets: len(targets))
    version = VERSIONS[cell.schedule]
    losses, kept, updates = [], list[Weights](), list[Weights]()
    for step, parts in enumerate(batches(job)):
        if step % cell_jobs.UNFLUSHED_STRETCH == 0:
            kept, updates = [copied(newest)], []
        used = {
            name: kept[version(stage_of[name], ranks, step % cell_jobs.UNFLUSHED_STRETCH)][name]
            for name in newest
            if name in stage_of
        }
        leaves = {name: tensor.clone().requires_grad_() for name, tensor in used.items()}
        shares = [float(weigh(targets)) for _, targets in parts]
        shares = [share / sum(shares) for share in shares]
        found = []
        for index, ((inputs, targets), share) in enumerate(zip(parts, shares, strict=True)):
            loss = loss_of(leaves, seed_of(3, step + 1, index), inputs, targets)
            (loss * share).backward()
            found.append(float(loss.detach()) * share)
        for name, leaf in leaves.items():
            newest[name].grad = leaf.grad
        updater.step()
        changed = copied(newest)
        updates.append({name: changed[name] - kept[-1][name] for name in leaves})
        if job.spec.training.correct_delay and len(updates) > 2:
            for name in leaves:
                newest[name].data += updates[-1][name] - updates[-2][name]
        kept.append(copied(newest))
        losses.append(math.fsum(found))
    trained = {n.removeprefix("model."): p.detach().clone() for n, p in newest.items()}
    return trained | {n: b.clone() for n, b in job.model.named_buffers()}, losses


def copied(weights: dict[str, nn.Parameter]) -> Weights:
    return {name: parameter.detach().clone() for name, parameter in weights.items()}


def batches(job: CapturedJob) -> Iterator[list[tuple[Any, Any]]]:
    spec = job.spec
    size = -(-spec.training.batch_size // spec.pipeline.micro_batches)
    steps = list(islice(job.loader.batches(), spec.training.steps))
    loaded = job.loader.micro_batches(steps, size)
    for batch in steps:
        yield list(islice(loaded, len(split_batch(batch.size, size))))


@cache
def code_of(graph: CapturedGraph, span: Span) -> StageCode:
    """The whole graph as one stage, built once for all steps and trainings."""
    cut = Cut(graph, dict.fromkeys((node.name for node in graph.operators), 0), training=True)
    return build_stage(cut, 0, span)


def loss_of_graph(
    job: CapturedJob, weights: Weights, seed: int, inputs: Any, targets: Any
) -> Tensor:
    """The whole captured graph as one function, whose random operators take a seed."""
    span = Span.of(len(inputs), inputs.shape[1] if job.loader.buckets else 0)
    graph = job.training_graph(*span.shape)
    code = code_of(graph, span)
    known = {**job.states, **job.training_graph(2).constants, **weights}
    states = [known[graph.states[slot.value].name] for slot in code.states]
    leaves = torch.utils._pytree.tree_leaves((inputs, targets))
    batch = dict(zip(graph.inputs, leaves, strict=True))
    given = [batch[name] for name in code.inputs]
    with arithmetic(job.spec.training.precision, torch.device("cpu")):
        results = dict(zip(code.results, code.module(seed, *states, *given), strict=True))
    return next(value for slot, value in results.items() if slot.value == graph.loss)
