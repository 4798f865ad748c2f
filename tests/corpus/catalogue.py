"""The corpus: every model with its loss and data, as a job spec names them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import yaml

from pipectl.spec import JobSpec, load

HERE = Path(__file__).resolve().parent
MICRO_BATCH, MICRO_BATCHES, STEPS = 2, 2, 2


@dataclass(frozen=True)
class Entry:
    """A model of the corpus.

    Args:
        model, loss, data: factories, ``file:name`` beside this file, ``model`` or importable.
        kwargs: of the model.
        package: that must be installed, besides torch.
        quick: whether the default test run has it.
        trait: what it is in the corpus for.
        opaque: submodules that the spec names as single operators.
    """

    name: str
    model: str
    loss: str
    data: str
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    data_kwargs: Mapping[str, Any] = field(default_factory=dict)
    package: str | None = None
    quick: bool = False
    trait: str = ""
    opaque: tuple[str, ...] = ()

    @property
    def missing(self) -> bool:
        """Whether its package is not installed."""
        return self.package is not None and find_spec(self.package) is None


def entries() -> tuple[Entry, ...]:
    """All models."""
    return ENTRIES


def spec_of(
    entry: Entry,
    path: Path,
    micro_batches: int = MICRO_BATCHES,
    *,
    micro_batch: int = MICRO_BATCH,
    optimizer: str = "SGD",
) -> JobSpec:
    """The job that trains a model of the corpus for two steps; its spec is written to ``path``."""
    momentum = {"momentum": 0.9} if optimizer == "SGD" else {}
    document = {
        "version": 1,
        "name": entry.name,
        "site_defaults": False,
        "model": {**_factory(entry.model, entry.kwargs), "opaque": list(entry.opaque)},
        "loss": _factory(entry.loss, {}),
        "data": _factory(entry.data, entry.data_kwargs),
        "optimizer": {"factory": f"torch.optim:{optimizer}", "kwargs": {"lr": 0.001, **momentum}},
        "evaluation": {
            "data": _factory(entry.data, entry.data_kwargs),
            "batch_size": MICRO_BATCH,
            "metrics": {"magnitude": f"{HERE}/own.py:magnitude"},
        },
        "training": {"steps": STEPS, "batch_size": micro_batch * micro_batches, "seed": 3},
        "pipeline": {"micro_batches": micro_batches},
    }
    path.write_text(yaml.safe_dump(document))
    return load(path)


def _factory(name: str, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    beside = name.partition(":")[0].endswith(".py")
    return {"factory": f"{HERE}/{name}" if beside else name, "kwargs": dict(kwargs)}


CROSS_ENTROPY, SEVERAL = "torch.nn:CrossEntropyLoss", "own.py:several_losses"
EQUALITY = "../equality/models.py"


def _own(
    name: str, model: str, data: str, trait: str, loss: str = CROSS_ENTROPY, **more: Any
) -> Entry:
    return Entry(name, f"own.py:{model}", loss, f"own.py:{data}", quick=True, trait=trait, **more)


def _vision(name: str, pixels: int, trait: str, *, quick: bool = False, **kwargs: Any) -> Entry:
    return Entry(
        name.replace("_", "-"),
        "vision.py:build",
        "vision.py:with_auxiliary",
        "own.py:Images",
        {"name": name, **kwargs},
        {"pixels": pixels, "classes": 10},
        "torchvision",
        quick,
        trait,
    )


def _language(
    name: str, model: str, trait: str, *, data: str = "Tokens", quick: bool = True
) -> Entry:
    config = model.partition("For")[0].removesuffix("LMHeadModel")
    kwargs = {"config": config, "model": model}
    given = ("language.py:build", "model", f"language.py:{data}", kwargs)
    return Entry(name, *given, package="transformers", quick=quick, trait=trait)


ENTRIES = (
    _own("lstm", "Lstm", "Sequences", "two layers with dropout, final state used"),
    _own("encoder-decoder", "Encoder", "Keywords", "keyword inputs, padding masks"),
    _own("recommender", "Recommender", "Sequences", "bag of integers, top-2 experts", loss=SEVERAL),
    _own(
        "structured", "Structured", "Sequences", "returns nested structures of all kinds", SEVERAL
    ),
    _own("unet", "Unet", "Images", "skips joined in reverse order"),
    _own("autoencoder", "Autoencoder", "Images", "tied weights, autograd function"),
    _own("views", "Views", "Images", "writes through views, a buffer that is read"),
    _own("conditional", "Conditional", "Images", "torch.cond with dropout in a branch"),
    _own("parametrized", "Parametrized", "Images", "spectral and weight norms"),
    _own("checkpointed", "Checkpointed", "Images", "recomputes its blocks"),
    _own("codebook", "Codebook", "Images", "buffers that follow the data"),
    _own("teacher", "Teacher", "Images", "frozen parts, inference mode"),
    _own("unsteady", "unsteady", "Images", "a list of layers that follow values"),
    _own("variational", "Variational", "Images", "distributions, assertions", "own.py:evidence"),
    _own("energy", "Energy", "Images", "gradients in the forward, torch.func.vmap"),
    _own(
        "routed",
        "Routed",
        "Sequences",
        "experts on the rows that chose them, as they are",
        SEVERAL,
        opaque=("blocks.*.router",),
    ),
    Entry(
        "own-precision",
        f"{EQUALITY}:own_precision",
        f"{EQUALITY}:token_loss",
        f"{EQUALITY}:Tokens",
        quick=True,
        trait="bfloat16 with float32 islands, parts without gradients",
    ),
    _vision("vgg16", 32, "138 M parameters, in-place ReLU, dropout"),
    _vision("alexnet", 64, "dropout in the classifier"),
    _vision("resnet18", 64, "residual blocks, BatchNorm", quick=True),
    _vision("resnet50", 64, "bottleneck blocks"),
    _vision("resnet101", 64, "101 layers"),
    _vision("resnext50_32x4d", 64, "grouped convolutions"),
    _vision("resnext101_32x8d", 64, "grouped convolutions, 101 layers"),
    _vision("inception_v3", 299, "auxiliary loss", aux_logits=True, init_weights=False),
    _vision("densenet121", 64, "every layer reads all before it"),
    _vision("squeezenet1_0", 64, "joined branches, dropout", quick=True),
    _vision("vit_b_16", 32, "attention, class token", image_size=32),
    _vision("swin_t", 32, "shifted windows, stochastic depth"),
    _vision("convnext_tiny", 32, "channels last inside, stochastic depth"),
    _language("gpt2", "GPT2LMHeadModel", "tied embeddings, returns a cache"),
    _language("llama", "LlamaForCausalLM", "rotary positions, grouped queries"),
    _language("bert", "BertForMaskedLM", "tied embeddings and bias", quick=False),
    _language("t5", "T5ForConditionalGeneration", "encoder and decoder, tied three times"),
    _language("vit", "ViTForImageClassification", "pixels by keyword", data="Pixels", quick=False),
    _language("mixtral", "MixtralForCausalLM", "mixture of experts, router loss"),
)
