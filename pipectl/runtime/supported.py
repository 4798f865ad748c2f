"""What a plan may ask for that the engine cannot do yet."""

from __future__ import annotations

from pipectl.errors import MismatchError
from pipectl.plan import Plan, Stage

_FEATURES = {
    "replicas": "ranks",
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
                cure="plan the job again with pipectl plan, which chooses what can be run",
            )


def unsupported(plan: Plan) -> list[str]:
    """What the plan asks for that cannot be run, in words; empty if it can be."""
    return [
        feature
        for feature, key in _FEATURES.items()
        if any(_asks(stage, key) for stage in plan.stages)
    ]


def _asks(stage: Stage, key: str) -> bool:
    if key == "ranks":
        return stage.replicas > 1
    if key == "backward_ranks":
        return stage.updating_ranks != stage.ranks
    return bool(getattr(stage, key))
