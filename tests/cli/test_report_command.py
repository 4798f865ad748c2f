"""`pipectl report`: a recorded step in the terminal, and a page read as text and in a browser."""

import json
import math
import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from pipectl.cluster import Cluster, Device, Node
from pipectl.jobs.planning import write_plan
from pipectl.link import Link
from pipectl.plan import Prediction
from pipectl.report.comparison import ComparisonJson
from pipectl.runs import RunDirectory
from pipectl.simulate import simulate
from pipectl.timeline import Event, Timeline

FREE = Link(0.0, 1e15)
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")


@pytest.fixture
def traced(finished, pipeline):
    """A completed run with a plan, both timelines, and what its ranks hold."""
    prediction = Prediction(5.0, 0.2, (0.8, 0.8), (1 << 30, 1 << 30))
    replace(pipeline(2, 4), prediction=prediction).save(finished / "plan.json")
    for name, pace in (("predicted", 1.0), ("step-000010", 1.2)):
        events = tuple(
            Event(rank, (rank + index) * pace, (rank + index + 1) * pace, "forward", rank, index)
            for rank in range(2)
            for index in range(4)
        )
        step = None if name == "predicted" else 10
        Timeline(events, 2, step).save(finished / "trace" / f"{name}.json")
    ranks = [{"rank": rank, "peak_bytes": 1 << 30} for rank in range(2)]
    beat = {"version": 1, "state": "training", "step": 10, "steps": 10, "ranks": ranks}
    (finished / "heartbeat.json").write_text(json.dumps(beat))
    return finished


def test_everything_about_a_run(cli, traced):
    result = cli("report", "-o", "report.html")
    assert (result.code, result.err) == (0, "")
    assert result.out.startswith("report.html (")
    text = Path("report.html").read_text()
    for words in ("COMPLETED, step 10 of 10", "measured, step 10", "1.00 GiB measured",
                  "samples/s", "computing, on all ranks alike", "4 micro-batches of"):  # fmt: skip
        assert words in text
    assert "<th>memory</th></tr>" not in text, "no stage is recomputed or offloaded"


def test_of_very_many_ranks_those_are_shown_that_hold_most(cli, traced):
    ranks = [{"rank": rank, "peak_bytes": (1 + rank) << 20} for rank in range(100)]
    (traced / "heartbeat.json").write_text(json.dumps({"version": 1, "ranks": ranks}))
    assert cli("report", "-o", "report.html").code == 0
    text = Path("report.html").read_text()
    assert "64 of 100 ranks: those that hold most." in text
    shown = re.findall(r"\brank (\d+)\b", text.partition(">Memory<")[2])
    assert list(map(int, shown)) == list(range(36, 100))


def test_files_that_are_missing_or_damaged_are_left_out(cli, traced, failed):
    assert cli("report", failed.name, "-o", "page.html").code == 0
    text = Path("page.html").read_text()
    assert "FAILED" in text
    assert "ValueError: boom 1" in text
    for name in ("plan.json", "trace/predicted.json", "heartbeat.json", "metrics.jsonl"):
        (traced / name).write_text("{")
        assert cli("report", traced.name, "-o", "page.html").code == 0, name


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium")
def test_a_browser_zooms_and_says_what_an_action_is(cli, traced, tmp_path):
    assert cli("report", "-o", "report.html").code == 0
    page = tmp_path / "report.html"
    events = """<script>
    const picture = document.querySelector(".zoom svg"), place = picture.getBoundingClientRect();
    const at = { bubbles: true, cancelable: true, clientX: place.right, clientY: place.top + 80 };
    const bar = document.querySelector(".bars g rect"), wide = bar.width.baseVal.value;
    bar.dispatchEvent(new PointerEvent("pointermove", at));
    for (let turn = 0; turn < 9; turn++)
      picture.dispatchEvent(new WheelEvent("wheel", { deltaY: -1, ...at }));
    document.title = `${Math.round(bar.width.baseVal.value / wide)} ${bar.x.baseVal.value < 0}`;
    </script>"""
    text = re.sub("script-src '[^']+'", "script-src 'unsafe-inline'", page.read_text())
    page.write_text(text.replace("</body>", f"{events}</body>"))
    assert CHROMIUM is not None
    done = subprocess.run(
        [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr",
         f"--user-data-dir={tmp_path / 'profile'}", "--window-size=900,700",
         "--virtual-time-budget=2000", "--dump-dom", f"file://{page}"],
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    assert "CONSOLE" not in done.stderr, done.stderr
    assert "<title>7 true</title>" in done.stdout, "1.25 to the 9th, and moved to the left"
    assert 'class="dim">rank 0: forward, stage 0, micro-batch 0, from 0.00 us on' in done.stdout


@pytest.fixture
def run(place, pipeline):
    """Steps 5 and 10 are recorded; in step 10, stage 1 took twice its time."""
    found = RunDirectory.create(place / "runs", "gpt", 0.0)
    plan, cluster = pipeline(2, 4), Cluster("c", "t", (Node("n", 2, 2, Device("cpu")),), FREE, FREE)
    write_plan(found, plan, cluster)
    timeline = simulate(plan, cluster).timeline
    Timeline(timeline.events, 2, 5).save(found.measured_of(5))
    slower = [
        event._replace(end_s=2 * event.end_s - event.start_s) if event.stage == 1 else event
        for event in timeline.events
        if event.rank == 1 or event.micro_batch != 3
    ]
    Timeline(tuple(slower), 2, 10, 2e-5).save(found.measured_of(10))
    return found


def test_the_last_recorded_step_is_compared(cli, run, golden):
    result = cli("report", "last")
    assert result.code == 0
    golden(result.out, result.err, vary=run.name)


def test_another_step_for_programs(cli, run):
    answer = cli("report", run.name, "--step", "5", "--json").json
    assert (answer["run"], answer["steps"], answer["step"]) == (run.name, [5, 10], 5)
    assert set(answer) == {"run", "steps", *ComparisonJson.__annotations__}
    assert answer["ratio"] == pytest.approx(1.0)
    assert {part["ratio"] for part in answer["parts"] if part["kind"] != "update"} == {1.0}


def test_a_page_a_picture_and_a_trace_at_once(cli, run):
    """Picture and trace show both timelines."""
    files = ("-o", "out/page.html", "--svg", "out/step.svg", "--perfetto", "out/step.json")
    result = cli("report", "gpt", "--json", *files)
    assert result.json["step"] == 10
    assert Path("out/page.html").exists()
    entries = json.loads(Path("out/step.json").read_text())["traceEvents"]
    named = [entry["args"]["name"] for entry in entries if entry["name"] == "process_name"]
    assert named == ["predicted, node 0", "measured, step 10, node 0"]
    assert re.search(r"^out/step\.svg \(.*\): open it in a browser$", result.err, re.MULTILINE)
    picture = Path("out/step.svg").read_text()
    assert picture.startswith("<svg ")
    for words in (f"{run.name}, step 10: ", "2 stages on 2 ranks", ">predicted<", "measured, step"):
        assert words in picture


def test_a_step_of_an_earlier_plan_is_not_compared(cli, run, pipeline):
    cluster = Cluster("c", "t", (Node("n", 4, 4, Device("cpu")),), FREE, FREE)
    events = simulate(pipeline(4, 4), cluster).timeline.events
    Timeline(events, 4, 12).save(run.measured_of(12))
    result = cli("report", "last", "--perfetto", "step.json")
    assert result.code == 2
    assert "step 12 was recorded on 4 ranks, and the plan has 2" in result.err
    assert not Path("step.json").exists()
    assert cli("report", "-o", "page.html").code == 0
    assert "measured, step" not in Path("page.html").read_text()
    assert cli("report", "last", "--step", "10").code == 0


def test_what_is_not_there_is_said(cli, run):
    result = cli("report", "last", "--step", "7")
    assert result.code == 2
    assert "step 7 is not recorded" in result.err
    assert "recorded steps: 5, 10" in result.err
    damaged = {"version": 1, "ranks": 2, "columns": ["rank"], "events": [[0]]}
    run.measured_of(10).write_text(json.dumps(damaged))
    result = cli("report")
    assert result.code == 3
    assert "step-000010.json: events: do not fit the columns" in result.err
    sound = Event(0, 0.0, 1.0, "forward", 0, 0)
    wrong = {"rank": 2, "start_s": "x", "end_s": math.inf, "kind": [], "stage": 1.5}
    for key, value in wrong.items():
        row = list(sound._replace(**{key: value}))
        damaged = {"version": 1, "ranks": 2, "columns": Event._fields, "events": [row]}
        run.measured_of(10).write_text(json.dumps(damaged))
        result = cli("report")
        assert result.code == 3
        assert "step-000010.json: events[0]: " in result.err
    assert cli("report", "-o", "page.html").code == 0
