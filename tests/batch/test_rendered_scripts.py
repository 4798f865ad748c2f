"""Scripts as they are rendered: what they hold, what may be set in them, and what is refused.

Five golden ones show everything; ``changes.txt`` has what further fields change. ``make golden``
accepts changes.
"""

import json
import shutil
import subprocess
from difflib import unified_diff
from pathlib import Path
from unittest.mock import Mock

import pytest
import yaml

from pipectl.batch import get_scheduler, process
from pipectl.batch.launchers import MpiChoice
from pipectl.directives import SYNTAXES, fault_of_option
from pipectl.errors import InvalidInputError, PipectlError, SpecError
from pipectl.files import escape_path
from pipectl.jobs.job import make_job
from pipectl.spec import load
from pipectl.spec.models import Checkpoint
from tests.batch.job_requests import change, fields, make_request

HERE = Path(__file__).parent
GOLDEN = HERE.parents[1] / "slurm" / "golden"
CASES = yaml.safe_load((HERE / "golden.yaml").read_text())


@pytest.mark.parametrize("name", CASES)
def test_a_script_is_the_golden_one_and_valid_bash(snapshot, name):
    request = make_request(Path("/none"), **fields(CASES[name]["fields"]))
    snapshot(GOLDEN / name, get_scheduler(CASES[name]["scheduler"]).render(request))
    assert {path.name for path in GOLDEN.glob("*.sh")} == set(CASES)
    subprocess.run(["bash", "-n", str(GOLDEN / name)], check=True)
    if shutil.which("shellcheck") is not None:
        subprocess.run(["shellcheck", "--severity=warning", str(GOLDEN / name)], check=True)


def test_what_each_field_changes_in_a_script_or_why_it_is_refused(snapshot):
    """Lines without and with the fields of each line in the file; errors with what to do."""
    plain = make_request(Path("/runs/x"), nodes=2, mpi="openmpi", walltime=600)
    plain = change(plain, checkpoint=Checkpoint(lead_time=400))
    lines = []
    for line in (HERE / "changes.txt").read_text("utf-8").splitlines():
        if line.startswith(" "):
            continue
        lines.append(line)
        scheduler, _, document = line.partition(" ")
        own = fields(yaml.safe_load(document))
        if "options" in own:
            own[scheduler] = {"options": own.pop("options")}
        render = get_scheduler(scheduler).render
        try:
            before, after = render(plain).splitlines(), render(change(plain, **own)).splitlines()
        except PipectlError as error:
            lines.append(f"  error: {error.message} ({error.hint})")
            continue
        found = unified_diff(before, after, n=0, lineterm="")
        lines += [f"  {text}" for text in [*found][2:] if text[:2] != "@@"]
    snapshot(HERE / "changes.txt", "".join(f"{text}\n" for text in lines))


OPTIONS = [
    line.split(maxsplit=1)
    for line in (HERE / "options.txt").read_text().splitlines()
    if not line.startswith("# ")
]


def test_options_of_a_job_are_taken_or_refused_with_what_to_do():
    for scheduler, case in OPTIONS:
        line, _, hint = (part.strip() for part in case.partition("->"))
        name, _, text = line.partition(": ")
        value = {"true": True, "false": False}.get(text, text)
        if " & " in text:
            value = tuple(text.split(" & "))
        fault = fault_of_option(SYNTAXES[scheduler], name, value)
        assert hint in fault if hint else fault == "", case


TEXT = {
    "slurm": ("partition", "account", "options.qos", "options.mail-type", "options.x"),
    "pbs": ("queue", "account", "options.P", "options.M", "options.m"),
}
"""Keys whose values are text."""
MARK = {"slurm": "#SBATCH ", "pbs": "#PBS "}
CONTROLS = ["a\x1b[31mb", "a\x07", "a\nb", "a\x85b", "a\u2028b", "a\u202eb", "\x00"]
JOB = {
    "version": 1,
    "name": "tiny",
    "model": {"factory": "torch.nn:Linear"},
    "loss": {"factory": "torch.nn:MSELoss"},
    "data": {"factory": "torch.utils.data:TensorDataset"},
    "training": {"steps": 4, "batch_size": 8},
    "site_defaults": False,
}


def sections(scheduler, value):
    """The section of a batch system with a value for every such key."""
    section = {"options": {}}
    for key in TEXT[scheduler]:
        group, _, last = key.rpartition(".")
        (section[group] if group else section)[last] = value
    return {scheduler: section}


def directives(script, scheduler):
    """The words of every line of options; they end with the first command."""
    lines = script.splitlines()[1:]
    end = next(index for index, line in enumerate(lines) if not line.startswith("#"))
    assert not any(line.startswith(MARK[scheduler]) for line in lines[end:])
    assert all(line.startswith(MARK[scheduler]) for line in lines[:end])
    return [words(line.removeprefix(MARK[scheduler]), scheduler) for line in lines[:end]]


def words(line, scheduler):
    """As src/sbatch/opt.c splits them, where a backslash escapes within quotes, too, and ``#``
    begins a comment; or make_argv in src/cmds/qsub.c, where both are letters."""
    found, word, quote, begun, letters = [], "", "", False, iter(line)
    for letter in letters:
        if letter == "\\" and scheduler == "slurm":
            word, begun = word + next(letters), True
        elif quote and letter == quote:
            quote = ""
        elif not quote and letter in "'\"":
            quote, begun = letter, True
        elif not quote and letter == "#" and scheduler == "slurm":
            break
        elif not quote and letter.isspace():
            if begun:
                found.append(word)
            word, begun = "", False
        else:
            word, begun = word + letter, True
    assert not quote, f"unmatched quote in {line!r}"
    return [*found, word] if begun else found


def test_hostile_values_arrive_in_the_directives_of_both(tmp_path, nasty):
    """And the scripts have no more and no other lines than with a plain value."""
    assert len(set(nasty)) >= 300
    lengths = set()
    for value in filter(str.strip, nasty):
        environment = {"variables": {"HOSTILE": escape_path(value)}, "modules": [value]}
        own = {**sections("slurm", value), **sections("pbs", value), "environment": environment}
        document = yaml.safe_dump({**JOB, **own, "launch": {"args": [value]}}, allow_unicode=True)
        (tmp_path / "job.yaml").write_text(document)
        spec = load(tmp_path / "job.yaml", check_files=False)
        job = make_job(spec, "local", mpi=MpiChoice("auto"))
        request = job.request_for(tmp_path / "run", mpiexec="/usr/bin/mpiexec")
        scripts = {name: get_scheduler(name).render(request) for name in TEXT}
        slurm, pbs = (directives(scripts[name], name) for name in TEXT)
        for option in ("--partition=", "--account=", "--qos=", "--mail-type=", "-x"):
            assert slurm.count([f"{option}{value}"]) == 1, (option, value)
        for letter in "qAPmM":
            assert [f"-{letter}", value] in pbs, (letter, value)
        lengths.add(tuple(script.count("\n") for script in scripts.values()))
    assert len(lengths) == 1


@pytest.mark.parametrize("scheduler", ["local", "slurm", "pbs"])
@pytest.mark.parametrize("key", ["setup", "teardown"])
def test_shell_code_of_the_user_is_whole(monkeypatch, scheduler, key):
    """It would take lines of the script into a text or a condition of its own."""
    monkeypatch.setenv("LC_ALL", "there_is.none")
    render = get_scheduler(scheduler).render
    wrong = [("echo", "echo it's"), ("cat <<END",), ("if true; then", "echo"), ("echo )",)]
    for lines in (*wrong, ("echo a \\",)):
        with pytest.raises(InvalidInputError, match=rf"^environment.{key}: not valid bash: "):
            render(make_request(Path("/runs/x"), **{key: lines}))
    lines = ("if true; then", "shopt -s extglob", "rm -f !(a)", "fi # it's", "cat <<END\n'\nEND")
    assert "\n".join(lines) in render(make_request(Path("/runs/x"), setup=lines))


def test_shell_code_of_the_user_is_read_as_by_a_bash_without_settings_and_once(
    tmp_path, monkeypatch
):
    (tmp_path / "env.sh").write_text("echo module: not found >&2\n")
    monkeypatch.setenv("BASH_ENV", str(tmp_path / "env.sh"))
    monkeypatch.setenv("SHELLOPTS", "verbose")
    run = Mock(wraps=process.run)
    monkeypatch.setattr(process, "run", run)
    for point in range(3):
        request = make_request(Path(f"/runs/{point}"), setup=("echo of no other test",))
        assert "of no other test" in get_scheduler("local").render(request)
    assert run.call_count == 2


@pytest.mark.parametrize("value", CONTROLS)
def test_control_characters_are_refused_with_their_line(tmp_path, value):
    path, head = tmp_path / "job.yaml", yaml.safe_dump(JOB, sort_keys=False)
    for name, keys in TEXT.items():
        path.write_text(f"{head}{json.dumps(sections(name, value))[1:-1]}\n")
        with pytest.raises(SpecError) as caught:
            load(path, check_files=False)
        problems = str(caught.value)
        assert problems.count(f"job.yaml:{len(head.splitlines()) + 1}:") == len(keys)
        assert all(f"{name}.{key}: " in problems for key in keys), problems
