"""`pipectl report`: a recorded step in the terminal, and a page read as text and in a browser."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from pipectl.report.comparison import ComparisonJson

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
    recorded.heartbeat.write_text(json.dumps({"version": 1, "ranks": ranks}))
    assert cli("report", "-o", "page.html").out.startswith("page.html (")
    page = Path("page.html").read_text()
    assert "64 of 100 ranks: those that hold most." in page
    held = re.findall(r"\brank (\d+)\b", page.partition(">Memory<")[2])
    assert list(map(int, held)) == list(range(36, 100))


def test_files_that_are_missing_or_damaged_are_left_out(cli, recorded, failed):
    assert cli("report", failed.name, "-o", "page.html").code == 0
    text = Path("page.html").read_text()
    assert "FAILED" in text
    assert "ValueError: boom 1" in text
    for name in ("plan.json", "trace/predicted.json", "heartbeat.json", "metrics.jsonl"):
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
