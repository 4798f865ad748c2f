"""Plans of a job and of any profile, and all that `plan` prints of plans with given figures."""

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime
from io import StringIO
from pathlib import Path
from unittest.mock import Mock

import pytest
from rich.console import Console, RenderableType

from pipectl.batch import JobRequest, Queue, get_scheduler
from pipectl.batch.limits import Misfit
from pipectl.batch.local import LocalScheduler
from pipectl.batch.slurm import SlurmScheduler
from pipectl.cli.views import plan as views
from pipectl.cli.views import prospects as prospect_views
from pipectl.cluster import assumed_cluster
from pipectl.jobs.plan_search import AnswerJson, StepAnswer
from pipectl.jobs.planning import PlanInputs
from pipectl.jobs.prospects import Prospect, ProspectJson, Prospects, ProspectsJson
from pipectl.plan import Plan, Prediction, Replication, Search, Segments, StageCost
from pipectl.planner import PlanRequest
from pipectl.planner.explain.bottleneck import LinkLoad, StepParts
from pipectl.planner.explain.data_parallel import Estimate, WithoutPipeline
from pipectl.planner.explain.explain import Alternative, Explanation, Offer
from pipectl.planner.explain.scaling import Count, Scaling, ScalingJson
from pipectl.profile import Profile
from pipectl.profile_parts import LoadedFile
from pipectl.runs import Pauses
from pipectl.simulate import simulate
from pipectl.spec import dump, load

PLAN = Path("runs/tiny.plan.json")
PROFILE = ("lab", "plan", "--profile", "p.json")
TWO = (*PROFILE, "--devices", "2", "--set", "training.batch_size=8")


def test_any_profile_is_planned_without_torch_and_mpi_and_printed_as_ascii(alone):
    program = (
        "import sys; from pipectl.cli import main\n"
        "for more in ([], ['--explain'], ['--json']):\n"
        "    assert main(['plan', '--profile', 'p.json', '--devices', '2', *more]) == 0\n"
        "assert main(['plan', '--profile', 'p.json', '--compare', '1,2']) == 0\n"
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
    keys = {*written, "stages", *AnswerJson.__annotations__} - {"explanation", "nodes"}
    assert set(found) == keys
    assert Plan.from_json(found) == plan
    assert [stage.ranks for stage in plan.stages] == [(0,), (1,)]
    assert plan.key is not None
    assert Path("pictures/plan.svg").read_text().startswith("<svg ")
    several = cli("plan", "job.yaml", "--compare", "1,2", "--scheduler", "slurm", "--json").json
    assert set(several) == {"cut_short", *ScalingJson.__annotations__}


def test_a_batch_system_that_does_not_answer_is_asked_for_one_start(
    cli, profile, slurm, monkeypatch
):
    monkeypatch.setattr("pipectl.jobs.prospects.QUEUES_TIMEOUT_S", 1.0)
    slurm("sinfo", "echo 'debug*|1:00:00|4|4|4000|(null)|up|1-infinite|no|all'")
    slurm("sbatch", "echo asked >>asked; exec sleep 60")
    several = ("--compare", "1,2,4", "--set=pipeline.stages=auto", "--set=training.steps=99")
    found = cli("plan", "job.yaml", "--when", *several, "--scheduler", "slurm", "--json").json
    assert found.keys() == ProspectsJson.__annotations__.keys()
    assert all(row.keys() == ProspectJson.__annotations__.keys() for row in found["rows"])
    said = [(row["nodes"], row["starts_at"], row["reason"]) for row in found["rows"]]
    assert said == [(nodes, None, "sbatch: no answer within 1 s") for nodes in (1, 2, 4)]
    assert Path("asked").read_text() == "asked\n"


def test_requeues_wait_at_least_as_long_as_slurm_holds_them_back(cli, profile, slurm, monkeypatch):
    ask = Mock(side_effect=SlurmScheduler.forecast_again)
    monkeypatch.setattr(SlurmScheduler, "forecast_again", lambda *given: ask(*given))
    slurm("sinfo", "echo 'debug*|1:00:00|4|4|4000|(null)|up|1-infinite|no|all'")
    slurm("scontrol", "echo 'AuthInfo = cred_expire=600'")
    options = (
        "--compare=1",
        "--set=pipeline.stages=auto",
        "--set=training.steps=60000",
        "--scheduler=slurm",
        "--json",
    )
    for waits_s, pause_s in ((1000, 1000), (100, 601)):
        start = int(time.time()) + waits_s
        slurm("sbatch", f"echo sbatch: Job 1 to start at {start} using 1 processors >&2")
        row = cli("plan", "job.yaml", "--when", *options).json["rows"][0]
        waited_s = row["done_at"] - row["starts_at"] - row["run_s"]
        assert row["requeues"] > 3
        assert ask.call_count == 3, "the last stands for those after it"
        ask.reset_mock()
        assert waited_s == pytest.approx(row["requeues"] * pause_s, rel=0.1)


def test_a_corrected_profile_is_written_with_its_plan_alone(cli, profile, recorded, monkeypatch):
    """Where `submit` reads it; what is only asked, or fails, leaves the profile as it was."""
    shutil.copy(profile, recorded.profile)
    before = profile.read_bytes()
    from_run = ("plan", "job.yaml", "--from-run", "last")
    assert cli(*from_run, "--compare", "1,2", "--scheduler", "slurm").code == 0
    assert cli(*from_run, "--when").code == 0
    assert cli(*from_run, "--set=pipeline.memory_limit=1MiB").code == 4
    assert cli(*from_run, "-o", "other.json").code == 0
    assert profile.read_bytes() == before
    assert cli(*from_run).code == 0
    assert Profile.load(profile).source.endswith(f"corrected by {recorded.path.name}")
    is_profile, access = str(profile).__eq__, os.access
    monkeypatch.setattr("pipectl.jobs.output.is_of_another", lambda path: is_profile(str(path)))
    monkeypatch.setattr(
        os, "access", lambda path, *mode: not is_profile(str(path)) and access(path, *mode)
    )
    profile.write_text("of another user")
    assert cli(*from_run).code == 0
    assert profile.read_text() == "of another user"
    assert Profile.load(Path(f"runs/tiny-{os.geteuid()}.profile.json"))


def test_a_stale_profile_of_a_run_is_named_and_not_written(cli, profile, recorded):
    shutil.copy(profile, recorded.profile)
    recorded.job.write_text(dump(load(Path("job.yaml"))))
    result = cli("plan", "job.yaml", "--from-run", "last", "--set=optimizer.kwargs.lr=0.5")
    assert f"{recorded.profile} was measured for other settings" not in result.err
    shutil.copy(recorded.profile, profile)
    result = cli(
        "plan", "job.yaml", "--from-run", "last", "--set=optimizer.factory=torch.optim:SGD"
    )
    assert f"{recorded.profile} was measured for other settings" in result.err.replace("\n", " ")
    assert result.code == 0
    assert profile.read_bytes() == recorded.profile.read_bytes()
    settings = LoadedFile(str(Path("net.yaml").absolute()), "of another content")
    replace(Profile.load(profile), code=(settings,)).save(profile)
    Path("net.yaml").write_text("")
    words = f"{profile} was measured before {settings.path} was changed; measure again with: "
    assert words in cli("plan", "job.yaml").err.replace("\n", " ")


def test_a_run_of_another_model_corrects_no_profile(cli, profile, recorded):
    shutil.copy(profile, recorded.profile)
    recorded.job.write_text(dump(load(Path("job.yaml"))))
    other = "--set=name=other", "--set=model.kwargs.width=64"
    result = cli("plan", "job.yaml", "--from-run", "last", *other)
    assert f"the model of {recorded.name} is not that of other" in result.err.replace("\n", " ")
    assert result.code != 0
    assert not list(Path("runs").glob("other*"))


RANGE = ("--set=resources.nodes=1-2", "--set=launch.scheduler=slurm", "--bandwidth=100GB/s")


@pytest.mark.parametrize("allowed", [(), ("--allow", "replicas")])
def test_a_range_of_nodes_has_one_answer_for_each_number(cli, profile, allowed):
    """As allowed, on all of them; without an output file, nothing is written."""
    one_stage = "--set=pipeline.stages=1", "--set=training.batch_size=64"
    found = cli("lab", "plan", "job.yaml", *RANGE, *one_stage, *allowed, "--json").json
    times = [each["step_time_s"] for each in found["nodes"]]
    assert times[-1] == found["value_s"]
    assert (times[1] < 0.6 * times[0]) == bool(allowed)
    assert not PLAN.exists()


def test_schedules_that_are_allowed_are_tried_although_one_is_named(cli, alone):
    gpipe = "--set=pipeline.schedule=gpipe", "--set=pipeline.micro_batches=4", "--json"
    named, free = cli(*TWO, *gpipe).json, cli(*TWO, *gpipe, "--allow", "schedules").json
    assert named["schedule"] == "gpipe" != free["schedule"]
    assert free["value_s"] < named["value_s"]


Plans = Callable[..., Plan]
COST = StageCost(1e-3, 2e-3, 0.0, 2**20, 2**21, 0)
CLUSTER = assumed_cluster("test", [1, 1], 1, None)
PARTS = StepParts(0, (0,), 1.0, 0.8, 0.0, 0.0, 0.0, 0.0, 0.05, 0.15)
NONE = WithoutPipeline(None, None)


def timed(plan: Plan, step_s: float) -> Plan:
    peaks = tuple(2**20 * (rank + 1) for rank in range(plan.ranks))
    return replace(plan, prediction=Prediction(step_s, 0.25, (), peaks))


def printed(found: RenderableType, width: int) -> str:
    console = Console(file=StringIO(), width=width)
    console.print(found)
    assert isinstance(console.file, StringIO)
    return console.file.getvalue()


LINK = LinkLoad("node", source=0, target=1, busy_s=0.25, bytes_per_step=2**30)


def explanation(pipeline: Plans) -> Explanation:
    plan = timed(pipeline(2, 4), 1.0)
    return Explanation(
        alternatives=(
            Alternative("schedule gpipe", timed(plan, 1.25)),
            Alternative("1 stage, 8 micro-batches of 2", timed(plan, 2.0)),
        ),
        offers=(
            Offer("one more node", 0.8),
            Offer("1 GiB more for every rank", 1.0),
            Offer("16 micro-batches", reason="the batch has only 8 samples"),
        ),
    )


def answer(
    plan: Plan, parts: StepParts = PARTS, without: WithoutPipeline | None = NONE, **more: object
) -> StepAnswer:
    """Of a plan with these parts of a step, two nodes, and 16 samples; the job is open."""
    fields = {name: more.pop(name) for name in ("micro_batches", "replicas") if name in more}
    request = PlanRequest("x", 16, **fields)  # type: ignore[arg-type]
    profile = Profile("x", "test", 4, (), ())
    inputs = PlanInputs(profile, CLUSTER, request)
    values = {"link": None, "stopped": "", "explanation": None, "compiling_s": 0.0, **more}
    ranks = [plan.node_of_rank.count(node) for node in range(max(plan.node_of_rank) + 1)]
    simulation = simulate(plan, assumed_cluster("test", ranks, 1, None))
    return StepAnswer(inputs, plan, simulation, parts, without=without, **values)  # type: ignore[arg-type]


def test_the_table_of_a_plan_with_replicas_and_marks(pipeline, golden):
    """Three stages on ranks 0-2, 3 and 4; the last recomputes and has a rank for its backward."""
    plan = pipeline(3, 4, costs=[COST] * 3, node_of_rank=(0, 0, 1, 1, 2, 2))
    first, second, third = plan.stages
    stages = (
        replace(first, ranks=(0, 1, 2)),
        replace(second, ranks=(3,), offload=True),
        replace(third, ranks=(4,), backward_ranks=(5,), recompute=True, offload=True),
    )
    plan = timed(replace(plan, stages=stages), 1.0)
    assert plan.summary.startswith("3 stages on 6 ranks, ")
    split = replace(plan, replication=Replication.SPLIT)
    segments = Segments(("b",), 1.0, 0.5, 2.5, 30, 10)
    some = (
        replace(stages[0], recompute=True),
        replace(stages[1], recompute=True, segments=segments),
    )
    in_blocks = replace(plan, stages=(*some, third))
    texts = (line for each in (plan, split, in_blocks) for line in (*views.mark_lines(each), ""))
    golden(printed(views.stage_table(plan, ["a … b"] * 3), 80), *texts)
    assert list(views.mark_lines(pipeline(4, 8))) == []


def test_the_table_has_the_nodes_of_all_ranks_of_a_stage(pipeline):
    """Those of its backward, too."""
    plan = pipeline(1, 4, costs=[COST], node_of_rank=(0, 1))
    apart = replace(plan.stages[0], backward_ranks=(1,))
    plan = timed(replace(plan, stages=(apart,)), 1.0)
    row = printed(views.stage_table(plan, ["a"]), 80).splitlines()[1].split()
    assert row[:3] == ["0", "0-1", "0-1"]


def test_what_is_predicted_of_a_step_and_of_one_without_work(pipeline, golden):
    plan = timed(pipeline(2, 4), 2.0)
    small = assumed_cluster("small", [1, 1], 1, 2**22)
    no_work = answer(plan, StepParts(0, (0,), *[0.0] * 8))
    golden(
        *plan.describe_prediction(CLUSTER, (1.5, 4.0)),
        *plan.describe_prediction(small),
        *timed(plan, 0.0).describe_prediction(CLUSTER),
        *views.explanation_lines(no_work, explanation(pipeline)),
    )


def test_a_thousand_stages_show_their_ends_and_their_extremes(pipeline, golden):
    costs = [replace(COST, forward_s=5e-3 if index == 500 else 1e-3) for index in range(1024)]
    plan = timed(pipeline(1024, 4, costs=costs), 1.0)
    texts = [printed(views.stage_table(plan, ["a … b"] * 1024), 80)]
    for every in (1, 2):
        stages = (replace(s, recompute=index % every == 0) for index, s in enumerate(plan.stages))
        texts += views.mark_lines(replace(plan, stages=tuple(stages)))
    golden(*texts)


def test_verdicts_advice_and_remarks(pipeline, golden):
    """Of what is lost, of links, without a pipeline, and of the search."""
    plan, why = replace(timed(pipeline(2, 4), 1.0), batch_size=16), explanation(pipeline)
    search = Search("pipectl", 2.0, 0.8, 0.25)
    busy = replace(LINK, busy_s=0.9)
    ends = {"switch": ("a", "b"), "node": (0, None), "rank": (None, 1), "nodes": (1, 1)}
    links = {
        f"link {between}": replace(busy, between=between.rstrip("s"), source=source, target=target)
        for between, (source, target) in ends.items()
    }
    parallel = WithoutPipeline(Estimate(1, 0.9, 0.0, 0), Estimate(4, 0.5, 0.1, 0))
    searched = answer(
        replace(plan, search=search), without=WithoutPipeline(None, None, "no size"),
        stopped="by Ctrl-C", compiling_s=1.5,
    )  # fmt: skip
    little = answer(plan, replace(PARTS, bubble_s=0.01, communication_s=0.0))
    best = replace(searched.plan, search=replace(search, gap=0.0))
    request = replace(searched.inputs.request, micro_batches=4, keeps_micro_batches=True)
    answers = {
        "bubble": answer(plan),
        "bubble, fixed micro-batches": answer(plan, micro_batches=4),
        "messages": answer(plan, replace(PARTS, communication_s=0.2)),
        "reduction": answer(plan, replace(PARTS, reduction_s=0.2)),
        "recomputation": answer(plan, replace(PARTS, recompute_s=0.2)),
        "little": little,
        "little, on this machine": replace(
            little, inputs=replace(little.inputs, can_add_nodes=False)
        ),
        "no offer helps": answer(plan, explanation=replace(why, offers=why.offers[1:])),
        "one stage": answer(timed(pipeline(1, 4, node_of_rank=(0, 1)), 1.0)),
        "one rank is slower": answer(plan, without=WithoutPipeline(Estimate(1, 1.1, 0.0, 0), None)),
        "data parallelism was considered": answer(plan, without=parallel, replicas=None),
        "search": replace(searched, inputs=replace(searched.inputs, request=request)),
        "best plan": replace(searched, plan=best),
        **{name: answer(plan, link=link) for name, link in links.items()},
    }
    texts = []
    for name, found in answers.items():
        lines = (*views.verdict(found), *views.remarks(found))
        texts += [name, *(f"  {label}: {text}" for label, text in lines)]
    golden(*texts)


@pytest.mark.parametrize(
    ("given", "advice"), [("4", "more micro-batches"), ("auto", "a larger batch")]
)
def test_more_micro_batches_are_advised_if_the_user_has_set_them(pipeline, job, given, advice):
    """With a range of nodes, the request has the number that all plans have."""
    found = answer(replace(timed(pipeline(2, 4), 1.0), batch_size=16), micro_batches=4)
    spec = load(job, [f"pipeline.micro_batches={given}"])
    found = replace(found, inputs=replace(found.inputs, spec=spec))
    (text,) = (text for label, text in views.verdict(found) if label == "may help")
    assert text.startswith(advice)


def test_the_table_of_node_counts(pipeline, golden):
    """By number of nodes; on those without a time nothing fits."""
    texts = []
    for times_s in (
        {1: None, 2: 7.2, 4: 4.0, 8: 3.9},
        {1: 8.0, 2: 4.0},
        {1: 8.0, 2: 8.0},
        {1: None},
    ):
        counts = [
            Count(nodes, 2 * nodes, None, "no feasible plan: too large")
            if step_s is None
            else Count(nodes, 2 * nodes, timed(pipeline(min(nodes, 4), 4), step_s), "")
            for nodes, step_s in times_s.items()
        ]
        found = Scaling(tuple(counts))
        if 8 in times_s:
            texts += [printed(views.scaling_table(found), width) for width in (120, 80)]
        texts += [*views.scaling_lines(found), ""]
    golden(*texts[:-1])


def test_when_a_job_would_be_done_in_an_allocation_and_on_a_package_s_system(
    cli, profile, monkeypatch
):
    class Here(LocalScheduler):
        name = "here"

        def walltime_of(self, request: JobRequest) -> int:
            return 1

        def misfit(self, queue: Queue, request: JobRequest) -> Misfit | None:
            return Misfit("too small", "") if request.resources.max_nodes > 2 else None

    class OfPackage(LocalScheduler):
        name, title, runs_in_shell = "other", "Other", False

        def forecast(self, request: JobRequest, queue: Queue, now: float) -> float | None:
            return now + 1e10 if request.resources.max_nodes == 2 else None

    several = (
        "plan",
        "job.yaml",
        "--when",
        "--compare",
        "1,2,4",
        "--set=pipeline.stages=auto",
        "--set=training.steps=99",
    )
    for system in (Here, OfPackage):
        monkeypatch.setattr("pipectl.jobs.prospects.get_scheduler", lambda *_, of=system: of())
        out = cli(*several, "--scheduler", "local").out
        rows = [line.split() for line in out.splitlines()]
        if system is Here:
            assert rows[1] == ["nodes", "step", "trains", "for", "done", "at", "node-h"]
            assert [row[0] for row in rows[2:4]] == ["1", "2"]
            assert "1 node; 2 nodes: the allocation ends before that, in 00:00:01" in out
            assert "4 nodes: too small" in out
        else:
            assert rows[1][:4] == ["nodes", "starts", "at", "step"]
            assert [row[:2] for row in rows[2:5]] == [["1", "?"], ["2", "in"], ["4", "?"]]
            assert "1 node; 4 nodes: Other does not say when it would start" in out


def test_when_a_job_would_be_done(golden, job):
    """The last row is soonest, the second cheapest; then none is known, and all need requeues."""
    now = datetime(2026, 11, 30, 13, 40).timestamp()
    hour, day = 3600.0, 86400.0

    def row(nodes, starts_s, queue, **more):
        step_s, run_s = 0.25 / nodes**0.7, 9900 / nodes**0.7
        at = now + starts_s
        times = {"starts_at": at, "done_at": at + run_s, "walltime_s": 7200, "limit_s": 86400}
        fields = {"enough_s": run_s + 180, "allowed_requeues": 3, "to": queue, **times, **more}
        return Prospect(nodes, step_s, run_s, queue=queue, **fields)

    unknown = {"starts_at": None, "done_at": None, "reason": "Slurm does not say when"}
    refused = {"reason": "Invalid qos specification", "is_refused": True}
    rows = [
        row(1, 30, "batch", requeues=1),
        row(1, 5 * day, "long"),
        row(2, 30 * day, "long", **unknown),
        row(4, 40 * day, "long", **refused),
        row(4, 500 * 365 * day, "gpu-a100-large", is_like_profile=False),
        row(2, 14 * hour, "gpu-a100-large"),
        row(4, hour, "short", requeues=7),
        row(8, hour, "batch"),
    ]
    spec, slurm = load(job), get_scheduler("slurm")
    pauses = Pauses(31.0, 0.012, 4.0, "20261129-120000-tiny")
    found = Prospects(spec, slurm, now, pauses, rows, {"root": "closed"}, {16: "too large"})
    others = [
        replace(found, rows=[row(1, 0, "batch", requeues=2, **unknown)], pauses=Pauses()),
        replace(
            found,
            rows=[row(1, 0, "batch", requeues=4)],
            left_out={},
            infeasible={},
            compared=(1, 8),
        ),
        replace(found, rows=[], left_out={"short": "closed"}, infeasible={}),
    ]
    texts = [printed(prospect_views.prospects_table(found), width) for width in (100, 80, 60)]
    for each in (found, *others):
        texts += ["", *prospect_views.prospects_lines(each)]
    golden(*texts)
