"""What a plan may ask for that the engine cannot do."""

from __future__ import annotations

from pipectl.errors import MismatchError
from pipectl.plan import Plan, Replication, Stage

_CURE = "plan the job again with pipectl plan, which chooses what can be run"

_FEATURES = {
    "a backward on other ranks than the forward": "backward_ranks",
}
"""By the key of a stage that asks for it."""


def check_supported(plan: Plan, file: str = "plan.json") -> None:
    """Refuse a plan before anything is built for it.

    Raises:
        MismatchError: naming the file, the stage and what it asks for.
    """
    for feature, key in _FEATURES.items():
        asking = [index for index, stage in enumerate(plan.stages) if _asks(stage, key)]
        if asking:
            raise MismatchError(
                f"{file}: stages[{asking[0]}].{key} asks for {feature}; plans with that can be "
                "simulated, but not run",
                cure=_CURE,
            )
    _check_samples(plan, file)


def _check_samples(plan: Plan, file: str) -> None:
    """Every replica of a split micro-batch gets samples, and keeps its backwards whole."""
    if plan.replication is Replication.WHOLE:
        return
    for index, stage in enumerate(plan.stages):
        if stage.replicas > plan.micro_batch_size:
            raise MismatchError(
                f"{file}: stages[{index}] has {stage.replicas} replicas for the "
                f"{plan.micro_batch_size} samples of a micro-batch",
                cure="use larger micro-batches, or fewer replicas",
            )


def unsupported(plan: Plan) -> list[str]:
    """What the plan asks for that cannot be run, in words; empty if it can be."""
    return [
        feature
        for feature, key in _FEATURES.items()
        if any(_asks(stage, key) for stage in plan.stages)
    ]


def _asks(stage: Stage, key: str) -> bool:
    if key == "backward_ranks":
        return stage.updating_ranks != stage.ranks
    return bool(getattr(stage, key))
