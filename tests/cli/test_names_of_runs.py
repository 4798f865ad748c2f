"""Naming runs: outside ``./runs``, by what commands print to be pasted; and in `submit --after`."""

import re
import shlex
from pathlib import Path

import pytest

SLURM = ("--scheduler", "slurm")
ELSEWHERE = ("--set", "output.directory=out side")
SWEEP = "sweep:\n  grid: {training.seed: [0, 1]}\n"


LISTED = "echo '{}|{}|1|N/A|N/A|n1||None'"


def pasted(text: str, command: str) -> list[str]:
    """The arguments of a command that a text tells to run."""
    (found,) = re.findall(rf"pipectl {command} ((?:'[^']*'|[^\s'`])+)", text)
    return [command, *shlex.split(found)]


@pytest.fixture
def running(slurm):
    """What is submitted runs as job 41."""
    slurm("squeue", LISTED.format(41, "RUNNING"))


def test_what_submit_tells_to_run(cli, profile, running):
    Path("runs").rename("out side")
    told = cli("submit", "job.yaml", *SLURM, *ELSEWHERE).out
    assert "see: pipectl status 'out side/" in told
    found = cli(*pasted(told, "status"))
    assert (found.code, "RUNNING" in found.out) == (0, True)
    (path,) = pasted(told, "status")[1:]
    assert cli("cancel", path).code == 5, "found, but there is no scancel"


def test_what_submit_tells_of_a_sweep(cli, profile, running):
    Path("runs").rename("out side")
    with Path("job.yaml").open("a") as job:
        job.write(SWEEP)
    told = cli("submit", "job.yaml", *SLURM, *ELSEWHERE).out
    called = pasted(told, "status")
    assert "2 runs" in cli(*called).out
    result = cli("status", called[1], "--ranks")
    assert (result.code, f"such as 'out side/{Path(called[1]).name}-0'" in result.err) == (2, True)
    assert cli("submit", "job.yaml", *SLURM, "--after", called[1]).code == 0


def test_what_is_told_of_runs_by_their_directory(cli, failed):
    Path("runs").rename("away")
    told = cli("status", "last", "-d", "away").out
    for command in ("logs", "resume"):
        assert pasted(told, command)[1] == f"away/{failed.name}"
    result = cli(*pasted(told, "logs"))
    assert result.code == 0
    assert pasted(result.err, "status")[1] == f"away/{failed.name}"


def test_a_variable_says_where_runs_are(cli, finished, monkeypatch):
    Path("runs").rename("away")
    monkeypatch.setenv("PIPECTL_RUNS", "away")
    assert finished.name in cli("status").out
    assert cli("logs", "last").out.startswith("started\n")
    assert "directory     away/" in cli("status", finished.name).out
    assert "see: pipectl status 20250101" in cli("logs", "last", "--rank", "1").err
    assert cli("status", "-d", "elsewhere").out.startswith("elsewhere: no runs yet")


def test_runs_that_wait_for_others_name_them(cli, profile, running, program):
    cli("submit", "job.yaml", *SLURM)
    (run,) = (path for path in Path("runs").iterdir() if path.is_dir())
    (run / "exit_code").write_text("1\n")
    Path("runs").rename("away")
    Path("runs").mkdir()
    Path("away/tiny.profile.json").rename("runs/tiny.profile.json")
    program("squeue", "exit 0")
    result = cli("submit", "job.yaml", *SLURM, "--after", f"away/{run.name}")
    assert result.code == 2
    assert pasted(result.err, "resume") == ["resume", f"away/{run.name}"]


def test_jobs_go_where_the_variable_says_unless_they_name_a_directory(
    cli, profile, running, monkeypatch
):
    monkeypatch.setenv("PIPECTL_RUNS", "away")
    Path("runs").rename("away")
    told = cli("submit", "job.yaml", *SLURM).out
    (run,) = (path for path in Path("away").iterdir() if path.is_dir())
    assert f"see: pipectl status {run.name}\n" in told
    assert "RUNNING" in cli("status", "41").out
    cli("submit", "job.yaml", *SLURM, *ELSEWHERE)
    assert Path("out side").is_dir()


def test_a_run_after_others(cli, job, slurm, queued, finished):
    slurm("squeue", LISTED.format(12, "RUNNING"))
    result = cli("submit", "job.yaml", *SLURM, "--after", "20250103", "--after", finished.name)
    assert result.code == 0, result.err
    script = max(Path("runs").glob("*-tiny")) / "job.sh"
    assert "#SBATCH --dependency=afterok:12\n" in script.read_text()


def test_a_run_of_another_batch_system_cannot_be_waited_for(cli, job, slurm, run_of):
    run_of("20250103-120000-tiny", scheduler="pbs", job_id="12.vm")
    slurm("qstat", "printf 'Job Id: 12.vm\\n    job_state = R\\n'")
    result = cli("submit", "job.yaml", *SLURM, "--after", "20250103")
    assert result.code == 2
    assert "is on pbs, and this job goes to slurm" in result.err
    assert len(list(Path("runs").iterdir())) == 1


def test_the_shell_offers_runs(cli, finished, failed, monkeypatch, capfd):
    words = {"_PIPECTL_COMPLETE": "complete_bash", "COMP_CWORD": "2"}
    for name, value in {**words, "COMP_WORDS": "pipectl status 202501"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit):
        cli()
    assert capfd.readouterr().out.split() == [failed.name, finished.name]
