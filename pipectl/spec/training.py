"""Sections of the spec that say what is trained, on what, and how the model is spread."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ConfigDict, Field, model_validator

from pipectl.spec import references
from pipectl.spec.document import plain
from pipectl.spec.types import (
    AutoBackward,
    AutoCount,
    AutoCounts,
    AutoOffload,
    AutoRecompute,
    AutoReplicas,
    Bytes,
    Count,
    Flag,
    Kwargs,
    LossReference,
    Natural,
    Positive,
    Reference,
    Schedule,
    Section,
    Text,
    WeightReference,
    without_nulls,
)


class Factory(Section):
    """User code to call: a class, constructed with `kwargs`, or a function.

    A plain text is short for `{factory: text}`.
    """

    factory: Reference
    """`./file.py:name`, relative to the spec file, or `package.module:name`, which is looked for
    beside the spec file first."""
    kwargs: Kwargs = Field(default_factory=dict)
    """Keyword arguments; the values keep their YAML types."""

    @model_validator(mode="before")
    @classmethod
    def _expand(cls, value: Any) -> Any:
        return {"factory": value} if isinstance(value, str) else value

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: Any, handler: Any) -> dict[str, Any]:
        return {"anyOf": [handler.resolve_ref_schema(handler(schema)), _SHORT]}

    def resolve(self, base: Path) -> references.Reference:
        """What `factory` names, with relative files looked up from ``base``."""
        return references.parse(self.factory, base)


_SHORT = {"title": "./file.py:name or package.module:name", "type": "string", "pattern": ":"}
Factories = Annotated[dict[Text, Factory], BeforeValidator(without_nulls)]
"""User code by name."""


class Group(Section):
    """Parameters with options of their own.

    Every further key is an option of the optimizer, such as `lr` or `weight_decay`, and replaces
    that of its `kwargs`.
    """

    model_config = ConfigDict(extra="allow")

    match: Text
    """A pattern of full names as in `model.named_parameters()`, such as `*.bias`; `*` also matches
    dots. A parameter belongs to the first group that matches it."""

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

    materialize: Literal["eager", "per_rank"] = "eager"
    """When parameters are made: `eager` builds the whole model in every process; `per_rank` builds
    it without memory, and each rank makes those of its own stages. They are then drawn one by one
    from `training.seed`: the same for every plan, but not those that `eager` draws."""
    opaque: tuple[Text, ...] = ()
    """Submodules to keep as one operator each, which runs their own code: patterns of names as in
    `model.named_modules()`, such as `blocks.*.router`. Submodules that cannot be captured otherwise
    are found without being named."""
    weights: Text | None = None
    """Weights to start from, relative to the spec file: a safetensors file, its `.index.json`, or a
    directory of them. By default the factory's."""


class Optimizer(Factory):
    """The optimizer, called with the parameters."""

    factory: Reference = "torch.optim:AdamW"
    """The optimizer class, or a function that makes one. Every rank that updates parameters calls
    it with those of its own stages (with `shard_optimizer`, with its part of them), in the order of
    `model.named_parameters()`; with `groups`, with a list of parameter groups."""
    groups: tuple[Group, ...] = ()
    """Parameters with options of their own. They follow the group of all others, for a schedule
    that takes a list of one value per group."""


class Data(Factory):
    """The training data: a function that returns the dataset, or the class of one.

    A sample is `(inputs, targets)` or a mapping; inputs go to the model (a mapping as keywords).
    """

    workers: Natural = 0
    """Processes that load samples, per rank."""
    drop_last: Flag = False
    """Leave out the last batch of an epoch if it is not full. Those of iterable data always are
    full: they run on into the next epoch."""
    shuffle: Flag = True
    """Draw a new order of samples every epoch. Iterable data come as they are: they order
    themselves."""


class Loss(Factory):
    """The loss, called with `(outputs, targets)`."""

    factory: LossReference
    """The loss function or class, or `model`: the model returns its loss."""
    weight: WeightReference = "samples"
    """Weight of a micro-batch in the loss of a step, and of an evaluation: its number of `samples`,
    or a function of its `targets`, such as the number of valid tokens."""


class Evaluation(Section):
    """Evaluation on held-out data."""

    data: Factory
    """The held-out dataset."""
    every: Count | None = None
    """Steps between evaluations; by default only after the last step."""
    batch_size: Count | None = None
    """Samples evaluated at once; by default those of a training micro-batch."""
    metrics: Factories = Field(default_factory=dict)
    """Names of metrics to their functions, called with `(outputs, targets)`."""


class LossScale(Section):
    """How gradients in `float16` are kept from becoming zero.

    The loss is multiplied by a scale before the backward, and the gradients are divided by it after
    it. A step in which any gradient of any rank overflows is skipped, the learning-rate schedule
    too, and the scale halved; it doubles after `growth_interval` steps without one. This is the
    rule of `torch.amp.GradScaler`.
    """

    initial: Positive = 65536.0
    """The scale of the first step."""
    growth_interval: Count = 2000
    """Steps without an overflow before the scale doubles."""


class Training(Section):
    """How long and on what batches to train."""

    steps: Count
    """Optimizer steps."""
    batch_size: Count
    """Samples per step, over all ranks."""
    seed: Natural = 0
    """Seed of the parameters, the order of samples and all random operators."""
    precision: Literal["float32", "bf16", "float16"] = "float32"
    """Precision of the arithmetic. `bf16` runs model and loss under `torch.autocast`, which decides
    operator by operator; parameters, gradients and optimizer stay float32. `float16` does so too,
    and scales the loss."""
    compile: Flag = False
    """Whether the ranks run their stages through `torch.compile`. It needs a C++ compiler on the
    nodes, takes a minute or more before the first step, and fuses operators, so results agree
    within rounding only. Profiles and plans are of what is not compiled."""
    loss_scale: LossScale = LossScale()
    clip_grad_norm: Positive | None = None
    """Largest norm of all gradients; by default they are not clipped."""
    on_nonfinite: Literal["stop", "skip", "ignore"] = "stop"
    """What happens if the loss of a step or a gradient is infinite or NaN. `stop` ends the job with
    an error that names it. `skip` leaves the step out on all ranks: weights, optimizer, learning
    rate and buffers stay as they were. `ignore` looks at nothing. In `float16`, the loss scale
    handles gradients, and this is about the loss."""
    check_replicas: Natural = 100
    """Steps after which the copies of a stage compare their weights, which have the same bits
    unless something is wrong: then the job ends with an error that names stage, ranks and
    parameter. They do so before every checkpoint too; with 0 only then."""


class Pipeline(Section):
    """How the model is spread over the ranks. The planner chooses what is `auto`."""

    stages: AutoCount = None
    """Parts the model is cut into: at most one per rank, with the schedules `interleaved` and
    `looped-bfs` a multiple of the ranks, with `zb-v` and `dualpipev` two per rank."""
    micro_batches: AutoCount = None
    """Parts each batch is cut into."""
    schedule: Schedule = None
    """Order of work: `gpipe` runs all forwards before the backwards, `1f1b` alternates them and
    keeps fewer activations, `interleaved` does so with several stages per rank (two, unless
    `stages` says otherwise), for less waiting and more messages; `looped-bfs` is `gpipe` with
    several stages per rank. `zb-h1`, `zb-v` and `dualpipev` (the last two with two stages per rank)
    compute the gradients of weights in time that they would otherwise wait. `pipedream` and
    `pipedream-2bw` let steps overlap, with gradients of older weights: no waiting, but other
    results. Or your own: a `.csv` file of actions, relative to this file, or the name of one that a
    package offers."""
    warm_up: AutoCounts = None
    """Forwards each stage runs before its first backward, one number per stage; needs `stages`."""
    replicas: AutoReplicas = None
    """Copies of each stage, which take micro-batches in turn and add up their gradients: a number,
    or `any` to let the planner choose stage by stage; `auto` is 1. Sums over copies round otherwise
    than one rank does, and the running statistics of a BatchNorm become means over the copies."""
    shard_optimizer: Flag = False
    """Whether each copy of a stage keeps the optimizer state of a part of its parameters (ZeRO
    stage 1): less memory, the same results, messages after each step."""
    recompute: AutoRecompute = None
    """Which stages keep only what they receive, and compute their forward once more before their
    backward: `all` of them at once, or `blocks`, one part of a stage after the other, which keeps
    the inputs of all parts. `auto`: those that do not fit into memory otherwise; in blocks if they
    do not fit at once; and of `backward: apart`, those whose links carry what they receive faster
    than what they save."""
    offload: AutoOffload = None
    """Where what stages keep for their backward waits meanwhile: `host` is the memory beside
    accelerators, `disk` a file on each node. `auto`: on accelerators `host`, on CPUs `disk` if the
    cluster file gives its bandwidth; for stages for which it pays."""
    offload_directory: Text | None = None
    """Directory of each node for `disk`, in which variables of its environment may stand; by
    default its directory for temporary files (`TMPDIR`)."""
    backward: AutoBackward = "together"
    """Where the backward of a stage runs: `together` with its forward, or `apart`, each on a rank
    of its own, the second with the optimizer. What a backward needs is then sent. `auto`: apart if
    that is faster."""
    memory_limit: Bytes | None = None
    """Resident memory of a rank, the process itself included; by default its share of
    `resources.memory_per_node`, if that is given."""

    @property
    def memory_limit_bytes(self) -> int | None:
        """Bytes a rank may hold."""
        return self.memory_limit
