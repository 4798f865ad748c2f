"""Home directories and variables in the paths of a spec, of the environment, and of commands."""

from pathlib import Path

import pytest

from pipectl.errors import SpecError, UsageError
from pipectl.runs import runs_directory
from pipectl.spec import dump, load
from pipectl.spec.code_sections import setting_of

PATHS = """\
version: 1
model: {factory: "~/code/model.py:build", weights: $STORE/w.safetensors}
loss: ${STORE}/loss.py:loss
data:
  factory: ./data.py:data
  kwargs: {root: ["~/data", /$STORE/$$a, $STORE/x, ./y, "$STORE", "$word", "~", "$$X", "/1$2$"]}
evaluation: {data: ~/code/models/data:held_out, metrics: {m: ~/m.py:m}}
tracking: {tensorboard: {directory: $STORE/$$t}, wandb: {dir: "~/w", project: "$$p"}}
optimizer: ~/code/own.py:adam
pipeline: {schedule: $STORE/mine.csv}
training: {steps: 1, batch_size: 1}
environment:
  container: {image: $STORE/image.sif, mounts: [~/d, "$STORE/e:/e"]}
  setup: [cd ~]
  variables: {A: "$STORE/a:~/a", B_PATH: "~/a:${STORE}/~:~", C: a$$b$1~/c, D: "~", E: "~x", F: $~/f}
script: {file: ./t.py, arguments: ["--in", ~/in, "--out=$STORE/o", 1e-3, $$x, "$~/y", $$~]}
output: {directory: $STORE/$$x/runs}
cluster: ~/cluster.json
"""


@pytest.fixture(autouse=True)
def _places(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.setenv("STORE", "/scratch/a b")
    monkeypatch.setenv("EMPTY", "")
    monkeypatch.delenv("UNKNOWN", raising=False)


def test_every_path_is_expanded_when_the_spec_is_read_and_stays_as_it_is(tmp_path, monkeypatch):
    job = tmp_path / "$STORE" / "job.yaml"  # a directory may have such a name
    job.parent.mkdir()
    job.write_text(PATHS)
    site = tmp_path / "site.yaml"
    site.write_text("output: {directory: other}\n")
    spec = load(job, sites=[site], check_files=False)
    paths = (
        spec.model.factory, spec.model.weights, spec.loss.factory, spec.data.factory,
        spec.evaluation.data.factory, spec.evaluation.metrics["m"].factory,
        spec.optimizer.factory, spec.pipeline.schedule,
        spec.environment.container.image, *spec.environment.container.mounts,
        spec.output.directory, spec.cluster,
    )  # fmt: skip
    assert paths == (
        "/home/me/code/model.py:build", "/scratch/a b/w.safetensors", "/scratch/a b/loss.py:loss",
        f"{job.parent}/data.py:data", "/home/me/code/models/data:held_out", "/home/me/m.py:m",
        "/home/me/code/own.py:adam", "/scratch/a b/mine.csv",
        "/scratch/a b/image.sif", "/home/me/d", "/scratch/a b/e:/e", "/scratch/a b/$x/runs",
        "/home/me/cluster.json",
    )  # fmt: skip
    assert spec.data.kwargs["root"] == [
        "/home/me/data", "//scratch/a b/$a", "/scratch/a b/x", f"{job.parent}/y", "/scratch/a b",
        "$word", "~", "$X", "/1$2$",
    ]  # fmt: skip
    assert spec.tracking.tensorboard == {"directory": "/scratch/a b/$t"}
    assert spec.tracking.wandb == {"dir": "/home/me/w", "project": "$$p"}
    assert spec.environment.setup == ("cd ~",), "the shell's"
    assert spec.environment.variables == {
        "A": "/scratch/a b/a:~/a", "B_PATH": "/home/me/a:/scratch/a b/~:/home/me", "C": "a$b$1~/c",
        "D": "/home/me", "E": "~x", "F": "~/f",
    }  # fmt: skip
    arguments = ("--in", "/home/me/in", "--out=/scratch/a b/o", "0.001", "$x", "~/y", "$~")
    assert spec.script.arguments == arguments
    texts = ["~", "~/a:$b", "~me/a", "$~/a", "~x", "$$~"]
    given = load(job, [setting_of(texts)], sites=[site], check_files=False)
    assert given.script.arguments == (*texts,), "a shell has expanded what it would"
    again = tmp_path / "again.yaml"
    again.write_text(dump(spec))
    monkeypatch.setenv("HOME", "/elsewhere")
    monkeypatch.delenv("STORE")
    assert load(again, check_files=False).model_copy(update={"site_defaults": True}) == spec


def test_a_site_file_is_expanded_before_it_is_looked_up_beside_it(tmp_path):
    (tmp_path / "site.yaml").write_text("cluster: ~/c.json\n")
    (tmp_path / "job.yaml").write_text("{version: 1, model: a:b, loss: a:b, data: a:b, training: "
                                       "{steps: 1, batch_size: 1}}")  # fmt: skip
    spec = load(tmp_path / "job.yaml", sites=[tmp_path / "site.yaml"], check_files=False)
    assert spec.cluster == "/home/me/c.json"


WRONG = {
    "$UNKNOWN/x": "the variable UNKNOWN is not set",
    "/scratch/${EMPTY}/x": "the variable EMPTY is empty",
    "${A:-b}/x": r"a variable is written \$NAME or \$\{NAME\}, and \$ alone \$\$",
    "~nobody-here/x": "no home directory is known for ~nobody-here; write ./~ for a name",
}


@pytest.mark.parametrize("text", WRONG)
@pytest.mark.parametrize("key", ["output.directory", "cluster", "model.weights"])
def test_what_cannot_be_expanded_is_refused(tmp_path, text, key):
    """It would be a directory of that name."""
    (tmp_path / "job.yaml").write_text(PATHS)
    with pytest.raises(SpecError, match=f"--set {key}: .*{WRONG[text]}"):
        load(tmp_path / "job.yaml", [f"{key}={text}"], sites=[], check_files=False)


@pytest.mark.parametrize("text", WRONG)
def test_nor_in_arguments(tmp_path, text):
    (tmp_path / "job.yaml").write_text(PATHS)
    with pytest.raises(SpecError, match=f"data.kwargs: .*{WRONG[text]}"):
        load(tmp_path / "job.yaml", [f"data.kwargs.root={text}"], sites=[], check_files=False)


@pytest.mark.parametrize("text", [*WRONG, "secret:$UNKNOWN"])
@pytest.mark.parametrize("key", ["environment.variables.X_PATH", "script.arguments"])
def test_nor_in_variables_and_arguments_of_a_script(tmp_path, text, key):
    """What else is in them may be secret."""
    (tmp_path / "job.yaml").write_text(PATHS)
    value = f'["{text}"]' if key == "script.arguments" else text
    fault = WRONG.get(text, "the variable UNKNOWN is not set").partition(" ")[2]
    with pytest.raises(SpecError, match=fault.partition(";")[0]) as raised:
        load(tmp_path / "job.yaml", [f"{key}={value}"], sites=[], check_files=False)
    assert "secret" not in raised.value.message


def test_a_variable_that_is_to_contain_itself_is_refused(tmp_path, monkeypatch):
    """It would contain what this shell has, not what the modules of the job give it."""
    (tmp_path / "job.yaml").write_text(PATHS)
    monkeypatch.setenv("MY_PATH", "/mine")
    override = "environment.variables.MY_PATH=/opt:$MY_PATH"
    with pytest.raises(SpecError, match=r"environment\.setup.*: export MY_PATH=\.\.\.\$MY_PATH"):
        load(tmp_path / "job.yaml", [override], sites=[], check_files=False)


@pytest.mark.parametrize("text", WRONG)
def test_neither_is_the_directory_of_runs(monkeypatch, text):
    monkeypatch.setenv("PIPECTL_RUNS", text)
    with pytest.raises(UsageError, match=WRONG[text]):
        runs_directory()


def test_commands_expand_what_a_shell_leaves(cli_at, monkeypatch):
    assert cli_at("check", "~/absent.yaml").err.startswith("error: /home/me/absent.yaml: no such")
    assert "/home/me/runs: no runs" in cli_at("status", "--directory=~/runs").out
    assert "$STORE/runs: no runs" in cli_at("status", "--directory=$STORE/runs").out
    monkeypatch.setenv("PIPECTL_RUNS", "$STORE/runs")
    assert "/scratch/a b/runs: no runs" in cli_at("status").out
    assert runs_directory() == Path("/scratch/a b/runs")


@pytest.fixture
def cli_at(capsys):
    from pipectl.cli import main

    def run(*words):
        main(words)
        return capsys.readouterr()

    return run
