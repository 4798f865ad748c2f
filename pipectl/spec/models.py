"""The job spec. Its models are the single definition of keys, defaults and meanings.

Field docstrings are the text of ``docs/spec-reference.md`` and of the JSON Schema. A key that is
null, or not given, has its default; in attributes of ``pipeline``, None stands for ``auto``.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, PrivateAttr

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
from pipectl.spec.training import (
    Data,
    Evaluation,
    Factories,
    Factory,
    Loss,
    Model,
    Optimizer,
    Pipeline,
    Training,
)
from pipectl.spec.types import (
    SCHEDULE_SUFFIX,
    VERSION,
    Count,
    Flag,
    JobName,
    Kwargs,
    Section,
    Text,
    Version,
    plain_values,
)


class Sweep(Section):
    """Several runs of this job that differ in some values: a job array on Slurm and PBS.

    Keys are dotted as for `--set`. What decides which nodes a job gets is the same for all runs:
    `version`, `name`, `resources`, `slurm`, `pbs`, `launch.scheduler`, `launch.template`, `output`,
    `site_defaults` and how a checkpoint is asked for (`on_signal`, `lead_time`, `max_requeues`)
    cannot be swept. All commands but `check` and `submit` leave the sweep alone, and work on the
    job as the rest of the file says. See [sweeps](sweeps.md).
    """

    grid: Annotated[dict[str, tuple[Any, ...]], BeforeValidator(plain_values)] = Field(
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
        """Absolute path of the script around the job script, if one is named."""
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
        return self.resources.cpus_per_task - self.launch.progress_core

    def __eq__(self, other: object) -> bool:
        """Equal in every key; the file it was read from does not count."""
        if not isinstance(other, JobSpec):
            return NotImplemented
        return self.model_dump() == other.model_dump()
