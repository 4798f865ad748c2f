"""Captures two small models: what torch makes at its first export, all that is forked then has."""

from __future__ import annotations

import tempfile
from pathlib import Path

MODELS = Path(__file__).parents[1] / "equality" / "models.py"
JOB = """
version: 1
name: warm
site_defaults: false
model: {{factory: '{models}:{model}'}}
loss: {{factory: '{loss}'}}
data: {{factory: '{models}:{data}'}}
evaluation: {{data: {{factory: '{models}:{data}'}}}}
training: {{steps: 1, batch_size: 4}}
"""


def capture() -> None:
    from pipectl.capture import CapturedJob
    from pipectl.spec import load

    images = ("cnn", "torch.nn:CrossEntropyLoss", "Images")
    for model, loss, data in (("gpt", f"{MODELS}:token_loss", "Tokens"), images):
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "job.yaml"
            path.write_text(JOB.format(models=MODELS, model=model, loss=loss, data=data))
            job = CapturedJob(load(path))
        job.training_graph(2)
        job.evaluation_graph(2)
