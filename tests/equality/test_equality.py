"""Training through any plan gives what one rank gives, to the bit; one rank gives plain PyTorch.

All processes are real MPI ranks with one thread each; the stages are random convex cuts. Every run
of the tests trains a sample of the cells, ``make test-equality`` all of them. Replicas of stages
add in another order than one rank: they are compared with it within rounding, under SGD, and to the
bit with each other.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from fnmatch import fnmatch
from itertools import islice
from pathlib import Path
from typing import Any

import cell_jobs as JOBS
import cells
import models as MODELS
import pytest
import staleness
import torch
import yaml
from cells import Cell, shared
from outcome import different, weights
from torch import Tensor

from pipectl.capture.data import Loader, split_batch
from pipectl.capture.randomness import seed_everything
from pipectl.runs import RunDirectory, read_metrics
from pipectl.schedule import NAMES

Trained = Callable[[Any, Any], Path]
pytestmark = [pytest.mark.mpi, pytest.mark.timeout(2000)]


def cells_that(chosen: Callable[[Cell], bool]) -> pytest.MarkDecorator:
    """For every ``cell, ranks``; those that only ``make test-equality`` has are marked."""
    found = []
    for ranks in cells.RANKS:
        sample = cells.sampled(ranks)
        for cell in filter(chosen, cells.every_cell(ranks).values()):
            marks = [] if cell in sample else [pytest.mark.product]
            if (cell, ranks) != (cell.reference, 1):
                found.append(pytest.param(cell, ranks, marks=marks, id=f"{cell}-{ranks}"))
    return pytest.mark.parametrize(("cell", "ranks"), found)


PLAIN_CELLS = [
    pytest.param(cell, marks=[] if sample else [pytest.mark.product], id=str(cell))
    for sample in (True, False)
    for cell in cells.plain_cells(sample=sample)
]
"""Without dropout on one rank."""


def figures(run: Path) -> list[tuple[Any, ...]]:
    """Losses, gradient norms, loss scales, faults and evaluations, in order of their steps."""
    lines = read_metrics(RunDirectory(run))
    keys = ("loss", "gradient_norm", "loss_scale", "skipped")
    found = [(line.step, *(getattr(line, key) for key in keys)) for line in lines]
    evaluations = [line.evaluation for line in lines if line.evaluation is not None]
    faults = [(line.step, line.not_finite) for line in lines if line.not_finite is not None]
    return [*sorted(item for item in found if item[1] is not None), faults, *evaluations]


def assert_close(run: Path, other: Path, rel: float, *, evaluations: bool = True) -> None:
    for found, expected in zip(figures(run), figures(other), strict=True):
        if isinstance(found, tuple):
            assert [each is None for each in found] == [each is None for each in expected]
            numbers = [each for each in expected if each is not None]
            near = pytest.approx(numbers, rel=rel)
            assert [each for each in found if each is not None] == near
        elif isinstance(found, dict) and evaluations:
            assert found == pytest.approx(expected, rel=rel)


def assert_weights_are_close(
    found: dict[str, Tensor], expected: dict[str, Tensor], allowed: float
) -> None:
    """Counts of a norm are exact; its statistics may be means over replicas."""
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        near = 0.5 if "running" in name else 0 if "num_batches" in name else allowed
        assert float((found[name] - tensor).abs().max()) <= near, name


def notes(run: Path) -> Any:
    return json.loads((run / "notes.json").read_text())


def test_every_schedule_and_every_use_of_memory_is_in_the_sample() -> None:
    sample = {ranks: cells.sampled(ranks) for ranks in (2, 3, 4)}
    chosen = [cell for some in sample.values() for cell in some if not cell.replicas]
    found = {(cell.schedule, cell.memory) for cell in chosen}
    schedules = {schedule for schedule, _ in found}
    assert {cells.PLANNED_AS.get(each, each) for each in schedules} - {*cells.OWN} == {*NAMES}
    assert schedules >= {*cells.APART, *cells.PAIRED, cells.DEEPER, *cells.OWN}
    for schedule in (*cells.SCHEDULES, *cells.CHUNKED):
        assert (schedule, "") in found
        assert {memory for of, memory in found if of == schedule} - {""}
    assert {(apart, memory) for apart in ("1f1b-apart",) for memory in cells.WITH_APART} <= found
    for models in ({"tied"}, {"cnn", "dense"}):
        some = [cell for cell in chosen if cell.model in models]
        assert {cell.schedule for cell in some} >= {*cells.SCHEDULES, *cells.CHUNKED, *cells.APART}
        assert {cell.memory for cell in some} == {"", *cells.MEMORY}
        assert all(any(cell.model in models for cell in each) for each in sample.values())


@cells_that(lambda cell: cell.flushes and not cell.replicas and not cells.OWN.get(cell.schedule))
def test_weights_and_losses_equal_one_rank_to_the_bit(
    trained: Trained, cell: Cell, ranks: int
) -> None:
    reference, found = trained(1, cell.reference), trained(ranks, cell)
    assert different(weights(reference), weights(found)) == []
    assert figures(found) == figures(reference)


@cells_that(lambda cell: cells.OWN.get(cell.schedule, False))
def test_gradients_added_in_another_order_are_equal_within_rounding(
    trained: Trained, cell: Cell, ranks: int
) -> None:
    found, reference = figures(trained(ranks, cell)), figures(trained(1, cell.reference))
    (step, loss, norm, *_), (first, expected, least, *_) = found[0], reference[0]
    assert (step, first, loss) == (1, 1, expected)
    assert norm == pytest.approx(least, rel=1e-5)


@cells_that(lambda cell: not cell.flushes)
def test_without_flushes_weights_and_losses_are_those_of_their_staleness(
    trained: Trained, cell: Cell, ranks: int
) -> None:
    run = trained(ranks, cell)
    expected, losses = staleness.simulate(run, cell, ranks)
    found = weights(run)
    assert different(expected, {name: found[name] for name in expected}) == []
    assert [line.loss for line in read_metrics(RunDirectory(run)) if line.is_step] == losses


@cells_that(lambda cell: bool(cell.replicas))
def test_replicas_equal_one_rank_within_rounding(trained: Trained, cell: Cell, ranks: int) -> None:
    """Steps of SGD move weights by some tenths; sums in another order, by some 1e-7."""
    half = cell.model in ("gpt_bf16", "gpt_float16")
    allowed, rel = (2e-4, 1e-3) if half else (2e-6, 2e-5)
    run, reference = trained(ranks, cell), trained(1, cell.reference)
    assert_weights_are_close(weights(run), weights(reference), allowed)
    assert_close(run, reference, rel, evaluations=cell.model != "cnn")


TWO = shared("gpt", 2)


@cells_that(
    lambda cell: (
        {*cell.replicas} == {2}
        and (cell.model, cell.way, cell.batch) == (TWO.model, TWO.way, TWO.batch)
    )
)
def test_equal_replicas_give_the_same_bits_in_every_plan(
    trained: Trained, cell: Cell, ranks: int
) -> None:
    run, two = trained(ranks, cell), trained(2, TWO)
    assert different(weights(two), weights(run)) == []
    assert_close(run, two, 1e-12)


def test_replicas_add_in_another_order_than_one_rank_and_begin_early(trained: Trained) -> None:
    """The table would also be equal if one replica did all the work, and if sums began behind the
    last backward of a step. Before the steps is the warm-up."""
    run = trained(2, TWO)
    assert different(weights(trained(1, TWO.reference)), weights(run))
    assert notes(run)["early_sums"][-JOBS.STEPS :] == [True] * JOBS.STEPS


@pytest.mark.parametrize(
    "cell",
    [
        Cell("gpt", "pipedream", "few"),
        Cell("gpt", "pipedream-2bw", "smaller_last"),
        Cell("gpt", "pipedream-apart", "few"),
        Cell("gpt", "pipedream-2bw-apart", "smaller_last"),
    ],
    ids=str,
)
def test_staleness_changes_what_is_computed(trained: Trained, cell: Cell) -> None:
    """The comparison would also hold if every step were flushed."""
    one, four = (weights(trained(ranks, cell)) for ranks in (1, 4))
    assert different(one, four) == ([] if "2bw" in cell.schedule else sorted(one))


def test_the_cuts_include_gradients_that_return_use_by_use(trained: Trained) -> None:
    """The rarest path of all, taken only by cuts whose stages interleave a value's uses."""
    runs = [trained(4, cell) for cell in cells.sampled(4) if cell.model == "dense"]
    assert any(notes(run)["split_uses"] for run in runs)


@pytest.mark.parametrize(
    ("cell", "unreached"),
    [
        (Cell("tied", "1f1b", "divisible"), ()),
        (Cell("frozen", "1f1b", "few"), ("constant", "unused")),
    ],
    ids=str,
)
def test_training_lowers_the_loss_and_moves_all_that_gradients_reach(
    trained: Trained, cell: Cell, unreached: tuple[str, ...]
) -> None:
    """The table would also be equal if nothing were trained."""
    run = trained(4, cell)
    losses = [item[1] for item in figures(run) if isinstance(item, tuple)]
    assert losses[-1] < losses[0]
    seed_everything(3)
    model = getattr(MODELS, cell.model)()
    first, found = model.state_dict(), weights(run)
    still = {name for name in first if torch.equal(first[name], found[name])}
    frozen = {name for name, p in model.named_parameters() if not p.requires_grad}
    assert still == frozen | {name for name in first if name.startswith(unreached)}


@pytest.mark.parametrize("model", ["gpt", "cnn"])
def test_mixed_precision_is_another_arithmetic(trained: Trained, model: str) -> None:
    """The table would also be equal if it were ignored."""
    runs = [
        trained(1, Cell(name, "gpipe", "smaller_last"))
        for name in (model, f"{model}_bf16", f"{model}_float16")
    ]
    losses = [figures(run)[0][1] for run in runs]
    assert len(set(losses)) == 3
    assert losses == pytest.approx([losses[0]] * 3, rel=0.02)
    half = {torch.bfloat16, torch.float16}
    assert not half & {tensor.dtype for run in runs for tensor in weights(run).values()}


@pytest.mark.parametrize(
    "cell",
    [Cell("gpt_float16", "1f1b", "few"), Cell("cnn_float16", "1f1b", "smaller_last")],
    ids=str,
)
def test_overflows_skip_steps_at_the_start_and_again_later(trained: Trained, cell: Cell) -> None:
    """Without them the table would not tell whether all ranks skip the same steps."""
    found = figures(trained(4, cell))
    skipped = [item[4] for item in found if isinstance(item, tuple)]
    assert skipped[0]
    assert True in skipped[skipped.index(False) :]
    assert skipped.count(False) >= 3


def test_the_step_of_a_spoilt_image_is_left_out_and_leaves_no_trace(trained: Trained) -> None:
    """What is not a number would spread to all weights, and to the statistics."""
    run = trained(4, Cell("cnn_bf16", "1f1b", "smaller_last"))
    (faults,) = [item for item in figures(run) if isinstance(item, list)]
    assert len(faults) in (1, 2)
    assert all(what.loss_of_micro_batch is not None for _, what in faults)
    found = weights(run)
    assert all(bool(tensor.isfinite().all()) for tensor in found.values())
    others = weights(trained(4, Cell("cnn", "1f1b", "smaller_last")))
    counts = [name for name in found if name.endswith("num_batches_tracked")]
    assert all(int(others[name]) == int(found[name]) + 4 * len(faults) for name in counts)


@pytest.mark.parametrize("cell", PLAIN_CELLS)
def test_one_rank_equals_a_plain_loop(trained: Trained, cell: Cell) -> None:
    """To the bit; but gradients of uses of a tied weight are summed in another order."""
    plain, found = plain_loop(cell.model, cell.batch), weights(trained("plain", cell))
    if cell.model != "tied":
        assert different(plain, found) == []
    assert_weights_are_close(found, plain, 2e-6)


def accumulate(model: Any, loss_of: Any, scaler: Any, parts: Any, precision: str, *, masked: bool):
    """The gradients of a step, micro-batch by micro-batch."""
    counts = [int((targets >= 0).sum()) if masked else len(targets) for _, targets in parts]
    dtype = getattr(torch, {"bf16": "bfloat16"}.get(precision, precision))
    for (inputs, targets), count in zip(parts, counts, strict=True):
        with torch.autocast("cpu", dtype, enabled=dtype.itemsize == 2):
            loss = loss_of(model(inputs), targets)
        scaler.scale(loss * (count / sum(counts))).backward()


def plain_loop(name: str, batch: str) -> dict[str, Tensor]:
    """What a user would write: the untouched model, one process, gradient accumulation."""
    row = JOBS.MODELS[name]
    batch_size, micro_batches = JOBS.BATCHES[batch]
    size = -(-batch_size // micro_batches)
    seed_everything(3)
    model = getattr(MODELS, row.factory)(dropout=0.0)
    loss_of = getattr(MODELS, row.loss, torch.nn.CrossEntropyLoss())
    buckets = yaml.safe_load(f"{{{row.buckets}}}")
    loader = Loader(getattr(MODELS, row.data)(), seed=3, batch_size=batch_size, **buckets)
    optimizer = plain_optimizer(name, model)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=12)
    enabled = row.precision == "float16"
    scale = yaml.safe_load(row.loss_scale)
    scaler = torch.amp.GradScaler(
        "cpu", scale.get("initial", 1.0), growth_interval=scale.get("growth_interval", 1),
        enabled=enabled,
    )  # fmt: skip
    planned = list(islice(loader.batches(), JOBS.MORE_STEPS.get(name, JOBS.STEPS)))
    loaded = loader.micro_batches(planned, size)
    for drawn in planned:
        parts = [next(loaded) for _ in split_batch(drawn.size, size)]
        before = {key: tensor.clone() for key, tensor in model.named_buffers()}
        accumulate(model, loss_of, scaler, parts, row.precision, masked=row.weight != "samples")
        if row.on_nonfinite == "skip" and has_nan(model):
            optimizer.zero_grad()
            model.load_state_dict(before, strict=False)
            continue
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        before = scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        if scaler.get_scale() >= before:
            schedule.step()
    return {key: tensor.detach().clone() for key, tensor in model.state_dict().items()}


def has_nan(model: torch.nn.Module) -> bool:
    return any(bool(each.grad.isnan().any()) for each in model.parameters())


def plain_optimizer(name: str, model: torch.nn.Module) -> torch.optim.Optimizer:
    if name == "tied":
        return torch.optim.SGD(model.parameters(), lr=0.1)
    groups = [*yaml.safe_load(JOBS.MODELS[name].groups), {"match": "*"}]
    for group in groups:
        group["params"] = []
    for key, parameter in model.named_parameters():
        first = next(group for group in groups if fnmatch(key, group["match"]))
        first["params"].append(parameter)
    return torch.optim.AdamW(groups, lr=0.003)
