"""Sweeps from submission to their end, with pretended commands of Slurm and PBS."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from pipectl.cluster import assumed_cluster
from pipectl.errors import InvalidInputError
from pipectl.jobs.prepare import UNKNOWN_ROWS, cluster_file_key, plan_file_key, prepare
from pipectl.link import RowTimes
from pipectl.plan import Plan
from pipectl.profile import Profile
from pipectl.runs import Record
from pipectl.spec import SpecFile, profile_key

SLURM, PBS = ("--scheduler", "slurm"), ("--scheduler", "pbs")
SWEEP = """\
sweep:
  grid: {optimizer.kwargs.lr: [0.1, 0.01], training.seed: [0, 1]}
  at_once: 2
"""
ROW = "{}|{}|1|N/A|N/A||{}|None"


@pytest.fixture
def sweep(profile):
    """The job gets a sweep of four points, and has a fresh profile."""
    with Path("job.yaml").open("a") as job:
        job.write(SWEEP)


@pytest.fixture
def submitted(cli, sweep, slurm):
    """That sweep waits in Slurm's queue as job 35."""
    program = slurm
    program("sbatch", "echo 35")
    program("scontrol", "exit 1")
    program("squeue", listed(ROW.format("35_[0-3%2]", "PENDING", "t")))
    program("scancel", 'echo "$@" >>scancel.argv')
    assert cli("submit", "job.yaml", *SLURM).code == 0


def runs() -> list[Path]:
    return sorted(path for path in Path("runs").glob("*-tiny-*") if path.is_dir())


def told(run: Path) -> Record:
    return Record.load(run / "record.json")


def listed(*rows: str) -> str:
    return "cat <<'ROWS'\n" + "\n".join(rows) + "\nROWS"


def test_a_run_for_every_point_and_one_array(cli, sweep, program):
    program("sbatch", 'echo "$@" >sbatch.argv; echo 35')
    assert "a sweep of 4 runs" in cli("check", "job.yaml").out
    result = cli("submit", "job.yaml", *SLURM)
    assert (result.code, result.err) == (0, "")
    (folder,) = Path("runs/sweeps").iterdir()
    assert result.out.splitlines() == [
        "submitted: 4 runs of tiny (slurm job 35)",
        f"sweep directory: {folder}",
        f"see: pipectl status {folder.name}",
    ]
    assert Path("sbatch.argv").read_text().split()[1] == str(folder.absolute() / "array.sh")
    script = (folder / "array.sh").read_text()
    assert "#SBATCH --array=0-3%2\n" in script
    assert [run.name for run in runs()] == [f"{folder.name}-{index}" for index in range(4)]
    values = []
    for index, run in enumerate(runs()):
        assert f"    {run.absolute()}\n" in script
        record = told(run)
        assert (record.job_id, record.state, record.task) == (f"35_{index}", "submitted", index)
        assert record.sweep is not None
        assert record.sweep.name == folder.name
        values.append(list(record.sweep.values.values()))
        own = (run / "job.sh").read_text()
        assert f"PIPECTL_RUN_DIRECTORY={run.absolute()}\n" in own
        assert "pipectl.jobs.in_job" not in own, "another learning rate needs no other profile"
        assert {path.name for path in run.iterdir()} >= {"profile.json", "plan.json", "job.yaml"}
        assert (run / "plan.json").read_bytes() == (runs()[0] / "plan.json").read_bytes()
        assert (run / "trace/predicted.json").exists()
    assert values == [[0.1, 0], [0.1, 1], [0.01, 0], [0.01, 1]]
    assert "lr: 0.01" in (runs()[3] / "job.yaml").read_text()


def test_points_of_another_model_leave_the_profile_to_their_jobs(cli, sweep, program):
    program("sbatch", "echo 35")
    grid = "sweep.grid={model.kwargs: [{}, {width: 3}]}"
    result = cli("submit", "job.yaml", *SLURM, "--set", grid)
    assert "no up-to-date profile for 1 of 2 runs" in result.err
    assert [(run / "profile.json").exists() for run in runs()] == [True, False]
    assert "pipectl.jobs.in_job" in (runs()[1] / "job.sh").read_text()


def test_on_this_machine_models_are_measured_once_each(sweep, profile_document, monkeypatch):
    measured = []

    def measure(spec, path, _progress):
        assert path is None, "the job's own place is that of its own model"
        measured.append(spec.model.kwargs)
        return Profile.from_json(profile_document(key=profile_key(spec)))

    monkeypatch.setattr("pipectl.jobs.profiles.measure", measure)
    widths = "sweep.grid={model.kwargs: [{}, {width: 3}, {width: 4}], training.seed: [0, 1]}"
    file = SpecFile.read(Path("job.yaml"), [widths])
    spec = file.spec()
    points = file.points(spec)
    found = prepare(spec, "local", points=points)
    assert measured == [{"width": 3}, {"width": 4}]
    plans = [id(inputs.plan) for inputs in found]
    assert plans == [plans[0]] * 2 + [plans[2]] * 2 + [plans[4]] * 2
    assert [inputs.profile is None for inputs in found] == [False] * 6


def test_an_error_in_the_script_of_a_point_names_it_before_its_model_is_measured(
    sweep, monkeypatch
):
    def render(job):
        if job.spec.model.kwargs:
            raise InvalidInputError("launch.bind: cannot be written")
        return ""

    monkeypatch.setattr("pipectl.jobs.prepare.render", render)
    monkeypatch.setattr("pipectl.jobs.profiles.measure", lambda *_: pytest.fail("measured"))
    file = SpecFile.read(Path("job.yaml"), ["sweep.grid={model.kwargs: [{}, {width: 3}]}"])
    spec = file.spec()
    with pytest.raises(InvalidInputError, match=r"^model.kwargs=.*width.*: launch.bind: cannot"):
        prepare(spec, "local", points=file.points(spec))


def test_row_times_of_one_points_cluster_are_assumed_for_the_others(profile, profile_document):
    cluster = assumed_cluster("two nodes", [1, 1], 1, None)
    cluster.with_rows(RowTimes()).save(Path("timed.json"))
    cluster.save(Path("untimed.json"))
    assumed_cluster("of no point", [9], 1, None).save(Path("unused.json"))
    key = json.loads(profile.read_text())["key"]
    profile.write_text(json.dumps(profile_document(key=key, assumptions=[UNKNOWN_ROWS])))
    points = "sweep.points=[{cluster: timed.json}, {cluster: untimed.json}]"
    file = SpecFile.read(Path("job.yaml"), [points, "cluster=unused.json"])
    spec = file.spec()
    found = prepare(spec, "local", points=file.points(spec))
    assert [UNKNOWN_ROWS in job.profile.assumptions for job in found if job.profile] == [0, 1]


def test_points_with_other_links_have_plans_of_their_own(profile):
    """The links may be measured for one way to start the ranks, and not for another."""
    file = SpecFile.read(Path("job.yaml"), ["sweep.grid={launch.bind: [none, cores]}"])
    spec = file.spec()
    points = file.points(spec)
    cluster = assumed_cluster("measured", [1, 1], 1, None)
    key = cluster_file_key(points[1].spec, "slurm")
    replace(cluster, key=key).save(Path("runs/tiny.cluster.json"))
    found = prepare(spec, "slurm", points=points)
    assert [each.cluster.key for each in found if each.cluster] == [None, key]
    keys = [
        plan_file_key(each.spec, each.profile, each.cluster)
        for each in found
        if each.profile and each.cluster
    ]
    assert [each.plan.key for each in found if each.plan] == keys
    assert Plan.load(Path("runs/tiny.plan.json")).key == keys[0]


def test_all_points_keep_the_micro_batches_of_the_last_plan(profile):
    """As they do if they are planned in their allocations."""

    def read(micro_batches):
        grid = "sweep.grid={pipeline.schedule: [1f1b, gpipe]}"
        file = SpecFile.read(Path("job.yaml"), [grid, f"pipeline.micro_batches={micro_batches}"])
        replace(Profile.load(profile), key=profile_key(file.spec())).save(profile)
        return file

    prepare(read("2").spec(), "slurm")
    file = read("auto")
    for _ in range(2):
        found = prepare(file.spec(), "slurm", points=file.points(file.spec()))
        assert [job.plan.micro_batches for job in found if job.plan] == [2, 2]


def test_a_point_that_cannot_be_planned_is_named(cli, sweep):
    limits = "sweep.grid={pipeline.memory_limit: [4GiB, 1MiB]}"
    result = cli("submit", "job.yaml", *SLURM, "--set", limits)
    assert result.code == 4
    assert result.err.startswith("error: pipeline.memory_limit=1MiB: ")
    assert not runs()


def test_a_dry_run_and_test_only_are_about_the_array(cli, sweep, program):
    out = cli("submit", "job.yaml", *SLURM, "--dry-run").out
    array, first = out.split('exec /bin/bash "$run/job.sh"\n')
    assert "#SBATCH --array=0-3%2" in array
    assert "--array" not in first
    assert "pipectl.jobs.in_job" not in array
    assert "-tiny-0\n" in first
    program("sbatch", 'grep -q array=0-3 && echo "sbatch: Job 9 to start at noon" >&2')
    Path("bin/grep").symlink_to("/usr/bin/grep")
    assert "to start at noon" in cli("submit", "job.yaml", *SLURM, "--test-only").out
    assert not runs()


def test_nothing_stays_of_what_is_refused(cli, sweep, program):
    program("sbatch", "echo 'sbatch: error: invalid partition specified: x' >&2; exit 1")
    result = cli("submit", "job.yaml", *SLURM)
    assert (result.code, "slurm.partition" in result.err) == (5, True)
    assert not runs()
    assert not list(Path("runs/sweeps").iterdir())


def test_an_interrupted_submission_is_found_again(cli, sweep, program):
    program("sbatch", "echo 'Socket timed out on send/recv' >&2; exit 1")
    program("squeue", "true")
    program("sacct", "exit 1")
    assert cli("submit", "job.yaml", *SLURM).code == 5
    assert [told(run).job_id for run in runs()] == [None] * 4
    tag = told(runs()[0]).tag
    assert {told(run).tag for run in runs()} == {tag}
    program("squeue", f"echo x >>asked\n{listed(ROW.format('35_[0-3%2]', 'PENDING', tag))}")
    refused = cli("submit", "job.yaml", *SLURM)
    assert "nothing new was submitted" in refused.err
    assert Path("asked").read_text().count("x") == 1, "one question for all runs"
    assert [told(run).job_id for run in runs()] == [f"35_{index}" for index in range(4)]
    assert cli("status", "tiny").out.count("QUEUED") == 4 + 1


def test_status_of_a_sweep(cli, submitted, program):
    over = [ROW.format(f"35_{index}", "COMPLETED", "t") for index in (0, 1)]
    program("squeue", listed(*over, ROW.format("35_2", "RUNNING", "t"), "35_[3]|PENDING|1||||t|x"))
    for index, loss in ((0, 0.5), (1, 0.25), (2, 0.1)):
        line = {"attempt": 1, "step": 4, "steps": 4, "time": 1, "loss": loss, "step_time_s": 1}
        evaluation = {"attempt": 1, "step": 4, "time": 1, "evaluation": {"loss": loss, "top1": 0.9}}
        lines = (json.dumps(line), json.dumps(evaluation))
        (runs()[index] / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    head, titles, *rows = cli("status", "tiny").out.splitlines()
    assert head.endswith("  4 runs: 2 COMPLETED, 1 RUNNING, 1 QUEUED")
    names = "run lr seed state step loss evaluation loss evaluation top1 best"
    assert titles.split() == names.split()
    assert rows[1].split() == ["1", "0.1", "1", "COMPLETED", "4/4", *["0.25"] * 2, "0.9", "*"]
    assert [row.rstrip().endswith("*") for row in rows] == [False, True, False, False]
    found = cli("status", "tiny", "--json").json
    assert (found["best"], len(found["runs"])) == (runs()[1].name, 4)
    assert found["runs"][3]["sweep"]["values"] == {"optimizer.kwargs.lr": 0.01, "training.seed": 1}
    assert "lr=0.01 seed=1" in cli("status").out
    assert "lr=0.01 seed=1" in cli("status", runs()[3].name).out
    assert cli("status", "tiny", "--ranks").code == 2


def test_one_run_or_all_are_cancelled(cli, submitted):
    assert cli("cancel", "tiny-2").code == 0
    assert Path("scancel.argv").read_text() == "35_2\n"
    assert "cancelled: 4 of the 4 runs" in cli("cancel", "tiny").out
    assert Path("scancel.argv").read_text() == "35_2\n35\n"
    assert {told(run).state for run in runs()} == {"cancelled"}


def test_an_unconfirmed_sweep_is_not_given_up_while_slurm_cannot_be_asked(cli, submitted, program):
    for run in runs():
        replace(told(run), state="submitting", job_id=None).save(run / "record.json")
    program("squeue", "echo 'squeue: down' >&2; exit 1")
    result = cli("cancel", "tiny")
    assert (result.code, "squeue: down" in result.err) == (5, True)


def test_a_resumed_run_is_a_job_of_its_own(cli, submitted, program):
    states = [ROW.format(f"35_{i}", "FAILED" if i == 1 else "RUNNING", "t") for i in range(4)]
    program("squeue", listed(*states))
    program("sbatch", "echo 50")
    assert cli("resume", "tiny-1").code == 0
    record = told(runs()[1])
    assert (record.job_id, record.task) == ("50", None)
    assert record.sweep is not None
    program("squeue", listed(*states, ROW.format("50", "RUNNING", "t")))
    cli("cancel", "tiny")
    assert Path("scancel.argv").read_text().split() == ["35", "50"]


def test_a_job_after_a_sweep(cli, submitted):
    alone = ("--set", "sweep=null", "--set", "name=next")
    assert cli("submit", "job.yaml", *SLURM, "--after", "tiny", *alone).code == 0
    (run,) = (path for path in Path("runs").glob("*-next") if path.is_dir())
    assert "--dependency=afterok:35_0:35_1:35_2:35_3\n" in (run / "job.sh").read_text()


def test_on_pbs(cli, sweep, program):
    program("qsub", "echo 41[].vm")
    assert cli("submit", "job.yaml", *PBS).code == 0
    (script,) = (path.read_text() for path in Path("runs/sweeps").glob("*/array.sh"))
    assert "#PBS -J 0-3\n#PBS -W max_run_subjobs=2\n" in script
    assert [told(run).job_id for run in runs()] == [f"41[{index}].vm" for index in range(4)]
    rows = [f"Job Id: 41[{i}].vm\n    job_state = {state}" for i, state in enumerate("XRQQ")]
    program("qstat", f'[[ $* == "-x -t -f 41[].vm" ]] && {listed(*rows)}')
    (runs()[0] / "exit_code").write_text("0\n")
    assert "1 COMPLETED, 1 RUNNING, 2 QUEUED" in cli("status", "tiny").out

    (runs()[1] / "resubmitted").write_text("57.vm\n")
    program("qstat", listed(*rows, "Job Id: 57.vm\n    job_state = Q"))
    assert cli("status", "tiny-1", "--json").json["job_id"] == "57.vm"
    program("qdel", 'echo "$@" >>qdel.argv')
    assert "cancelled: 3 of the 4 runs" in cli("cancel", "tiny").out
    assert sorted(Path("qdel.argv").read_text().split()) == ["41[].vm", "57.vm"]


def test_after_an_array_of_pbs(cli, sweep, program):
    """All of it is awaited, or none: a run that has completed is not."""
    program("qsub", "echo 41[].vm")
    cli("submit", "job.yaml", *PBS)
    alone = ("submit", "job.yaml", *PBS, "--set", "sweep=null", "--set", "name=next", "--after")
    rows = [f"Job Id: 41[{i}].vm\n    job_state = Q" for i in range(4)]
    program("qstat", listed(*rows))
    refused = cli(*alone, "tiny-2")
    assert (refused.code, "wait for the whole array" in refused.err) == (2, True)
    assert cli(*alone, "tiny").code == 0
    (run,) = (path for path in Path("runs").glob("*-next") if path.is_dir())
    assert "-W depend=afterok:41[].vm\n" in (run / "job.sh").read_text().replace("'", "")
    shutil.rmtree(run)
    (runs()[2] / "exit_code").write_text("0\n")
    program("qstat", listed(*rows).replace(rows[2], rows[2][:-1] + "X"))
    assert cli(*alone, "tiny-2").code == 0
    (run,) = (path for path in Path("runs").glob("*-next") if path.is_dir())
    assert "depend" not in (run / "job.sh").read_text()


def test_values_are_text_on_a_terminal(cli, sweep, program):
    program("sbatch", "echo 35")
    program("squeue", "true")
    program("sacct", "exit 1")
    hostile = "[red]x[/red] $(touch PWNED) `id`"
    grid = f"sweep.grid={{model.kwargs.text: ['{hostile}', '; touch PWNED']}}"
    assert cli("submit", "job.yaml", *SLURM, "--set", grid).code == 0
    assert "[red]x[/red] $(touch ..." in cli("status", "tiny").out
    assert hostile in (runs()[0] / "job.yaml").read_text()
    (array,) = Path("runs/sweeps").glob("*/array.sh")
    for script in (array, *(run / "job.sh" for run in runs())):
        assert "PWNED" not in script.read_text()
