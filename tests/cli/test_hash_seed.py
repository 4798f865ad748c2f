"""All processes of a run hash alike: commands, ranks, and those of a resumed run."""

import json
import os
import subprocess
import sys

import pytest

from pipectl.cli import restart
from pipectl.cli.app import main
from pipectl.hash_seed import DRAWN, VARIABLE, hash_seed_of
from pipectl.runs import RunDirectory, read_metrics
from pipectl.spec import load, profile_key

PYTHON = ("/bin/python", "-B")
SETS = """
import torch
from torch import nn

WORDS = [f"word {number}" for number in range(64)]


class Words(torch.utils.data.Dataset):
    "A word is its number in a set; the targets are the inputs."

    def __init__(self):
        self.numbers = torch.tensor([list(set(WORDS)).index(word) for word in WORDS])

    def __len__(self):
        return len(WORDS)

    def __getitem__(self, index):
        return self.numbers[index], self.numbers[index]


class Model(nn.Module):
    "It gives what it gets; its submodules have the order of a set."

    def __init__(self):
        super().__init__()
        self.read = nn.Embedding(64, 64)
        names = {"first", "second", "third", "fourth"}
        shapes = {"first": nn.Identity(), "second": nn.ReLU(), "third": nn.Flatten(),
                  "fourth": nn.Hardtanh(0, 1)}
        self.inner = nn.Sequential(*[shapes[name] for name in names])
        self.write = nn.Linear(64, 64, bias=False)
        with torch.no_grad():
            self.read.weight.copy_(torch.eye(64))
            self.write.weight.copy_(20 * torch.eye(64))

    def forward(self, x):
        return self.write(self.inner(self.read(x)))
"""


@pytest.fixture
def shell(monkeypatch):
    """``shell("5")``: the environment sets the hash seed, or does not with None."""

    def set_seed(seed):
        monkeypatch.delenv(DRAWN, raising=False)
        if seed is None:
            monkeypatch.delenv(VARIABLE, raising=False)
        else:
            monkeypatch.setenv(VARIABLE, seed)

    set_seed(None)
    return set_seed


@pytest.mark.parametrize(
    ("own", "outside", "seed"),
    [
        ({}, None, 0),
        ({}, "5", 5),
        ({}, "", 0),
        ({VARIABLE: "7"}, "5", 7),
        ({VARIABLE: "0"}, "5", 0),
    ],
)
def test_the_job_decides_then_the_environment(shell, own, outside, seed):
    shell(outside)
    assert hash_seed_of(own) == seed


@pytest.mark.parametrize("own", [{}, {VARIABLE: "random"}])
def test_a_random_seed_is_drawn_once(shell, own):
    shell("random")
    drawn = hash_seed_of(own)
    assert drawn == hash_seed_of(own) > 0


@pytest.fixture
def starts(monkeypatch, shell):
    """``starts(words, started=)``: what is executed for these arguments of the process, or None."""

    def run(words, started=None, *, ignores=False, program="pipectl", job=None, file=None):
        found = []
        monkeypatch.setattr(sys, "argv", [program, *words])
        monkeypatch.setattr(sys, "orig_argv", [*PYTHON, *(started or ("-m", "pipectl", *words))])
        monkeypatch.setattr(restart, "_own_words", [])
        monkeypatch.setattr(os, "execve", lambda *how: found.append(how))
        if ignores:
            monkeypatch.setattr(sys, "flags", type("F", (), {"ignore_environment": 1}))
        restart.restart_for_command(words)
        if job is not None:
            assert not found
            restart.restart_for_job(job, file)
        assert len(found) < 2
        return found[0] if found else None

    return run


def test_a_command_that_may_run_the_users_code_starts_again_with_the_same_words(starts, shell):
    words = ["--debug", "lab", "verify", "job.yaml", "--set", "name=a b"]
    shell("random")
    for started in (["-m", "pipectl", *words], ["/env/bin/pipectl", *words], ["-c", "x()", *words]):
        file, command, environment = starts(words, started)
        assert (file, command) == (sys.executable, [sys.executable, "-B", *started])
        shell(environment[VARIABLE])
        assert starts(words, started) is None, "it would never end"
        shell("random")
    shell("007")
    assert starts(["submit", "x"])[2][VARIABLE] == "7"


def test_a_python_that_cannot_start_again_is_an_error_with_what_to_do(monkeypatch, capsys, shell):
    def refuse(*_):
        raise PermissionError(13, "Permission denied")

    words = ["profile", "job.yaml"]
    monkeypatch.setattr(sys, "argv", ["pipectl", *words])
    monkeypatch.setattr(sys, "orig_argv", [*PYTHON, "-m", "pipectl", *words])
    monkeypatch.setattr(restart, "_own_words", [])
    monkeypatch.setattr(os, "execve", refuse)
    assert main() == 2
    assert capsys.readouterr().err == (
        f"error: {sys.executable} cannot start again with {VARIABLE}=0: Permission denied\n"
        f"  set it before: export {VARIABLE}=0\n"
    )


def test_no_other_process_starts_again(starts):
    submit = ["submit", "job.yaml"]
    assert starts(["status"]) is None
    assert starts(["plan", "submit"]) is None
    assert starts(submit, ["server.py", "folder"]) is None, (
        "it would become what it was forked from"
    )
    assert starts(submit, ["-", *submit], program="-") is None, "its program was read"
    assert starts(submit) is not None
    assert starts(submit, ignores=True) is None


def test_a_job_sets_another_seed_if_its_file_can_be_read_again(starts, shell, job, tmp_path):
    def spec(seed):
        return load(job, [f"environment.variables.{VARIABLE}={seed}"])

    shell("0")
    words = ["profile", "job.yaml"]
    assert starts(words, job=load(job), file=job) is None
    assert starts(words, job=spec(0), file=job) is None
    assert starts(words, job=spec(7), file=job)[2][VARIABLE] == "7"
    environment = starts(words, job=spec("random"), file=job)[2]
    assert int(environment[VARIABLE]) > 0
    assert environment[DRAWN] == environment[VARIABLE]
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    assert starts(words, job=spec(7), file=pipe) is None


def test_arguments_of_a_call_start_nothing_again(monkeypatch, cli):
    monkeypatch.setattr(sys.modules["pipectl.cli.app"], "restart_for_command", None)
    assert cli("profile", "absent.yaml").code


def test_a_run_keeps_its_seed(cli, shell, profile, slurm, only_run):
    """Also where it is resumed, unless that sets another."""

    def seeds():
        script = (only_run() / "job.sh").read_text()
        assert script.count(VARIABLE) == 1
        record = json.loads((only_run() / "record.json").read_text())["hash_seed"]
        assert f"export {VARIABLE}={record}\n" in script
        assert cli("status", "last", "--json").json["hash_seed"] == record
        return record

    def resume(*settings):
        start = RunDirectory(only_run()).start
        start.begun.touch()
        start.exit_code.write_text("1\n")
        assert cli("resume", "last", *settings).code == 0

    assert cli("submit", "job.yaml", "--scheduler", "slurm").code == 0
    assert seeds() == 0
    shell("5")
    resume()
    assert seeds() == 0
    resume("--set", f"environment.variables={{{VARIABLE}: random}}")
    drawn = seeds()
    assert drawn > 0
    shell(None)
    resume()
    assert seeds() == drawn
    assert not (only_run() / "variables.sh").exists()


def test_another_seed_is_another_model(shell, job, cli):
    keys = [profile_key(load(job))]
    shell("5")
    keys.append(profile_key(load(job)))
    keys.append(profile_key(load(job, [f"environment.variables.{VARIABLE}=5"])))
    keys.append(profile_key(load(job, [f"environment.variables.{VARIABLE}=0"])))
    assert [keys.index(key) for key in keys] == [0, 1, 1, 0]
    wrong = cli("check", "job.yaml", "--set", f"environment.variables.{VARIABLE}=-1")
    assert "must be a number from 0 to 4294967295, or random" in wrong.err


@pytest.mark.product
@pytest.mark.mpi
@pytest.mark.timeout(600)
def test_what_is_made_of_sets_is_the_same_in_the_profile_and_on_all_ranks(
    job, monkeypatch, shell, only_run
):
    """In processes that start as a user's do, with a hash of their own."""
    monkeypatch.setenv("PATH", os.pathsep.join((os.path.dirname(sys.executable), os.defpath)))  # noqa: PTH120
    (job.parent / "model.py").write_text(SETS)
    settings = (
        "model.factory=./model.py:Model", "data.factory=./model.py:Words",
        "loss.factory=torch.nn:CrossEntropyLoss", "output.directory=runs",
    )  # fmt: skip
    words = [word for setting in settings for word in ("--set", setting)]
    command = [sys.executable, "-m", "pipectl", "submit", "job.yaml", "--scheduler", "local"]
    done = subprocess.run(
        [*command, "--wait", *words],
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
        preexec_fn=lambda: os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:1]),
    )
    assert done.returncode == 0, done.stderr
    losses = [line.loss for line in read_metrics(RunDirectory(only_run()))]
    assert len(losses) == 4
    assert max(losses) < 1e-6
