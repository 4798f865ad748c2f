"""`pipectl lab verify`: with what a job is compared, and real MPI ranks beside a plain process."""

import os
import re
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from pipectl.capture.traits import Traits
from pipectl.jobs.cancel import cancel
from pipectl.jobs.verify import expect, unlike_script
from pipectl.profiler import neighbours
from pipectl.runs import Record
from pipectl.spec import load

PATH = os.environ["PATH"]
"""With the compiler on it; tests of commands have a shorter one."""
NORMALIZED = "--set=model.factory=./model.py:normalized"
SCHEDULE = "--set=lr_scheduler={factory: 'torch.optim.lr_scheduler:StepLR', kwargs: {step_size: 1}}"
TAGGER = ("--set=model=./model.py:tagger", "--set=loss=./model.py:tags")
BUCKETS = "buckets: [4, 8], pad: {inputs: 0, targets: -100}"
SEQUENCES = f"--set=data={{factory: './model.py:sequences', {BUCKETS}}}"
SCALING = "--set=training.loss_scale={initial: 1048576, growth_interval: 2}"
FLOAT16 = ["--set=training.precision=float16", SCALING]


@pytest.fixture
def verified(cli, real_job, place, monkeypatch, warm_python):
    """``verified("--steps", "2")``: with ranks that begin sooner, and nothing left behind.

    Ranks have no neighbours while measuring: results depend on neither.
    """
    monkeypatch.setattr(sys, "executable", warm_python)
    monkeypatch.setattr(neighbours, "neighbour_count", lambda *_: 0)
    monkeypatch.setenv("TORCHINDUCTOR_COMPILE_THREADS", "1")  # else it starts a pool of processes
    temporary = place / "temporary"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))

    def run(*words):
        result = cli("lab", "verify", "job.yaml", *words)
        assert list(temporary.glob("pipectl*")) == []
        assert not Path("runs").exists()
        return result

    return run


TIED_MODEL = "--set=model.factory=./model.py:Tied"
MOVING = "--set=optimizer={factory: './model.py:Moving', kwargs: {lr: 0.01}}"
STOPPING = "metrics: {error: 'torch.nn.functional:cross_entropy'}, early_stopping: {metric: error}"
EVALUATED = f"--set=evaluation={{data: './model.py:data', every: 2, {STOPPING}}}"
TRACKED = "--set=tracking=wandb"
BY_VARIABLE = (
    "--set=model.factory=./model.py:build_by_variable",
    "--set=environment.variables={WIDTH: 8}",
)
HALVED = (
    "--set=training.precision=bf16-weights",
    "--set=training.clip_grad_norm=0.1",
    "--set=training.deterministic=true",
    "--set=loss.weight=./model.py:weigh_in_deterministic_processes",
)
CLIPPED, COMPILED = "--set=training.clip_grad_norm=0.1", "--set=training.compile=true"
PLAIN_PROCESS = {"compared": "a plan and one process", "reference": "one plain PyTorch process"}
OTHER_PLAN = {"compared": "two plans", "reference": "another plan: 3 ranks, 3 stages"}


@pytest.mark.mpi
@pytest.mark.parametrize(
    ("ranks", "steps", "words", "expected", "note"),
    [
        (3, 4, ["--set=pipeline.stages=3", NORMALIZED, SCHEDULE, *HALVED], PLAIN_PROCESS, ""),
        (2, 4, [SCHEDULE, EVALUATED, TRACKED, *BY_VARIABLE], PLAIN_PROCESS, ""),
        pytest.param(2, 5, [*TAGGER, SEQUENCES], PLAIN_PROCESS, "", marks=pytest.mark.product),
        pytest.param(2, 8, FLOAT16, PLAIN_PROCESS, "", marks=pytest.mark.product),
        (2, 3, [TIED_MODEL, MOVING, "--set=training.precision=bf16"], PLAIN_PROCESS, ""),
        pytest.param(
            *(2, 2, ["--between-plans", CLIPPED], OTHER_PLAN),
            "--between-plans: compared with another",
            marks=pytest.mark.product,
        ),
        (2, 2, [CLIPPED], OTHER_PLAN, "one process would need "),
        pytest.param(
            *(2, 2, [COMPILED], {**PLAIN_PROCESS, "tolerance": 1e-4}),
            "training.compile: fused operators round differently",
            marks=[
                pytest.mark.skipif(not shutil.which("g++"), reason="needs a C++ compiler"),
                pytest.mark.product,
            ],
        ),
    ],
    ids=[
        "clipped, with weights in bfloat16, in deterministic processes",
        "evaluations that end it early, and variables",
        "lengths",
        "float16 with torch's own scaler",
        "tied weights that get other memory",
        "two plans",
        "no memory",
        "compiled",
    ],
)
def test_a_pipeline_equals_its_reference_to_the_bit_unless_operators_are_fused(
    verified, monkeypatch, ranks, steps, words, expected, note
):
    if COMPILED in words:
        monkeypatch.setenv("PATH", PATH)
    if note.startswith("one process would need"):
        memory = psutil.virtual_memory()._replace(available=1)
        monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)
    result = verified("--json", "--ranks", str(ranks), "--steps", str(steps), *words)
    assert result.code == 0, result.err
    answer = result.json
    plan = {"ranks": ranks, "stages": ranks, "micro_batches": 4, "micro_batch_size": 2}
    assert answer.items() >= {"equal": True, "first_difference": None, **plan, **expected}.items()
    assert "".join(answer["notes"][:1]).startswith(note)
    if COMPILED not in words:
        assert answer["tolerance"] == answer["max_abs_difference"] == 0.0
    assert len({loss for loss, _ in answer["losses"]}) > 1
    assert len(answer["losses"]) == steps


@pytest.mark.mpi
@pytest.mark.parametrize(
    ("model", "code", "lines"),
    [
        ("dropping", 0, ["reference: one rank", "note: dropout: random numbers",
                         "equal: every loss and every weight, to the bit"]),
        ("Deceiving", 1, ["different: by ", "first at step 1, in loss: by "]),
    ],
    ids=["random operators", "a difference"],
)  # fmt: skip
def test_with_what_it_is_compared_is_told_and_where_a_difference_began(
    verified, model, code, lines
):
    result = verified("--steps", "2", f"--set=model.factory=./model.py:{model}")
    assert result.code == code
    assert result.out.startswith("pipeline: 2 ranks, 2 stages, 1f1b, ")
    for line in lines:
        assert f"\n{line}" in result.out


@pytest.mark.parametrize(
    ("override", "random", "words"),
    [
        ("name=same", (), ""),
        ("training.batch_size=4", (), "training.batch_size is 4, and a step of the script has 8"),
        ("data.shuffle=true", (), "the job has its own data.shuffle"),
        ("lr_scheduler=torch.optim.lr_scheduler:StepLR", (), "the job has its own lr_scheduler"),
        ("name=same", ("dropout_1",), r"the script draws other random numbers \(dropout_1\)"),
    ],
)
def test_a_job_that_is_not_compared_with_its_script_says_why(tmp_path, override, random, words):
    (tmp_path / "train.py").touch()
    job = tmp_path / "job.yaml"
    job.write_text("{script: {file: ./train.py}, training: {steps: 4, batch_size: 8}}")
    assert re.fullmatch(f"{words}.*" if words else "", unlike_script(
        load(job, [override]), Traits(random, {}, half=False, script_samples=8)
    ))  # fmt: skip


@pytest.mark.mpi
def test_a_failure_of_the_ranks_is_told_and_leaves_nothing(verified, monkeypatch):
    """Here it is that of a compiler that does not exist."""
    monkeypatch.setenv("CXX", "no-such-compiler")
    result = verified("--steps", "2", COMPILED)
    assert (result.code, result.out) == (3, "")
    (error,) = (line for line in result.err.splitlines() if line.startswith("error: "))
    assert error.startswith("error: rank ")
    assert "training.compile: torch.compile fails" in error
    assert "set training.compile: false" in result.err


@pytest.mark.mpi
def test_an_interrupt_leaves_no_ranks_behind(verified, monkeypatch):
    """Its files go too, though it is asked twice."""
    runs: list[psutil.Process] = []

    def interrupted(run):
        script = psutil.Process(int((Record.load(run.record).job_id or "").partition(".")[0]))
        while not run.start.heartbeat.exists():
            assert script.is_running()
            time.sleep(0.01)
        runs.extend([script, *script.children(recursive=True)])
        signal.raise_signal(signal.SIGTERM)

    def cancel_slowly(run, now):
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGHUP)
        return cancel(run, now)

    monkeypatch.setattr("pipectl.jobs.verify.poll", interrupted)
    monkeypatch.setattr("pipectl.jobs.verify.cancel", cancel_slowly)
    result = verified("--steps", "1000000")
    assert (result.code, result.out) == (130, "")
    assert len(runs) > 3
    assert psutil.wait_procs(runs, timeout=300)[1] == []


DROPS, TIED = Traits(("dropout",), {}, False), Traits((), {"tied.weight": 2}, False)
PLAIN, HALF = Traits((), {}, False), Traits((), {"tied.weight": 2}, True)
SHARED = "tied.weight: used several times"


def spec(precision="float32", gpus=0, compiled=False):
    return SimpleNamespace(
        training=SimpleNamespace(precision=precision, compile=compiled),
        resources=SimpleNamespace(gpus_per_node=gpus),
        model=SimpleNamespace(materialize="eager"),
    )


@pytest.mark.parametrize(
    ("job", "traits", "reason", "replicas", "tolerance", "note"),
    [
        (spec(), PLAIN, "", 1, 0.0, ""),
        (spec(), DROPS, "", 1, 0.0, "dropout: random numbers"),
        (spec(), HALF, "why", 1, 0.0, "why: "),
        (spec(), TIED, "", 1, 1e-4, SHARED),
        (spec(), HALF, "", 1, 2e-2, SHARED),
        (spec("bf16"), TIED, "", 1, 2e-2, SHARED),
        (spec(gpus=1), HALF, "why", 1, 2e-2, "why: "),
        (spec(compiled=True), PLAIN, "", 1, 1e-4, "training.compile: fused operators round diff"),
        (spec(), PLAIN, "", 2, 1e-4, "replicas add up gradients in another order"),
    ],
)
def test_plans_differ_in_no_bit_on_cpus_and_else_within_the_coarsest_rounding(
    job, traits, reason, replicas, tolerance, note
):
    plan = SimpleNamespace(stages=[SimpleNamespace(replicas=replicas)], reproducible=False)
    notes, found = expect(job, traits, plan, reason, [] if reason else [*traits.shared])
    assert found == tolerance
    assert (notes or ("",))[0].startswith(note)
