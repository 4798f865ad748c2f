"""`pipectl check`: mistakes, the values of a job and where they come from, and the schema."""

import json
import re
from pathlib import Path

import pytest

ONE = "must be a whole number of at least 1, not"


@pytest.mark.parametrize(
    ("arguments", "code", "lines"),
    [
        ("job.yaml", 0, ["job.yaml: valid; 2 ranks, 4 steps"]),
        ("many.yaml", 3, [f"error: many.yaml:6:19: training.steps: {ONE} 'many'"]),
        ("job.yaml --set training.stps=3 --set resources.nodes=0", 3,
         [f"error: --set resources.nodes: {ONE} 0",
          "error: --set training.stps: unknown key; did you mean 'steps'?"]),
    ],
)  # fmt: skip
def test_check_says_what_is_valid_and_each_mistake_by_its_place(cli, job, arguments, code, lines):
    Path("many.yaml").write_text(job.read_text().replace("steps: 4", "steps: many"))
    result = cli("check", *arguments.split())
    assert (result.code, (result.err if code else result.out).splitlines()) == (code, lines)
    assert not (result.out if code else result.err)


def test_origins_of_values_for_people_and_programs(cli, job, tmp_path_factory, monkeypatch):
    home = tmp_path_factory.mktemp("home")
    site = home / ".config/pipectl/site.yaml"
    site.parent.mkdir(parents=True)
    site.write_text("# defaults\nslurm:\n  account: staff\n")
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    monkeypatch.setenv("PIPECTL_RUNS", "elsewhere")
    text = job.read_text().replace("site_defaults: false\n", "")
    job.write_text(f'{text}environment: {{setup: ["echo {"x" * 300}\\necho [red]two"]}}\n')
    changes = ("training.seed=7", "optimizer.kwargs.lr=.nan", "optimizer.kwargs.eps=-.inf")
    line = ("check", "job.yaml", "--origins", *(w for each in changes for w in ("--set", each)))
    found = {row["key"]: row for row in cli(*line, "--json").json}
    assert found["training.seed"] == {
        "key": "training.seed", "value": 7, "origin": "--set", "file": None, "line": None,
    }  # fmt: skip
    assert found["slurm.account"]["line"] == 3
    assert found["slurm.account"]["file"].endswith("site.yaml")
    assert (found["pipeline.schedule"]["value"], found["pipeline.schedule"]["line"]) == ("1f1b", 7)
    assert found["resources.walltime"]["origin"] == "default"
    assert found["output.directory"]["origin"] == "PIPECTL_RUNS"
    assert found["optimizer.kwargs.lr"]["value"] is None, "JSON has no such numbers"

    monkeypatch.setenv("COLUMNS", "120")
    text = cli(*line).out
    rows = {words[0]: words[1:] for line in text.splitlines() if (words := line.split())}
    assert rows["name"] == ["tiny", "job.yaml:2"]
    assert rows["seed"] == ["7", "--set"]
    assert rows["walltime"] == ["01:00:00", "default"]
    assert re.search(r"account +staff +~/.config/pipectl/site.yaml:3", text)
    monkeypatch.setenv("COLUMNS", "70")
    text = cli(*line).out
    assert max(map(len, text.splitlines())) <= 70
    assert text.count("x") > 300, "folded, not cut"
    assert "[red]two" in re.sub(r"\s", "", text)


def test_the_schema_is_printed_and_written(cli):
    printed = cli("check", "--schema")
    written = cli("check", "--schema", "-o", "job.schema.json")
    assert json.loads(printed.out)["additionalProperties"] is False
    assert Path("job.schema.json").read_text() == printed.out
    assert written.out == "schema: job.schema.json\n"
