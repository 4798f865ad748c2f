"""The job spec. Its models are the single definition of keys, defaults and meanings.

Field descriptions are the text of ``docs/spec-reference.md`` and of the JSON Schema. A key that is
null, or not given, has its default; in attributes of ``pipeline``, None stands for ``auto``.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from pydantic import Field, PrivateAttr

from pipectl.spec.launching import Checkpoint, Environment, Launch, Output, Trace
from pipectl.spec.pipeline import Pipeline
from pipectl.spec.resources import Pbs, Resources, Slurm
from pipectl.spec.schedules import SUFFIX
from pipectl.spec.section import Section
from pipectl.spec.sweep import Sweep
from pipectl.spec.training import (
    Data,
    Evaluation,
    Factories,
    Factory,
    Loss,
    Model,
    Optimizer,
    Training,
)
from pipectl.spec.values import Flag, JobName, Line, Version


class JobSpec(Section):
    """A training job: what is trained, on what, and how the job runs."""

    version: Version = Field(description="Version of this format.")
    name: JobName = Field(description="Name of the job and of its runs.")
    model: Model
    loss: Loss
    data: Data
    optimizer: Optimizer = Field(default_factory=Optimizer)
    lr_scheduler: Factory | None = Field(
        default=None,
        description="The learning-rate schedule, called with the optimizer. It moves after every "
        "optimizer step: `T_max` is `training.steps`, say. One whose steps take a loss, such as "
        "`ReduceLROnPlateau`, moves after every evaluation instead, by its loss.",
    )
    evaluation: Evaluation | None = None
    training: Training
    pipeline: Pipeline = Field(default_factory=Pipeline)
    resources: Resources = Field(default_factory=Resources)
    launch: Launch = Field(default_factory=Launch)
    environment: Environment = Field(default_factory=Environment)
    checkpoint: Checkpoint = Field(default_factory=Checkpoint)
    trace: Trace = Field(default_factory=Trace)
    callbacks: Factories = Field(
        default_factory=dict,
        description="User code that is told the metrics on rank 0, by a name of yours: called with "
        "the run directory and this job as a dict, it returns what is called with every line of "
        "`metrics.jsonl`. `pipectl.runtime.tensorboard:writer` is one.",
    )
    output: Output = Field(default_factory=Output)
    cluster: Line | None = Field(
        default=None,
        description="Path of `cluster.json`, relative to the file that names it; by default the "
        "one that `pipectl profile --links` measured for this job, else the cluster is assumed "
        "from `resources`.",
    )
    slurm: Slurm = Field(default_factory=Slurm)
    pbs: Pbs = Field(default_factory=Pbs)
    sweep: Sweep | None = None
    site_defaults: Flag = Field(
        default=True, description="Whether the site files give defaults to this job."
    )

    _source: Path = PrivateAttr(default=Path("job.yaml"))

    @property
    def source(self) -> Path:
        """The file this spec was read from."""
        return self._source

    @property
    def base(self) -> Path:
        """Directory from which relative files of the spec are looked up."""
        return self._source.absolute().parent

    def files(self) -> Iterator[tuple[tuple[str, ...], Path]]:
        """Absolute paths of all files besides user code, with the path of their key."""
        named = {
            ("cluster",): self.cluster_file,
            ("pipeline", "schedule"): self.schedule_file,
            ("launch", "template"): self.template_file,
            ("model", "weights"): self.weights_path,
        }
        yield from ((key, file) for key, file in named.items() if file is not None)

    @property
    def cluster_file(self) -> Path | None:
        """Absolute path of the cluster file, if one is named."""
        return None if self.cluster is None else self.base / self.cluster

    @property
    def template_file(self) -> Path | None:
        """Absolute path of the script around the job script, if one is named."""
        return None if self.launch.template is None else self.base / self.launch.template

    @property
    def threads(self) -> int:
        """Threads that a rank computes with."""
        return self.resources.cpus_per_task - self.launch.progress_core

    @property
    def schedule_file(self) -> Path | None:
        """Absolute path of the user's own schedule, if a file is named."""
        name: str | None = self.pipeline.schedule
        return self.base / name if name is not None and name.endswith(SUFFIX) else None

    @property
    def container(self) -> str | None:
        """The image: an absolute path, or an address; None for no container."""
        image: str | None = self.environment.container
        return image if image is None or "://" in image else str(self.base / image)

    @property
    def weights_path(self) -> Path | None:
        """Absolute path of the weights to start from, if they are given."""
        return None if self.model.weights is None else self.base / self.model.weights

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

    def __eq__(self, other: object) -> bool:
        """Equal in every key; the file it was read from does not count."""
        if not isinstance(other, JobSpec):
            return NotImplemented
        return self.model_dump() == other.model_dump()
