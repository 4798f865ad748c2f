"""Cost of a checkpoint every 50 steps.

Two ranks train configs/gpt-stdlib.yaml in turns, 50 steps with a checkpoint in the middle and 50
without. The bytes on the disk are compared with the size of the parameters, buffers and optimizer
state.

    python tests/benchmarks/checkpoint.py [ROUNDS [STEPS [DIRECTORY OF THE CHECKPOINTS]]]
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from in_turns import CONFIGS, cluster_of, ratio, spread, start

from pipectl.capture.factories import find
from pipectl.planner import PlanRequest, make_plan
from pipectl.profile import Profile
from pipectl.runs import RunDirectory, checkpoints
from pipectl.spec import JobSpec, load

JOB = CONFIGS.parent / "gpt-stdlib.yaml"
RANKS, MICRO_BATCHES = 2, 4
ROUNDS, STEPS = 11, 50
OVERRIDES = [
    "site_defaults=false",
    "evaluation=null",
    f"pipeline={{stages: {RANKS}, micro_batches: {MICRO_BATCHES}}}",
    f"resources={{nodes: 1, tasks_per_node: {RANKS}}}",
]


def prepare(folder: Path, rounds: int, steps: int) -> JobSpec:
    """Profile, plan, and what the ranks do."""
    spec = load(JOB, overrides=OVERRIDES)
    batch = spec.training.batch_size
    request = PlanRequest(spec.name, batch, micro_batches=MICRO_BATCHES, stages=RANKS)
    make_plan(profile_of(folder), cluster_of(RANKS), request).save(folder / "plan.json")
    case = {
        "job": str(JOB),
        "overrides": OVERRIDES,
        "folder": str(folder),
        "rounds": rounds,
        "steps": steps,
        "warm_up": max(steps // 2, 1),
    }
    (folder / "case.json").write_text(json.dumps(case))
    return spec


def profile_of(folder: Path) -> Profile:
    """Of this machine, by the quickest measurement."""
    command = [sys.executable, "-m", "pipectl", "profile", str(JOB), "--scheduler", "local"]
    settings = [word for override in OVERRIDES for word in ("--set", override)]
    path = folder / "profile.json"
    subprocess.run(
        [*command, "--effort", "fast", "-o", str(path), *settings], check=True, capture_output=True
    )
    return Profile.load(path)


def state_bytes(spec: JobSpec) -> int:
    """Of the state dict of the job's model, and of its optimizer behind one step."""
    model = find(spec.model.factory)(**spec.model.kwargs)
    optimizer = torch.optim.AdamW(model.parameters(), **spec.optimizer.kwargs)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    remembered = [value for state in optimizer.state.values() for value in state.values()]
    return sum(tensor.nbytes for tensor in (*model.state_dict().values(), *remembered))


def written_bytes(run: Path) -> int:
    """All files of the last checkpoint, the manifest too."""
    newest = checkpoints(RunDirectory(run).checkpoints)[0]
    return sum(path.stat().st_size for path in newest.rglob("*") if path.is_file())


def show(found: dict[str, Any], written: int, state: int) -> None:
    """Print all figures."""
    without, saving = found["without"], found["with"]
    overhead, size = ratio(saving, without) - 1, written / state - 1
    rounds = [one / other - 1 for one, other in zip(saving, without, strict=True)]
    pauses = [1e3 * seconds for seconds in found["saving_s"]]
    print(f"a step without checkpoints:    {spread(without, '.4f')} s, {len(without)} rounds")
    print(f"a step, checkpoints among them: {spread(saving, '.4f')} s")
    print(f"overhead: {overhead:.2%} of the medians, by round {spread(rounds, '.2%')}")
    print(f"training stands still for the copy: {spread(pauses, '.1f')} ms")
    print(f"written: {written:,} B, {size:+.2%} of the state's {state:,} B")


def main(rounds: str = str(ROUNDS), steps: str = str(STEPS), directory: str | None = None) -> None:
    with tempfile.TemporaryDirectory(dir=directory) as place:
        folder = Path(place)
        spec = prepare(folder, int(rounds), int(steps))
        start("checkpoint.py", folder, RANKS)
        found = json.loads((folder / "result.json").read_text())
        show(found, written_bytes(folder / "with"), state_bytes(spec))


if __name__ == "__main__":
    main(*sys.argv[1:])
