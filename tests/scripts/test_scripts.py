"""Training scripts as they are written for plain PyTorch, unchanged, as the source of a job."""

import json
from pathlib import Path

import pytest

from pipectl.errors import CaptureError
from pipectl.runtime import plain
from pipectl.script import Command, Parts
from pipectl.script.findings import findings_of
from pipectl.script.plain import own_losses
from pipectl.spec import load

HERE = Path(__file__).parent
SCRIPTS = ["digits_cnn", "gpt_on_characters"]
STEPS = 5


@pytest.fixture
def job_of(tmp_path, monkeypatch):
    """``job_of("digits_cnn.py")``: the spec of a job of a script, as ``init`` writes it."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")

    def make(file, *arguments, **training):
        found = findings_of(Parts.of(Command(str(HERE / file), arguments)))
        job = {
            "script": {"file": str(HERE / file), "arguments": list(arguments)},
            "training": {**found.training, "steps": STEPS, **training},
            "data": found.data,
        }
        path = tmp_path / "job.yaml"
        path.write_text(json.dumps(job))
        return load(path)

    return make


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_trains_as_by_itself(job_of, tmp_path, name):
    spec = job_of(f"{name}.py")
    own = own_losses(Command.of(spec), STEPS)
    plain.train(spec, spec.training.batch_size, tmp_path)
    losses = json.loads((tmp_path / plain.LOSSES).read_text())["losses"]
    assert losses == pytest.approx(own, rel=1e-6)


def test_what_cannot_be_followed_is_refused_with_its_line(refused, tmp_path):
    path = tmp_path / "refused.py"
    path.write_text(refused.script)
    with pytest.raises(CaptureError) as caught:
        Parts.of(Command(str(path)))
    line = next(n for n, text in enumerate(refused.script.splitlines(), 1) if "# here" in text)
    assert f"refused.py:{line}" in str(caught.value)
    assert refused.words in str(caught.value)
