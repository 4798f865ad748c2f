"""`pipectl plan`: of a job, and of any profile without a job file, torch or MPI."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from pipectl.cluster import assumed_cluster
from pipectl.jobs.plan_search import AnswerJson
from pipectl.jobs.planning import gather
from pipectl.plan import Plan
from pipectl.planner.explain.scaling import ScalingJson

PLAN = Path("runs/tiny.plan.json")
ALONE = ("plan", "--profile", "p.json")
BATCH = ("--set", "training.batch_size=8")
TWO = (*ALONE, "--devices", "2", *BATCH)
AUTO = ("--set", "pipeline.micro_batches=auto")
FOUR_MICRO_BATCHES = ("--set", "pipeline.micro_batches=4")


def test_plan_shows_stages_a_verdict_and_a_gantt_in_80_columns(cli, profile, monkeypatch, golden):
    cli("plan", "job.yaml")  # the first compiles kernels, and says how long that takes
    monkeypatch.setenv("COLUMNS", "80")
    result = cli("plan", "job.yaml", "--scheduler", "slurm")
    assert (result.code, result.err) == (0, "")
    assert max(map(len, result.out.splitlines())) <= 80
    golden(result.out, vary=r"(?s)search: .*?(?=\n\n)")


def test_assumptions_are_wrapped_beside_their_label(cli, profile, monkeypatch):
    monkeypatch.setenv("COLUMNS", "50")
    lines = cli("plan", "job.yaml", "--scheduler", "slurm").out.splitlines()
    first = lines.index("assumed: the memory of temporary values is not")
    assert lines[first + 1] == "         given: taken as none"


def test_a_search_that_compiled_the_planner_says_so(cli, profile, monkeypatch):
    spent = iter((3.0, 15.5, 15.5, 15.7))
    monkeypatch.setattr("pipectl.jobs.plan_search.compiling_s", lambda: next(spent))
    first, second = (" ".join(cli("plan", "job.yaml").out.split()) for _ in range(2))
    assert "12.5 s of it to compile the planner" in first
    assert "to compile" not in second


def test_any_profile_is_planned_without_torch_and_mpi_and_printed_as_ascii(alone):
    program = (
        "import sys; from pipectl.cli import main\n"
        "for more in ([], ['--explain'], ['--json']):\n"
        "    assert main(['plan', '--profile', 'p.json', '--devices', '2', *more]) == 0\n"
        "assert main(['plan', '--profile', 'p.json', '--nodes', '1,2']) == 0\n"
        "assert not {'torch', 'mpi4py'} & set(sys.modules)\n"
    )
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, env=environment, capture_output=True, check=False, text=True)
    assert done.returncode == 0, done.stderr
    assert "rank 0 0?" in done.stdout


def test_plan_writes_a_file_that_loads(cli, profile):
    found = cli("plan", "job.yaml", "--svg", "pictures/plan.svg", "--json").json
    plan, written = Plan.load(PLAN), json.loads(PLAN.read_text())
    del written["stages"]
    assert found.items() >= written.items()
    keys = {*written, "stages", *AnswerJson.__annotations__} - {"explanation"}
    assert set(found) == keys
    assert Plan.from_json(found) == plan
    assert [stage.ranks for stage in plan.stages] == [(0,), (1,)]
    assert plan.key is not None
    assert Path("pictures/plan.svg").read_text().startswith("<svg ")


def test_a_damaged_profile_is_named_and_an_earlier_plan_untouched(cli, profile, profile_document):
    PLAN.write_text("earlier")
    profile.write_text(profile.read_text()[:200])
    result = cli("plan", "job.yaml")
    assert (result.code, result.out) == (3, "")
    assert result.err.startswith("error: runs/tiny.profile.json:1:")
    assert "truncated?" in result.err
    profile.write_text(json.dumps(profile_document(edges=None)))
    result = cli("plan", "job.yaml")
    assert result.code == 3
    assert result.err.startswith("error: runs/tiny.profile.json: edges: missing\n")
    assert PLAN.read_text() == "earlier"


def test_a_stale_profile_is_used_with_a_warning(cli, profile):
    result = cli("plan", "job.yaml", "--set", "optimizer.factory=torch.optim:SGD")
    assert result.code == 0
    assert result.err == (
        "warning: runs/tiny.profile.json was measured for other settings (model, data, optimizer, "
        "batch or ranks per node); measure again with: "
        "pipectl profile job.yaml --set optimizer.factory=torch.optim:SGD\n"
    )


def test_what_fits_nowhere_is_said_and_an_earlier_plan_untouched(cli, profile):
    PLAN.write_text("earlier")
    stages = ("--set", "pipeline.stages=5", "--set", "resources.nodes=5")
    for changes, words in ((stages, "5"), (("--set", "pipeline.memory_limit=256MiB"), "MiB")):
        result = cli("plan", "job.yaml", *changes, "--scheduler", "slurm")
        assert (result.code, result.out) == (4, "")
        assert result.err.startswith("error: ")
        assert words in result.err
    assert PLAN.read_text() == "earlier"


def test_a_job_keeps_the_micro_batches_of_its_first_plan_until_asked(cli, job, profile_document):
    def measured(fixed_s):
        """Times with a fixed part; the larger that is, the fewer micro-batches are best."""
        document = profile_document(key=None, coupled=["layer.2"])
        for node in document["nodes"]:
            node["timings"] = {"1": [fixed_s + 0.005] * 2, "8": [fixed_s + 0.04] * 2}
            node["forward_s"] = node["backward_s"] = fixed_s + 0.01
        Path("runs").mkdir(exist_ok=True)
        Path("runs/tiny.profile.json").write_text(json.dumps(document))

    def planned(*options):
        result = cli("plan", "job.yaml", *AUTO, *options)
        assert result.code == 0, result.err
        return Plan.load(PLAN).micro_batches, result.out, result.err

    measured(0.0)
    many, out, err = planned()
    assert "as in the previous plan" not in out
    assert err.startswith("warning: layer.2 computes over all samples of a micro-batch")
    measured(1.0)
    kept, out, _ = planned()
    assert kept == many
    assert f"micro-batches: {many}, as in the previous plan" in out
    limit = ("plan", "job.yaml", *AUTO, "--set", "pipeline.memory_limit={}MiB")
    advice = "from the previous plan): pipectl plan JOB.yaml --new-micro-batches"
    for size, is_advised in ((257, True), (1, False)):  # the process alone takes more than 1 MiB
        result = cli(*limit[:-1], limit[-1].format(size))
        assert (result.code, advice in result.err) == (4, is_advised), result.err
    few, out, _ = planned("--new-micro-batches")
    assert few < many
    assert "as in the previous plan" not in out
    assert planned()[0] == few
    assert cli("plan", "job.yaml", "--set", "pipeline.micro_batches=8").err == ""
    assert Plan.load(PLAN).micro_batches == 8


def test_other_devices_or_nodes_are_a_question_and_not_the_jobs_plan(cli, profile):
    found = cli("plan", "job.yaml", "--nodes", "1,2,3", "--scheduler", "slurm", "--json").json
    assert [count["ranks"] for count in found["counts"]] == [1, 2, 3]
    assert [count["feasible"] for count in found["counts"]] == [False, True, True]
    free = ("--set", "pipeline.stages=auto", "--scheduler", "slurm")
    assert cli("plan", "job.yaml", "--devices", "1", *free).out.startswith("tiny: 1 stage on 1 r")
    assert not PLAN.exists()
    result = cli("plan", "job.yaml", "--devices", "3", "--scheduler", "slurm")
    assert result.code == 2
    assert "--nodes 1,2,4 plans for other sizes" in result.err


def test_a_profile_and_a_number_of_devices_are_enough(cli, alone):
    result = cli(*TWO, *FOUR_MICRO_BATCHES)
    assert (result.code, result.err) == (0, "")
    assert result.out.startswith("tiny: 2 stages on 2 ranks, 1f1b, 4 micro-batches of 2")
    assert "plan:" not in result.out
    assert {path.name for path in Path().iterdir()} == {"bin", "p.json"}
    files = ("-o", "out/plan.json", "--svg", "out/p.svg")
    result = cli(*ALONE, "--devices", "2", *files)
    assert result.code == 0
    assert result.out.splitlines()[-2:] == ["plan: out/plan.json", "picture: out/p.svg"]
    assert len(Plan.load(Path("out/plan.json")).stages) == 2
    assert Path("out/p.svg").read_text().startswith("<svg ")


def test_the_devices_of_a_cluster_file_or_of_an_imported_profile_are_used(
    cli, alone, profile_document
):
    assumed_cluster("mine", [2, 2], 2, None).save(Path("c.json"))
    cluster = (*ALONE, "--cluster", "c.json")
    assert cli(*cluster, "--json").json["node_of_rank"] == [0, 0, 1, 1]
    assert cli(*cluster, "--devices", "3", "--json").json["node_of_rank"] == [0, 0, 1]
    result = cli(*cluster, "--devices", "5")
    assert (result.code, result.out) == (2, "")
    assert "--devices 5: the cluster 'mine' has 4 ranks" in result.err
    result = cli(*ALONE, "--devices", "1000000000")
    assert (result.code, "1,000,000,000 ranks; pipectl plans for at mo" in result.err) == (2, True)
    counts = cli(*cluster, "--nodes", "1,131072", "--json").json["counts"]
    assert [count["feasible"] for count in counts] == [True, False]
    shipped = {"accelerators": 3, "memory_limit_bytes": 2.0**30}
    alone.write_text(json.dumps(profile_document(cluster=shipped)))
    found = cli(*ALONE, "--json").json
    assert (len(found["node_of_rank"]), found["memory_limit_bytes"]) == (3, 2**30)
    changes = ("--devices", "2", "--set", "pipeline.memory_limit=2GiB")
    other = cli(*ALONE, *changes, "--json").json
    assert (len(other["node_of_rank"]), other["memory_limit_bytes"]) == (2, 2**31)


def test_keys_of_a_job_can_be_set_without_one_and_the_batch_is_assumed(cli, alone):
    keys = ("--set", "pipeline.stages=2", "--set", "pipeline.schedule=gpipe")
    found = cli(*ALONE, "--devices", "4", *BATCH, *keys, "--json").json
    assert (len(found["stages"]), found["schedule"], found["batch_size"]) == (2, "gpipe", 8)
    found = cli(*ALONE, "--devices", "2", "--json").json
    assert found["batch_size"] == 16
    said = "the batch is not given: taken as 16 samples (--set training.batch_size=N sets it)"
    assert said in found["assumptions"]


def test_an_explanation_says_where_the_step_goes_and_what_would_help(cli, alone):
    result = cli(*TWO, *FOUR_MICRO_BATCHES, "--explain")
    assert (result.code, result.err) == (0, "")
    for said in (
        "checkpoints: while writing one, rank 0 holds ",
        "  1 stage",
        "  one more node ",
        "  1 GiB more for every rank          nothing: memory is not limited",
        "  links between nodes twice as fast  ",
        "  8 micro-batches ",
    ):
        assert f"\n{said}" in result.out
    found = cli(*TWO, "--explain", "--json").json["explanation"]
    assert found["binds"] == "rank"
    assert found["busiest_rank"]["stages"] == [0]
    assert found["busiest_link"]["between"] == "node"
    assert {"change", "step_time_s", "gain", "reason"} == set(found["offers"][0])
    times = [other["step_time_s"] for other in found["alternatives"]]
    assert times == sorted(times) != []


def test_numbers_of_nodes(cli, alone):
    found = cli(*ALONE, "--nodes", "2,1", "--set", "training.batch_size=64", "--json").json
    assert [count["nodes"] for count in found["counts"]] == [1, 2]
    assert (found["pays_until_nodes"], found["cut_short"]) == (2, False)
    assert set(found) == {"cut_short", *ScalingJson.__annotations__}
    result = cli(*ALONE, "--nodes", "1,4", "--set", "pipeline.memory_limit=268MiB")
    assert result.code == 0
    assert re.search(r"^ +1 +1 +- +- +-", result.out, re.MULTILINE)
    assert "1 node: the one with the smallest peak needs" in result.out
    assert "efficiency is against 4 nodes, the fewest on which the model fits" in result.out


def test_no_pipeline_is_recommended_if_that_is_faster(cli, alone, profile):
    assumed_cluster("fast", [4], 4, None).save(Path("c.json"))
    batch = ("--set", "training.batch_size=16")
    text = " ".join(cli(*ALONE, "--cluster", "c.json", *batch).out.split())
    assert "faster: data parallelism on 4 ranks without a pipeline: about " in text
    slow = ("--communication-scale", "100000")
    result = cli("lab", "plan", "job.yaml", "--scheduler", "slurm", *slow)
    assert "one rank without a pipeline: " in result.out


@pytest.mark.parametrize("name", ["c.json", "two #2: {c}.json", "1e5", "'\"\\.json", "é😀.json"])
def test_a_cluster_is_looked_up_where_the_command_runs(alone, job, name):
    Path("jobs").mkdir()
    for file in ("job.yaml", "model.py"):
        Path(file).rename(Path("jobs", file))
    assumed_cluster("mine", [1, 1], 1, None).save(Path(name))
    inputs = gather(Path("jobs/job.yaml"), alone, cluster=Path(name))
    assert (inputs.cluster.name, inputs.cluster_file) == ("mine", Path(name).absolute())
