"""Ranks that are killed before any operation on files: nothing saved is lost."""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import psutil
import pytest

from pipectl.runs import START_VARIABLE, RunDirectory, checkpoints, read_metrics, step_of
from pipectl.runtime import checkpoint

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(7200)]
HERE = Path(__file__).parent
RANKS, PARTS = HERE / "ranks_that_die.py", HERE.parent / "job_parts.py"
STRUCK = "struck.json"
KILLS = int(os.environ.get("PIPECTL_TORTURE_KILLS", "100"))
SEED = int(os.environ.get("PIPECTL_TORTURE_SEED", "1"))
Start = Callable[..., tuple[int, str]]


@pytest.fixture
def start(launch, monkeypatch: pytest.MonkeyPatch) -> Start:
    """``start(ranks, attempt, arguments, **fate)``: the exit code of ranks that may be killed, and
    what they print. One rank is forked, and needs no launcher."""

    def run(ranks: int, attempt: int, arguments: list[Any], **fate: Any) -> tuple[int, str]:
        usual = {"rank": None, "operation": 0, "kills_all": False}
        monkeypatch.setenv("TEST_FATE", json.dumps({**usual, **fate}))
        monkeypatch.setenv("TEST_START", str(attempt))
        own = RunDirectory(Path(arguments[1])).start_of(attempt)
        if arguments[0] == "--run":
            own.errors.mkdir(parents=True, exist_ok=True)
        monkeypatch.setenv(START_VARIABLE, str(own.path))
        done = launch(ranks if ranks > 1 else 0, RANKS, *arguments, fresh=ranks > 1)
        return done.returncode, done.stdout + done.stderr

    return run


def visible(directory: Path) -> list[int]:
    return sorted(step_of(path) or 0 for path in checkpoints(directory))


def hidden(directory: Path) -> set[str]:
    """What a kill has left of a checkpoint that was written or removed."""
    return {path.name for path in directory.glob(".step-*")}


@pytest.mark.parametrize("every", [5, pytest.param(1, marks=pytest.mark.torture)])
def test_what_writes_checkpoints_is_killed_before_each_of_its_operations(
    start: Start, tmp_path: Path, every: int
) -> None:
    """It replaces a damaged one, and drops what is too old, so there are all kinds of them."""
    base = tmp_path / "base"
    base.mkdir()
    assert start(1, 1, ["--save", base, 3, 2, 4, 6])[0] == 0
    (base / "step-000006" / "rank-0000.safetensors").write_bytes(b"")
    left = set[str]()
    for operation in count(1, every):
        directory = tmp_path / f"{operation}" / "checkpoints"
        shutil.copytree(base, directory)
        again = ["--save", directory, 1, 6, 8]
        code, log = start(1, 2, again, rank=0, operation=operation)
        if code == 0:
            break
        assert code == -9, log
        left |= hidden(directory)
        at_the_kill = json.loads((directory.parent / STRUCK).read_text())["names"]
        assert {*at_the_kill} >= {path.name for path in checkpoints(directory)}
        whole = [
            (step_of(path), checkpoint.load(path)["a"].tolist())
            for path in checkpoints(directory)
            if (path / "rank-0000.safetensors").stat().st_size
        ]
        assert all(values == [step] * 3 for step, values in whole)
        assert whole[0][0] >= 4
        if operation % (4 * every) == 1:
            code, log = start(1, 3, again)
            assert code == 0, log
            assert (visible(directory), hidden(directory)) == ([8], set())
    assert operation > 30
    assert {name.split(".")[2].split("-")[0] for name in left} == {"partial", "dropped"}


RANKS_OF_STARTS = (1, 1, 1, 1, 2, 1, 1, 1, 1, 3)
"""Most are one rank that is forked; others begin with mpiexec and the import of everything."""
STEPS = 6 * KILLS + 4
"""For every kill as many as it may come forward until then, and more."""
OPERATIONS = 150
"""On files, within which ranks are killed: those of several steps and checkpoints."""


def sections(every: int) -> dict[str, Any]:
    cosine = "torch.optim.lr_scheduler:CosineAnnealingLR"
    return {
        "model": {"factory": f"{PARTS}:Model", "kwargs": {"depth": 3, "dropout": 0.2}},
        "data": {"shuffle": True},
        "optimizer": {"factory": "torch.optim:AdamW", "kwargs": {"lr": 0.01}},
        "lr_scheduler": {"factory": cosine, "kwargs": {"T_max": STEPS}},
        "training": {"steps": STEPS, "batch_size": 4, "clip_grad_norm": 1.0},
        "checkpoint": {"every": every, "keep": 2},
    }


def check_what_a_kill_left(run: RunDirectory, newest_before: int) -> int:
    """All that has the name of a checkpoint is whole, and none is lost; the newest."""
    found = json.loads((run.path / STRUCK).read_text())
    alive = [psutil.Process(pid) for pid in found["pids"] if psutil.pid_exists(pid)]
    assert not psutil.wait_procs(alive, timeout=60)[1]  # they go by themselves
    for directory in checkpoints(run.checkpoints):
        checkpoint.load(directory)
    seen = [step_of(Path(name)) or 0 for name in found["names"] if name.startswith("step-")]
    newest = max(visible(run.checkpoints), default=0)
    assert newest >= max([newest_before, *seen]), (newest, newest_before, found)
    return newest


@pytest.mark.torture
def test_a_run_that_is_killed_again_and_again_ends_to_the_bit(
    make_run: Any, start: Start, contents: Any
) -> None:
    """With another plan than before, perhaps, over other numbers of ranks. Weights, the optimizer's
    state, and the figures of every step are the same."""
    random_ = random.Random(SEED)
    whole, run = make_run(1, **sections(STEPS)), make_run(1, **sections(2))
    plans = {ranks: make_run(ranks, **sections(2)) for ranks in {*RANKS_OF_STARTS}}
    code, log = start(1, 1, ["--run", whole.path])
    assert code == 0, log
    newest = 0
    for kill in range(KILLS + 1):
        ranks = RANKS_OF_STARTS[kill % len(RANKS_OF_STARTS)]
        fate = {
            "rank": random_.randrange(ranks),
            "operation": random_.randint(1, OPERATIONS if ranks == 1 else OPERATIONS // 3),
            "kills_all": random_.random() < 0.3,
        }
        shutil.copy(plans[ranks].job, run.job)
        shutil.copy(plans[ranks].plan, run.plan)
        code, log = start(ranks, kill + 1, ["--run", run.path], **(fate if kill < KILLS else {}))
        if kill < KILLS:
            print(f"seed {SEED}, kill {kill}: {ranks} ranks, {fate}, newest {newest}", flush=True)
            assert code != 0
            newest = check_what_a_kill_left(run, newest)
            (run.path / STRUCK).unlink()
    assert code == 0, log[-5000:]
    assert hidden(run.checkpoints) == set()
    last = f"step-{STEPS:06d}"
    assert contents(whole.checkpoints / last) == contents(run.checkpoints / last)
    first, second = (
        {x.step: (x.loss, x.learning_rate, x.gradient_norm) for x in read_metrics(each)}
        for each in (whole, run)
    )
    assert [*first] == [*second] == [*range(1, STEPS + 1)]
    assert first == second
