"""The page of a run: no text in its files becomes a part of the page, and it needs nothing else."""

import base64
import hashlib
import json
import re
import socket
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

from pipectl.cli.views.page import make_page
from pipectl.runs import RunDirectory
from pipectl.timeline import Event, Timeline

pytestmark = pytest.mark.slow

DATA = Path(__file__).parents[1] / "data" / "scheduler" / "nasty.json"
HOSTILE = [
    "<script>alert(1)</script>",
    "</script><img src=x onerror=alert(1)>",
    "\"'><svg onload=alert(1)>",
    "<!--",
    "]]>",
    "&lt;",
    "{{ 7 * 7 }}",
    "\u2028\u2029",
    *filter(str.strip, json.loads(DATA.read_text())),
]


class Reader(HTMLParser):
    """Tags, attributes and text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[str] = []
        self.text = ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [name for name, _ in attrs]

    def handle_data(self, data: str) -> None:
        self.text += data


@pytest.fixture
def page_with(tmp_path, pipeline):
    """The page of a failed run whose files hold a text wherever they hold any."""
    run = RunDirectory.create(tmp_path, "x", 0.0)
    events = tuple(Event(rank, 0.0, 1.0, "forward", rank, 0) for rank in range(2))
    for path in (run.predicted, run.measured_of(10)):
        Timeline(events, 2, 10).save(path)
    run.start.exit_code.write_text("1\n")
    line = {"attempt": 1, "step": 1, "steps": 2, "loss": 1.0, "step_time_s": 0.5}
    run.metrics.write_text(json.dumps(line) + "\n")

    def page(text):
        plan = pipeline(2, 1)
        stages = [
            replace(stage, nodes=(f"{text}{index}", f"{index}{text}"))
            for index, stage in enumerate(plan.stages)
        ]
        replace(plan, name=text, stages=tuple(stages)).save(run.plan)
        ranks = [
            {"rank": rank, "node": text, "waiting": rank / 2, "peak_bytes": 9} for rank in (0, 1)
        ]
        beat = {"version": 1, "state": text, "step": 1, "steps": 2, "ranks": ranks}
        run.start.heartbeat.write_text(json.dumps(beat))
        error = {"rank": 0, **dict.fromkeys(("host", "action", "type", "message"), text)}
        run.start.error_of(0).write_text(json.dumps(error))
        record = {"version": 1, "name": text, "scheduler": "local", "tag": text, "ranks": 2,
                  "submitted_at": 1.0, "nodes": 1, "steps": 2, "state": "submitted", "history": [],
                  "job_id": f"{2**22 - 1}.1@{socket.gethostname()}"}  # fmt: skip
        run.record.write_text(json.dumps(record))
        return Reader(make_page(run, 1.7e9))

    return page


def test_text_stays_text(page_with):
    plain = page_with("x")
    assert plain.tags.count("script") == 1
    for text in HOSTILE:
        found = page_with(text)
        tags = [tag for tag in found.tags if tag != "code"]  # of words in backticks
        assert tags == [tag for tag in plain.tags if tag != "code"], text
        assert found.attributes == plain.attributes, text
        shown = found.text.replace("`", "").count(text.replace("`", ""))
        assert shown >= 4 + 4, "of the failure, and of the operators"


def test_it_asks_nothing_of_the_network_and_has_commands_as_code_and_losses_as_curves(
    page_with, tmp_path
):
    page_with("x")
    run = RunDirectory(next(tmp_path.glob("*-x")))
    slow = (Event(0, 0.0, 1.0, "forward", 0, 0), Event(1, 1.0, 5.0, "forward", 1, 0))
    Timeline(slow, 2, 10).save(run.measured_of(10))
    with run.metrics.open("a") as lines:
        for step, evaluation in enumerate(({"loss": 0.5}, {"loss": None}, None)):
            line = {"attempt": 1, "step": step, "evaluation": evaluation}
            lines.write(json.dumps(line) + "\n")
    text = make_page(run, 1.7e9)
    assert "<code>pipectl profile --again</code>" in text
    assert ">evaluation</text>" in text
    assert "default-src 'none'" in text
    (script,) = re.findall("<script>(.*)</script>", text, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'\"" in text, "and no other program runs"
    assert not re.search(r"https?://(?!www\.w3\.org)|src=|href=|@import|url\(", text)
