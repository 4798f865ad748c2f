"""The jobs of the equality table: their specs, and their models, each captured once."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from cells import OVERLAPPING, Cell
from torch import Tensor

from pipectl.capture import CapturedJob
from pipectl.spec import JobSpec, load


@dataclass(frozen=True)
class Model:
    """A row of the table; names without a module are of models.py."""

    factory: str
    loss: str
    data: str
    metrics: str = "{}"
    weight: str = "samples"
    precision: str = "float32"
    groups: str = "[]"
    loss_scale: str = "{}"
    on_nonfinite: str = "stop"
    buckets: str = ""


def tokens(factory: str, **more: str) -> Model:
    return Model(factory, "token_loss", **{"data": "Tokens", **more})


def images(factory: str, **more: str) -> Model:
    metrics = f"{{accuracy: '{HERE}:accuracy'}}"
    loss = "torch.nn:CrossEntropyLoss"
    return Model(factory, loss, **{"data": "Images", "metrics": metrics, **more})


OVERFLOWING = "{initial: 2097152, growth_interval: 2}"
"""The first steps overflow, and later ones again."""
HERE = Path(__file__).resolve().with_name("models.py")
MODELS = {
    "gpt": tokens("gpt"),
    "tied": tokens("tied"),
    "cnn": images("cnn"),
    "dense": images("dense"),
    "frozen": tokens(
        "frozen",
        groups="[{match: '*.bias', weight_decay: 0.0}, {match: '*norm*', lr: 0.01}]",
    ),
    "gpt_bf16": tokens("gpt", precision="bf16"),
    "cnn_bf16": images("cnn", precision="bf16", data="SpoiltImages", on_nonfinite="skip"),
    "gpt_float16": tokens("gpt", precision="float16", loss_scale=OVERFLOWING),
    "cnn_float16": images("cnn", precision="float16", loss_scale=OVERFLOWING),
    "own_precision": tokens("own_precision"),
    "gpt_buckets": tokens(
        "gpt",
        data="Sentences",
        weight="valid_tokens",
        buckets="buckets: [5, 12], pad: {inputs: 0, targets: -100},",
    ),
}
BATCHES = {"divisible": (8, 4), "smaller_last": (7, 4), "few": (6, 1), "one_left_over": (5, 2)}
"""Name to (samples a batch, micro-batches)."""
UNFLUSHED_STEPS, UNFLUSHED_STRETCH = 16, 11
"""Enough for a body on four ranks, and an evaluation on the way, which empties the pipeline."""
STEPS = 3
MORE_STEPS = {"gpt_float16": 8, "cnn_float16": 8, "cnn_bf16": 8, "cnn": 8}
"""Models of which some steps are left out, and one that is compared with them."""


@dataclass(frozen=True)
class Captured:
    """A captured job, and the weights that it began with."""

    job: CapturedJob
    first: dict[str, Tensor]

    def of(self, spec: JobSpec) -> CapturedJob:
        """The same model with its first weights, in another training."""
        self.job.spec = spec
        size, drop_last = spec.training.batch_size, spec.data.drop_last
        self.job.loader = self.job.loader.with_batch_size(size, drop_last=drop_last)
        for name, tensor in self.job.states.items():
            tensor.data = self.first[name].clone()
        return self.job


def captured(model: str, *, plain: bool) -> Captured:
    """A model for training and evaluation; the first weights are those of the spec's seed."""
    return _captured(model, plain and MODELS[model].factory != "cnn")  # which drops nothing


@cache
def _captured(model: str, plain: bool) -> Captured:
    with tempfile.TemporaryDirectory() as folder:
        text = spec_text(Cell(model, "gpipe", "divisible"), plain=plain)
        (Path(folder) / "job.yaml").write_text(text)
        job = CapturedJob(load(Path(folder) / "job.yaml"))
    for length in job.loader.lengths:
        job.training_graph(2, length)
        if not plain:
            job.evaluation_graph(4, length)
    return Captured(job, {name: tensor.detach().clone() for name, tensor in job.states.items()})


def spec_text(cell: Cell, *, plain: bool) -> str:
    model = MODELS[cell.model]
    batch_size, micro_batches = BATCHES[cell.batch]
    dropout = "{dropout: 0.0}" if plain else "{}"
    optimizer = "AdamW', kwargs: {lr: 0.003}"
    if cell.replicas or (plain and cell.model == "tied"):
        # Where sums are rounded, Adam moves a weight by the full rate whatever a tiny gradient is.
        optimizer = "SGD', kwargs: {lr: 0.1}"
    steps, clip = MORE_STEPS.get(cell.model, STEPS), "0.5"
    drop_last, every = "false", "null"
    if cell.schedule in OVERLAPPING:
        steps, clip, every = UNFLUSHED_STEPS, "null", UNFLUSHED_STRETCH
        drop_last = "true" if micro_batches > 1 else "false"
    held_out = f"data: {{factory: '{HERE}:{model.data}', kwargs: {{count: 11}}}}, batch_size: 4"
    evaluation = f"{{{held_out}, every: {every}, metrics: {model.metrics}}}"
    return f"""
version: 1
name: {cell}
site_defaults: false
model: {{factory: '{HERE}:{model.factory}', kwargs: {dropout}}}
loss: {{factory: '{placed(model.loss)}', weight: '{placed(model.weight)}'}}
data: {{factory: '{HERE}:{model.data}', {model.buckets} drop_last: {drop_last}}}
optimizer: {{factory: 'torch.optim:{optimizer}, groups: {model.groups}}}
lr_scheduler: {{factory: 'torch.optim.lr_scheduler:CosineAnnealingLR', kwargs: {{T_max: 12}}}}
evaluation: {"null" if plain else evaluation}
training:
  {{steps: {steps}, batch_size: {batch_size}, seed: 3, clip_grad_norm: {clip},
   precision: {model.precision}, loss_scale: {model.loss_scale},
   on_nonfinite: {model.on_nonfinite}, compile: {str(cell.compiled).lower()}}}
pipeline: {{micro_batches: {micro_batches}}}
"""


def placed(name: str) -> str:
    return name if ":" in name or name == "samples" else f"{HERE}:{name}"
