"""Sections of the spec that say what is trained, and on what."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator, ConfigDict, Field, model_validator

from pipectl.spec import references
from pipectl.spec.section import Section, without_nulls
from pipectl.spec.tree import Scalar, plain
from pipectl.spec.values import (
    Count,
    Flag,
    Kwargs,
    Line,
    LossReference,
    Materialize,
    Natural,
    OnNonfinite,
    Positive,
    Precision,
    Reference,
    WeightReference,
)


class Factory(Section):
    """User code to call: a class, constructed with `kwargs`, or a function.

    A plain text is short for `{factory: text}`.
    """

    factory: Reference = Field(
        description="`./file.py:name`, relative to the spec file, or `package.module:name`, which "
        "is looked for beside the spec file first."
    )
    kwargs: Kwargs = Field(
        default_factory=dict, description="Keyword arguments; the values keep their YAML types."
    )

    @model_validator(mode="before")
    @classmethod
    def _expand(cls, value: Any) -> Any:
        return {"factory": value} if isinstance(value, Scalar | str) else value

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: Any, handler: Any) -> dict[str, Any]:
        mapping = handler.resolve_ref_schema(handler(schema))
        return {"anyOf": [mapping, {"type": "string", "pattern": ":"}]}

    def resolve(self, base: Path) -> references.Reference:
        """What `factory` names, with relative files looked up from ``base``."""
        return references.parse(self.factory, base)


class Group(Section):
    """Parameters with options of their own.

    Every further key is an option of the optimizer, such as `lr` or `weight_decay`, and replaces
    that of its `kwargs`.
    """

    model_config = ConfigDict(extra="allow")

    match: Line = Field(
        description="A pattern of full names as in `model.named_parameters()`, such as `*.bias`; "
        "`*` also matches dots. A parameter belongs to the first group that matches it."
    )

    @model_validator(mode="before")
    @classmethod
    def _read_options(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        return {key: item if key == "match" else plain(item) for key, item in value.items()}

    @property
    def options(self) -> dict[str, Any]:
        """The optimizer's options for these parameters."""
        return dict(self.model_extra or {})


class Model(Factory):
    """The model: a function that returns it, or its class."""

    materialize: Materialize = Field(
        default="eager",
        description="Where parameters come to be: `eager` builds the whole model in every process; "
        "`per_rank` builds it without memory, and each rank makes those of its own stages. They "
        "are then drawn one by one from `training.seed`: the same for every plan, but not those "
        "that `eager` draws.",
    )
    opaque: tuple[Line, ...] = Field(
        default=(),
        description="Submodules to keep as one operator each, which runs their own code: patterns "
        "of names as in `model.named_modules()`, such as `blocks.*.router`. Submodules that cannot "
        "be captured otherwise are found without being named.",
    )
    weights: Line | None = Field(
        default=None,
        description="Weights to start from, relative to the spec file: a safetensors file, its "
        "`.index.json`, or a directory of them. By default the factory's.",
    )


class Optimizer(Factory):
    """The optimizer, called with the parameters."""

    factory: Reference = Field(
        default="torch.optim:AdamW",
        description="The optimizer class, or a function that makes one. Every rank that updates "
        "parameters calls it with those of its own stages (with `shard_optimizer`, with its part "
        "of them), in the order of `model.named_parameters()`; with `groups`, with a list of "
        "parameter groups.",
    )
    groups: tuple[Group, ...] = Field(
        default=(),
        description="Parameters with options of their own. They follow the group of all others, "
        "for a schedule that takes a list of one value a group.",
    )


class Data(Factory):
    """The training data: a function that returns the dataset, or the class of one.

    A sample is `(inputs, targets)` or a mapping; inputs go to the model (a mapping as keywords).
    """

    workers: Natural = Field(default=0, description="Processes that load samples, per rank.")
    drop_last: Flag = Field(
        default=False,
        description="Leave out the last batch of an epoch if it is not full. Those of iterable "
        "data always are full: they run on into the next epoch.",
    )
    shuffle: Flag = Field(
        default=True,
        description="Draw a new order of samples every epoch. Iterable data come as they are: what "
        "order they have, they give themselves.",
    )


class Loss(Factory):
    """The loss, called with `(outputs, targets)`."""

    factory: LossReference = Field(
        description="The loss function or class, or `model`: the model returns its loss."
    )
    weight: WeightReference = Field(
        default="samples",
        description="Weight of a micro-batch in the loss of a step, and of an evaluation: its "
        "number of `samples`, or a function of its `targets`, such as the number of valid tokens.",
    )


Factories = Annotated[dict[Line, Factory], BeforeValidator(without_nulls)]
"""User code by name."""


class Evaluation(Section):
    """Evaluation on held-out data."""

    data: Factory = Field(description="The held-out dataset.")
    every: Count | None = Field(
        default=None, description="Steps between evaluations; by default only after the last step."
    )
    batch_size: Count | None = Field(
        default=None,
        description="Samples evaluated at once; by default those of a training micro-batch.",
    )
    metrics: Factories = Field(
        default_factory=dict,
        description="Names of metrics to their functions, called with `(outputs, targets)`.",
    )


class LossScale(Section):
    """How gradients in `float16` are kept from becoming zero.

    The loss is multiplied by a scale before the backward, and the gradients are divided by it after
    it. A step in which any gradient of any rank overflows is skipped, the learning-rate schedule
    too, and the scale halved; it doubles after `growth_interval` steps without one. This is the
    rule of `torch.amp.GradScaler`.
    """

    initial: Positive = Field(default=65536.0, description="The scale of the first step.")
    growth_interval: Count = Field(
        default=2000, description="Steps without an overflow before the scale doubles."
    )


class Training(Section):
    """How long and on what batches to train."""

    steps: Count = Field(description="Optimizer steps.")
    batch_size: Count = Field(description="Samples a step, over all ranks.")
    seed: Natural = Field(
        default=0, description="Of the parameters, the order of samples and all random operators."
    )
    precision: Precision = Field(
        default="float32",
        description="Of the arithmetic. `bf16` runs model and loss under `torch.autocast`, which "
        "decides operator by operator; parameters, gradients and optimizer stay float32. "
        "`float16` does so too, and scales the loss.",
    )
    compile: Flag = Field(
        default=False,
        description="Whether the ranks run their stages through `torch.compile`. It needs a C++ "
        "compiler on the nodes, takes a minute or more before the first step, and fuses operators, "
        "so results agree within rounding only. Profiles and plans are of what is not compiled.",
    )
    loss_scale: LossScale = Field(default_factory=LossScale)
    clip_grad_norm: Positive | None = Field(
        default=None, description="Largest norm of all gradients; by default they are not clipped."
    )
    on_nonfinite: OnNonfinite = Field(
        default="stop",
        description="What happens where the loss of a step or a gradient is infinite or NaN. "
        "`stop` ends the job with an error that names it. `skip` leaves the step out on all ranks: "
        "weights, optimizer, learning rate and buffers stay as they were. `ignore` looks at "
        "nothing. In `float16`, gradients are the loss scale's matter, and this is about the loss.",
    )
    check_replicas: Natural = Field(
        default=100,
        description="Steps after which the copies of a stage compare their weights, which have the "
        "same bits unless something is wrong: then the job ends with an error that names stage, "
        "ranks and parameter. They do so before every checkpoint too; 0 leaves it at these.",
    )
