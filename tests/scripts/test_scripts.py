"""Training scripts as they are written for plain PyTorch, unchanged, as the source of a job."""

import json
from pathlib import Path

import pytest

from pipectl.capture import CapturedJob
from pipectl.errors import CaptureError
from pipectl.runtime import plain
from pipectl.script import Command, Parts
from pipectl.script.findings import findings_of
from pipectl.script.plain import own_losses
from pipectl.spec import load

HERE = Path(__file__).parent
PACKAGES = {
    "digits_cnn": "torch",
    "gpt_on_characters": "torch",
    "windows_of_text": "torch",
    "amp_accumulation": "torch",
    "groups_warmup_cosine": "torch",
    "unet_mixed_losses": "torch",
    "seq2seq_teacher_forcing": "torch",
    "hf_trainer_lm": "transformers",
    "hf_trainer_lora": "peft",
    "accelerate_loop": "accelerate",
    "lightning_module": "lightning",
    "sft_trl": "trl",
}
"""The scripts, and what each needs."""
STEPS = 5


@pytest.fixture
def job_of(tmp_path, monkeypatch):
    """``job_of("digits_cnn.py")``: the spec of a job of a script, as ``init`` writes it, and the
    number of batches of a step."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")

    def make(file, *arguments, **training):
        parts = Parts.of(Command(str(HERE / file), arguments, str(tmp_path)))
        found = findings_of(parts)
        job = {
            "script": {
                "file": str(HERE / file),
                "arguments": list(arguments),
                "directory": str(tmp_path),
            },
            "training": {**found.training, "steps": STEPS, **training},
            "data": found.data,
        }
        path = tmp_path / "job.yaml"
        path.write_text(json.dumps(job))
        return load(path), parts.accumulation

    return make


@pytest.mark.parametrize("name", PACKAGES)
def test_a_script_trains_as_by_itself(job_of, tmp_path, monkeypatch, name):
    """The model's graph is captured, too; that pipelines train what it says is held elsewhere."""
    pytest.importorskip(PACKAGES[name])
    monkeypatch.chdir(tmp_path)
    spec, accumulated = job_of(f"{name}.py")
    own = own_losses(Command.of(spec), STEPS)
    plain.train(spec, spec.training.batch_size // accumulated, tmp_path)
    losses = json.loads((tmp_path / plain.LOSSES).read_text())["losses"]
    assert losses == pytest.approx(own, rel=1e-6)
    assert CapturedJob(spec).training_graph(2).operators


def test_batches_without_a_loader_are_refused_with_the_way_to_wrap_them():
    with pytest.raises(CaptureError, match=r"batch_of_windows.py:\d+: .*no DataLoader") as caught:
        Parts.of(Command(str(HERE / "batch_of_windows.py")))
    assert "class Windows(torch.utils.data.Dataset)" in str(caught.value)


def test_what_cannot_be_followed_is_refused_with_its_line(refused, tmp_path):
    path = tmp_path / "refused.py"
    path.write_text(refused.script)
    with pytest.raises(CaptureError) as caught:
        Parts.of(Command(str(path)))
    line = next(n for n, text in enumerate(refused.script.splitlines(), 1) if "# here" in text)
    assert f"refused.py:{line}" in str(caught.value)
    assert refused.words in str(caught.value)
