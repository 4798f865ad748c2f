"""The job spec. Its models, those of :mod:`pipectl.spec.launch` among them, are the single
definition of keys, defaults and meanings.

Field docstrings are the text of ``docs/spec-reference.md`` and of the JSON Schema. A key that is
null, or not given, has its default; in attributes of ``pipeline``, None stands for ``auto``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import product
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationInfo,
    field_validator,
    model_validator,
)

from pipectl.spec import argument_paths, references, types
from pipectl.spec.launch import Environment, Launch, Pbs, Resources, Slurm


class Factory(types.Section):
    """User code to call: a class, constructed with `kwargs`, or a function.

    A string is short for `{factory: string}`.
    """

    factory: types.Reference
    """`./file.py:name`, relative to the spec file, or `package.module:name`, which may also be next
    to the spec file."""
    kwargs: types.Keywords = Field(default_factory=dict)
    """Keyword arguments; the values keep their YAML types. A text that begins with `./` or `../` is
    a path relative to the spec file, and your code gets it as an absolute path. Other relative
    paths mean another file in a job than in `pipectl profile`: ranks run in the run directory. In
    texts that begin with these, `/`, `~/` or `$NAME/`, and in `$NAME` alone, variables are
    replaced as in other paths."""

    @model_validator(mode="before")
    @classmethod
    def _expand(cls, value: Any) -> Any:
        return {"factory": value} if isinstance(value, str) else value

    @field_validator("kwargs")
    @classmethod
    def _make_paths_absolute(cls, kwargs: Any, info: ValidationInfo) -> Any:
        base = types.base_of(info)
        return kwargs if base is None else argument_paths.make_absolute(kwargs, base)

    @classmethod
    def __get_pydantic_json_schema__(cls, core: Any, handler: Any) -> dict[str, Any]:
        return {"anyOf": [handler.resolve_ref_schema(handler(core)), _SHORT]}

    @property
    def reference(self) -> references.Reference:
        """What `factory` names."""
        return references.parse(self.factory)


_SHORT = {"title": "./file.py:name or package.module:name", "type": "string", "pattern": ":"}
Factories = Annotated[dict[types.Text, Factory], BeforeValidator(types.drop_nulls)]
"""User code by name."""


class Group(types.Section):
    """Parameters with options of their own.

    Every other key is an option of the optimizer, such as `lr` or `weight_decay`, and overrides
    `optimizer.kwargs`.
    """

    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: types.Keywords = Field(init=False)

    match: types.Text
    """A pattern of full names as in `model.named_parameters()`, such as `*.bias`; `*` also matches
    dots. A parameter belongs to the first group that matches it."""

    @property
    def options(self) -> dict[str, Any]:
        """The optimizer's options for these parameters."""
        return dict(self.model_extra or {})


class Part(Factory):
    """User code to call, or `script` for what the script of the job makes; `script` is the default
    if there is one."""

    factory: types.PartReference
    """A reference as in [factories](#factories), or `script`."""

    @property
    def is_of_script(self) -> bool:
        """Whether the script of the job makes it."""
        return self.factory == types.SCRIPT


class Script(types.Section):
    """A training script that makes the model, the data, the loss and the optimizer of the job.

    Every process runs the file up to its first optimizer step, and takes what it has made. Each of
    these sections can be given instead. See [your training script](training-script.md).
    """

    file: types.File
    """The Python file, relative to the spec file."""
    arguments: tuple[types.Value, ...] = ()
    """Its arguments on the command line."""
    directory: types.File | None = None
    """Its working directory, relative to the spec file; by default that of `file`."""

    @field_validator("arguments")
    @classmethod
    def _make_texts(cls, values: tuple[Any, ...]) -> tuple[str, ...]:
        return tuple(map(str, values))


class Model(Part):
    """The model: a function that returns it, or its class."""

    materialize: Literal["eager", "per_rank"] = "eager"
    """When parameters are created: `eager` builds the whole model in every process; `per_rank`
    builds it without memory, and each rank creates only the parameters of its own stages. Their
    random values follow from `training.seed`: the same for every plan, but not those of `eager`."""
    opaque: tuple[types.Text, ...] = ()
    """Submodules to keep whole, as one operator each that runs their own code: patterns of names as
    in `model.named_modules()`, such as `blocks.*.router`. Submodules that cannot be captured are
    kept whole without being named."""
    weights: types.File | None = None
    """Weights to start from, relative to the spec file: a safetensors file, its `.index.json`, or a
    directory of them; by default those that the factory creates."""


class Optimizer(Part):
    """The optimizer, called with the parameters."""

    factory: types.PartReference = "torch.optim:AdamW"
    """The optimizer class, a function that returns an optimizer, or `script`. Each rank calls it
    with the parameters of its own stages (with `shard_optimizer`, its part of them), in the order
    of `model.named_parameters()`, or with a list of parameter groups if there are `groups`."""
    groups: tuple[Group, ...] = ()
    """Parameters with options of their own. For learning-rate schedules with one value per group,
    the group of all other parameters is the first."""


class Data(Part):
    """The training data: a function that returns the dataset, or the class of one.

    A sample is `(inputs, targets)` or a mapping; inputs go to the model (a mapping as keywords).
    Python's, numpy's and torch's shared generators are seeded by `training.seed` before each data
    factory, also that of `evaluation.data`: the same random split has the same parts in both, and
    data that are only drawn are the same, too, unless they have a generator of their own.
    """

    workers: types.Natural = 0
    """Processes that load samples, per rank."""
    drop_last: types.Flag = False
    """Leave out the last batch of an epoch if it is not full. Batches of iterable data are always
    full: they continue into the next epoch."""
    read: Literal["auto", "once", "everywhere"] = "auto"
    """Which ranks read samples, held-out ones too: each rank those that it needs (`everywhere`; a
    sample that differs between ranks ends the run), or one rank for all (`once`). `auto` chooses
    `once` for iterable data, and if the profile found samples that differ between processes."""
    shuffle: types.Flag | None = None
    """Draw a new order of samples every epoch, from `training.seed`. Iterable data keep their own
    order. By default true, except for the data of a script, which keep the order of its
    `DataLoader`."""
    buckets: tuple[types.Count, ...] = ()
    """Lengths that sequences are padded to, rising: each step takes samples of one bucket, the
    shortest that holds them. By default all samples have one shape. Held-out data are padded
    likewise."""
    pad: types.Padding = Field(default_factory=dict)
    """Fields that are padded to the length of a bucket, with the value for each, such as
    `{input_ids: 0, labels: -100}`. The fields of a mapping have the names of its keys, the two of a
    pair `inputs` and `targets`; the first dimension of each is the sequence."""


class HeldOut(Part):
    """The held-out dataset: a function that returns it, the class of one, or `script`."""


class Loss(Part):
    """The loss, called with `(outputs, targets)`."""

    factory: types.LossReference
    """The loss function or class; `model`: the model returns its loss; or `script`."""
    weight: types.WeightReference = "samples"
    """Weight of a micro-batch in the loss of a step or evaluation: its number of `samples`; or a
    function of its `targets`, such as the number of valid tokens, if the loss is a mean
    [over these](reading-a-plan.md#how-the-loss-is-weighted); or `sum`, if the loss is a sum over
    samples: then the losses of micro-batches are added up."""

    @property
    def adds_up(self) -> bool:
        """Whether the losses of micro-batches are added up."""
        return self.weight == types.SUM

    @property
    def weigher(self) -> str | None:
        """What names the function that weighs micro-batches; None if there is none."""
        return None if self.weight in (types.SAMPLES, types.SUM) else self.weight


class EarlyStopping(types.Section):
    """Ends the training when a metric of the evaluations no longer improves.

    The weights after the last evaluation are saved; the job is COMPLETED.
    """

    metric: types.Text = "loss"
    """`loss`, or the name of one of `metrics`."""
    mode: Literal["min", "max"] = "min"
    """Whether a smaller (`min`) or a larger (`max`) value is better."""
    patience: types.Count = 3
    """Number of evaluations in a row without an improvement after which the training ends."""
    min_delta: types.NonNegative = 0.0
    """A value counts as an improvement if it is better than the best one by more than this."""


class Evaluation(types.Section):
    """Evaluation on held-out data."""

    data: HeldOut
    """The held-out dataset. With `factory: script`, the argument `loader` names the `DataLoader` in
    the script by its variable: `{factory: script, kwargs: {loader: val_loader}}`."""
    every: types.Count | None = None
    """Steps between evaluations; by default only after the last step."""
    batch_size: types.Count | None = None
    """Samples evaluated at once; by default those of a training micro-batch."""
    metrics: Factories = Field(default_factory=dict)
    """Functions by name, called with `(outputs, targets)`, or classes with `update(outputs,
    targets)` and `compute()`."""
    early_stopping: EarlyStopping | None = None


class LossScale(types.Section):
    """How `float16` keeps small gradients from becoming zero: as `torch.amp.GradScaler` does.

    The loss is multiplied by a scale, and the gradients are divided by it. If a gradient overflows
    on any rank, the step is skipped, the learning-rate schedule too, and the scale is halved; it is
    doubled after `growth_interval` steps without an overflow.
    """

    initial: types.Positive = 65536.0
    """The scale of the first step."""
    growth_interval: types.Count = 2000
    """Steps without an overflow before the scale doubles."""


class Training(types.Section):
    """How long and on what batches to train."""

    steps: types.Count
    """Optimizer steps."""
    batch_size: types.Count
    """Samples per step, over all ranks."""
    seed: types.Natural = 0
    """Seed of the parameters, the order of samples and all random operators."""
    precision: Literal["float32", "bf16", "bf16-weights", "float16"] = "float32"
    """Precision of the arithmetic. `bf16` and `float16` run model and loss under `torch.autocast`;
    `float16` also scales the loss. With `bf16-weights` the model computes with its inputs and
    float32 parameters (but those of batch norms) converted to bfloat16, as a model after
    `.bfloat16()`, and its outputs go to the loss in float32. In all of them the optimizer, sums of
    gradients over micro-batches, checkpoints and exports have the parameters in float32."""
    float32_matmul_precision: Literal["highest", "high", "medium"] = "highest"
    """How matrices in float32 are multiplied, as `torch.set_float32_matmul_precision` says: `high`
    allows TF32, which NVIDIA's GPUs multiply faster, and `medium` bfloat16. Convolutions keep
    torch's own setting."""
    deterministic: types.Flag = False
    """Use only operators that give the same bits in every run (`torch.use_deterministic_algorithms`
    with the workspaces that cuBLAS needs for it). Operators without such a variant end the job
    with an error that names them. It matters on accelerators; on CPUs with one thread per rank,
    runs are equal without it."""
    reproducible: types.Flag = False
    """Weights, losses and metrics do not depend on `pipeline.replicas`, to the bit, on CPUs with
    one thread per rank. It needs `pipeline.micro_batches`. Gradients are summed
    [in another order](schedules.md#the-same-bits-for-any-number-of-replicas), which takes more
    memory, and running statistics of BatchNorm are means over the micro-batches of a step."""
    compile: types.Compile = False
    """Run the stages through `torch.compile`: `true`, or with its mode
    `max-autotune-no-cudagraphs`, which tries several kernels for each matrix product. It needs a
    C++ compiler on the nodes, takes a minute or more before the first step, and fuses operators,
    so results agree only within rounding. Profiles and plans do not include its effect."""
    loss_scale: LossScale = LossScale()
    clip_grad_norm: types.Positive | None = None
    """Maximum norm of all gradients; by default they are not clipped."""
    on_nonfinite: Literal["stop", "skip", "ignore"] = "stop"
    """What happens if the loss, a gradient or a buffer that forwards write becomes infinite or NaN.
    `stop` ends the job with an error that names it. `skip` skips the step on all ranks: weights,
    optimizer, learning rate and buffers stay as they were. `ignore` does not check. In `float16`
    the loss scale handles gradients, so this key applies only to the loss and to buffers."""
    correct_delay: types.Flag = False
    """With `schedule: pipedream-2bw`, whose gradients are one update old: correct each update by
    what the one before it should have been. It needs the memory of the parameters once more. See
    [overlapping steps](schedules.md#steps-that-overlap-pipedream-and-pipedream-2bw)."""
    rebalance: types.Flag = True
    """Go on under another plan if some ranks have become slower than others, or if the profile was
    wrong, and the steps that are left save more than the change costs. Results do not change. See
    [slow nodes](reliability.md#when-a-node-becomes-slow)."""

    @property
    def updates_together(self) -> bool:
        """Whether ranks wait for each other before they update: to clip gradients, to scale the
        loss, or to skip a step."""
        skips = self.on_nonfinite == "skip" or self.precision == "float16"
        return skips or self.clip_grad_norm is not None


class Pipeline(types.Section):
    """How the model is spread over the ranks. The planner chooses what is `auto`."""

    stages: Annotated[types.Count | None, types.Auto()] = None
    """Number of stages: at most one per rank, or as many as the [schedule](schedules.md) takes."""
    micro_batches: Annotated[types.Count | None, types.Auto()] = None
    """Number of parts into which each batch is divided. `auto` is refused if the loss
    [depends on it](reading-a-plan.md#how-the-loss-is-weighted)."""
    schedule: types.Schedule = None
    """Order of work: one of the [schedules](schedules.md), which differ in waiting time, memory and
    messages. Those that overlap steps also have other results; `auto` leaves them out. Or your own:
    a `.csv` file of actions, relative to the spec file, or the name of a schedule of an installed
    package."""
    warm_up: Annotated[tuple[types.Count, ...] | None, types.Auto()] = None
    """Forwards that each stage runs before its first backward, one number per stage; needs
    `stages`."""
    replicas: types.Replicas = None
    """Copies of each stage, which take micro-batches in turn and add up their gradients: a number,
    or `any` to let the planner choose stage by stage; `auto` is 1. Sums over copies are rounded
    in another order than on one rank, and running statistics of BatchNorm are means over the
    copies; `training.reproducible` makes results independent of their number."""
    shard_optimizer: types.Flag = False
    """Divide the optimizer state of a stage among its copies (ZeRO stage 1): less memory, the same
    results, messages after each step."""
    recompute: Annotated[Literal["none", "all", "blocks"] | None, types.Auto()] = None
    """Which stages keep only their inputs, and compute their forward again before the backward:
    `all` stages, or all stages by segments (`blocks`), which keeps the inputs of each segment and
    recomputes one after the other. `auto`: the stages that do not fit into memory otherwise, by
    segments if necessary; and with `backward: apart`, stages whose inputs are faster to send than
    what they save."""
    offload: Annotated[Literal["none", "host", "disk"] | None, types.Auto()] = None
    """Where stages keep what they save for their backward: `host` is the host's memory, for ranks
    on accelerators; `disk` is a file in the `TMPDIR` of each node. `auto`: `host` on accelerators,
    and on CPUs `disk` if the cluster file gives its bandwidth; only for stages that it helps."""
    backward: Annotated[Literal["together", "apart"] | None, types.Auto()] = "together"
    """Where the backward of a stage runs: `together` with its forward, or `apart`, on a rank of its
    own, which also updates the weights and receives what it needs. `auto`: apart if faster."""
    memory_limit: types.Bytes | None = None
    """Memory per rank. On CPUs: resident, the process itself included; by default and at most its
    share of `resources.memory_per_node`, if that is given. On accelerators: of tensors; by default
    and at most what the profile found that they can have there, or what the cluster file says."""


class Checkpoint(types.Section):
    """When the training state is saved."""

    every: types.Count | None = None
    """Steps between checkpoints; by default only after the last step."""
    keep: types.Count = 3
    """Number of checkpoints to keep; older ones are removed."""
    keep_every: types.Count | None = None
    """Checkpoints whose step is a multiple of this are kept too."""
    keep_best: types.Flag | None = None
    """Whether a checkpoint is saved after every evaluation that is the best so far, and the best
    one kept. By default if there is `evaluation.early_stopping`, whose `metric` and `mode` say what
    is best; without it, the smallest `loss` is. `pipectl export --best` exports it."""
    lead_time: types.LeadTime = 180
    """How long before the end of the walltime the ranks save a checkpoint and end, at most a
    quarter of the walltime. It must be enough for a step and the checkpoint."""
    max_requeues: types.Natural = 3
    """How often the job is requeued after that, or by the batch system after the failure of a node
    or a preemption, to continue from its last checkpoint. (On PBS it submits itself again, if the
    site allows that.)"""


class Trace(types.Section):
    """Which steps are recorded action by action, for `pipectl report`."""

    steps: tuple[types.Count, ...] = (10,)
    """Steps to record, or the last step of a shorter run. `[]` for none."""
    every: types.Count | None = None
    """Also record every step that is a multiple of this; 1 records all."""

    def includes(self, step: int, steps: int) -> bool:
        """Whether a step is recorded.

        Args:
            steps: of the whole run.
        """
        due = self.every is not None and step % self.every == 0
        return due or any(step == min(wanted, steps) for wanted in self.steps)


class Tracking(types.Section):
    """Experiment trackers that get every line of the metrics, and the job as their config.

    In arguments that begin with `/`, `~/` or `$NAME/`, variables are replaced as in other paths.
    The name of one, such as `wandb`, is short for `{wandb: {}}`. See [metrics](metrics.md).
    """

    tensorboard: types.Keywords | None = None
    """TensorBoard: event files in the run directory, in the folder `directory`, by default
    `tensorboard`."""
    wandb: types.Keywords | None = None
    """Weights & Biases: arguments of `wandb.init`, such as `project` and `entity`."""
    mlflow: types.Keywords | None = None
    """MLflow: `experiment` and `tracking_uri`."""

    @model_validator(mode="before")
    @classmethod
    def _expand(cls, value: Any) -> Any:
        return {value: {}} if isinstance(value, str) else value

    @classmethod
    def __get_pydantic_json_schema__(cls, core: Any, handler: Any) -> dict[str, Any]:
        return {"anyOf": [handler.resolve_ref_schema(handler(core)), {"enum": [*cls.model_fields]}]}


class Output(types.Section):
    """Where results go."""

    directory: types.Text = "runs"
    """Directory of the run directories, relative to the working directory; the environment variable
    `PIPECTL_RUNS` changes the default. Commands on runs read no job: they look in the default, or
    in `-d DIRECTORY`."""


class Sweep(types.Section):
    """Several runs of this job that differ in some values: a job array on Slurm and PBS.

    Keys are dotted as for `--set`. `version`, `name`, `resources`, `slurm`, `pbs`,
    `launch.scheduler`, `launch.options`, `output`, `site_defaults`,
    `checkpoint.lead_time` and `checkpoint.max_requeues` cannot be swept: they are the same for all
    jobs of an array. Commands other than `check` and `submit` ignore the sweep. See
    [sweeps](sweeps.md).
    """

    grid: types.Grid = Field(default_factory=dict)
    """Keys with lists of values, such as `optimizer.kwargs.lr: [1e-3, 3e-4]`; every combination is
    a run."""
    points: tuple[types.Keywords, ...] = ()
    """Further runs, each a mapping of keys to values."""
    at_once: types.Count | None = None
    """How many may run at the same time; by default what the batch system allows, and one on this
    machine."""

    def runs(self) -> Iterator[dict[str, tuple[tuple[str | int, ...], Any]]]:
        """The values of every run, each with its path in the spec, by dotted key.

        The runs of the grid come first, the last key changing fastest.
        """
        columns = [
            [(key, (("sweep", "grid", key, index), value)) for index, value in enumerate(values)]
            for key, values in self.grid.items()
        ]
        yield from map(dict, product(*columns) if columns else ())
        for index, point in enumerate(self.points):
            yield {key: (("sweep", "points", index, key), point[key]) for key in point}


def _is_of_script(section: Any) -> bool:
    factory = section.get("factory") if isinstance(section, Mapping) else section
    return bool(factory == types.SCRIPT)


PARTS_OF_SCRIPT = ("model", "loss", "data", "optimizer", "lr_scheduler")
"""Sections that a script makes unless they name something else."""


class JobSpec(types.Section):
    """A training job: what is trained, on what, and how the job runs."""

    version: types.Version = types.VERSION
    """Version of this format."""
    name: types.JobName = ""
    """Name of the job and of its runs; by default the name of the file, without its ending."""
    script: Script | None = None
    model: Model
    loss: Loss
    data: Data
    optimizer: Optimizer = Optimizer()
    lr_scheduler: Part | None = None
    """The learning-rate schedule, called with the optimizer. It steps after every optimizer step,
    so `T_max` is `training.steps`. A schedule whose steps take a loss, such as `ReduceLROnPlateau`,
    steps after every evaluation."""
    evaluation: Evaluation | None = None
    training: Training
    pipeline: Pipeline = Pipeline()
    resources: Resources = Resources()
    launch: Launch = Launch()
    environment: Environment = Environment()
    checkpoint: Checkpoint = Checkpoint()
    trace: Trace = Trace()
    callbacks: Factories = Field(default_factory=dict)
    """User code for metrics, by names of your choice. Rank 0 calls it with the run directory and
    this job as a dict; what it returns is called with every line of `metrics.jsonl`."""
    tracking: Tracking = Tracking()
    output: Output = Output()
    cluster: types.File | None = None
    """Path of `cluster.json`, relative to the file that names it; by default the one that `pipectl
    profile --links` measured for this job, else a cluster assumed from `resources`."""
    slurm: Slurm = Slurm()
    pbs: Pbs = Pbs()
    sweep: Sweep | None = None
    site_defaults: types.Flag = True
    """Whether this job takes defaults from site files."""

    @model_validator(mode="before")
    @classmethod
    def _take_from_script(cls, data: Any) -> Any:
        """Let the script make the parts for which no factory is given."""
        if not isinstance(data, Mapping) or not data.get("script"):
            return data
        taken = dict(data)
        for part in PARTS_OF_SCRIPT:
            section = taken.get(part)
            if section is None:
                if part != "lr_scheduler" or _is_of_script(taken["optimizer"]):
                    taken[part] = types.SCRIPT
            elif isinstance(section, Mapping) and section.get("factory") is None:
                taken[part] = {**section, "factory": types.SCRIPT}
        return taken

    @field_validator("*")
    @classmethod
    def _collect(cls, value: Any, info: ValidationInfo) -> Any:
        """Give the loader each valid section, also if others are wrong."""
        if info.context:
            info.context["sections"][info.field_name] = value
        return value

    @property
    def schedule_file(self) -> Path | None:
        """Path of the user's own schedule, if a file is named."""
        name = self.pipeline.schedule or ""
        return Path(name) if name.endswith(types.SCHEDULE_SUFFIX) else None

    def factories(self) -> Iterator[tuple[tuple[str, ...], references.Reference]]:
        """Every reference to user code, with the path of its key."""
        if self.script is not None:
            yield ("script", "file"), references.Reference(Path(self.script.file), None, "__main__")
        for path, text, _ in factories_in(self.model_dump()):
            yield path, references.parse(text)

    def sources(self, named: Iterable[references.Reference]) -> dict[str, Path]:
        """Files behind some of its references; see :func:`pipectl.spec.references.user_sources`."""
        return references.user_sources(named, self._more_places)

    @property
    def large_packages(self) -> set[str]:
        """See :func:`pipectl.spec.references.large_packages`."""
        return references.large_packages((each for _, each in self.factories()), self._more_places)

    @property
    def _more_places(self) -> list[str]:
        """Absolute directories that the job's ``PYTHONPATH`` names."""
        more = self.environment.variables.get("PYTHONPATH", "").split(":")
        return [place for place in more if place.startswith("/")]

    @property
    def follows_script(self) -> bool:
        """Whether the script makes all parts of the job, and the order of its samples."""
        parts = self.model, self.loss, self.data, self.optimizer
        return all(part.is_of_script for part in parts) and self.data.shuffle is None

    @property
    def threads(self) -> int:
        """Threads that a rank computes with."""
        return self.launch.threads(self.resources.cpus_per_task)

    @property
    def keeps_best(self) -> bool:
        """Whether the checkpoint of the best evaluation is saved and kept."""
        stops_early = self.evaluation is not None and self.evaluation.early_stopping is not None
        return stops_early if self.checkpoint.keep_best is None else self.checkpoint.keep_best


def files_in(data: Any) -> Iterator[tuple[tuple[str, ...], str]]:
    """All files besides user code that the data of a spec name, with the paths of their keys.

    Args:
        data: valid or not.
    """
    keys = "cluster model.weights pipeline.schedule script.file script.directory"
    for path, text in _values_at(data, keys):
        is_name = path[-1] == "schedule" and not str(text).endswith(types.SCHEDULE_SUFFIX)
        if isinstance(text, str) and not is_name:
            yield path, text


def factories_in(data: Any) -> Iterator[tuple[tuple[str, ...], str, Mapping[str, Any]]]:
    """Path of the key, reference and keyword arguments of all user code in the data of a spec.

    Args:
        data: valid or not; what is no reference, or no mapping, is left out.
    """
    keys = "model loss data optimizer lr_scheduler evaluation.data evaluation.metrics.* callbacks.*"
    for path, item in (*_values_at(data, keys), *_values_at(data, "loss.weight")):
        key = () if path == ("loss", "weight") else ("factory",)
        section = item if isinstance(item, Mapping) else {"factory": item}
        text, kwargs = section.get("factory"), section.get("kwargs")
        if path == ("optimizer",) and text is None:
            text = Optimizer.model_fields["factory"].default
        if isinstance(text, str) and not references.fault_of(text):  # as `model`, for the loss
            yield (*path, *key), text, kwargs if isinstance(kwargs, Mapping) else {}


def _values_at(data: Any, keys: str) -> Iterator[tuple[tuple[str, ...], Any]]:
    """The values at dotted keys, with their paths; ``*`` stands for every key of a mapping."""
    for key in keys.split():
        values: list[tuple[tuple[str, ...], Any]] = [((), data)]
        for step in key.split("."):
            values = [
                ((*path, name), item)
                for path, value in values
                for name, item in (value.items() if isinstance(value, Mapping) else ())
                if step in ("*", name)
            ]
        yield from values


def holds_variables(key: str) -> bool:
    """Whether environment variables, which may be secrets, are in the value of a dotted key."""
    variables = "environment.variables"
    return is_within(key, variables) or is_within(variables, key)


def is_within(key: str, other: str) -> bool:
    """Whether a dotted key is another one, or a part of it."""
    return f"{key}.".startswith(f"{other}.")
