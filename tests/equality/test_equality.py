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

import pytest
import torch
from torch import Tensor
from torch.func import functional_call

from pipectl.capture.data import Loader, split_batch
from pipectl.capture.factories import find
from pipectl.objects import seed_everything
from pipectl.runs import MetricsLine, RunDirectory, read_metrics
from pipectl.schedule import NAMES
from pipectl.spec import JobSpec, load
from tests.equality import cell_jobs as JOBS
from tests.equality import cells, staleness
from tests.equality import models as MODELS
from tests.equality.cells import Cell, Kind, shared
from tests.equality.outcome import different, weights

Trained = Callable[[int, Cell], Path]
pytestmark = [pytest.mark.mpi, pytest.mark.timeout(2000)]
TWO = shared("gpt", 2)


def all_cells(chosen: Callable[[Cell], bool]) -> pytest.MarkDecorator:
    """For every ``cell, ranks``; those that only ``make test-equality`` has are marked."""
    return pytest.mark.parametrize(
        ("cell", "ranks"),
        [
            pytest.param(
                cell,
                ranks,
                marks=[] if cell in cells.sampled(ranks) else [pytest.mark.product],
                id=f"{cell}-{ranks}",
            )
            for ranks in cells.RANKS
            for cell in cells.every_cell(ranks).values()
            if chosen(cell) and (cell, ranks) != (cell.reference, 1)
        ],
    )


def adds_as_two(cell: Cell) -> bool:
    """Whether every stage has two replicas, which have the same terms to add as those of TWO."""
    return {*cell.replicas} == {2} and (cell.way, cell.reference) == (TWO.way, TWO.reference)


def cells_of(kind: Kind) -> pytest.MarkDecorator:
    return all_cells(lambda cell: cell.kind is kind)


def lines_of(run: Path) -> list[MetricsLine]:
    return read_metrics(RunDirectory(run))


def losses(run: Path) -> list[float | None]:
    return [line.loss for line in lines_of(run) if line.is_step]


FIGURES = ("loss", "gradient_norm", "loss_scale", "skipped", "not_finite")


def figures(run: Path) -> dict[tuple[int, str], Any]:
    """All that training and evaluations gave, by step and name."""
    found: dict[tuple[int, str], Any] = {}
    for line in lines_of(run):
        values = {name: getattr(line, name) for name in FIGURES}
        values |= {f"evaluation {name}": value for name, value in (line.evaluation or {}).items()}
        found |= {(line.step, name): v for name, v in values.items() if v is not None}
    return found


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
    chosen = [cell for ranks in (2, 3, 4) for cell in cells.sampled(ranks) if not cell.replicas]
    names = {cell.schedule for cell in chosen}
    assert {cells.PLANNED_AS.get(name, name) for name in names} - {*cells.OWN} == {*NAMES}
    assert names >= {*cells.APART, *cells.PAIRED, cells.DEEPER, *cells.OWN}
    for models in ({"tied"}, {"cnn", "dense"}):
        some = [cell for cell in chosen if cell.model in models]
        assert {cell.schedule for cell in some} >= {*cells.SCHEDULES, *cells.CHUNKED, *cells.APART}
        assert {cell.memory for cell in some} == {"", *cells.MEMORY}


@cells_of(Kind.SAME)
def test_weights_and_losses_equal_one_rank_to_the_bit(
    trained: Trained, cell: Cell, ranks: int
) -> None:
    reference, found = trained(1, cell.reference), trained(ranks, cell)
    assert different(weights(reference), weights(found)) == []
    assert figures(found) == figures(reference)


@cells_of(Kind.REORDERED)
def test_gradients_added_in_another_order_are_equal_within_rounding(
    trained: Trained, cell: Cell, ranks: int
) -> None:
    found, reference = figures(trained(ranks, cell)), figures(trained(1, cell.reference))
    assert found[1, "loss"] == reference[1, "loss"]
    assert found[1, "gradient_norm"] == pytest.approx(reference[1, "gradient_norm"], rel=1e-5)


@cells_of(Kind.STALE)
def test_without_flushes_weights_and_losses_are_those_of_their_staleness(
    trained: Trained, cell: Cell, ranks: int
) -> None:
    run = trained(ranks, cell)
    expected, expected_losses = staleness.simulate(run, cell, ranks)
    found = weights(run)
    assert different(expected, {name: found[name] for name in expected}) == []
    assert losses(run) == expected_losses


@cells_of(Kind.REPLICAS)
def test_replicas_equal_one_rank_within_rounding(trained: Trained, cell: Cell, ranks: int) -> None:
    """Steps of SGD move weights by some tenths; sums in another order, by some 1e-7."""
    half = cell.model in ("gpt_bf16", "gpt_float16")
    allowed, rel = (2e-4, 1e-3) if half else (2e-6, 2e-5)
    run, reference = trained(ranks, cell), trained(1, cell.reference)
    assert_weights_are_close(weights(run), weights(reference), allowed)
    found, expected = figures(run), figures(reference)
    assert found.keys() == expected.keys()
    if cell.model == "cnn":  # evaluations use its statistics, which may be means over replicas
        expected = {key: value for key, value in expected.items() if key[1] in FIGURES}
    assert {key: found[key] for key in expected} == pytest.approx(expected, rel=rel)


@cells_of(Kind.COMPILED)
def test_compiled_stages_equal_one_rank_within_rounding(
    trained: Trained, cell: Cell, ranks: int
) -> None:
    """The backend keeps the operators, but not the order of all sums."""
    run, reference = trained(ranks, cell), trained(1, cell.reference)
    assert_weights_are_close(weights(run), weights(reference), 2e-6)
    assert figures(run) == pytest.approx(figures(reference), rel=2e-5)


@all_cells(adds_as_two)
def test_equal_replicas_give_the_same_bits_in_every_plan(
    trained: Trained, cell: Cell, ranks: int
) -> None:
    run, two = trained(ranks, cell), trained(2, TWO)
    assert different(weights(two), weights(run)) == []
    assert figures(run) == pytest.approx(figures(two), rel=1e-12)


def test_replicas_add_in_another_order_than_one_rank_and_begin_early(trained: Trained) -> None:
    """The table would also be equal if one replica did all the work, and if sums began behind the
    last backward of a step. Before the steps is the warm-up."""
    run = trained(2, TWO)
    assert different(weights(trained(1, TWO.reference)), weights(run))
    assert notes(run)["early_sums"][-JOBS.STEPS :] == [True] * JOBS.STEPS


def test_many_of_the_compared_trainings_went_on_under_another_plan(trained: Trained) -> None:
    """In the same processes, after a step or two."""
    sample = [(ranks, cell) for ranks in (2, 3, 4) for cell in cells.sampled(ranks)]
    moves = [notes(trained(ranks, cell))["moves"] for ranks, cell in sample]
    assert set(moves) == {0, 1}
    assert sum(moves) >= len(sample) / 20


@pytest.mark.parametrize("schedule", cells.OVERLAPPING)
def test_staleness_changes_what_is_computed(trained: Trained, schedule: str) -> None:
    """The comparison would also hold if every step were flushed."""
    two_versions = "2bw" in schedule
    cell = Cell("gpt", schedule, cells.BATCH if two_versions else "few")
    one, four = (weights(trained(ranks, cell)) for ranks in (1, 4))
    assert different(one, four) == ([] if two_versions else sorted(one))


def test_the_cuts_include_gradients_that_return_use_by_use(trained: Trained) -> None:
    """The rarest path of all, taken only by cuts whose stages interleave a value's uses."""
    runs = [trained(4, cell) for cell in cells.sampled(4) if cell.model == "dense"]
    assert any(notes(run)["split_uses"] for run in runs)


@pytest.mark.parametrize(
    ("model", "batch", "unreached"),
    [("tied", "divisible", ()), ("frozen", "few", ("constant", "unused"))],
)
def test_training_lowers_the_loss_and_moves_all_that_gradients_reach(
    trained: Trained, model: str, batch: str, unreached: tuple[str, ...]
) -> None:
    """The table would also be equal if nothing were trained."""
    run = trained(4, Cell(model, "1f1b", batch))
    assert losses(run)[-1] < losses(run)[0]
    seed_everything(3)
    untrained = getattr(MODELS, model)()
    first, found = untrained.state_dict(), weights(run)
    still = {name for name in first if torch.equal(first[name], found[name])}
    frozen = {name for name, p in untrained.named_parameters() if not p.requires_grad}
    assert still == frozen | {name for name in first if name.startswith(unreached)}


@pytest.mark.parametrize("model", ["gpt", "cnn"])
def test_mixed_precision_is_another_arithmetic(trained: Trained, model: str) -> None:
    """The table would also be equal if it were ignored."""
    runs = [
        trained(1, Cell(name, "gpipe", "smaller_last"))
        for name in (model, f"{model}_bf16", f"{model}_float16")
    ]
    first = [losses(run)[0] for run in runs]
    assert len(set(first)) == 3
    assert first == pytest.approx(first[:1] * 3, rel=0.02)
    half = {torch.bfloat16, torch.float16}
    assert not half & {tensor.dtype for run in runs for tensor in weights(run).values()}


@pytest.mark.parametrize(
    ("model", "batch"), [("gpt_float16", "few"), ("cnn_float16", "smaller_last")]
)
def test_overflows_skip_steps_at_the_start_and_again_later(
    trained: Trained, model: str, batch: str
) -> None:
    """Without them the table would not tell whether all ranks skip the same steps."""
    run = trained(4, Cell(model, "1f1b", batch))
    skipped = [line.skipped for line in lines_of(run) if line.is_step]
    assert skipped[0]
    assert True in skipped[skipped.index(False) :]
    assert skipped.count(False) >= 3


def test_the_step_of_a_spoilt_image_is_left_out_and_leaves_no_trace(trained: Trained) -> None:
    """What is not a number would spread to all weights, and to the statistics."""
    run = trained(4, Cell("cnn_bf16", "1f1b", "smaller_last"))
    faults = [line.not_finite for line in lines_of(run) if line.not_finite is not None]
    assert len(faults) in (1, 2)
    assert all(fault.loss_of_micro_batch is not None for fault in faults)
    found = weights(run)
    assert all(bool(tensor.isfinite().all()) for tensor in found.values())
    others = weights(trained(4, Cell("cnn", "1f1b", "smaller_last")))
    counts = [name for name in found if name.endswith("num_batches_tracked")]
    assert all(int(others[name]) == int(found[name]) + 4 * len(faults) for name in counts)


@cells_of(Kind.PLAIN)
def test_one_rank_equals_a_plain_loop(trained: Trained, cell: Cell, ranks: int) -> None:
    """To the bit; but gradients of uses of a tied weight are summed in another order."""
    run = trained(ranks, cell)
    plain, found = plain_loop(load(run / "job.yaml")), weights(run)
    if cell.model != "tied":
        assert different(plain, found) == []
    assert_weights_are_close(found, plain, 2e-6)


def plain_loop(spec: JobSpec) -> dict[str, Tensor]:
    """What a user would write: the untouched model, one process, gradient accumulation."""
    training, scale = spec.training, spec.training.loss_scale
    size = -(-training.batch_size // spec.pipeline.micro_batches)
    seed_everything(training.seed)
    model = find(spec.model.factory)(**spec.model.kwargs)
    data = {"buckets": spec.data.buckets, "pad": spec.data.pad}
    dataset, batch_size = find(spec.data.factory)(), training.batch_size
    loader = Loader(dataset, seed=training.seed, batch_size=batch_size, **data)
    optimizer = plain_optimizer(spec, model)
    schedule = find(spec.lr_scheduler.factory)(optimizer, **spec.lr_scheduler.kwargs)
    scaler = torch.amp.GradScaler(
        "cpu",
        scale.initial,
        growth_interval=scale.growth_interval,
        enabled=training.precision == "float16",
    )
    planned = list(islice(loader.batches(), training.steps))
    loaded = loader.micro_batches(planned, size)
    for drawn in planned:
        parts = [next(loaded) for _ in split_batch(drawn.size, size)]
        before = {key: tensor.clone() for key, tensor in model.named_buffers()}
        accumulate(spec, model, scaler, parts)
        if training.on_nonfinite == "skip" and has_nan(model):
            optimizer.zero_grad()
            model.load_state_dict(before, strict=False)
            continue
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), training.clip_grad_norm)
        before = scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        if scaler.get_scale() >= before:
            schedule.step()
    return {key: tensor.detach().clone() for key, tensor in model.state_dict().items()}


def plain_optimizer(spec: JobSpec, model: torch.nn.Module) -> torch.optim.Optimizer:
    """Each parameter is in the first group whose pattern it matches."""
    chosen = [group.model_dump(exclude_none=True) for group in spec.optimizer.groups]
    groups = [{**group, "params": []} for group in (*chosen, {"match": "*"})]
    for name, parameter in model.named_parameters():
        first = next(group for group in groups if fnmatch(name, group["match"]))
        first["params"].append(parameter)
    return find(spec.optimizer.factory)(groups, **spec.optimizer.kwargs)


def accumulate(spec: JobSpec, model: torch.nn.Module, scaler: Any, parts: list[Any]) -> None:
    """The gradients of a step, micro-batch by micro-batch."""
    loss_of = find(spec.loss.factory)
    loss_of = loss_of() if isinstance(loss_of, type) else loss_of
    weigh = len if spec.loss.weight == "samples" else find(spec.loss.weight)
    total = sum(int(weigh(targets)) for _, targets in parts)
    precision = spec.training.precision
    dtype = getattr(torch, {"bf16": "bfloat16"}.get(precision, "float16"))
    norms = [module for module in model.modules() if isinstance(module, torch.nn.BatchNorm2d)]
    whole = {id(parameter) for norm in norms for parameter in norm.parameters()}
    for inputs, targets in parts:
        if precision == "bf16-weights":
            kept = model.named_parameters()
            half = {name: p if id(p) in whole else p.bfloat16() for name, p in kept}
            inputs = inputs.bfloat16() if inputs.is_floating_point() else inputs
            loss = loss_of(functional_call(model, half, inputs).float(), targets)
        else:
            with torch.autocast("cpu", dtype, enabled=precision != "float32"):
                loss = loss_of(model(inputs), targets)
        scaler.scale(loss * (int(weigh(targets)) / total)).backward()


def has_nan(model: torch.nn.Module) -> bool:
    return any(bool(each.grad.isnan().any()) for each in model.parameters())
