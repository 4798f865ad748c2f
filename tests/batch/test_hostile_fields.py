"""Fields of a job with values that would break out of a script: they arrive, or are refused."""

import json
import re

import pytest
import yaml

from pipectl.batch import get_scheduler
from pipectl.batch.launchers import MpiChoice
from pipectl.cli.console import say
from pipectl.errors import SpecError
from pipectl.jobs.job import make_job
from pipectl.spec import load

SLURM = ("qos", "mail-type", "x")
TEXT = {
    "slurm": ["partition", "account", *(f"options.{key}" for key in SLURM)],
    "pbs": ["queue", "account", *(f"options.{key}" for key in "PMm")],
}
PREFIX = {"slurm": "#SBATCH ", "pbs": "#PBS "}
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


def directives(script: str, scheduler: str) -> list[list[str]]:
    """The words of every line of options; they end with the first command."""
    lines = script.splitlines()[1:]
    end = next(index for index, line in enumerate(lines) if not line.startswith("#"))
    assert not any(line.startswith(PREFIX[scheduler]) for line in lines[end:])
    assert all(line.startswith(PREFIX[scheduler]) for line in lines[:end])
    return [words(line.removeprefix(PREFIX[scheduler]), scheduler) for line in lines[:end]]


def words(line: str, scheduler: str) -> list[str]:
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


def test_they_arrive_in_the_directives_of_both(tmp_path, nasty):
    """And the scripts have no more and no other lines than with a plain value."""
    assert len(set(nasty)) >= 300
    lengths = set()
    for value in filter(str.strip, nasty):
        document = {
            **JOB,
            "slurm": {"partition": value, "account": value, "options": dict.fromkeys(SLURM, value)},
            "pbs": {"queue": value, "account": value, "options": dict.fromkeys("PMm", value)},
            "environment": {"variables": {"HOSTILE": value}, "modules": [value]},
            "launch": {"args": [value]},
        }
        (tmp_path / "job.yaml").write_text(yaml.safe_dump(document, allow_unicode=True))
        spec = load(tmp_path / "job.yaml", check_files=False)
        job = make_job(spec, "local", mpi=MpiChoice("auto"))
        request = job.request_for(tmp_path / "run", mpiexec="/usr/bin/mpiexec")
        scripts = {name: get_scheduler(name).render(request) for name in ("slurm", "pbs")}
        slurm = directives(scripts["slurm"], "slurm")
        for option in ("--partition=", "--account=", "--qos=", "--mail-type=", "-x"):
            assert slurm.count([f"{option}{value}"]) == 1, (option, value)
        pbs = directives(scripts["pbs"], "pbs")
        for letter in "qAPmM":
            assert [f"-{letter}", value] in pbs, (letter, value)
        lengths.add(tuple(script.count("\n") for script in scripts.values()))
    assert len(lengths) == 1


def test_a_terminal_shows_them_as_they_are(nasty, capsys):
    for value in [*nasty, "[link=x]y[/link]", ":smiley:"]:
        say(value)
        assert capsys.readouterr().out == f"{value}\n"
    for value in CONTROLS:
        say(value)
        shown = capsys.readouterr().out
        assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u202a-\u202e]", shown)


@pytest.mark.parametrize("value", CONTROLS)
def test_control_characters_are_refused_with_their_line(tmp_path, value):
    path, head = tmp_path / "job.yaml", yaml.safe_dump(JOB, sort_keys=False)
    for name, keys in TEXT.items():
        for key in keys:
            group, _, last = key.rpartition(".")
            option = {last: value}
            document = {name: {group: option} if group else option}
            path.write_text(f"{head}{json.dumps(document)[1:-1]}\n")
            with pytest.raises(SpecError) as caught:
                load(path, check_files=False)
            assert f"job.yaml:{head.count(chr(10)) + 1}:" in str(caught.value)
            assert f"{name}.{key}" in str(caught.value)
