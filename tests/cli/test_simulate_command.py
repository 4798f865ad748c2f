from dataclasses import replace
from pathlib import Path

import pytest

from pipectl.cluster import assumed_cluster
from pipectl.link import Link
from pipectl.units import format_time

PLAIN = "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n"
SHAPE = ("--stages", "4", "--micro-batches", "8")


@pytest.fixture
def mine(place):
    (place / "mine.csv").write_text(PLAIN)
    return "mine.csv"


def test_a_built_in_schedule_is_drawn(cli, place):
    result = cli("lab", "simulate", "--schedule", "1f1b", *SHAPE, "--svg", "out/step.svg")
    lines = result.out.splitlines()
    assert lines[0] == "4 stages on 4 ranks, 1f1b, 8 micro-batches of 1 (batch 8)"
    assert lines[1] == "step 33, bubble 27.3%, micro-batches in flight by stage: 4 3 2 1"
    assert [line.split()[1] for line in lines[2:6]] == ["0", "1", "2", "3"]
    assert lines[-1] == "picture: out/step.svg"
    assert Path("out/step.svg").read_text().startswith("<svg")


def test_a_file_is_drawn_with_times_of_its_own(cli, mine):
    times = ("--forward", "2", "--backward", "3", "--latency", "1")
    answer = cli("lab", "simulate", "--schedule", mine, *times, "--json").json
    assert (answer["stages"], answer["ranks"], answer["micro_batches"]) == (2, 2, 2)
    # 0F0, message, 1F0, 1B0, 1F1, 1B1, message, 0B1
    assert answer["step_time_s"] == pytest.approx(2 + 1 + 2 * (2 + 3) + 1 + 3)
    assert answer["peak_in_flight"] == [2, 1]


@pytest.mark.parametrize(
    ("name", "stages", "bubble"), [("interleaved", 8, 0.158), ("zb-v", 8, 0.059)]
)
def test_several_stages_a_rank(cli, place, name, stages, bubble):
    shape = ("--stages", str(stages), "--micro-batches", "8", "--json")
    answer = cli("lab", "simulate", "--schedule", name, *shape).json
    assert answer["ranks"] == 4
    assert answer["bubble"] == pytest.approx(bubble, abs=0.001)


def test_a_plan_and_its_stages_in_another_order(cli, profile):
    assert cli("plan", "job.yaml").code == 0
    plan = ("--plan", "runs/tiny.plan.json")
    planned = cli("lab", "simulate", *plan, "--json").json
    assert planned["schedule"] == "1f1b"
    time = format_time(planned["step_time_s"])
    assert f"step {time}, bubble" in cli("lab", "simulate", *plan).out
    serial = "0F0,0B0,0F1,0B1,0F2,0B2,0F3,0B3\n"
    Path("serial.csv").write_text(serial + serial.replace("0F", "1F").replace("0B", "1B"))
    other = cli("lab", "simulate", *plan, "--schedule", "serial.csv", "--json").json
    assert other["step_time_s"] > planned["step_time_s"]
    assert other["planned_step_time_s"] is None
    assert "the plan predicts" not in cli("lab", "simulate", *plan, "--schedule", "serial.csv").out
    assert other["peak_memory_bytes"][0] < planned["peak_memory_bytes"][0]


def test_a_machine_that_nobody_named_is_told(cli, profile):
    job = (Path("job.yaml").read_text(), "cluster: slow.json\n")
    cluster = assumed_cluster("slow", [1, 1], 1, None)
    replace(cluster, between_nodes=Link(0.01, 1e6), assumed=False).save(Path("slow.json"))
    Path("job.yaml").write_text("".join(job))
    assert cli("plan", "job.yaml").code == 0
    plan = ("--plan", "runs/tiny.plan.json")
    told = cli("lab", "simulate", *plan).out.splitlines()[-2:]
    assert told[0] == "assumed: cluster 'tiny' (not measured)"
    assert told[1].startswith("the plan predicts ")
    assert "assumed" not in cli("lab", "simulate", *plan, "--cluster", "slow.json").out
    answer, known = (
        cli("lab", "simulate", *plan, *named, "--json").json
        for named in ((), ("--cluster", "slow.json"))
    )
    assert answer["assumptions"] == ["cluster 'tiny' is assumed, not measured"]
    assert answer["step_time_s"] < answer["planned_step_time_s"]
    assert known["step_time_s"] == known["planned_step_time_s"] == answer["planned_step_time_s"]


@pytest.mark.parametrize("changes", [{"ranks": (0, 1)}, {"backward_ranks": (1,)}])
def test_lists_give_every_stage_one_rank(cli, mine, pipeline, changes):
    plan = pipeline(2, 2, node_of_rank=(0, 0))
    stages = (replace(plan.stages[0], **changes), plan.stages[1])
    replace(plan, stages=stages).save(Path("plan.json"))
    result = cli("lab", "simulate", "--plan", "plan.json", "--schedule", mine)
    assert (result.code, result.out) == (2, "")
    assert "stages of the plan have several ranks" in result.err
