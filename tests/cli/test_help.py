"""Help texts, completion in the shell, and what commands import."""

import subprocess
import sys

import pytest

from pipectl.cli.app import COMMANDS, LAB

HEAVY = {"torch", "mpi4py", "numpy", "llvmlite", "pipectl.spec", "pipectl.planner"}


@pytest.mark.parametrize("group", [(), ("lab",)])
def test_help_lists_every_command_with_a_whole_sentence(cli, monkeypatch, group):
    monkeypatch.setenv("COLUMNS", "80")
    result = cli(*group, "--help")
    assert result.code == 0
    lines = result.out.partition("Commands:\n")[2].splitlines()
    assert len(lines) > len(group) + 2
    assert [line for line in lines if not line.endswith(".") or line.endswith("...")] == []
    assert cli(*group) == result


OF_SCRIPT = " [-- ARGUMENTS]"
USAGES = {
    "init": " [DIRECTORY] [ARGUMENTS...]",
    **dict.fromkeys(("check", "plan", "doctor", "lab plan"), f" [JOB.yaml]{OF_SCRIPT}"),
    **dict.fromkeys(("profile", "submit", "lab rehearse", "lab verify"), f" JOB.yaml{OF_SCRIPT}"),
    **dict.fromkeys(("status", "logs"), " [RUN...]"),
    "report": " [RUN] [OTHER]",
    "export": " [RUN]",
    "cancel": " RUN...",
    "resume": f" RUN{OF_SCRIPT}",
    "lab simulate": "",
}


def test_help_of_every_command_shows_arguments_as_they_are_written(cli, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    assert USAGES.keys() == {*COMMANDS, *(f"lab {name}" for name in LAB)}
    for name, arguments in USAGES.items():
        lines = cli(*name.split(), "--help").out.splitlines()
        assert lines[0] == f"Usage: pipectl {name} [OPTIONS]{arguments}"
        assert max(map(len, lines)) <= 80


def test_help_of_a_command_explains_options(cli):
    for line in cli("init", "--help").out.splitlines():
        if line.startswith("  -"):
            words = line.split("  ", 2)[2].replace("[x>=1]", "").replace("[x>=0]", "")
            assert words.strip(), line


def test_the_shell_offers_runs(cli, finished, failed, monkeypatch, capfd):
    words = {"_PIPECTL_COMPLETE": "complete_bash", "COMP_CWORD": "2"}
    for name, value in {**words, "COMP_WORDS": "pipectl status 202501"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit):
        cli()
    assert capfd.readouterr().out.split() == [failed.name, finished.name]


def test_commands_load_nothing_that_is_slow(recorded, failed):
    """Each runs in a fork of one process, so that none uses what another has loaded."""
    (recorded.path / "job.sh").write_text("exit\n")
    names = (recorded.name, failed.name)
    commands = [
        *([name, run] for name in ("status", "logs", "cancel") for run in names),
        *(["status", run, more] for run in names for more in ("--ranks", "--json")),
        *(["logs", recorded.name, more] for more in ("--follow", "--script")),
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
