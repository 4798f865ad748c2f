"""`pipectl report`: a recorded step in the terminal, and a page read as text and in a browser."""

import json
import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from pipectl.report.comparison import ComparisonJson, divide_last_step
from pipectl.timeline import Timeline

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")


def test_a_page_a_picture_and_a_trace_at_once(cli, recorded):
    """Picture and trace show both timelines; the page everything about the run."""
    files = ("-o", "out/page.html", "--svg", "out/step.svg", "--perfetto", "out/step.json")
    result = cli("report", "last", "--json", *files)
    assert result.json["step"] == 10
    assert set(result.json) == {"run", "steps", *ComparisonJson.__annotations__}
    page = Path("out/page.html").read_text()
    for words in ("COMPLETED, step 10 of 10", "measured, step 10", "1.00 GiB measured",
                  "samples/s", "time between actions (Python)", "4 micro-batches of"):  # fmt: skip
        assert words in page
    assert "<th>memory</th></tr>" not in page, "no stage is recomputed or offloaded"
    entries = json.loads(Path("out/step.json").read_text())["traceEvents"]
    named = [entry["args"]["name"] for entry in entries if entry["name"] == "process_name"]
    assert named == ["predicted, node 0", "measured, step 10, node 0"]
    assert re.search(r"^out/step\.svg \(.*\): open it in a browser$", result.err, re.MULTILINE)
    picture = Path("out/step.svg").read_text()
    assert picture.startswith("<svg ")
    shown = (f"{recorded.name}, step 10: ", "2 stages on 2 ranks", ">predicted<", "measured, step")
    for words in shown:
        assert words in picture

    ranks = [{"rank": rank, "peak_bytes": (1 + rank) << 20} for rank in range(100)]
    recorded.start.heartbeat.write_text(json.dumps({"version": 1, "ranks": ranks}))
    assert cli("report", "-o", "page.html").out.startswith("page.html (")
    page = Path("page.html").read_text()
    assert "64 of 100 ranks: those that hold most." in page
    held = re.findall(r"\brank (\d+)\b", page.partition(">Memory<")[2])
    assert list(map(int, held)) == list(range(36, 100))


def test_a_step_with_another_batch_is_compared_with_nothing(cli, recorded):
    """It is chosen only by its number."""
    timeline = Timeline.load(recorded.measured_of(10))
    odd = replace(timeline, step=12, differs="its batch had 3 of 16 samples")
    odd.save(recorded.measured_of(12))
    assert cli("report", "last", "--json").json["step"] == 10
    assert divide_last_step(recorded)[0] == 10
    shown = cli("report", "last", "--step", "12").out
    assert ", its batch had 3 of 16 samples; predicted " in shown
    assert "its batch had 3 of 16 samples; the prediction is of another step" in " ".join(
        shown.split()
    )
    assert "times the predicted" not in shown
    assert "advice" not in shown
    for step in (5, 10):
        recorded.measured_of(step).unlink()
    assert cli("report", "last", "--json").json["differs"] == odd.differs
    assert divide_last_step(recorded) is None


EVERY_METRIC = """\
{"attempt": 1, "step": 1, "steps": 9, "loss": 2.0, "step_time_s": 1.0, "samples_per_s": 8.0,
 "learning_rate": 0.1, "gradient_norm": 3.0}
{"attempt": 1, "step": 2, "steps": 9, "loss": 1.0, "step_time_s": 1.0, "samples_per_s": 8.0,
 "learning_rate": 0.05, "gradient_norm": 2.0, "processor": {"share": 0.3, "ranks": 2, "rank": 0,
 "lost_to": "processes"}}
{"attempt": 1, "step": 2, "evaluation": {"loss": 0.5, "accuracy": 0.9}, "early_stop": "it is over"}
"""
A_JOB = """\
version: 1
name: tiny
model: {factory: "torch.nn:Linear", kwargs: {in_features: 4}}
loss: {factory: "torch.nn:MSELoss"}
data: {factory: "a:b"}
training: {steps: 9, batch_size: 8}
pipeline: {memory_limit: 640MiB}
environment: {variables: {TOKEN: secret}, setup: [export TOKEN=secret]}
"""


def test_a_page_names_its_job_draws_every_metric_and_says_nothing_twice(cli, recorded):
    recorded.job.write_text(A_JOB)
    recorded.metrics.write_text(EVERY_METRIC.replace("\n ", " "))
    assert cli("report", "-o", "page.html").code == 0
    page = Path("page.html").read_text()
    body = page.partition("<body>")[2]
    cells = re.findall(r"<(?:td|th|p|h\d)\b[^>]*>(.*?)</(?:td|th|p|h\d)>", body, re.DOTALL)
    shown = [re.sub(r"<[^>]+>", "", cell).strip() for cell in cells]
    for text in ("job", "submitted", "2023-11-14 22:13:20", "640MiB", "pipeline.memory_limit",
                 "model.kwargs.in_features"):  # fmt: skip
        assert text in shown, text
    assert any(re.fullmatch("tiny, local job .*", text) for text in shown)
    assert "secret" not in page
    titles = re.findall('<text x="0" y="-10">(.*?)</text>', body)
    assert titles == [
        "loss",
        "accuracy (evaluation)",
        "samples/s",
        "learning rate",
        "gradient norm",
    ]
    sentences = [part.strip() for text in shown for part in re.split(r"[;.:]\s|\n", text)]
    long = [text for text in sentences if len(text) > 30]
    assert len(long) == len(set(long))


def test_files_that_are_missing_or_damaged_are_left_out(cli, recorded, failed):
    assert cli("report", failed.name, "-o", "page.html").code == 0
    text = Path("page.html").read_text()
    assert "FAILED" in text
    assert "ValueError: boom 1" in text
    for name in ("plan.json", "trace/predicted.json", "starts/1/heartbeat.json", "metrics.jsonl"):
        (recorded.path / name).write_text("{")
        assert cli("report", recorded.name, "-o", "page.html").code == 0, name


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium")
def test_a_browser_zooms_and_says_what_an_action_is(cli, recorded, tmp_path):
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
        capture_output=True, text=True, timeout=300, check=True,
    )  # fmt: skip
    assert "CONSOLE" not in done.stderr, done.stderr
    assert "<title>7 true</title>" in done.stdout, "1.25 to the 9th, and moved to the left"
    assert 'class="dim">rank 0: forward, stage 0, micro-batch 0, from 0.00 us on' in done.stdout


def test_a_page_is_written_with_the_other_files_or_not_at_all(cli, failed):
    result = cli("report", failed.name, "-o", "page.html", "--svg", "step.svg")
    assert result.code != 0
    assert not Path("page.html").exists()
