"""Predicted and measured steps, memory and speed-up, of the example jobs and of six models.

Every repeat profiles, plans and trains again; the repeats of all cases take turns. With
``--alternatives``, the planner is free to choose, and its plan is compared with nine others of the
same batch, in turns too.

    python tests/benchmarks/prediction.py [--ranks N ...] [--repeats N] [--alternatives] [CASE ...]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from tables import print_table

sys.path.insert(0, str(Path(__file__).parents[1] / "corpus"))

from catalogue import entries, spec_of

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
GOAL_MEDIAN, GOAL_NINTH, GOAL_WORST = 0.04, 0.10, 0.20
GOAL_MEMORY, GOAL_MEMORY_BYTES = 0.05, 16 * 2**20
_WIDE = {"n_embd": 256, "n_layer": 6, "n_head": 8}
_HIDDEN = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 6}
_TOKENS = {"samples": 256}
_T5 = {"d_model": 256, "d_kv": 32, "d_ff": 1024, "num_layers": 3, "num_heads": 8}


@dataclass(frozen=True, eq=False)
class Case:
    """A job to predict and to train.

    Args:
        batch: samples per step; None for those of the job file.
        kwargs: arguments of a corpus model that make it wide enough for a pipeline.
        data: arguments of its data.
    """

    name: str
    micro_batches: int
    steps: int
    batch: int | None = None
    kwargs: dict[str, Any] = field(default_factory=dict)
    data: dict[str, Any] = field(default_factory=dict)

    def write(self, folder: Path) -> Path:
        """The job file; a job of ``configs`` stays where it is."""
        if self.batch is None:
            return CONFIGS / f"{self.name}.yaml"
        entry = next(each for each in entries() if each.name == self.name)
        job = folder / "job.yaml"
        spec_of(entry, job)
        document = yaml.safe_load(job.read_text())
        del document["evaluation"]
        document["model"]["kwargs"] |= self.kwargs
        document["training"]["batch_size"] = self.batch
        document["data"]["kwargs"] = {**document["data"].get("kwargs", {}), **self.data}
        job.write_text(yaml.safe_dump(document))
        return job


CASES = (
    Case("gpt-stdlib", 8, 30),
    Case("digits-cnn", 4, 60),
    Case("resnet18", 4, 20, 16),
    Case("densenet121", 4, 20, 16),
    Case("vit-b-16", 4, 20, 16),
    Case("gpt2", 4, 30, 64, _WIDE, _TOKENS),
    Case("llama", 4, 30, 64, _HIDDEN, _TOKENS),
    Case("t5", 4, 30, 64, _T5, _TOKENS),
)
ALTERNATIVES = [
    {"schedule": schedule, "micro_batches": count}
    for schedule in ("gpipe", "1f1b", "zb-h1")
    for count in (2, 4, 8)
]


def train(case: Case, ranks: int, folder: Path, pipeline: dict[str, Any]) -> dict[str, Any]:
    """Profile, plan and train; the JSON of ``status``."""
    settings: dict[str, Any] = {
        "training.steps": case.steps,
        "resources.nodes": 1,
        "resources.tasks_per_node": ranks,
        **{f"pipeline.{key}": value for key, value in pipeline.items()},
    }
    sets = [part for key, value in settings.items() for part in ("--set", f"{key}={value}")]
    command = [sys.executable, "-m", "pipectl"]
    job = str(case.write(folder))
    for arguments in (["submit", job, *sets, "--scheduler", "local", "--wait"], ["status", "last"]):
        done = subprocess.run(
            [*command, *arguments, "--json"], cwd=folder, capture_output=True, text=True
        )
        if done.returncode:
            sys.exit(f"{case.name} on {ranks}: {done.stderr}")
    return json.loads(done.stdout)  # type: ignore[no-any-return]


def predict(cases: Iterable[Case], ranks: Iterable[int], repeats: int) -> None:
    """Compare predictions with runs, the number of stages and micro-batches given."""
    keys = [(case, count) for case in cases for count in ranks]
    runs: dict[tuple[Case, int], list[dict[str, Any]]] = {key: [] for key in keys}
    for repeat in range(repeats):
        for case, count in keys:
            with tempfile.TemporaryDirectory() as folder:
                pipeline = {"micro_batches": case.micro_batches, "stages": count}
                runs[case, count].append(train(case, count, Path(folder), pipeline))
            sys.stderr.write(f"repeat {repeat + 1} of {repeats}: {case.name} on {count}\n")
    print(f"{os.cpu_count()} cores; medians of {repeats} (lowest to highest)\n")
    columns = ("job", "ranks", "predicted", "measured", "measured / predicted", "speed-up")
    print_table((*columns, "memory"), (_row(case, count, runs) for case, count in keys))
    ratios = [[run["measured_over_predicted"] for run in each] for each in runs.values()]
    errors = sorted(abs(statistics.median(each) - 1) for each in ratios)
    worst = max(abs(ratio - 1) for each in ratios for ratio in each)
    peaks = [peak for each in runs.values() for run in each for peak in run["peaks"]]
    close = sum(_is_close(peak) for peak in peaks)
    print(
        f"\nSteps, medians of cases: median {statistics.median(errors):.1%} off, nine of ten "
        f"within {errors[int(0.9 * (len(errors) - 1))]:.1%}, worst {errors[-1]:.1%} (goals "
        f"{GOAL_MEDIAN:.0%}, {GOAL_NINTH:.0%}, {GOAL_WORST:.0%}); worst run {worst:.1%}. Memory: "
        f"{close} of {len(peaks)} ranks within {GOAL_MEMORY:.0%} or {GOAL_MEMORY_BYTES >> 20} MiB "
        "of their peak."
    )


def _row(
    case: Case, count: int, runs: dict[tuple[Case, int], list[dict[str, Any]]]
) -> tuple[object, ...]:
    here = runs[case, count]
    measured = [run["step_time_s"] for run in here]
    ratios = [run["measured_over_predicted"] for run in here]
    step = statistics.median(measured)
    alone = [run["step_time_s"] for run in runs.get((case, 1), [])]
    memory = [
        peak["measured_bytes"] / peak["predicted_bytes"] for run in here for peak in run["peaks"]
    ]
    return (
        case.name,
        count,
        f"{statistics.median(run['predicted_step_time_s'] for run in here) * 1e3:.1f} ms",
        f"{step * 1e3:.1f} ms ({min(measured) * 1e3:.1f} to {max(measured) * 1e3:.1f})",
        f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})",
        f"{statistics.median(alone) / step:.2f}x" if alone else "",
        f"{min(memory):.2f} to {max(memory):.2f}",
    )


def _is_close(peak: dict[str, int]) -> bool:
    difference = abs(peak["measured_bytes"] - peak["predicted_bytes"])
    return difference <= max(GOAL_MEMORY_BYTES, GOAL_MEMORY * peak["measured_bytes"])


def choose(cases: Iterable[Case], ranks: Iterable[int], repeats: int) -> None:
    """Compare the planner's free choice with nine other plans, as measured."""
    rows = []
    for case in cases:
        for count in ranks:
            times: dict[int, list[float]] = {}
            plans = [{"micro_batches": "auto"}, *ALTERNATIVES]
            with tempfile.TemporaryDirectory() as folder:
                for repeat in range(repeats):
                    for index, pipeline in enumerate(plans):
                        run = train(case, count, Path(folder), pipeline)
                        times.setdefault(index, []).append(run["step_time_s"])
                        sys.stderr.write(f"{repeat + 1}: {case.name} on {count}: {pipeline}\n")
            steps = [statistics.median(times[index]) for index in range(len(plans))]
            best = min(range(1, len(plans)), key=steps.__getitem__)
            own, other = (f"{steps[index] * 1e3:.1f} ms" for index in (0, best))
            which = ", ".join(map(str, plans[best].values()))
            rows.append((case.name, count, own, other, which, f"{steps[0] / steps[best]:.2f}"))
    columns = ("job", "ranks", "planner's plan", "best other", "which")
    print_table((*columns, "planner's / best (goal 1.03)"), rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cases", nargs="*", metavar="CASE", help="all by default")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--alternatives", action="store_true")
    options = parser.parse_args()
    cases = [case for case in CASES if not options.cases or case.name in options.cases]
    run = choose if options.alternatives else predict
    run(cases, options.ranks, options.repeats)


if __name__ == "__main__":
    main()
