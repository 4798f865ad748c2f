"""The job spec. Its models, with those of :mod:`pipectl.spec.code_sections` and
:mod:`pipectl.spec.launch`, are the single definition of keys, defaults and meanings.

Field docstrings are the text of ``docs/spec-reference.md`` and of the JSON Schema. A key that is
null, or not given, has its default; in attributes of ``pipeline``, None stands for ``auto``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import product
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    Field,
    ValidationInfo,
    field_validator,
    model_validator,
)

from pipectl.spec import references, types
from pipectl.spec.code_sections import (
    Data,
    Factories,
    HeldOut,
    Loss,
    Model,
    Optimizer,
    Part,
    Script,
)
from pipectl.spec.launch import Environment, Launch, Pbs, Resources, Slurm
from pipectl.spec.places import factories_in


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
    """Steps to record, or the last step of a shorter run; if its batch is not full, the next with a
    full one (the one before, if none follows). `[]` for none."""
    every: types.Count | None = None
    """Also record every step that is a multiple of this; 1 records all."""


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
    steps after every evaluation. One whose steps take anything else, such as an epoch, is
    refused."""
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
    def beside_script(self) -> tuple[str, ...]:
        """Keys that replace what the script of the job makes, or the order of its samples."""
        parts = {name: getattr(self, name) for name in PARTS_OF_SCRIPT}
        others = [name for name, part in parts.items() if part and not part.is_of_script]
        return (*others, *(("data.shuffle",) if self.data.shuffle is not None else ()))

    @property
    def threads(self) -> int:
        """Threads that a rank computes with."""
        return self.launch.threads(self.resources.cpus_per_task)

    @property
    def keeps_best(self) -> bool:
        """Whether the checkpoint of the best evaluation is saved and kept."""
        stops_early = self.evaluation is not None and self.evaluation.early_stopping is not None
        return stops_early if self.checkpoint.keep_best is None else self.checkpoint.keep_best
