"""`pipectl check --origins`, as people and programs see it."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from pipectl.cli import main

JOB = """\
version: 1
name: demo
model: {factory: torch.nn:Linear, kwargs: {in_features: 4, out_features: 2}}
loss: torch.nn:MSELoss
data: torch.utils.data:TensorDataset
training: {steps: 10, batch_size: 8}
environment:
  setup:
    - "echo one\\necho [red]two"
"""


@pytest.fixture(autouse=True)
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A job here, and a site file in a home directory."""
    home = tmp_path / "home"
    (home / ".config" / "pipectl").mkdir(parents=True)
    site = home / ".config" / "pipectl" / "site.yaml"
    site.write_text("# defaults\nslurm:\n  account: staff\n", encoding="utf-8")
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    Path("job.yaml").write_text(JOB, encoding="utf-8")


def _rows(text: str) -> dict[str, list[str]]:
    return {words[0]: words[1:] for line in text.splitlines() if (words := line.split())}


def test_a_line_for_every_key(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "job.yaml", "--origins", "--set", "training.seed=7"]) == 0

    text = capsys.readouterr().out
    rows = _rows(text)
    assert rows["name"] == ["demo", "job.yaml:2"]
    assert rows["kwargs.in_features"] == ["4", "job.yaml:3"]
    assert re.search(r"account +staff +~/.config/pipectl/site.yaml:3", text)
    assert rows["seed"] == ["7", "--set"]
    assert rows["walltime"] == ["01:00:00", "default"]


def test_nothing_is_wider_than_the_screen(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "70")
    Path("job.yaml").write_text(JOB.replace("echo one", "echo " + "x" * 300), encoding="utf-8")
    assert main(["check", "job.yaml", "--origins"]) == 0

    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= 70
    assert text.count("x") > 300, "folded, not cut"
    assert "[red]two" in re.sub(r"\s", "", text)


def test_the_same_for_programs(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIPECTL_RUNS", "elsewhere")
    assert main(["check", "job.yaml", "--origins", "--json", "--set", "training.seed=7"]) == 0

    found = {row["key"]: row for row in json.loads(capsys.readouterr().out)}
    assert found["training.seed"] == {
        "key": "training.seed", "value": 7, "origin": "--set", "file": None, "line": None,
    }  # fmt: skip
    assert found["slurm.account"]["line"] == 3
    assert found["slurm.account"]["file"].endswith("site.yaml")
    assert found["pipeline.stages"]["value"] == "auto"
    assert found["pipeline.stages"]["origin"] == "default"
    assert found["output.directory"]["origin"] == "PIPECTL_RUNS"
