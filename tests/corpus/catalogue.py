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

    def __str__(self) -> str:
        return self.name

    @property
    def missing(self) -> bool:
        """Whether its package is not installed."""
        return self.package is not None and find_spec(self.package) is None


def entries() -> list[Entry]:
    """All models."""
    tables = ((_own, _OWN), (_vision, _VISION), (_language, _LANGUAGE))
    return [_OWN_PRECISION, *(make(*row) for make, table in tables for row in table)]


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


_CROSS_ENTROPY = "torch.nn:CrossEntropyLoss"
_SEVERAL = "own.py:several_losses"

_OWN = (
    # name, class, loss, data, trait
    ("lstm", "Lstm", _CROSS_ENTROPY, "Sequences", "two layers with dropout, final state used"),
    ("encoder-decoder", "Encoder", _CROSS_ENTROPY, "Keywords", "keyword inputs, padding masks"),
    ("recommender", "Recommender", _SEVERAL, "Sequences", "bag of integers, top-2 experts"),
    ("structured", "Structured", _SEVERAL, "Sequences", "returns nested structures of all kinds"),
    ("unet", "Unet", _CROSS_ENTROPY, "Images", "skips joined in reverse order"),
    ("autoencoder", "Autoencoder", _CROSS_ENTROPY, "Images", "tied weights, autograd function"),
    ("views", "Views", _CROSS_ENTROPY, "Images", "writes through views, a buffer that is read"),
    ("conditional", "Conditional", _CROSS_ENTROPY, "Images", "torch.cond with dropout in a branch"),
    ("parametrized", "Parametrized", _CROSS_ENTROPY, "Images", "spectral and weight norms"),
    ("checkpointed", "Checkpointed", _CROSS_ENTROPY, "Images", "recomputes its blocks"),
    ("codebook", "Codebook", _CROSS_ENTROPY, "Images", "buffers that follow the data"),
    ("teacher", "Teacher", _CROSS_ENTROPY, "Images", "frozen parts, inference mode"),
    ("unsteady", "unsteady", _CROSS_ENTROPY, "Images", "a list of layers that follow values"),
    ("variational", "Variational", "own.py:evidence", "Images", "distributions, assertions"),
    ("energy", "Energy", _CROSS_ENTROPY, "Images", "gradients in the forward, torch.func.vmap"),
    ("routed", "Routed", _SEVERAL, "Sequences", "experts on the rows that chose them, as they are"),
)
_EQUALITY = "../equality/models.py"
_OWN_PRECISION = Entry(
    "own-precision",
    f"{_EQUALITY}:own_precision",
    f"{_EQUALITY}:token_loss",
    f"{_EQUALITY}:Tokens",
    quick=True,
    trait="bfloat16 with float32 islands, parts without gradients",
)
_OPAQUE = {"routed": ("blocks.*.router",)}


def _own(name: str, model: str, loss: str, data: str, trait: str) -> Entry:
    model, data, opaque = f"own.py:{model}", f"own.py:{data}", _OPAQUE.get(name, ())
    return Entry(name, model, loss, data, quick=True, trait=trait, opaque=opaque)


_VISION: tuple[tuple[str, int, dict[str, Any], bool, str], ...] = (
    # name, pixels, further arguments, quick, trait
    ("vgg16", 32, {}, False, "138 M parameters, in-place ReLU, dropout"),
    ("alexnet", 64, {}, False, "dropout in the classifier"),
    ("resnet18", 64, {}, True, "residual blocks, BatchNorm"),
    ("resnet50", 64, {}, False, "bottleneck blocks"),
    ("resnet101", 64, {}, False, "101 layers"),
    ("resnext50_32x4d", 64, {}, False, "grouped convolutions"),
    ("resnext101_32x8d", 64, {}, False, "grouped convolutions, 101 layers"),
    ("inception_v3", 299, {"aux_logits": True, "init_weights": False}, False, "auxiliary loss"),
    ("densenet121", 64, {}, False, "every layer reads all before it"),
    ("squeezenet1_0", 64, {}, True, "joined branches, dropout"),
    ("vit_b_16", 32, {"image_size": 32}, False, "attention, class token"),
    ("swin_t", 32, {}, False, "shifted windows, stochastic depth"),
    ("convnext_tiny", 32, {}, False, "channels last inside, stochastic depth"),
)


def _vision(name: str, pixels: int, kwargs: dict[str, Any], quick: bool, trait: str) -> Entry:
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


_LANGUAGE = (
    # name, config, model, data, quick, trait
    ("gpt2", "GPT2", "GPT2LMHeadModel", "Tokens", True, "tied embeddings, returns a cache"),
    ("llama", "Llama", "LlamaForCausalLM", "Tokens", True, "rotary positions, grouped queries"),
    ("bert", "Bert", "BertForMaskedLM", "Tokens", False, "tied embeddings and bias"),
    (
        "t5",
        "T5",
        "T5ForConditionalGeneration",
        "Tokens",
        True,
        "encoder and decoder, tied three times",
    ),
    ("vit", "ViT", "ViTForImageClassification", "Pixels", False, "pixels by keyword"),
    ("mixtral", "Mixtral", "MixtralForCausalLM", "Tokens", True, "mixture of experts, router loss"),
)


def _language(name: str, config: str, model: str, data: str, quick: bool, trait: str) -> Entry:
    kwargs = {"config": config, "model": model}
    given = ("language.py:build", "model", f"language.py:{data}", kwargs)
    return Entry(name, *given, package="transformers", quick=quick, trait=trait)
