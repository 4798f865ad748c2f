"""What a plan may ask for that the engine cannot do yet."""

from __future__ import annotations

from pipectl.errors import MismatchError
from pipectl.plan import Plan


def check_supported(plan: Plan) -> None:
    """Refuse a plan before anything is built for it.

    Raises:
        MismatchError: naming the stages and what they ask for.
    """
    for feature, key, stages in (
        ("replicas", "ranks", [stage.replicas > 1 for stage in plan.stages]),
        ("recomputation", "recompute", [stage.recompute for stage in plan.stages]),
        ("offload", "offload", [stage.offload for stage in plan.stages]),
        (
            "a backward on other ranks than the forward",
            "backward_ranks",
            [stage.updating_ranks != stage.ranks for stage in plan.stages],
        ),
    ):
        asking = [index for index, asks in enumerate(stages) if asks]
        if asking:
            raise MismatchError(
                f"plan.json: stages[{asking[0]}].{key} asks for {feature}; plans with that can be "
                "simulated, but not run",
                cure="plan the job again with pipectl plan, which chooses what can be run",
            )
