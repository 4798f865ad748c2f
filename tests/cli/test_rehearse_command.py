import json
import shutil
from pathlib import Path

import pytest

LINE = '{"attempt":1,"step":1,"steps":1,"time":1,"loss":null,"step_time_s":0.5,"late_s":%s}'
RANKS = """\
run="${@: -1}"
[[ "$*" == *" -n 4 "* || "$1 $2" == "-n 4" ]] || exit 9
[[ "$*" == *"pipectl.runtime.rehearsal"* ]] || exit 8
"""
FOUR = ("--set", "resources.nodes=4", "--set", "pipeline.stages=4")


@pytest.fixture
def mpi(mpiexec):
    """An mpiexec that checks its arguments and does as told."""
    return lambda text: mpiexec(RANKS + text)


def test_a_rehearsal_runs_here_and_compares(cli, profile, mpi):
    mpi(f"echo '{LINE % 0}' > $run/metrics.jsonl")
    result = cli("lab", "rehearse", "job.yaml", *FOUR, "--set", "launch.scheduler=slurm")
    assert result.code == 0, result.err
    assert "rehearsing 4 ranks (local): " in result.err
    predicted, rehearsed, *_ = result.out.splitlines()
    assert predicted.startswith("predicted: ")
    assert rehearsed.startswith("rehearsed: 500 ms per step, ")
    assert " REHEARSAL" not in result.out
    assert cli("status", "last").out.count("COMPLETED") == 1


def test_a_rehearsal_plans_for_this_machine_if_that_is_named(cli, profile, mpi):
    mpi(f"echo '{LINE % 0}' > $run/metrics.jsonl")
    rehearse = ("lab", "rehearse", "job.yaml", *FOUR, "--set", "launch.scheduler=slurm")
    for options, cluster in ((), "'from resources:'"), (("--scheduler", "local"), "'this machine'"):
        assert cli(*rehearse, *options).code == 0
        (plan,) = Path("runs").glob("2*-tiny-rehearsal/plan.json")
        assert f"cluster {cluster} is assumed" in plan.read_text()
        shutil.rmtree(plan.parent)


def test_figures_of_a_rehearsal_fit_80_columns(cli, profile, mpi, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    mpi(f"echo '{LINE % 3.5}' > $run/metrics.jsonl")
    out = cli("lab", "rehearse", "job.yaml", *FOUR, "--scheduler", "local").out
    assert "the latest rank was 3.50 s late" in out
    assert max(map(len, out.splitlines())) <= 80


def test_a_rehearsal_for_programs_says_when_it_was_disturbed(cli, profile, mpi):
    mpi(f"echo '{LINE % 3.5}' > $run/metrics.jsonl")
    answer = cli("lab", "rehearse", "job.yaml", *FOUR, "--json").json
    assert (answer["ranks"], answer["late_s"], answer["rehearsed_step_time_s"]) == (4, 3.5, 0.5)
    assert answer["rehearsed_over_predicted"] == pytest.approx(
        0.5 / answer["predicted_step_time_s"]
    )
    words = cli("lab", "rehearse", "job.yaml", *FOUR).out
    assert "the latest rank was 3.50 s late" in words


def test_json_stays_json_beside_warnings(cli, profile, mpi, program):
    from pipectl.cluster import assumed_cluster

    mpi(f"echo '{LINE % 0}' > $run/metrics.jsonl")
    program("sbatch", "echo 41")
    assumed_cluster("mine", [1, 1, 1], 1, None).save(Path("runs/tiny.cluster.json"))
    unused = "warning: runs/tiny.cluster.json describes nodes of [1, 1, 1] ranks"
    result = cli("lab", "rehearse", "job.yaml", *FOUR, "--json")
    assert result.err.startswith(unused)
    assert json.loads(result.out)["ranks"] == 4
    result = cli("lab", "rehearse", "job.yaml", *FOUR, "--json", "--scheduler", "slurm")
    assert result.err.startswith(unused)
    answer = json.loads(result.out)
    assert (answer["scheduler"], answer["job_id"]) == ("slurm", "41")
    assert Path(answer["directory"]).name == answer["run"]
    mpi("exit 7")
    result = cli("lab", "rehearse", "job.yaml", *FOUR, "--json")
    assert (result.code, json.loads(result.out)["state"]) == (1, "FAILED")
    result = cli("lab", "rehearse", "job.yaml", *FOUR)
    assert (result.code, result.out.split()[1]) == (1, "FAILED")
