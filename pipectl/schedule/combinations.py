"""What goes together: schedules, and what jobs and plans may have besides.

:data:`CLASHES` is the only list of what does not. The checks of job files, the planner's choices,
the ranks, and the table in ``docs/schedules.md`` follow it;
``tests/runtime/test_combinations.py`` trains or refuses every pair.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass

from pipectl.older_python import StrEnum
from pipectl.plan import Plan, Stage
from pipectl.schedule.one_f_one_b import ONE_F_ONE_B
from pipectl.schedule.order import Placement, Schedule
from pipectl.schedule.registry import SCHEDULES, schedule_of


class Trait(StrEnum):
    """What matters of a schedule here, as a part of a sentence about it."""

    OVERLAPS = "whose steps overlap"
    ONE_MICRO_BATCH = "which updates after every micro-batch"
    SPLITS = "which splits backwards"
    SHARES_RANKS = "which places several stages on a rank"
    FIXED_WARM_UP = "which has a warm-up of its own"
    LISTED = "which is a list of actions"


@dataclass(frozen=True)
class Feature:
    """A setting of a job.

    Args:
        key: dotted; of a model's trait the section.
        on: the value in a job file; empty for any, or for a trait of models.
        off: the value without it; empty if the key is left out.
        words: for pages and messages if ``key: on`` does not say it.
    """

    key: str
    on: str = ""
    off: str = ""
    words: str = ""

    @property
    def name(self) -> str:
        """For example ``backward: apart``."""
        short = self.key.removeprefix("pipeline.")
        return self.words or (f"{short}: {self.on}" if self.on else short)

    @property
    def without(self) -> str:
        """How to do without it, for example ``write pipeline.backward: together``."""
        return f"write {self.key}: {self.off}" if self.off else f"leave {self.key} out"


APART = Feature("pipeline.backward", "apart", "together")
RECOMPUTE = Feature("pipeline.recompute", "all", "none")
SEGMENTS = Feature("pipeline.recompute", "blocks", "all")
OFFLOAD = Feature("pipeline.offload", off="none")
WARM_UP = Feature("pipeline.warm_up")
REPLICAS = Feature("pipeline.replicas", off="1")
SHARD = Feature("pipeline.shard_optimizer", "true", "false")
MICRO_BATCHES = Feature("pipeline.micro_batches", words="several micro-batches")
COMPILE = Feature("training.compile", "true", "false")
CLIP = Feature("training.clip_grad_norm")
FLOAT16 = Feature("training.precision", "float16", "bf16")
BF16_WEIGHTS = Feature("training.precision", "bf16-weights", "float32")
REPRODUCIBLE = Feature("training.reproducible", "true", "false")
SKIP = Feature("training.on_nonfinite", "skip", "stop")
EVALUATION = Feature("evaluation")
EARLY_STOPPING = Feature("evaluation.early_stopping")
TIED = Feature("model", words="a weight that several operators use")
Part = Feature | Trait


@dataclass(frozen=True)
class Clash:
    """Two things that do not go together.

    Args:
        feature: whose key is to blame.
        other: another feature, or a trait of the schedule.
        reason: a clause.
        unless: a feature with which they do go together.
    """

    feature: Feature
    other: Part
    reason: str
    unless: Feature | None = None

    def fault(self, schedule: str = "") -> str:
        """The sentence for a job, without the key.

        Args:
            schedule: name of the job's.
        """
        said = f"{self.feature.on} " if self.feature.on not in ("", "true") else ""
        return f"{said}does not go with {self._other(schedule)}: {self.reason}"

    def pair(self, schedule: str = "") -> str:
        """The two, for example ``backward: apart with replicas``."""
        return f"{self.feature.name} with {self._other(schedule)}"

    def _other(self, schedule: str) -> str:
        is_feature = isinstance(self.other, Feature)
        return self.other.name if is_feature else f"schedule {schedule}, {self.other}"

    def hint(self) -> str:
        """How to do without either."""
        other = f"write pipeline.schedule: {ONE_F_ONE_B.name}"
        if isinstance(self.other, Feature):
            other = self.other.without
        ways = [self.feature.without, other]
        if self.unless is not None:
            ways.append(f"write {self.unless.key}: {self.unless.on}")
        return ", or ".join(ways)


_APART_STAGE = "one rank has all forwards of a stage, and one other all its backwards"
_AT_ONCE = "it needs the gradients of all stages at once, and stages update at different times"
CLASHES = (
    Clash(APART, Trait.SPLITS, "both halves of a backward follow the forward's own graph"),
    Clash(APART, Trait.SHARES_RANKS, _APART_STAGE),
    Clash(APART, Trait.LISTED, "the list says which rank computes what"),
    Clash(APART, REPLICAS, _APART_STAGE),
    Clash(
        APART, SEGMENTS, "the rank of the forward sends the inputs of the stage, not of segments"
    ),
    Clash(
        APART, COMPILE, "no other rank can follow what torch.compile makes of a forward", RECOMPUTE
    ),
    Clash(REPLICAS, Trait.OVERLAPS, "versions of the weights are kept for one rank per stage"),
    Clash(REPLICAS, Trait.LISTED, "the list says which rank computes what"),
    Clash(WARM_UP, Trait.FIXED_WARM_UP, "its forwards follow from stages and micro-batches"),
    Clash(MICRO_BATCHES, Trait.ONE_MICRO_BATCH, "a step is one micro-batch"),
    Clash(CLIP, Trait.OVERLAPS, _AT_ONCE),
    Clash(FLOAT16, Trait.OVERLAPS, f"to scale the loss, {_AT_ONCE}"),
    Clash(SKIP, Trait.OVERLAPS, f"to leave out a step, {_AT_ONCE}, and later steps have begun"),
    Clash(
        REPRODUCIBLE,
        Trait.OVERLAPS,
        "forwards begin before the buffers of the step before are known, and there are no replicas",
    ),
    Clash(REPRODUCIBLE, COMPILE, "rounding depends on the operators that it fuses in each stage"),
    Clash(TIED, Trait.OVERLAPS, "its gradients would be of different steps"),
)
"""All else goes together."""


def traits_of(schedule: Schedule | None) -> frozenset[Trait]:
    """The traits of a built-in schedule, or of a user's own (None)."""
    if schedule is None:
        return frozenset((Trait.LISTED, Trait.FIXED_WARM_UP))
    stale = schedule.staleness
    found = {
        Trait.OVERLAPS: stale is not None,
        Trait.ONE_MICRO_BATCH: stale is not None and stale.one_micro_batch,
        Trait.SPLITS: schedule.splits_backward,
        Trait.SHARES_RANKS: schedule.placement is not Placement.STRAIGHT,
        Trait.FIXED_WARM_UP: not schedule.chooses_warm_up,
    }
    return frozenset(trait for trait, has in found.items() if has)


def clashes(parts: Collection[Part]) -> Iterator[Clash]:
    """What of features, and traits of a schedule, does not go together."""
    for clash in CLASHES:
        if clash.feature in parts and clash.other in parts and clash.unless not in parts:
            yield clash


def go_together(parts: Collection[Part]) -> bool:
    """Whether features, and traits of a schedule, go together."""
    return not any(clashes(parts))


def clashes_of_plan(plan: Plan) -> Iterator[Clash]:
    """What of a plan no ranks can run; stages may differ in what they do."""
    schedule = schedule_of(plan)
    traits = traits_of(None if plan.actions else schedule)
    known: set[Part] = {*traits, REPRODUCIBLE} if plan.reproducible else {*traits}
    found = (clash for stage in plan.stages for clash in clashes({*known, *_features(stage)}))
    yield from dict.fromkeys(found)


def _features(stage: Stage) -> Iterator[Feature]:
    has = {
        APART: stage.updating_ranks != stage.ranks,
        RECOMPUTE: stage.recompute,
        SEGMENTS: stage.segments is not None,
        OFFLOAD: stage.offload,
        REPLICAS: stage.replicas > 1,
    }
    yield from (feature for feature, is_so in has.items() if is_so)


def markdown() -> str:
    """The table of clashes, for the page about schedules."""
    rows: dict[tuple[str, str], list[str]] = {}
    for clash in CLASHES:
        other, key = clash.other, (clash.feature.name, clash.reason)
        if isinstance(other, Feature):
            unless = f", unless `{clash.unless.name}`" if clash.unless else ""
            names = [f"`{other.name}`{unless}"]
        else:
            names = [f"`{name}`" for name, each in SCHEDULES.items() if other in traits_of(each)]
            names += ["schedules of your own"] if other in traits_of(None) else []
        rows.setdefault(key, []).extend(names)
    lines = ["| setting | does not go with | because |", "|---|---|---|"]
    for (name, reason), others in rows.items():
        shown = name if " " in name and ":" not in name else f"`{name}`"
        lines.append(f"| {shown} | {', '.join(dict.fromkeys(others))} | {reason} |")
    return "\n".join([*lines, ""])
