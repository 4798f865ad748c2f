"""Live bytes of ranks that train, against what the simulation predicts from the profile."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from pipectl.cluster import assumed_cluster
from pipectl.plan import Plan
from pipectl.simulate import simulate
from tests.corpus.catalogue import CROSS_ENTROPY, Entry, entries, spec_of

SIZE = 8
WIDE = Entry("wide", f"{Path(__file__).name}:Wide", CROSS_ENTROPY, "own.py:Images")
ENTRIES = {entry.name: entry for entry in (*entries(), WIDE)}
SMALL = 64 << 10
"""These models are small: what the loader and the engine hold would hide behind 8 MiB."""
Peaks = Callable[..., list[list[int]]]
pytestmark = pytest.mark.mpi


class Wide(nn.Sequential):
    """Its weights take far more than its values."""

    def __init__(self) -> None:
        layers = [nn.Sequential(nn.Linear(256, 256), nn.GELU()) for _ in range(5)]
        super().__init__(nn.Flatten(), nn.Linear(768, 256), *layers, nn.Linear(256, 5))


@pytest.fixture
def peaks(tmp_path: Path, run_in: Any, launch: Any) -> Peaks:
    """``peaks(model, ranks, *ways)``: as predicted, of all ranks, for every way to plan.

    The model may be followed by a precision.
    """

    def measure(model: str, ranks: int, *ways: dict[str, Any], count: int = 4) -> list[list[int]]:
        name, _, precision = model.partition(",")
        path = tmp_path / "job.yaml"
        spec = spec_of(ENTRIES[name], path, count, micro_batch=SIZE, optimizer="AdamW")
        resources = spec.resources.model_copy(update={"tasks_per_node": ranks})
        training = spec.training.model_copy(update={"precision": precision or "float32"})
        changed = {"resources": resources, "evaluation": None, "training": training}
        spec = spec.model_copy(update=changed)
        usual = {"stages": ranks, "schedule": "1f1b"}
        pipelines = [spec.pipeline.model_copy(update={**usual, **way}) for way in ways]
        specs = [spec.model_copy(update={"pipeline": pipeline}) for pipeline in pipelines]
        runs = [run_in(tmp_path / "runs", each) for each in specs]
        program = Path(__file__).with_name("peaks.py")
        done = launch(ranks, program, *[run.path for run in runs])
        assert done.returncode == 0, done.stderr[-4000:]
        found = []
        for run in runs:
            plan = Plan.load(run.plan)
            message = max((transfer.size_bytes for transfer in plan.transfers), default=0)
            predicted = simulate(plan, assumed_cluster("c", [ranks], 1, None)).peak_memory_bytes
            found.append([int((run.path / f"peak-{rank}").read_text()) for rank in range(ranks)])
            # Two messages may be under way at another time than predicted.
            assert predicted == pytest.approx(found[-1], rel=0.05, abs=SMALL + 2 * message)
        return found

    return measure


@pytest.mark.parametrize(
    ("name", "ranks"),
    [
        *[("checkpointed", 3), ("wide,bf16-weights", 2)],
        pytest.param("unet", 3, marks=pytest.mark.product),
        pytest.param("lstm", 2, marks=pytest.mark.product),
        pytest.param("wide,bf16", 2, marks=pytest.mark.product),
        *(
            pytest.param(name, ranks, marks=pytest.mark.corpus)
            for name in ("encoder-decoder", "recommender")
            for ranks in (2, 3)
        ),
    ],
)
def test_peaks_of_live_bytes_are_as_predicted(name: str, ranks: int, peaks: Peaks) -> None:
    """Without recomputation of a model's own checkpoints: what torch keeps of a forward without a
    backward waits for the garbage collector."""
    again = [] if name == "checkpointed" else [{"recompute": "all"}]
    peaks(name, ranks, {"recompute": "none"}, *again)


def test_in_blocks_a_stage_holds_less_than_if_it_recomputes_at_once(peaks: Peaks) -> None:
    (at_once,), (in_blocks,) = peaks("unet", 1, {"recompute": "all"}, {"recompute": "blocks"})
    assert in_blocks < 0.85 * at_once


def test_what_waits_on_a_disk_takes_no_memory(peaks: Peaks) -> None:
    """With eight micro-batches in flight, a stage keeps two or three of them."""
    ways = {}, {"offload": "disk"}, {"offload": "disk", "recompute": "all"}
    gpipe = [{"schedule": "gpipe", **way} for way in ways]
    kept, left, recomputed = (max(found) for found in peaks("lstm", 2, *gpipe, count=8))
    assert left < 0.6 * kept
    assert recomputed < left
