"""Transcripts: what is typed at a shell, and all that is printed; `make golden` writes the latter.

A story of transcripts/*.txt begins with ``===`` and its title; ``given`` names fixtures. In lines
after ``$``, `pipectl` runs in this process, and the rest in bash, where ``fake NAME SCRIPT`` puts
a program on PATH, ``$run`` is the latest run and ``$start`` its newest start, which begins with
``begins`` and ends with ``ends CODE``, ``soon`` hides times of today, and ``json KEY...``
shows values of a document, such as ``history.-1.what``. Errors are shown
after ``!``, an exit code unless it is 0, and NOW for the time in the name of a run; in commands,
that is the time shown last.
"""

import json
import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest

FILES = sorted(Path(__file__).with_name("transcripts").glob("*.txt"))
STORIES = [
    pytest.param(file, story, id=f"{file.stem}: {story.splitlines()[0].removeprefix('=== ')}")
    for file in FILES
    for story in re.split("^(?==== )", file.read_text("utf-8"), flags=re.MULTILINE)[1:]
]
COMMANDS = re.compile(r"^\$ .*\n(?:> .*\n)*", re.MULTILINE)
PRELUDE = """\
PATH=$PATH:/usr/bin:/bin LC_ALL=C
run=$(ls -d runs/[12]* 2>/dev/null | tail -1)
start=$(ls -d $run/starts/* 2>/dev/null | sort -V | tail -1)
begins() { : >$start/begun; }
ends() { begins && echo "$1" >$start/exit_code; }
soon() { # times of today or tomorrow, in columns of any width
    tr -s ' ' | sed -E 's/ [*]?([A-Z][a-z]{2} )?[0-9]{2}:[0-9]{2} / SOON /; s/at [0-9:]+$/at NOON/'
}
fake() { printf '#!/bin/bash\\n%s\\n' "$2" >"bin/$1"; chmod +x "bin/$1"; }
"""


def values(text: str, keys: str) -> str:
    """A line for each key, whose parts are joined by dots; numbers have four digits."""
    lines = []
    for key in keys.split():
        found: Any = json.loads(text, parse_float=lambda number: float(f"{float(number):.4g}"))
        for part in key.split("."):
            found = found[int(part) if isinstance(found, list) else part]
        lines.append(f"{key}: {json.dumps(found)}\n")
    return "".join(lines)


def bash(script: str, text: str = "") -> tuple[str, int]:
    done = subprocess.run(
        ["/bin/bash", "-c", PRELUDE + script],
        input=text, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    return done.stdout, done.returncode


@pytest.fixture
def shell(cli, place, monkeypatch):
    """``shell("pipectl status | head -1")``: what is printed, and the exit code of pipectl."""

    def run(command):
        if command.startswith("cd "):
            monkeypatch.chdir(command.removeprefix("cd "))
            return ""
        command, *keys = command.replace("$PWD", str(place)).split(" | json ")
        words, *filters = re.split(r" \| ", command, maxsplit=1)
        words, *redirected = re.split(r" 2>(?=&1$|/dev/null$)", words)
        settings, called, arguments = words.partition("pipectl ")
        if not called or not re.fullmatch(r"(\w+=\S* )*", settings):
            (out, code), err = bash(command), ""
        else:
            with monkeypatch.context() as patch:
                for setting in shlex.split(settings):
                    patch.setenv(*setting.split("=", 1))
                result = cli(*shlex.split(arguments))
            out, err, code = result.out, result.err, result.code
            if redirected:
                out, err = (out + err if redirected == ["&1"] else out), ""
            out = bash(filters[0], out)[0] if filters else out
        out = values(out, keys[0]) if keys else out
        errors = "".join(f"! {line}\n" for line in err.splitlines())
        out += "" if out.endswith("\n") or not out else "\n"
        return out + errors + (f"exit code {code}\n" if code else "")

    return run


@pytest.mark.parametrize(("file", "story"), STORIES)
def test_what_commands_print(request, shell, settled, time_in_names, snapshot, file, story):
    head, *_ = COMMANDS.split(story)
    for fixture in head.partition("\ngiven ")[2].split():
        request.getfixturevalue(fixture)
    text, now = head, "NOW-"
    for command in COMMANDS.findall(story):
        script = command.removeprefix("$ ").replace("\n> ", "\n").rstrip("\n")
        shown = shell(script.replace("NOW-", now))
        now = [now, *time_in_names.findall(shown)][-1]
        text += command + settled(shown)
    text = text.rstrip("\n") + "\n" * (1 + (not file.read_text("utf-8").endswith(story)))
    snapshot(file, file.read_text("utf-8").replace(story, text))
