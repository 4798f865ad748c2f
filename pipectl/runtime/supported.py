"""What a plan may ask for that the engine cannot do."""

from __future__ import annotations

from pipectl.errors import MismatchError
from pipectl.plan import Plan, Replication
from pipectl.schedule import splits_backwards


def check_supported(plan: Plan, file: str = "plan.json") -> None:
    """Refuse a plan before anything is built for it.

    Raises:
        MismatchError: naming the file and what it asks for.
    """
    for feature in unsupported(plan):
        raise MismatchError(
            f"{file}: the plan has {feature}; it can be simulated, but not run",
            cure="set pipeline.backward to together, and plan the job again",
        )
    _check_samples(plan, file)


def unsupported(plan: Plan) -> list[str]:
    """What the plan asks for that cannot be run, in words; empty if it can be."""
    stages = [stage for stage in plan.stages if stage.updating_ranks != stage.ranks]
    clashes = {
        "split backwards": bool(stages) and splits_backwards(plan),
        "replicas": any(stage.replicas > 1 for stage in stages),
    }
    return [f"{what} and a backward on other ranks" for what, found in clashes.items() if found]


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
