"""The job spec. Its models are the single definition of keys, defaults and meanings.

Field docstrings are the text of ``docs/spec-reference.md`` and of the JSON Schema. A key that is
null, or not given, has its default; in attributes of ``pipeline``, None stands for ``auto``.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, ConfigDict, Field, PrivateAttr, model_validator

from pipectl.spec import references
from pipectl.spec.document import to_python
from pipectl.spec.running import (
    Checkpoint,
    Environment,
    Launch,
    Output,
    Pbs,
    Resources,
    Slurm,
    Trace,
)
from pipectl.spec.types import (
    SCHEDULE_SUFFIX,
    VERSION,
    Auto,
    Bytes,
    Count,
    Flag,
    Former,
    JobName,
    Kwargs,
    LossReference,
    Natural,
    Positive,
    Reference,
    Replicas,
    Schedule,
    Section,
    Text,
    Version,
    WeightReference,
    to_python_values,
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
        return {key: item if key == "match" else to_python(item) for key, item in value.items()}

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

    former_keys: ClassVar = {
        "check_replicas": Former(
            "remove it: replicas are compared every 100 steps and before every checkpoint", (100,)
        )
    }


class Pipeline(Section):
    """How the model is spread over the ranks. The planner chooses what is `auto`."""

    stages: Annotated[Count | None, Auto()] = None
    """Parts the model is cut into: at most one per rank, with the schedules `interleaved` and
    `looped-bfs` a multiple of the ranks, with `zb-v` and `dualpipev` two per rank."""
    micro_batches: Annotated[Count | None, Auto()] = None
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
    warm_up: Annotated[tuple[Count, ...] | None, Auto()] = None
    """Forwards each stage runs before its first backward, one number per stage; needs `stages`."""
    replicas: Replicas = None
    """Copies of each stage, which take micro-batches in turn and add up their gradients: a number,
    or `any` to let the planner choose stage by stage; `auto` is 1. Sums over copies round otherwise
    than one rank does, and the running statistics of a BatchNorm become means over the copies."""
    shard_optimizer: Flag = False
    """Whether each copy of a stage keeps the optimizer state of a part of its parameters (ZeRO
    stage 1): less memory, the same results, messages after each step."""
    recompute: Annotated[Literal["none", "all", "blocks"] | None, Auto()] = None
    """Which stages keep only what they receive, and compute their forward once more before their
    backward: `all` of them at once, or `blocks`, one part of a stage after the other, which keeps
    the inputs of all parts. `auto`: those that do not fit into memory otherwise; in blocks if they
    do not fit at once; and of `backward: apart`, those whose links carry what they receive faster
    than what they save."""
    offload: Annotated[Literal["none", "host", "disk"] | None, Auto()] = None
    """Where what stages keep for their backward waits meanwhile: `host` is the memory beside
    accelerators, `disk` a file on each node, in its `TMPDIR`. `auto`: on accelerators `host`, on
    CPUs `disk` if the cluster file gives its bandwidth; for stages for which it pays."""
    backward: Annotated[Literal["together", "apart"] | None, Auto()] = "together"
    """Where the backward of a stage runs: `together` with its forward, or `apart`, each on a rank
    of its own, the second with the optimizer. What a backward needs is then sent. `auto`: apart if
    that is faster."""
    memory_limit: Bytes | None = None
    """Resident memory of a rank, the process itself included; by default its share of
    `resources.memory_per_node`, if that is given."""

    former_keys: ClassVar = {
        "offload_directory": Former("write environment.variables: {TMPDIR: ...}")
    }

    @property
    def memory_limit_bytes(self) -> int | None:
        """Bytes a rank may hold."""
        return self.memory_limit


class Sweep(Section):
    """Several runs of this job that differ in some values: a job array on Slurm and PBS.

    Keys are dotted as for `--set`. What decides which nodes a job gets is the same for all runs:
    `version`, `name`, `resources`, `slurm`, `pbs`, `launch.scheduler`, `launch.template`, `output`,
    `site_defaults`, `checkpoint.lead_time` and `checkpoint.max_requeues` cannot be swept. All
    commands but `check` and `submit` leave the sweep alone, and work on the job as the rest of the
    file says. See [sweeps](sweeps.md).
    """

    grid: Annotated[dict[str, tuple[Any, ...]], BeforeValidator(to_python_values)] = Field(
        default_factory=dict
    )
    """Keys with lists of values, such as `optimizer.kwargs.lr: [1e-3, 3e-4]`; every combination is
    a run."""
    points: tuple[Kwargs, ...] = ()
    """Further runs, each a mapping of keys to values."""
    at_once: Count | None = None
    """How many may run at the same time; by default all that the batch system starts, and on this
    machine one."""


class JobSpec(Section):
    """A training job: what is trained, on what, and how the job runs."""

    version: Version = VERSION
    """Version of this format."""
    name: JobName = ""
    """Name of the job and of its runs; by default that of the file, without its ending."""
    model: Model
    loss: Loss
    data: Data
    optimizer: Optimizer = Optimizer()
    lr_scheduler: Factory | None = None
    """The learning-rate schedule, called with the optimizer. It moves after every optimizer step:
    `T_max` is `training.steps`, say. One whose steps take a loss, such as `ReduceLROnPlateau`,
    moves after every evaluation instead, by its loss."""
    evaluation: Evaluation | None = None
    training: Training
    pipeline: Pipeline = Pipeline()
    resources: Resources = Resources()
    launch: Launch = Launch()
    environment: Environment = Environment()
    checkpoint: Checkpoint = Checkpoint()
    trace: Trace = Trace()
    callbacks: Factories = Field(default_factory=dict)
    """User code that is given the metrics on rank 0, by a name of yours: called with the run
    directory and this job as a dict, it returns what is called with every line of `metrics.jsonl`.
    `pipectl.runtime.tensorboard:writer` is one."""
    output: Output = Output()
    cluster: Text | None = None
    """Path of `cluster.json`, relative to the file that names it; by default the one that `pipectl
    profile --links` measured for this job, else the cluster is assumed from `resources`."""
    slurm: Slurm = Slurm()
    pbs: Pbs = Pbs()
    sweep: Sweep | None = None
    site_defaults: Flag = True
    """Whether the site files give defaults to this job."""

    _source: Path = PrivateAttr(default=Path("job.yaml"))

    @property
    def source(self) -> Path:
        """The file this spec was read from."""
        return self._source

    @property
    def base(self) -> Path:
        """Directory from which relative files of the spec are looked up."""
        return self._source.absolute().parent

    @property
    def cluster_file(self) -> Path | None:
        """Absolute path of the cluster file, if one is named."""
        return None if self.cluster is None else self.base / self.cluster

    @property
    def schedule_file(self) -> Path | None:
        """Absolute path of the user's own schedule, if a file is named."""
        name = self.pipeline.schedule
        return self.base / name if name is not None and name.endswith(SCHEDULE_SUFFIX) else None

    @property
    def template_file(self) -> Path | None:
        """Absolute path of the template of the job script, if one is named."""
        return None if self.launch.template is None else self.base / self.launch.template

    @property
    def weights_path(self) -> Path | None:
        """Absolute path of the weights to start from, if they are given."""
        return None if self.model.weights is None else self.base / self.model.weights

    def files(self) -> Iterator[tuple[tuple[str, ...], Path]]:
        """Absolute paths of all files besides user code, with the path of their key."""
        named = {
            ("cluster",): self.cluster_file,
            ("pipeline", "schedule"): self.schedule_file,
            ("launch", "template"): self.template_file,
            ("model", "weights"): self.weights_path,
        }
        yield from ((key, file) for key, file in named.items() if file is not None)

    def factories(self) -> Iterator[tuple[tuple[str, ...], str]]:
        """Every reference to user code, with the path of its key."""
        named = {"model": self.model, "loss": self.loss, "data": self.data}
        optional = {"optimizer": self.optimizer, "lr_scheduler": self.lr_scheduler}
        for key, section in (named | optional).items():
            if section is not None and section.factory != "model":
                yield (key, "factory"), section.factory
        if self.loss.weight != "samples":
            yield ("loss", "weight"), self.loss.weight
        if self.evaluation is not None:
            yield ("evaluation", "data", "factory"), self.evaluation.data.factory
            for name, metric in self.evaluation.metrics.items():
                yield ("evaluation", "metrics", name, "factory"), metric.factory
        for name, callback in self.callbacks.items():
            yield ("callbacks", name, "factory"), callback.factory

    @property
    def container(self) -> str | None:
        """The image: an absolute path, or an address; None for no container."""
        image = self.environment.container
        return image if image is None or "://" in image else str(self.base / image)

    @property
    def threads(self) -> int:
        """Threads that a rank computes with."""
        return self.resources.cpus_per_task - self.launch.spare_cores

    def __eq__(self, other: object) -> bool:
        """Equal in every key; the file it was read from does not count."""
        if not isinstance(other, JobSpec):
            return NotImplemented
        return self.model_dump() == other.model_dump()
