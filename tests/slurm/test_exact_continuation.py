"""Jobs that are ended in every way, at a random step, and go on: to the bit as if they had not.

Each is ended and goes on under the same plan, and from 1 over 4 and 2 to 3 ranks, ended on each but
the last. What they are compared with is one rank that trains without an end.
"""

import json
import os
import random
import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from pipectl.batch import JobState
from pipectl.jobs.job import make_job
from pipectl.jobs.planning import plan_job
from pipectl.jobs.prepare import find_cluster, join_rows
from pipectl.jobs.resume import resume
from pipectl.jobs.state import RunStatus, get_status
from pipectl.jobs.submit import submit
from pipectl.runs import RunDirectory, checkpoints, read_heartbeat, read_metrics
from pipectl.spec import load, profile_key

pytestmark = [pytest.mark.mpi, pytest.mark.torture, pytest.mark.timeout(3600)]
PARTS = Path(__file__).parents[1] / "runtime" / "job_parts.py"
LAB = Path(__file__).parents[2] / "slurm" / "lab"
SEED = int(os.environ.get("PIPECTL_TORTURE_SEED", "1"))
PATIENCE_S = 900
STEPS, EVERY = 32, 2
SLOWLY, AT_ONCE = 0.1, 0.0
"""Seconds a sample: while somebody waits for a step, and else."""

JOB: dict[str, Any] = {
    "version": 1,
    "name": "job",
    "site_defaults": False,
    "model": {"factory": f"{PARTS}:Model", "kwargs": {"depth": 3, "dropout": 0.2}},
    "loss": {"factory": f"{PARTS}:loss", "weight": f"{PARTS}:valid"},
    "data": {"factory": f"{PARTS}:Paced", "kwargs": {"pause_s": AT_ONCE}},
    "optimizer": {"factory": "torch.optim:AdamW", "kwargs": {"lr": 0.01}},
    "lr_scheduler": {
        "factory": "torch.optim.lr_scheduler:CosineAnnealingLR",
        "kwargs": {"T_max": STEPS},
    },
    "training": {"steps": STEPS, "batch_size": 8},
    "pipeline": {"micro_batches": 4},
    "checkpoint": {"every": EVERY, "keep": 2},
}
Settings = dict[str, Any]
FAMILIES: dict[str, dict[int, Settings]] = {
    "flushed": {
        1: {"stages": 1, "schedule": "gpipe"},
        4: {"stages": 4, "schedule": "zb-h1"},
        2: {"stages": 4, "schedule": "interleaved"},
        3: {"stages": 3, "schedule": "1f1b"},
    },
    "2bw": {ranks: {"stages": ranks, "schedule": "pipedream-2bw"} for ranks in (1, 4, 2, 3)},
    "pipefb": {
        1: {"stages": 1, "schedule": "1f1b"},
        4: {"stages": 2, "schedule": "1f1b", "backward": "apart"},
        2: {"stages": 1, "schedule": "1f1b", "backward": "apart"},
        3: {"stages": 3, "schedule": "1f1b", "backward": "together"},
    },
}
"""``pipeline`` by number of ranks."""
CHAIN = (1, 4, 2, 3)
HERE_KINDS = ("usr2", "term", "kill")
SLURM_KINDS = ("scancel", "requeue", "time limit", "node")
SLURM_CHAINS = {
    "flushed": ("scancel", "requeue", "node"),
    "2bw": ("requeue", "time limit", "scancel"),
    "pipefb": ("node", "scancel", "time limit"),
}


@dataclass
class Continued:
    """A job that is ended and goes on."""

    run: RunDirectory
    scheduler: str
    random: random.Random
    family: str
    lab: Path | None = None
    ended: int = 0

    def status(self) -> RunStatus:
        return get_status(self.run, time.time())

    def wait(self, *states: JobState) -> JobState:
        """Until it is in one of some states, or over."""
        deadline = time.monotonic() + PATIENCE_S
        while True:
            found = self.status().job.state
            if found in states or found.final:
                return found
            assert time.monotonic() < deadline, (found, self.log())
            time.sleep(0.2)

    def wait_for_a_step(self) -> int:
        """Until some random steps of this start are done; the step."""
        attempt = self.attempt()
        wanted, deadline = self.random.randint(2, 5), time.monotonic() + PATIENCE_S
        while True:
            mine = [x.step for x in read_metrics(self.run) if x.attempt == attempt]
            if len(mine) >= wanted:
                return int(mine[-1])
            assert time.monotonic() < deadline, self.log()
            assert not self.status().job.state.final, self.log()
            time.sleep(0.05)

    def attempt(self) -> int:
        """The number of the present start, once its ranks have come so far as to say it."""
        deadline = time.monotonic() + PATIENCE_S
        while True:
            beat = read_heartbeat(self.run)
            with suppress(OSError, ValueError):
                started = int((self.run.path / "attempt").read_text())
                if beat and beat.attempt == started > self.ended and beat.ranks:
                    return started
            assert time.monotonic() < deadline, self.log()
            time.sleep(0.1)

    def end(self, kind: str) -> JobState:
        """End it in a way; what the state is, once nothing of it waits or runs any more."""
        saved = checkpoints(self.run.checkpoints)[:1]
        if kind != "time limit":
            step = self.wait_for_a_step()
            print(f"{self.family}: {kind} at step {step}, saved {saved}", flush=True)
            ENDINGS[kind](self)
        else:
            print(f"{self.family}: {kind}", flush=True)
        found = self.wait(JobState.QUEUED) if kind in ("requeue", "node") else self.wait()
        self.ended = int((self.run.path / "attempt").read_text())
        if kind == "node":
            subprocess.run([LAB / "up"], capture_output=True, check=True, timeout=120)
        assert found in ENDS_AS[kind], (found, self.log())
        return found

    def cancel(self) -> None:
        subprocess.run(["scancel", str(self.job_id)], check=True)
        self.wait()

    @property
    def job_id(self) -> str:
        record = self.status().record
        assert record is not None
        return str(record.job_id)

    def go_on(self, ranks: int, **settings: Any) -> None:
        overrides = {**of(self.scheduler, self.family, ranks), **settings}
        again = [f"{key}={json.dumps(value)}" for key, value in overrides.items()]
        resume(self.run, again, time.time())
        print(f"{self.family}: goes on over {ranks} ranks", flush=True)

    def log(self) -> str:
        with suppress(OSError):
            return self.run.job_log.read_text()[-8000:]
        return ""


def of(scheduler: str, family: str, ranks: int) -> Settings:
    """What another number of ranks changes."""
    local = scheduler == "local"
    return {
        "resources.nodes": 1 if local else ranks,
        "resources.tasks_per_node": ranks if local else 1,
        **{f"pipeline.{key}": value for key, value in FAMILIES[family][ranks].items()},
    }


def signal_script(job: Continued, number: signal.Signals) -> None:
    os.kill(int(job.job_id.split(".")[0]), number)


def kill_rank(job: Continued) -> None:
    beat = read_heartbeat(job.run)
    os.kill(job.random.choice(beat.ranks).pid, signal.SIGKILL)


def lose_a_node(job: Continued) -> None:
    """Slurm's daemon there, and all that it has started."""
    beat = read_heartbeat(job.run)
    assert job.lab is not None
    node = job.random.choice(beat.ranks).node
    daemon = psutil.Process(int((job.lab / f"slurmd.{node}.pid").read_text()))
    lost = [daemon, *filter(lambda process: is_of(process, node), psutil.process_iter())]
    for process in lost:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(lost, timeout=20)


def is_of(process: psutil.Process, node: str) -> bool:
    """Whether a job's process of this lab is on a node."""
    try:
        found = process.environ()
    except psutil.Error:
        return False
    ours = found.get("SLURM_CONF") == os.environ["SLURM_CONF"]
    return ours and found.get("SLURMD_NODENAME") == node


ENDINGS: dict[str, Callable[[Continued], None]] = {
    "usr2": lambda job: signal_script(job, signal.SIGUSR2),
    "term": lambda job: signal_script(job, signal.SIGTERM),
    "kill": kill_rank,
    "scancel": lambda job: job.cancel(),
    "requeue": lambda job: subprocess.run(  # type: ignore[dict-item, return-value]
        ["scontrol", "requeue", job.job_id], check=True
    ),
    "node": lose_a_node,
}
ENDS_AS = {
    "usr2": (JobState.PREEMPTED,),
    "term": (JobState.PREEMPTED,),
    "kill": (JobState.FAILED,),
    "scancel": (JobState.CANCELLED,),
    "requeue": (JobState.QUEUED,),
    "node": (JobState.QUEUED, JobState.FAILED),  # what notices first: Slurm, or the launcher
    "time limit": (JobState.PREEMPTED,),
}


@pytest.fixture(scope="module")
def profile(tmp_path_factory):
    from pipectl.profiler import profile_job

    path = tmp_path_factory.mktemp("profile") / "job.yaml"
    path.write_text(yaml.safe_dump(JOB))
    return profile_job(load(path))


@pytest.fixture(scope="module")
def begin(tmp_path_factory, profile):
    """``begin(scheduler, family, ranks, **settings)``: submitted."""
    started: list[Continued] = []

    def start(scheduler, family, ranks, **settings):
        folder = tmp_path_factory.mktemp("job")
        path = folder / "job.yaml"
        path.write_text(yaml.safe_dump(JOB))
        changed = {**of(scheduler, family, ranks), **settings}
        changed["output.directory"] = str(folder / "runs")
        spec = load(path, [f"{key}={json.dumps(value)}" for key, value in changed.items()])
        fresh = replace(profile, key=profile_key(spec))
        fresh, cluster = join_rows(fresh, find_cluster(spec, scheduler).cluster)
        plan = plan_job(spec, fresh, cluster)
        job = replace(make_job(spec, scheduler), cluster=cluster, profile=fresh, plan=plan)
        run = submit([job], time.time())[0].run
        seed = f"{SEED} {scheduler} {family} {ranks} {settings}"
        started.append(Continued(run, scheduler, random.Random(seed), family))
        return started[-1]

    yield start
    for job in started:
        with suppress(Exception):
            if job.status().job.state.alive:
                job.cancel() if job.scheduler == "slurm" else kill_rank(job)


@pytest.fixture(scope="module")
def expected(begin):
    """``expected(family)``: one rank that trains without an end, once."""
    found: dict[str, RunDirectory] = {}

    def train(family):
        key = "2bw" if family == "2bw" else "flushed"
        if key not in found:
            job = begin("local", key, 1)
            assert job.wait() is JobState.COMPLETED, job.log()
            found[key] = job.run
        return found[key]

    return train


def check_same(one: RunDirectory, job: Continued, contents: Any) -> None:
    """Weights, the optimizer's state, and the figures of every step."""
    assert job.wait() is JobState.COMPLETED, job.log()
    name = f"step-{STEPS:06d}"
    assert contents(one.checkpoints / name) == contents(job.run.checkpoints / name)
    first, second = (
        {x.step: (x.loss, x.learning_rate) for x in read_metrics(run)} for run in (one, job.run)
    )
    assert first == second
    assert [*first] == [*range(1, STEPS + 1)]


SLOW = {"data.kwargs.pause_s": SLOWLY}
QUICK = {"data.kwargs.pause_s": AT_ONCE}
LIMITED = {"resources.walltime": "2m", "data.kwargs.pause_s": 6 * SLOWLY}
"""Slurm's signal comes 30 to 90 s before; the whole of the samples takes about as long."""
UNLIMITED = {"resources.walltime": "30m"}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kind", HERE_KINDS)
def test_a_local_job_goes_on_under_its_plan(begin, expected, contents, kind, family):
    job = begin("local", family, 2, **SLOW)
    job.end(kind)
    job.go_on(2, **QUICK)
    check_same(expected(family), job, contents)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_local_job_goes_on_over_other_ranks(begin, expected, contents, family):
    first, *others = CHAIN
    job = begin("local", family, first, **SLOW)
    kinds = job.random.sample(HERE_KINDS, len(HERE_KINDS))
    for kind, ranks in zip(kinds, others, strict=True):
        job.end(kind)
        job.go_on(ranks, **(QUICK if ranks == CHAIN[-1] else SLOW))
    check_same(expected(family), job, contents)


@pytest.mark.slurm
@pytest.mark.parametrize("kind", SLURM_KINDS)
def test_a_slurm_job_goes_on_under_its_plan(begin, expected, contents, lab, kind):
    """By itself, but where it is over."""
    often = {"checkpoint.max_requeues": 20}
    limits = {**LIMITED, **often} if kind == "time limit" else {**UNLIMITED, **SLOW}
    job = begin("slurm", "flushed", 2, **limits)
    job.lab = lab
    if kind == "time limit":
        check_same(expected("flushed"), job, contents)
        assert {x.attempt for x in read_metrics(job.run)} > {1}
        return
    if job.end(kind).final:
        job.go_on(2, **QUICK)
    check_same(expected("flushed"), job, contents)


@pytest.mark.slurm
@pytest.mark.parametrize("family", FAMILIES)
def test_a_slurm_job_goes_on_over_other_ranks(begin, expected, contents, lab, family):
    """What Slurm has put back into the queue is cancelled there, and resumed with other nodes."""
    kinds = SLURM_CHAINS[family]
    settings = [settings_before(kind) for kind in kinds]
    job = begin("slurm", family, CHAIN[0], **settings[0])
    job.lab = lab
    for kind, ranks, more in zip(
        kinds, CHAIN[1:], [*settings[1:], {**UNLIMITED, **QUICK}], strict=True
    ):
        if not job.end(kind).final:
            job.cancel()
        job.go_on(ranks, **more)
    check_same(expected(family), job, contents)


def settings_before(kind: str) -> Settings:
    """Of a start that is to end in a way."""
    if kind == "time limit":
        return {**LIMITED, "checkpoint.max_requeues": 0}
    return {**UNLIMITED, **SLOW, "checkpoint.max_requeues": 3}
