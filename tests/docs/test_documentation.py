"""What the documentation names exists, its tables are complete, and its examples are accepted."""

import inspect
import json
import re
import shlex

import pytest

from pipectl import errors
from pipectl.batch import CHECKPOINTED, get_scheduler
from pipectl.cli.app import INTERRUPTED
from pipectl.cluster import Cluster
from pipectl.profile import Profile
from pipectl.spec.schema import json_schema, properties
from tests.batch.job_requests import make_request
from tests.docs.formats import with_tables
from tests.docs.man_pages import commands_of
from tests.docs.pages import CHECKOUT, PAGES, blocks
from tests.docs.spec_reference import reference_markdown

DOCS = CHECKOUT / "docs"
each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


COMMANDS = {path.partition(" ")[2]: each for path, each in commands_of().items()}
TARGETS = re.findall(r"^([\w-]+):", (CHECKOUT / "Makefile").read_text(), re.MULTILINE)


def anchors(page):
    """Of its headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", text.lower()).replace(" ", "-") for text in headings}


@each_page
def test_links_lead_somewhere(page):
    broken = []
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        if target.startswith("http"):
            continue
        name, _, anchor = target.partition("#")
        path = page if not name else page.parent / name
        if not path.exists() or (anchor and anchor not in anchors(path)):
            broken.append(target)
    assert broken == []


@pytest.mark.parametrize("name", ["README.md", "llms.txt"])
def test_every_page_is_in_the_lists_of_pages(name):
    text = (DOCS / name).read_text(encoding="utf-8")
    named = re.findall(r"\]\(([\w.-]+\.md)\)", text)
    pages = {page.name for page in DOCS.glob("*.md")} - {"README.md"}
    assert set(named) == pages
    if name == "llms.txt":  # as llmstxt.org has it: a title, a summary, and lists of links
        assert re.match(r"# \w+\n\n(> .+\n)+\n", text)
        assert len(named) == len(pages)


@each_page
def test_commands_and_options_exist_and_command_lines_can_be_parsed(page):
    text = page.read_text(encoding="utf-8")
    shown = [line for block in blocks(page) for line in block.commands]
    code = "\n".join([*shown, *re.findall(r"^    .*$|`[^`\n]+`", text, re.MULTILINE)])
    for name, rest in re.findall(r"(?<!#)pipectl ((?:lab )?[a-z]+)\b([^`\n&#]*)", code):
        assert name in COMMANDS
        known = {option for parameter in COMMANDS[name].params for option in parameter.opts}
        own = rest.partition(" -- ")[0]  # what follows are arguments of a script
        assert set(re.findall(r"(?<=\s)--[a-z-]+", own)) <= known, f"pipectl {name}{rest}"
    assert {*re.findall(r"^`?make ([\w-]+)", code, re.MULTILINE)} <= {*TARGETS}
    for line in shown:
        if line.startswith("pipectl ") and not re.search(r"[|<>$&]", line):
            words = shlex.split(line, comments=True)[1:]
            length = 2 if words[0] == "lab" else 1
            command = COMMANDS[" ".join(words[:length])]
            command.make_parser(command.context_class(command)).parse_args(words[length:])


@each_page
def test_tests_that_are_named_exist(page):
    named = r"`(tests/[\w/.-]+)(?:::(\w+))?`"
    for file, name in re.findall(named, page.read_text("utf-8")):
        assert (CHECKOUT / file).exists(), file
        assert not name or f"def {name}(" in (CHECKOUT / file).read_text("utf-8"), f"{file}::{name}"


def test_examples_of_files_are_accepted():
    fenced = r"^```\w+ (profile|cluster)\n(.*?)^```"
    page = (DOCS / "formats.md").read_text(encoding="utf-8")
    examples = dict(re.findall(fenced, page, re.MULTILINE | re.DOTALL))
    profile = Profile.from_json(json.loads(examples["profile"]))
    assert (len(profile.operators), profile.assumptions) == (2, ())
    assert Cluster.from_json(json.loads(examples["cluster"])).ranks == 4


def test_the_schema_and_the_reference_are_made_from_the_models_and_explain_every_key(snapshot):
    page = DOCS / "spec-reference.md"
    text = reference_markdown(page.read_text("utf-8"))
    snapshot(page, text)
    schema = json_schema()
    written = json.dumps(schema, indent=1, ensure_ascii=False) + "\n"
    snapshot(CHECKOUT / "configs" / "job.schema.json", written)
    for section in (schema, *schema["$defs"].values()):
        for name in properties(section):
            rows = re.findall(rf"^\| `{name}` \| .+ \| .* \| (.*) \|$", text, re.MULTILINE)
            assert rows, f"{name} is not in the reference"
            assert all(rows), f"{name} has no meaning"


@pytest.mark.parametrize("name", ["formats.md", "json.md"])
def test_tables_of_keys_are_made_from_the_types(snapshot, name):
    text = (DOCS / name).read_text(encoding="utf-8")
    assert text.count("<!-- keys of ") > 1
    snapshot(DOCS / name, with_tables(text))


def test_every_command_that_prints_json_has_a_row():
    """Its keys are those of a type in ``with_tables``, which mypy compares with what it prints."""
    rows = re.findall(r"^\| `pipectl ((?:lab )?[a-z]+)", (DOCS / "json.md").read_text(), re.M)
    options = {
        name: [o for p in command.params for o in p.opts] for name, command in COMMANDS.items()
    }
    assert set(rows) == {name for name, known in options.items() if "--json" in known}


def test_the_tables_of_exit_codes_are_those_of_the_program(tmp_path):
    """Of errors, of an interrupt, of ranks that stopped, and of signals to the script."""
    text = (DOCS / "exit-codes.md").read_text(encoding="utf-8")
    classes = [
        found
        for _, found in inspect.getmembers(errors, inspect.isclass)
        if issubclass(found, errors.PipectlError)
    ]
    rows = re.findall(r"^\| (\d+) \| `(\w+)` \|", text, re.MULTILINE)
    assert sorted(rows) == sorted((str(found.exit_code), found.__name__) for found in classes)
    script = get_scheduler("local").render(make_request(tmp_path))
    signals = re.findall(r"trap 'forward \w+ (\d+)'", script)
    for codes in (INTERRUPTED, CHECKPOINTED, ", ".join(sorted(signals))):
        assert f"\n| {codes} | " in text
