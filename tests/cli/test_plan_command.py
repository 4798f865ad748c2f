"""Plans of a job and of any profile: what holds beside what `pipectl plan` prints."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from pipectl.jobs.plan_search import AnswerJson
from pipectl.plan import Plan
from pipectl.planner.baselines import NAMES, OWN
from pipectl.planner.explain.scaling import ScalingJson

PLAN = Path("runs/tiny.plan.json")
AUTO = ("--set", "pipeline.micro_batches=auto")
PROFILE = ("lab", "plan", "--profile", "p.json")
TWO = (*PROFILE, "--devices", "2", "--set", "training.batch_size=8")


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
    several = cli("plan", "job.yaml", "--nodes", "1,2", "--scheduler", "slurm", "--json").json
    assert set(several) == {"cut_short", *ScalingJson.__annotations__}


@pytest.mark.parametrize("name", NAMES)
def test_planners_can_be_compared(cli, alone, name):
    found = cli(*TWO, "--planner", name, "--json").json
    assert found["search"]["planner"] == name
    assert found["planning_s"] == found["search"]["planning_s"] > 0
    assert found["value_s"] == found["predicted"]["step_time_s"]
    assert sum(len(stage["nodes"]) for stage in found["stages"]) == 4
    text = cli(*TWO, "--planner", name, "--explain").out
    assert f"search:     {'' if name == OWN else f'by {name}, '}took " in text
    assert "cannot be submitted" not in text
    assert "with other resources or settings:" in text
    table = cli(*PROFILE, "--planner", name, "--nodes", "1,2")
    assert (table.code, table.out.count("\n    ")) == (0, 2)


def test_a_balance_that_has_no_time_is_what_was_found_or_an_error(cli, alone):
    load = ("--objective", "max-stage-load", "--budget", "0")
    result = cli(*TWO, *load)
    assert "largest stage load" in result.out or "before any plan was found" in result.err


def test_a_job_keeps_the_micro_batches_of_its_first_plan_until_asked(cli, profile):
    def measured(fixed_s):
        """Times with a fixed part; the larger that is, the fewer micro-batches are best."""
        document = {**json.loads(profile.read_text()), "key": None, "coupled": ["layer.2"]}
        for node in document["nodes"]:
            node["timings"] = {"1": [fixed_s + 0.005] * 2, "8": [fixed_s + 0.04] * 2}
            node["forward_s"] = node["backward_s"] = fixed_s + 0.01
        profile.write_text(json.dumps(document))

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
