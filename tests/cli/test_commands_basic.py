from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from conftest import Command

    from pipectl.plan import Plan

HEAVY = {"torch", "mpi4py", "numpy", "llvmlite", "pipectl.spec", "pipectl.planner"}


@pytest.mark.parametrize("group", [(), ("lab",)])
def test_help_lists_every_command_with_a_whole_sentence(
    cli: Command, monkeypatch: pytest.MonkeyPatch, group: tuple[str, ...]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    result = cli(*group, "--help")
    assert result.code == 0
    lines = result.out.partition("Commands:\n")[2].splitlines()
    assert len(lines) > len(group) + 2
    assert [line for line in lines if not line.endswith(".") or line.endswith("...")] == []


def test_no_command_shows_the_help(cli: Command) -> None:
    assert cli() == cli("--help")
    assert cli("lab") == cli("lab", "--help")


def test_commands_load_nothing_that_is_slow(
    place: Path, finished: Path, failed: Path, pipeline: Callable[..., Plan]
) -> None:
    """Each in a fork of one process, so that what one loads is no excuse for the next."""
    for run in (finished, failed):
        pipeline(2, 4).save(run / "plan.json")
        (run / "job.sh").write_text("exit\n")
        beat = {"version": 1, "state": "training", "step": 4, "steps": 10, "time": 1, "ranks": []}
        (run / "heartbeat.json").write_text(json.dumps(beat))
    names = [run.name for run in (finished, failed)]
    commands = [
        *([name, run] for name in ("status", "logs", "cancel") for run in names),
        *(["status", run, more] for run in names for more in ("--ranks", "--json")),
        *(["logs", run, more] for run in names for more in ("--follow", "--script")),
        *(["--help"], ["lab", "--help"], ["status", "--help"], ["status"]),
    ]
    program = (
        "import os, sys; from pipectl.cli import main\n"
        f"for words in {commands}:\n"
        "    if not os.fork():\n"
        "        code = main(words)\n"
        f"        loaded = {HEAVY} & set(sys.modules)\n"
        "        os._exit(bool(code or loaded and print(words, loaded, file=sys.stderr) is None))\n"
        "    assert os.wait()[1] == 0, words\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


ONE = "must be a whole number of at least 1, not"


@pytest.mark.parametrize(
    ("arguments", "code", "lines"),
    [
        ("job.yaml", 0, ["job.yaml: valid; 2 ranks, 4 steps"]),
        ("many.yaml", 3, [f"error: many.yaml:6:19: training.steps: {ONE} 'many'"]),
        ("nope.yaml", 3, ["error: nope.yaml: no such file",
                          "  write a starter spec with: pipectl init"]),
        ("job.yaml --set training.stps=3 --set resources.nodes=0", 3,
         [f"error: --set resources.nodes: {ONE} 0",
          "error: --set training.stps: unknown key; did you mean 'steps'?"]),
    ],
)  # fmt: skip
def test_check_says_what_is_valid_and_each_mistake_by_its_place(
    cli: Command, job: Path, arguments: str, code: int, lines: list[str]
) -> None:
    Path("many.yaml").write_text(job.read_text().replace("steps: 4", "steps: many"))
    result = cli("check", *arguments.split())
    assert (result.code, (result.err if code else result.out).splitlines()) == (code, lines)
    assert not (result.out if code else result.err)


def test_json_has_no_numbers_that_are_not_finite(cli: Command, job: Path) -> None:
    changes = ("--set", "optimizer.kwargs.lr=.nan", "--set", "optimizer.kwargs.eps=-.inf")
    result = cli("check", "job.yaml", "--origins", "--json", *changes)
    assert result.code == 0, result.err

    def refuse(name: str) -> None:
        raise AssertionError(name)

    json.loads(result.out, parse_constant=refuse)


def test_the_schema_is_printed_and_written(cli: Command) -> None:
    printed = cli("check", "--schema")
    written = cli("check", "--schema", "-o", "job.schema.json")
    assert json.loads(printed.out)["additionalProperties"] is False
    assert Path("job.schema.json").read_text() == printed.out
    assert written.out == "schema: job.schema.json\n"
