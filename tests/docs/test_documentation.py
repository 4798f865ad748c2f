"""What the documentation names exists, and its examples are accepted."""

import json
import re
import shlex
from pathlib import Path

import pytest
from formats import with_tables
from pages import CHECKOUT, PAGES, anchor_of, blocks, commands_of
from typer.main import get_command

from pipectl.cli import app
from pipectl.cluster import Cluster
from pipectl.profile import Profile

FENCED = re.compile(r"^```(\w+) (\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)


def _anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {anchor_of(heading) for heading in headings}


def _example(kind: str) -> dict:
    """The example of a kind in docs/formats.md."""
    text = (CHECKOUT / "docs" / "formats.md").read_text(encoding="utf-8")
    return next(json.loads(body) for _, name, body in FENCED.findall(text) if name == kind)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    broken = []
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        if target.startswith("http"):
            continue
        name, _, anchor = target.partition("#")
        path = page if not name else page.parent / name
        if not path.exists() or (anchor and anchor not in _anchors(path)):
            broken.append(target)
    assert broken == []


COMMANDS = commands_of(get_command(app))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_and_options_exist(page):
    text = page.read_text(encoding="utf-8")
    shown = [line for block in blocks(text) for line in block.commands]
    code = "\n".join([*shown, *re.findall(r"^    .*$|`[^`\n]+`", text, re.MULTILINE)])
    for name, rest in re.findall(r"(?<!#)pipectl ((?:lab )?[a-z]+)\b([^`\n&#]*)", code):
        assert name in COMMANDS
        known = {option for parameter in COMMANDS[name].params for option in parameter.opts}
        assert set(re.findall(r"(?<=\s)--[a-z-]+", rest)) <= known, f"pipectl {name}{rest}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_command_lines_can_be_parsed(page):
    for block in blocks(page.read_text(encoding="utf-8")):
        for line in block.commands:
            if line.startswith("pipectl ") and not re.search(r"[|<>$&]|# .*fails", line):
                words = shlex.split(line, comments=True)[1:]
                length = 2 if words[0] == "lab" else 1
                command = COMMANDS[" ".join(words[:length])]
                context = command.context_class(command)
                command.make_parser(context).parse_args(words[length:])


def test_example_profile_is_accepted():
    profile = Profile.from_json(_example("profile"))
    assert len(profile.operators) == 2
    assert profile.assumptions == ()


def test_example_cluster_is_accepted():
    assert Cluster.from_json(_example("cluster")).ranks == 4


@pytest.mark.parametrize("name", ["formats.md", "json.md"])
def test_tables_of_keys_are_made_from_the_types(snapshot, name):
    page = CHECKOUT / "docs" / name
    text = page.read_text(encoding="utf-8")
    assert text.count("<!-- keys of ") > 1
    snapshot(page, with_tables(text))


def test_every_command_that_prints_json_has_a_row():
    """Its keys are those of a type in ``with_tables``, which mypy compares with what it prints."""
    rows = re.findall(
        r"^\| `pipectl ((?:lab )?[a-z]+)", (CHECKOUT / "docs/json.md").read_text(), re.M
    )
    printing = {
        name
        for name, command in commands_of(get_command(app)).items()
        if any("--json" in parameter.opts for parameter in command.params)
    }
    assert set(rows) == printing


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_tests_that_are_named_exist(page):
    for file, name in re.findall(r"`(tests/[\w/.]+\.py)(?:::(\w+))?`", page.read_text("utf-8")):
        assert (CHECKOUT / file).is_file(), file
        assert f"def {name}(" in (CHECKOUT / file).read_text("utf-8") or not name, f"{file}::{name}"
