"""What differs from a job as the user wrote it while it is verified, as overrides of its spec."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from pipectl.planner.request import ROUND, V_SHAPED

if TYPE_CHECKING:
    from pipectl.spec import JobSpec

SGD = ("optimizer={factory: 'torch.optim:SGD', kwargs: {lr: 0.1}}", "lr_scheduler=null")
"""An optimizer that does not make large differences of small ones, where results may differ."""


def local(spec: JobSpec, steps: int, directory: Path) -> list[str]:
    """What differs from the job as the user wrote it: here, short, one thread a rank."""
    launcher = ["launch={launcher: mpiexec}"] if spec.launch.launcher == "srun" else []
    # What is not finite on both sides is equal, too.
    onwards = ["training.on_nonfinite=ignore"] if spec.training.on_nonfinite == "stop" else []
    # A schedule may follow the loss of evaluations.
    watched = spec.evaluation is not None and spec.lr_scheduler is not None
    evaluation = ["evaluation.every=1", "evaluation.metrics={}"] if watched else ["evaluation=null"]
    return [
        *launcher,
        *onwards,
        *evaluation,
        f"training.steps={steps}",
        f"output.directory='{directory}'",
        f"checkpoint={{every: 1, keep: {steps}}}",
        f"pipeline.stages={_stages(spec)}",
        "resources.cpus_per_task=1",
        "launch.progress_core=false",
        "resources.memory_per_node=null",
        "pipeline.memory_limit=null",
        "callbacks=null",
        "cluster=null",
    ]


def _stages(spec: JobSpec) -> int | str:
    """Fewer would leave ranks unverified, unless the planner chooses the ranks of a stage."""
    if spec.pipeline.stages is not None:
        return spec.pipeline.stages
    if spec.pipeline.replicas == "any" or spec.pipeline.backward is None:
        return "auto"
    chunks = 2 if spec.pipeline.schedule in (*ROUND, *V_SHAPED) else 1
    of_each = 2 if spec.pipeline.backward == "apart" else int(spec.pipeline.replicas or 1)
    return chunks * max(1, spec.resources.ranks // of_each)


def on_ranks(ranks: int) -> tuple[str, ...]:
    """On one node, whatever the job asks for."""
    return "resources.nodes=1", f"resources.tasks_per_node={ranks}", "resources.more=[]"
