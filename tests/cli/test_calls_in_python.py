"""Jobs, plans and runs in Python: what commands do, with errors as exceptions."""

import io
import json
import os
import re
import signal
import sys
import threading
import time
from enum import Enum, IntEnum
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

import pipectl
from pipectl.api.advice import in_python
from pipectl.plan import Plan
from pipectl.runs import Record, RunDirectory

VALUES = {
    "model": "model:build",
    "loss": "torch.nn:MSELoss",
    "data": "model:data",
    "training": {"steps": 4, "batch_size": 8},
    "site_defaults": False,
}


PYTHON = sys.executable


class Colour(str, Enum):
    RED = "red"


class Level(IntEnum):
    LOW = 1


@pytest.fixture
def tiny(job, profile):
    """The job of a file, with a profile."""
    return pipectl.Job(job)


def test_the_same_job_from_a_file_a_mapping_arguments_and_another_job(job):
    pipectl.Job(job).check()
    made = [
        pipectl.Job(VALUES, name="j", **{"training.steps": 9}),
        pipectl.Job(name="j", **{**VALUES, "training": {"steps": 9, "batch_size": 8}}),
        pipectl.Job(pipectl.Job(VALUES), **{"name": "j", "training.steps": 9}),
        pipectl.Job({"name": "j", **VALUES, "training.steps": 9}),
    ]
    assert {each.to_yaml() for each in made} == {made[0].to_yaml()}
    Path("other.yaml").write_text(made[0].to_yaml())
    assert pipectl.Job("other.yaml").to_yaml() == made[0].to_yaml()
    assert repr(made[0]) == "<pipectl.Job j: 1 rank, 9 steps>"


def test_values_keep_their_types_and_paths_are_absolute(job, place):
    kwargs = {
        "text": "0042", "no": "no", "rate": np.float64(1e-5), "many": np.int32(7),
        "inf": float("inf"), "rows": np.arange(3), "pair": (1, None), "flag": True,
        "colour": Colour.RED, "level": Level.LOW, "path": Path("x"), "shape": {"a b": [[]]},
    }  # fmt: skip
    spec = pipectl.Job(VALUES, data={"factory": "model:data", "kwargs": kwargs})._spec
    assert spec.data.kwargs == {
        **kwargs, "rate": 1e-5, "many": 7, "rows": [0, 1, 2], "pair": [1, None], "colour": "red",
        "path": str(place / "x"),
    }  # fmt: skip
    assert spec.output.directory == str(place / "runs")


def test_paths_are_relative_to_the_job_file_or_to_where_the_job_was_made(job, place, monkeypatch):
    there = place / "there"
    for folder in (there, place / "w"):
        folder.mkdir()
    made = pipectl.Job(VALUES)
    monkeypatch.chdir(there)
    weights = {"model": {"factory": "model:build", "weights": Path("w")}}
    from_file, again = pipectl.Job(place / "job.yaml", **weights), pipectl.Job(made, **weights)
    for each in (from_file, again):
        assert Path(each._spec.model.weights) == place / "w"
        assert each._spec.model.factory == f"{place}/model:build"
    assert from_file._spec.output.directory == again._spec.output.directory == str(there / "runs")
    assert made._spec.output.directory == str(place / "runs")


def test_functions_and_classes_become_references(job, monkeypatch):
    monkeypatch.syspath_prepend(".")
    sys.modules.pop("model", None)
    model = import_module("model")
    spec = pipectl.Job(VALUES, model=model.build, optimizer=json.JSONEncoder)._spec
    assert spec.model.factory == f"{Path('model.py').absolute()}:build"
    assert spec.optimizer.factory == "json.encoder:JSONEncoder"
    del sys.modules["model"]

    def build():
        pass

    main = type("Net", (), {"__module__": "__main__"})
    for wrong, why in (
        (build, r"model: .*<locals>\.build is defined within a function"),
        (main, "model: Net is defined in .* itself"),
        (lambda: 0, "within a function"),
        ({1, 2}, "model: a spec has numbers, texts, lists and mappings, not an object of type set"),
        (pipectl.Job(VALUES), "not an object of type pipectl.api.job.Job"),
    ):
        with pytest.raises(pipectl.SpecError, match=why):
            pipectl.Job(VALUES, model=wrong)
    endless = []
    endless.append(endless)
    with pytest.raises(pipectl.SpecError, match="nested more than"):
        pipectl.Job(VALUES, model=endless)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"training.stepz": 1}, "training.stepz: unknown key; did you mean 'steps'?"),
        ({"training": {"stepz": 1, "batch_size": 8, "steps": 1}}, "training.stepz: unknown key"),
        ({"training.steps": "many"}, "training.steps: "),
        ({"resources": {"nodes": -1}}, "resources.nodes: "),
        ({"optimizer.kwargs.lr": "0.1\x00"}, "unprintable"),
        ({"nothing": 1}, "nothing: unknown key"),
    ],
)
def test_mistakes_are_named_by_their_keys(job, changes, message):
    with pytest.raises(pipectl.SpecError) as error:
        pipectl.Job(job, **changes)
    assert message in str(error.value)
    assert "--set" not in str(error.value)
    assert all(not problem.line for problem in error.value.problems)


def test_a_job_that_lacks_keys_or_is_not_there_says_so(place):
    with pytest.raises(pipectl.SpecError, match="model: ") as error:
        pipectl.Job(loss="torch.nn:MSELoss")
    assert {p.file for p in error.value.problems} >= {"model", "data", "training"}
    with pytest.raises(pipectl.SpecError, match=r"nowhere\.yaml: no such file"):
        pipectl.Job("nowhere.yaml")
    with pytest.raises(pipectl.UsageError, match="a key is missing"):
        pipectl.Job({"": 1})


def test_a_file_that_was_edited_is_not_submitted_as_it_was(tiny, job):
    job.write_text(job.read_text().replace("steps: 4", "steps: 40"))
    for call in (tiny.check, tiny.plan, tiny.profile, tiny.submit):
        with pytest.raises(pipectl.UsageError, match=r"job\.yaml: has changed since this Job"):
            call()
    assert "steps: 40" in pipectl.Job(job).to_yaml()


def test_a_plan_tells_what_the_command_prints_and_shows_itself(tiny, cli, capfd):
    plan = tiny.plan()
    printed = cli("plan", "job.yaml", "--json").json
    assert plan.step_time_s == printed["value_s"]
    assert (plan.stages, plan.ranks, plan.micro_batches) == (2, 2, 4)
    assert plan.peak_memory_bytes == tuple(printed["predicted"]["peak_memory_bytes"])
    assert plan.samples_per_s == pytest.approx(8 / plan.step_time_s)
    differing = {"planning_s", "compiling_s", "search"}
    told = json.loads(json.dumps(plan.to_json()))
    assert {k: v for k, v in told.items() if k not in differing} == {
        k: v for k, v in printed.items() if k not in differing
    }
    plan.save("elsewhere.json")
    assert Plan.load(Path("elsewhere.json")).summary == plan.summary
    assert repr(plan).startswith("<pipectl.Plan tiny: 2 stages on 2 ranks, 1f1b")
    html = plan._repr_html_()
    assert html.count("<tr>") >= 4
    assert html.count("data:image/svg+xml;base64,") == 1
    console = Console(file=io.StringIO(), record=True, width=100)
    console.print(plan)
    shown = console.export_text()
    assert "rank 0" in shown
    assert "bottleneck" in shown
    assert "tiny: 2 stages on 2 ranks" in cli("plan", "job.yaml").out


def test_a_plan_needs_a_profile_of_these_settings(job, tiny):
    with pytest.raises(pipectl.MismatchError, match="other settings") as error:
        pipectl.Job(job, **{"training.batch_size": 16}).plan()
    assert "job.profile()" in str(error.value)
    with pytest.raises(pipectl.DataFileError, match=r"other\.profile\.json: no such file"):
        pipectl.Job(job, name="other").plan()
    with pytest.raises(pipectl.InfeasibleError):
        pipectl.Job(job, **{"pipeline.memory_limit": "1MiB"}).plan()


def test_a_submission_prints_nothing_and_is_what_the_command_would_submit(tiny, slurm, cli, capfd):
    capfd.readouterr()
    run = pipectl.Job(tiny, scheduler="slurm").submit()
    assert capfd.readouterr() == ("", "")
    assert (run.name[16:], run.path.parent) == ("tiny", Path("runs").absolute())
    assert run.status()["job_id"] == "41"
    assert pipectl.Run() == run == pipectl.Run("41") == pipectl.runs()[0]
    assert {run, pipectl.Run("last")} == {run}
    assert cli("status", run.name, "--json").json["job_id"] == "41"
    other = cli("submit", "job.yaml", "--scheduler", "slurm", "--json").json
    assert [each.name for each in pipectl.runs()] == [run.name, other["run"]]
    names = re.compile(r"\d{8}-\d{6}-tiny(-\d+)?|[0-9a-f]{8}\b")
    scripts = [(Path(path) / "job.sh").read_text() for path in (run.path, other["directory"])]
    assert names.sub("", scripts[0]) == names.sub("", scripts[1])


def test_a_run_can_wait_for_others(tiny, slurm):
    on_slurm = pipectl.Job(tiny, scheduler="slurm")
    first = on_slurm.submit()
    second = on_slurm.submit(after=first)
    third = on_slurm.submit(after=[first.name, second])
    assert Record.load(third.path / "record.json").after == (second.name,)
    assert "afterok:41" in (second.path / "job.sh").read_text()
    with pytest.raises(pipectl.UnknownRunError, match="no run 'nobody'"):
        on_slurm.submit(after="nobody")
    with pytest.raises(pipectl.UsageError, match="is on slurm, and this job goes to local"):
        pipectl.Job(tiny, scheduler="local").submit(after=first)


def test_sweeps_give_a_run_per_point(tiny, slurm):
    swept = pipectl.Job(tiny, scheduler="slurm", sweep={"grid": {"training.seed": [1, 2]}})
    with pytest.raises(pipectl.UsageError, match="is a sweep of 2 runs"):
        swept.submit()
    found = swept.submit_sweep()
    assert [each.status()["sweep"]["values"] for each in found] == [
        {"training.seed": 1}, {"training.seed": 2},
    ]  # fmt: skip
    with pytest.raises(pipectl.UsageError, match="has no sweep"):
        tiny.submit_sweep()


@pytest.mark.parametrize(
    ("name", "value", "why"),
    [
        ("PIPECTL_RUN_DIRECTORY", "/runs/x", "belongs to a job"),
        ("PIPECTL_MEASURING", "1", "belongs to a job"),
        ("PMI_SIZE", "4", "one of 4 processes of an MPI program"),
        ("OMPI_COMM_WORLD_SIZE", "2", "one of 2 processes"),
        ("SLURM_STEP_NUM_TASKS", "8", "each of which would plan and submit"),
    ],
)
def test_processes_of_jobs_and_of_mpi_programs_submit_nothing(tiny, monkeypatch, name, value, why):
    monkeypatch.setenv(name, value)
    run = pipectl.Run._of(RunDirectory.create(Path("runs"), "old", 0.0))
    for call in (tiny.profile, tiny.plan, tiny.submit, run.resume):
        with pytest.raises(pipectl.UsageError, match=why):
            call()
    assert len(pipectl.runs()) == 1


def test_where_nothing_can_be_written_it_says_so(tiny, slurm):
    blocked = pipectl.Job(tiny, scheduler="slurm", output={"directory": "/proc/nowhere"})
    profile = Path("runs/tiny.profile.json").read_text()
    assert profile
    with pytest.raises(pipectl.UsageError, match="/proc/nowhere"):
        blocked.submit()


def test_runs_of_others_are_listed_and_their_files_refused(place, monkeypatch):
    run = RunDirectory.create(Path("runs"), "theirs", 0.0)
    monkeypatch.setattr("pipectl.jobs.state.fault_of_reading", lambda _: "not readable: owner ann")
    monkeypatch.setattr("pipectl.api.run.fault_of_reading", lambda _: "not readable: owner ann")
    (theirs,) = pipectl.runs()
    assert theirs.name == run.name
    assert theirs.state == "UNKNOWN"
    assert theirs.status()["reason"] == "not readable: owner ann"
    assert "not readable" in theirs._repr_html_()
    for call in (theirs.metrics, theirs.logs, theirs.best, theirs.state_dict, theirs.wait):
        with pytest.raises(pipectl.UsageError, match="owner ann"):
            call()


def metrics_of(*lines):
    run = RunDirectory.create(Path("runs"), "done", 0.0)
    run.metrics.write_text(
        "".join(f"{json.dumps(line)}\n" for line in lines) + '{"attempt": 1, "st'
    )
    return pipectl.Run._of(run)


def test_metrics_are_columns_of_one_length(place):
    run = metrics_of(
        {"attempt": 1, "step": 1, "loss": 3.0, "step_time_s": 0.5},
        {"attempt": 1, "step": 2, "loss": 2.0, "step_time_s": 0.4, "learning_rate": 0.1},
        {"attempt": 1, "step": 2, "evaluation": {"loss": 2.5, "accuracy": None}},
        {"attempt": 1, "step": 3, "loss": 9.0},
        {"attempt": 2, "step": 3, "loss": None, "step_time_s": 0.4},
    )
    assert run.metrics() == {
        "step": [1, 2, 3],
        "loss": [3.0, 2.0, None],
        "step_time_s": [0.5, 0.4, 0.4],
        "learning_rate": [None, 0.1, None],
        "evaluation.loss": [None, 2.5, None],
        "evaluation.accuracy": [None, None, None],
    }
    assert metrics_of().metrics() == {"step": [], "loss": []}


def test_a_run_knows_its_best_evaluation_or_says_why_not(place):
    with pytest.raises(pipectl.UsageError, match="does not know its best evaluation"):
        metrics_of().best()
    with pytest.raises(pipectl.UsageError, match="has no checkpoint yet"):
        metrics_of().state_dict(best=True)
    with pytest.raises(pipectl.UsageError, match="has no checkpoint yet"):
        metrics_of().export("x.safetensors")
    with pytest.raises(pipectl.UsageError, match="format 'hff': there is none; did you mean 'hf'"):
        metrics_of().export(format="hff")


def test_a_run_that_fails_raises_what_status_says(tiny, mpiexec):
    mpiexec("echo 'no such device'; exit 9")
    run = pipectl.Job(tiny, scheduler="local").submit()
    seen = []
    with pytest.raises(pipectl.WorkerError, match=f"{run.name}: FAILED") as error:
        run.wait(progress=seen.append, timeout_s=60)
    assert error.value.hint
    assert seen[-1]["state"] == run.state == "FAILED"
    assert run.wait(check=False).status()["exit_code"] == 9
    assert "no such device" in run.logs()
    assert run.logs(tail=0) == ""
    with pytest.raises(pipectl.UsageError, match="has the ranks 0 to 1"):
        run.logs(ranks=7)
    with pytest.raises(pipectl.UsageError, match="tail: -1 is negative"):
        run.logs(tail=-1)
    assert not run.cancel()


def test_waiting_can_be_interrupted_and_has_an_end(tiny, mpiexec):
    mpiexec("until [[ -e go ]]; do sleep 0.05; done; exit 9")
    run = pipectl.Job(tiny, scheduler="local").submit()
    with pytest.raises(TimeoutError, match=r"after 0\.1 s"):
        run.wait(timeout_s=0.1)
    threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        run.wait()
    assert run.state == "RUNNING"
    (run.path / "go").touch()
    assert run.wait(check=False, timeout_s=60).state == "FAILED"
    assert not run.cancel()


def test_a_run_is_resumed_with_changes(tiny, mpiexec):
    mpiexec("exit 9")
    run = pipectl.Job(tiny, scheduler="local").submit()
    run.wait(check=False, timeout_s=60)
    again = run.resume(**{"training.steps": 6})
    assert again == run
    again.wait(check=False, timeout_s=60)
    assert "steps: 6" in (run.path / "job.yaml").read_text()
    with pytest.raises(pipectl.SpecError, match=r"training\.stepz: unknown key"):
        run.resume(**{"training.stepz": 6})


def test_threads_submit_one_after_the_other(tiny, slurm):
    on_slurm, found, errors = pipectl.Job(tiny, scheduler="slurm"), [], []

    def submit():
        try:
            found.append(on_slurm.submit())
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=submit) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert len({run.name for run in found}) == len(pipectl.runs()) == 4


def ask(monkeypatch, tmp_path, text):
    """What measures is this program instead."""
    python = tmp_path / "python"
    python.write_text(f"#!{PYTHON}\nimport sys\nsys.argv[1:] = sys.argv[3:]\n{text}")
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))


def test_a_batch_system_measures_in_a_job(tiny, mpiexec, slurm, monkeypatch):
    """Where commands would, too."""
    slurm("squeue", "exit 0")
    slurm(
        "sbatch",
        'cat profile.json >"${2%/*}/profile.json"; echo 0 >"${2%/*}/starts/1/exit_code"; echo 41',
    )
    Path("profile.json").write_text(Path("runs/tiny.profile.json").read_text())
    seen = []
    profile = pipectl.Job(tiny, scheduler="slurm").profile(progress=lambda *now: seen.append(now))
    assert profile.name == pipectl.Run().path.name[16:-8] == "tiny"
    assert seen


def test_errors_of_the_process_that_measures_are_those_of_the_package(tiny, tmp_path, monkeypatch):
    local = pipectl.Job(tiny, scheduler="local")
    said = {"type": "CaptureError", "message": "no such layer", "hint": "write it", "exit_code": 3}
    ask(monkeypatch, tmp_path, f"open('error.json', 'w').write({json.dumps(said)!r}); sys.exit(1)")
    with pytest.raises(pipectl.CaptureError, match="no such layer\n  write it"):
        local.profile()
    said["type"] = "ZeroDivisionError"
    ask(monkeypatch, tmp_path, f"open('error.json', 'w').write({json.dumps(said)!r}); sys.exit(1)")
    with pytest.raises(pipectl.PipectlError, match="ZeroDivisionError: no such layer"):
        local.profile()
    ask(monkeypatch, tmp_path, "print('[0, 0, 1]'); sys.stderr.write('boom'); sys.exit(4)")
    with pytest.raises(pipectl.PipectlError, match="has ended: boom"):
        local.profile()


def test_an_interrupt_ends_the_process_that_measures(tiny, tmp_path, monkeypatch):
    ask(monkeypatch, tmp_path, (
        f"import os, time\nopen({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid()))\n"
        "try:\n print('[1, 2, \"it\"]', flush=True)\n time.sleep(60)\n"
        f"except KeyboardInterrupt: open({str(tmp_path / 'kept')!r}, 'w').close()\n"
    ))  # fmt: skip

    def interrupt(*_):
        raise KeyboardInterrupt

    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        pipectl.Job(tiny, scheduler="local").profile(progress=interrupt)
    assert time.monotonic() - began < 20
    assert (tmp_path / "kept").exists()
    assert not Path(f"/proc/{(tmp_path / 'pid').read_text()}").exists()


def test_a_file_that_submits_when_it_is_imported_starts_no_further_job(
    job, warm_python, monkeypatch
):
    """A script without a guard, in which the model is, too: what measures it imports it."""
    with Path("model.py").open("a") as file:
        file.write("import pipectl\npipectl.Job('job.yaml').submit()\n")
    monkeypatch.setattr(sys, "executable", warm_python)
    with pytest.raises(pipectl.CaptureError, match="this process belongs to a job") as error:
        pipectl.Job(job, scheduler="local").profile("fast")
    assert '__name__ == "__main__"' in str(error.value)
    assert not pipectl.runs()


@pytest.mark.parametrize(
    ("advice", "words"),
    [
        ("if you know that it has: pipectl resume --force", "run.resume(force=True)"),
        ("if not: `pipectl resume --force 'a b'`", "`run.resume(force=True)`"),
        (
            "give it more steps: pipectl resume r --set training.steps=8",
            'run.resume(**{"training.steps": 8})',
        ),
        ("set the number (--set pipeline.micro_batches=N), with", 'Job(job, **{"pipeline.micro_ba'),
        ("read what it does; then add --trust-owner", "add trust_owner=True"),
        ("pipectl resume --with-changed-code", "run.resume(with_changed_code=True)"),
        ("measure again with: pipectl profile JOB.yaml", "measure again with: job.profile()"),
        ("with: pipectl plan JOB.yaml --new-micro-batches", "job.plan(new_micro_batches=True)"),
        ("follow it with `pipectl status r-1`, or", "follow it with `run.status()`, or"),
        ("pipectl submit job.yaml --scheduler local --wait", 'Job(job, scheduler="local")'),
        ("to measure again: pipectl profile JOB.yaml --links", "pipectl profile JOB.yaml --links"),
    ],
)
def test_errors_advise_calls_instead_of_commands(advice, words):
    assert words in in_python(advice)


def test_the_advice_of_an_error_names_arguments(tiny, slurm):
    run = pipectl.Job(tiny, scheduler="slurm").submit()
    with pytest.raises(pipectl.UsageError) as error:
        run.resume()
    assert "pipectl " not in error.value.hint
    assert "run." in error.value.hint
