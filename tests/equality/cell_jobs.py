"""The jobs of the equality table: their specs, and their models, each captured once."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from torch import Tensor

from pipectl.capture import CapturedJob
from pipectl.spec import JobSpec, load
from tests.equality.cells import Cell, Kind

HERE = Path(__file__).resolve().with_name("models.py")


@dataclass(frozen=True)
class Model:
    """A row of the table: sections of a spec, and more of them."""

    factory: str
    loss: dict[str, str]
    data: dict[str, Any]
    metrics: dict[str, str] = field(default_factory=dict)
    groups: list[dict[str, Any]] = field(default_factory=list)
    training: dict[str, Any] = field(default_factory=dict)


def tokens(name: str, data: str = "Tokens", *, weight: str = "samples", **more: Any) -> Model:
    loss = {"factory": f"{HERE}:token_loss", "weight": weight}
    buckets = more.pop("buckets", {})
    return Model(f"{HERE}:{name}", loss, {"factory": f"{HERE}:{data}", **buckets}, **more)


def images(name: str, data: str = "Images", **training: Any) -> Model:
    loss, metrics = {"factory": "torch.nn:CrossEntropyLoss"}, {"accuracy": f"{HERE}:accuracy"}
    data_of = {"factory": f"{HERE}:{data}"}
    return Model(f"{HERE}:{name}", loss, data_of, metrics, training=training)


FLOAT16 = {"precision": "float16", "loss_scale": {"initial": 2097152, "growth_interval": 2}}
"""The first steps overflow, and later ones again."""
MODELS = {
    "gpt": tokens("gpt"),
    "tied": tokens("tied"),
    "cnn": images("cnn"),
    "dense": images("dense"),
    "frozen": tokens(
        "frozen",
        groups=[{"match": "*.bias", "weight_decay": 0.0}, {"match": "*norm*", "lr": 0.01}],
    ),
    "gpt_bf16": tokens("gpt", training={"precision": "bf16"}),
    "cnn_bf16": images("cnn", "SpoiltImages", precision="bf16", on_nonfinite="skip"),
    "tied_bf16_weights": tokens("tied", training={"precision": "bf16-weights"}),
    "cnn_bf16_weights": images("cnn", precision="bf16-weights"),
    "gpt_float16": tokens("gpt", training=FLOAT16),
    "cnn_float16": images("cnn", **FLOAT16),
    "gated": images("gated"),
    "own_precision": tokens("own_precision"),
    "gpt_buckets": tokens(
        "gpt",
        "Sentences",
        weight=f"{HERE}:valid_tokens",
        buckets={"buckets": [5, 12], "pad": {"inputs": 0, "targets": -100}},
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


@cache
def captured(model: str, *, plain: bool) -> Captured:
    """A model for training and evaluation; the first weights are those of the spec's seed."""
    with tempfile.TemporaryDirectory() as folder:
        cell = Cell(model, "gpipe", "divisible", plain=plain)
        (Path(folder) / "job.yaml").write_text(spec_text(cell))
        job = CapturedJob(load(Path(folder) / "job.yaml"))
    for length in job.loader.lengths:
        for samples in (2, 1):  # one is compared with more, which ranks forked from here need not
            job.training_graph(samples, length)
        for samples in () if plain else (4, 1):
            job.evaluation_graph(samples, length)
    return Captured(job, {name: tensor.detach().clone() for name, tensor in job.states.items()})


def spec_text(cell: Cell) -> str:
    model = MODELS[cell.model]
    batch_size, micro_batches = BATCHES[cell.batch]
    optimizer: dict[str, Any] = {"factory": "torch.optim:AdamW", "kwargs": {"lr": 0.003}}
    if cell.replicas or cell.compiled or (cell.plain and cell.model == "tied"):
        # Where sums are rounded, Adam moves a weight by the full rate whatever a tiny gradient is.
        optimizer = {"factory": "torch.optim:SGD", "kwargs": {"lr": 0.1}}
    steps, clip, every, drop_last = MORE_STEPS.get(cell.model, STEPS), 0.5, None, False
    if cell.kind is Kind.STALE:
        steps, clip, every, drop_last = UNFLUSHED_STEPS, None, UNFLUSHED_STRETCH, micro_batches > 1
    held_out = {"factory": model.data["factory"], "kwargs": {"count": 11}}
    evaluation = {"data": held_out, "batch_size": 4, "every": every, "metrics": model.metrics}
    cosine = "torch.optim.lr_scheduler:CosineAnnealingLR"
    document = {
        "version": 1,
        "name": str(cell),
        "site_defaults": False,
        "model": {"factory": model.factory, "kwargs": {"dropout": 0.0} if cell.plain else {}},
        "loss": model.loss,
        "data": {**model.data, "drop_last": drop_last},
        "optimizer": {**optimizer, "groups": model.groups},
        "lr_scheduler": {"factory": cosine, "kwargs": {"T_max": 12}},
        "evaluation": None if cell.plain else evaluation,
        "training": {
            "steps": steps,
            "batch_size": batch_size,
            "seed": 3,
            "clip_grad_norm": clip,
            "compile": cell.compiled,
            "correct_delay": cell.corrected,
            **model.training,
        },
        "pipeline": {"micro_batches": micro_batches},
    }
    if cell.corrected:  # refused with other schedules
        document["pipeline"]["schedule"] = "pipedream-2bw"
    return yaml.safe_dump(document)
