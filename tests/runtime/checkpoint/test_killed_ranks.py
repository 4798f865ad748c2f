"""Ranks that are killed, at any moment and before any operation on files: nothing saved is lost."""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import psutil
import pytest

from pipectl.runs import ATTEMPT, RunDirectory, checkpoints, read_metrics, step_of
from pipectl.runtime import checkpoint

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(7200)]
HERE = Path(__file__).parent
RANKS, PARTS = HERE / "ranks_that_die.py", HERE.parent / "job_parts.py"
STRUCK = "struck.json"
KILLS = int(os.environ.get("PIPECTL_TORTURE_KILLS", "100"))
SEED = int(os.environ.get("PIPECTL_TORTURE_SEED", "1"))
PATIENCE_S = 60
NOBODY = {"victims": ""}


@pytest.fixture
def start(launch, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[int, str]]:
    """``start(ranks, attempt, fate, *arguments)``: the exit code of ranks that may be killed, and
    what they print. One rank is forked, and needs no launcher."""

    def run(ranks: int, attempt: int, fate: dict[str, Any], *arguments: object) -> tuple[int, str]:
        monkeypatch.setenv("TEST_FATE", json.dumps(fate))
        monkeypatch.setenv(ATTEMPT, str(attempt))
        done = launch(ranks if ranks > 1 else 0, RANKS, *arguments, fresh=ranks > 1)
        return done.returncode, done.stdout + done.stderr

    return run


def visible(directory: Path) -> list[int]:
    return sorted(step_of(path) or 0 for path in checkpoints(directory))


def hidden(directory: Path) -> list[str]:
    """What a kill has left of a checkpoint that was written or removed."""
    return [path.name for path in directory.glob(".step-*")]


@pytest.mark.parametrize("every", [3, pytest.param(1, marks=pytest.mark.torture)])
def test_what_writes_checkpoints_is_killed_before_each_of_its_operations(
    start: Callable[..., tuple[int, str]], tmp_path: Path, every: int
) -> None:
    """It replaces a damaged one, and drops what is too old, so there are all kinds of them."""
    base = tmp_path / "base"
    base.mkdir()
    assert start(1, 1, NOBODY, "--save", base, 3, 2, 4, 6)[0] == 0
    (base / "step-000006" / "rank-0000.safetensors").write_bytes(b"")
    left = set[str]()
    for operation in count(1, every):
        directory = tmp_path / f"{operation}" / "checkpoints"
        shutil.copytree(base, directory)
        again = "--save", directory, 1, 6, 8
        code, log = start(1, 2, {"victims": "rank", "operation": operation}, *again)
        if code == 0:
            break
        assert code == -9, log
        left |= set(hidden(directory))
        at_the_kill = json.loads((directory.parent / STRUCK).read_text())["names"]
        assert {*at_the_kill} >= {path.name for path in checkpoints(directory)}
        whole = [step for step in visible(directory) if not is_damaged(directory, step)]
        assert all(is_whole(directory, step) for step in whole)
        assert whole[-1] >= 4
        if operation % (4 * every) == 1:
            code, log = start(1, 3, NOBODY, *again)
            assert code == 0, log
            assert (visible(directory), hidden(directory)) == ([8], [])
    assert operation > 30
    assert {name.split(".")[2].split("-")[0] for name in left} == {"partial", "dropped"}


def is_damaged(directory: Path, step: int) -> bool:
    return (directory / f"step-{step:06d}" / "rank-0000.safetensors").stat().st_size == 0


def is_whole(directory: Path, step: int) -> bool:
    return bool(checkpoint.load(directory / f"step-{step:06d}")["a"].eq(step).all())


STEPS = 6
"""Of the run, for every kill: as many as it may come forward until then, and more."""
RANKS_OF_STARTS = (1, 1, 1, 1, 2, 1, 1, 1, 1, 3)
"""Most are one rank that is forked; others begin with mpiexec and the import of everything."""


def sections(steps: int, every: int) -> dict[str, Any]:
    return {
        "model": {"factory": f"{PARTS}:Model", "kwargs": {"depth": 3, "dropout": 0.2}},
        "data": {"shuffle": True},
        "optimizer": {"factory": "torch.optim:AdamW", "kwargs": {"lr": 0.01}},
        "lr_scheduler": {
            "factory": "torch.optim.lr_scheduler:CosineAnnealingLR",
            "kwargs": {"T_max": steps},
        },
        "training": {"steps": steps, "batch_size": 4, "clip_grad_norm": 1.0},
        "checkpoint": {"every": every, "keep": 2},
    }


@dataclass
class Tally:
    """What has been done to a run."""

    kills: int = 0
    while_writing: int = 0
    over_mpi: int = 0
    newest: int = 0
    victims: dict[str, int] = field(default_factory=dict)


def some_fate(random_: random.Random, ranks: int) -> dict[str, Any]:
    """Three of four strike behind the beginning of a checkpoint, half of these at an operation."""
    victims = random_.choice(["rank", "rank", "all", "launcher"]) if ranks > 1 else "rank"
    rank = random_.randrange(ranks)
    how = random_.choice(["operation", "operation", "delay", "anywhere"])
    saves = 0 if how == "anywhere" else random_.randint(1, 3)
    most_s = 0.02 if saves else 2.0
    return {
        "rank": rank,
        "victims": victims,
        "saves": saves,
        "operation": random_.randint(1, 24) if how == "operation" else 0,
        "delay_s": 0.0 if how == "operation" else random_.uniform(0, most_s),
    }


class Killed:
    """A run that is continued again and again, over some numbers of ranks."""

    def __init__(self, run: RunDirectory, plans: dict[int, RunDirectory], start: Any) -> None:
        self.run, self._plans, self._start = run, plans, start
        self.attempt, self.log = 0, ""
        self.tally = Tally()

    def start(self, ranks: int, fate: dict[str, Any]) -> int:
        """With another plan than before, perhaps, until the end; the exit code."""
        self.attempt += 1
        if (planned := self._plans.get(ranks)) is not None:
            shutil.copy(planned.job, self.run.job)
            shutil.copy(planned.plan, self.run.plan)
        (self.run.path / STRUCK).unlink(missing_ok=True)
        code, self.log = self._start(ranks, self.attempt, fate, "--run", self.run.path)
        return code

    def kill(self, ranks: int, fate: dict[str, Any]) -> bool:
        """Whether it was killed before its end."""
        before = hidden(self.run.checkpoints)
        code, tally = self.start(ranks, fate), self.tally
        struck = self.run.path / STRUCK
        if not struck.exists():
            assert code == 0, self.log[-5000:]
            return False
        assert code != 0
        found = json.loads(struck.read_text())
        wait_for(found["pids"])
        left = [name for name in hidden(self.run.checkpoints) if name not in before]
        directories = checkpoints(self.run.checkpoints)
        for directory in directories:  # all that has a name, not just the newest
            checkpoint.load(directory)
        newest = visible(self.run.checkpoints)[-1] if directories else 0
        seen = [step_of(Path(name)) or 0 for name in found["names"] if name.startswith("step-")]
        assert newest >= max([tally.newest, *seen]), (newest, tally, found)
        tally.kills += 1
        tally.while_writing += bool(left)
        tally.over_mpi += ranks > 1
        tally.newest = newest
        tally.victims[fate["victims"]] = tally.victims.get(fate["victims"], 0) + 1
        print(
            f"kill {tally.kills}: {ranks} ranks, {fate}, left {left}, newest {newest}", flush=True
        )
        return True


def wait_for(pids: list[int]) -> None:
    """Until ranks have gone, which they do by themselves."""
    alive = [psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)]
    _, left = psutil.wait_procs(alive, timeout=PATIENCE_S)
    assert not left


@pytest.mark.torture
def test_a_run_that_is_killed_again_and_again_ends_to_the_bit(
    make_run: Any, start: Any, contents: Any
) -> None:
    """Each time, all that has the name of a checkpoint is whole, and none is lost."""
    random_, steps = random.Random(SEED), STEPS * KILLS + 4
    plans = {ranks: make_run(ranks, **sections(steps, 2)) for ranks in {*RANKS_OF_STARTS}}
    whole = Killed(make_run(1, **sections(steps, steps)), {}, start)
    assert whole.start(1, NOBODY) == 0, whole.log
    killed = Killed(make_run(1, **sections(steps, 2)), plans, start)
    print(f"seed {SEED}")
    while killed.tally.kills < KILLS:
        ranks = RANKS_OF_STARTS[killed.tally.kills % len(RANKS_OF_STARTS)]
        if not killed.kill(ranks, some_fate(random_, ranks)):  # it was too quick; once more
            check_same(whole.run, killed.run, steps, contents)
            again(killed)
    assert killed.start(2, NOBODY) == 0, killed.log
    check_same(whole.run, killed.run, steps, contents)
    assert hidden(killed.run.checkpoints) == []
    print(killed.tally)


def again(killed: Killed) -> None:
    shutil.rmtree(killed.run.checkpoints)
    killed.run.checkpoints.mkdir()
    killed.run.metrics.unlink()
    killed.tally.newest = 0


def check_same(one: RunDirectory, other: RunDirectory, steps: int, contents) -> None:
    """Weights, the optimizer's state, and the figures of every step."""
    name = f"step-{steps:06d}"
    assert contents(one.checkpoints / name) == contents(other.checkpoints / name)
    first, second = (
        {x.step: (x.loss, x.learning_rate, x.gradient_norm) for x in read_metrics(run)}
        for run in (one, other)
    )
    assert [*first] == [*second] == [*range(1, steps + 1)]
    assert first == second
