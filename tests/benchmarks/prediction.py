"""Predicted and measured steps, memory and speed-up, of the example jobs and of six models.

Every repeat profiles, plans and trains again; the repeats of all cases take turns. With
``--alternatives``, the planner is free to choose, and its plan is compared with nine others of the
same batch, in turns too.

    python tests/benchmarks/prediction.py [--ranks N ...] [--repeats N] [--alternatives] [CASE ...]
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

from tests.benchmarks.jobs import CONFIGS, CORPUS, print_table, spread, trained

sys.path.insert(0, str(CORPUS))

from tests.corpus.catalogue import entries, spec_of

GOAL_MEDIAN, GOAL_NINTH, GOAL_WORST = 0.04, 0.10, 0.20
GOAL_MEMORY, GOAL_MEMORY_BYTES = 0.05, 16 * 2**20
IMAGES = {"training.batch_size": 16, "training.steps": 20}
TOKENS = {"training.batch_size": 64, "training.steps": 30, "data.kwargs.samples": 256}
GPT2 = {"n_embd": 256, "n_layer": 6, "n_head": 8}
LLAMA = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 6}
T5 = {"d_model": 256, "d_kv": 32, "d_ff": 1024, "num_layers": 3, "num_heads": 8}
Settings = dict[str, Any]


def wide(sizes: Mapping[str, int]) -> Settings:
    """A model of the corpus, wide enough for a pipeline."""
    return {**TOKENS, **{f"model.kwargs.{key}": size for key, size in sizes.items()}}


CASES: dict[str, tuple[int, Settings]] = {
    "gpt-stdlib": (8, {"training.steps": 30}),
    "digits-cnn": (4, {"training.steps": 60}),
    "resnet18": (4, IMAGES),
    "densenet121": (4, IMAGES),
    "vit-b-16": (4, IMAGES),
    "gpt2": (4, wide(GPT2)),
    "llama": (4, wide(LLAMA)),
    "t5": (4, wide(T5)),
}
"""Jobs of ``configs`` and models of the corpus: micro-batches, and further settings."""
PLANNED: Settings = {"pipeline.micro_batches": "auto"}
ALTERNATIVES: list[Settings] = [
    {"pipeline.schedule": schedule, "pipeline.micro_batches": count}
    for schedule in ("gpipe", "1f1b", "zb-h1")
    for count in (2, 4, 8)
]
Run = dict[str, Any]


def run(name: str, ranks: int, pipeline: Settings) -> Run:
    """Of a case, in a folder that no other run has seen."""
    settings = {"resources.nodes": 1, "resources.tasks_per_node": ranks, **CASES[name][1]}
    sys.stderr.write(f"{name} on {ranks}: {pipeline}\n")
    with tempfile.TemporaryDirectory() as folder:
        job = CONFIGS / f"{name}.yaml"
        if not job.exists():
            job = Path(folder) / "job.yaml"
            spec_of(next(entry for entry in entries() if entry.name == name), job)
            settings["evaluation"] = None
        return trained(Path(folder), job, {**settings, **pipeline})


def predict(names: Sequence[str], ranks: Sequence[int], repeats: int) -> None:
    """Compare predictions with runs, the number of stages and micro-batches given."""
    runs: dict[tuple[str, int], list[Run]] = {key: [] for key in product(names, ranks)}
    for _ in range(repeats):
        for (name, count), found in runs.items():
            given = {"pipeline.micro_batches": CASES[name][0], "pipeline.stages": count}
            found.append(run(name, count, given))
    print(f"{os.cpu_count()} cores; medians of {repeats} (lowest to highest)\n")
    columns = ("job", "ranks", "predicted ms", "measured ms", "measured / predicted")
    print_table((*columns, "speed-up", "memory"), predictions(runs))
    ratios = [[each["measured_over_predicted"] for each in found] for found in runs.values()]
    errors = sorted(abs(statistics.median(found) - 1) for found in ratios)
    worst = max(abs(ratio - 1) for found in ratios for ratio in found)
    peaks = [peak for found in runs.values() for each in found for peak in each["peaks"]]
    close = sum(is_close(peak) for peak in peaks)
    print(
        f"\nSteps, medians of cases: median {statistics.median(errors):.1%} off, nine of ten "
        f"within {errors[int(0.9 * (len(errors) - 1))]:.1%}, worst {errors[-1]:.1%} (goals "
        f"{GOAL_MEDIAN:.0%}, {GOAL_NINTH:.0%}, {GOAL_WORST:.0%}); worst run {worst:.1%}. Memory: "
        f"{close} of {len(peaks)} ranks within {GOAL_MEMORY:.0%} or {GOAL_MEMORY_BYTES >> 20} MiB "
        "of their peak."
    )


def predictions(runs: Mapping[tuple[str, int], list[Run]]) -> Iterator[Sequence[object]]:
    """Rows of the table, by case and number of ranks."""

    def step_ms(name: str, count: int, key: str = "step_time_s") -> list[float]:
        return [1e3 * each[key] for each in runs[name, count]]

    for (name, count), found in runs.items():
        measured = step_ms(name, count)
        predicted_ms = statistics.median(step_ms(name, count, "predicted_step_time_s"))
        alone = statistics.median(step_ms(name, 1)) if (name, 1) in runs else None
        memory = [
            peak["measured_bytes"] / peak["predicted_bytes"]
            for each in found
            for peak in each["peaks"]
        ]
        yield (
            *(name, count, f"{predicted_ms:.1f}", spread(measured, ".1f")),
            spread([each["measured_over_predicted"] for each in found], ".2f"),
            f"{alone / statistics.median(measured):.2f}x" if alone else "",
            f"{min(memory):.2f} to {max(memory):.2f}",
        )


def is_close(peak: Mapping[str, int]) -> bool:
    """Whether the prediction of a peak reaches the goal."""
    difference = abs(peak["measured_bytes"] - peak["predicted_bytes"])
    return difference <= max(GOAL_MEMORY_BYTES, GOAL_MEMORY * peak["measured_bytes"])


def choose(names: Sequence[str], ranks: Sequence[int], repeats: int) -> None:
    """Compare the planner's free choice with nine other plans, as measured."""

    def row(name: str, count: int) -> Sequence[object]:
        plans = (PLANNED, *ALTERNATIVES)
        turns = [
            [run(name, count, pipeline)["step_time_s"] for pipeline in plans]
            for _ in range(repeats)
        ]
        own_s, *others_s = map(statistics.median, zip(*turns, strict=True))
        best_s, best = min(zip(others_s, range(len(others_s)), strict=True))
        which = ", ".join(map(str, ALTERNATIVES[best].values()))
        times = (f"{seconds * 1e3:.1f}" for seconds in (own_s, best_s))
        return name, count, *times, which, f"{own_s / best_s:.2f}"

    columns = ("job", "ranks", "planner's plan ms", "best other ms", "which")
    rows = (row(name, count) for name, count in product(names, ranks))
    print_table((*columns, "planner's / best (goal 1.03)"), rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cases", nargs="*", metavar="CASE", help="all by default")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--alternatives", action="store_true")
    options = parser.parse_args()
    names = [name for name in CASES if not options.cases or name in options.cases]
    compare = choose if options.alternatives else predict
    compare(names, options.ranks, options.repeats)


if __name__ == "__main__":
    main()
