"""What a plan may change in the results of training, and other warnings about a job."""

from __future__ import annotations

import json

from pipectl.profile import Profile
from pipectl.profile_parts import SEEDED_HINT
from pipectl.spec import JobSpec, evaluation_key
from pipectl.units import shorten

_MAX_NAMED = 3
_SENSITIVE = frozenset({"Adam", "AdamW", "Adamax", "NAdam", "RAdam"})
"""Optimizers that train worse if gradients are one update old; see docs/schedules.md."""


def warnings_of(spec: JobSpec, profile: Profile) -> list[str]:
    """What a plan can change in the results of training, and held-out data that are trained on."""
    say = (
        coupling_warning,
        replicas_warning,
        delay_warning,
        loss_warning,
        sharing_warning,
        splitting_warning,
        metrics_warning,
        redrawing_warning,
        batch_warning,
        script_warning,
    )
    return [text for text in (each(spec, profile) for each in say) if text]


def batch_warning(spec: JobSpec, profile: Profile) -> str:
    """A warning if the steps of a job are not those of its script; empty if they are."""
    samples, training = profile.script_samples, spec.training
    if samples in (None, training.batch_size) or not spec.data.is_of_script:
        return ""
    steps = f"training.steps: {training.steps}"
    if spec.evaluation is not None and spec.evaluation.every is not None:
        steps += f" and evaluation.every: {spec.evaluation.every}"
    return (
        f"a step of the script has {samples} samples, and training.batch_size is "
        f"{training.batch_size}: {steps} count steps of the job; if the script has an argument for "
        "its batch size, init with it sets all of them"
    )


def script_warning(spec: JobSpec, profile: Profile) -> str:
    """A warning if a job is not as its script is now, with its arguments; empty if it is."""
    differing = []
    for key, value in profile.script_values.items():
        section, _, name = key.partition(".")
        now = getattr(getattr(spec, section), name, value)
        if now != value:
            differing.append(f"{key} is {json.dumps(now)} in the job, {json.dumps(value)} by it")
    if not differing:
        return ""
    return (
        "the script or its arguments are others than those that init has seen: "
        f"{'; '.join(differing)}: set what should follow the script, too, by --set KEY=VALUE, or "
        "let init write the job again (--force)"
    )


def redrawing_warning(_: JobSpec, profile: Profile) -> str:
    """A warning if initial weights are others each time; empty if they are not."""
    if profile.redrawn is None:
        return ""
    return (
        f"model: {profile.redrawn!r} has another initial value each time the model is built (by a "
        "generator of its own, os.urandom or the time?), so no training can be repeated, and ranks "
        f"that each hold it do not start: {SEEDED_HINT}"
    )


def sharing_warning(spec: JobSpec, profile: Profile) -> str:
    """A warning if held-out samples are trained on; empty if none were found."""
    if not profile.shared_samples or not _is_of_evaluation(profile, spec):
        return ""
    pairs = zip(*profile.shared_samples, strict=True)
    held_out, trained = (", ".join(map(str, each)) for each in pairs)
    return (
        f"samples {held_out} of evaluation.data equal samples {trained} of data, so evaluation "
        "measures what was trained on: let both factories split the same rows (both draw from the "
        "same seed), or draw rows with generators of their own "
        "(torch.Generator().manual_seed(1) in one, 2 in the other)"
    )


def splitting_warning(spec: JobSpec, profile: Profile) -> str:
    """A warning if each start of the job holds out other samples; empty if not."""
    if not profile.redrawn_samples or not _is_of_evaluation(profile, spec):
        return ""
    return (
        "each start of the job holds out other samples of evaluation.data (its generator has no "
        "seed?), so after a requeue or `resume`, evaluation measures what was trained on before: "
        "give the generator that splits the rows a seed, the same in both factories"
    )


def _is_of_evaluation(profile: Profile, spec: JobSpec) -> bool:
    """Whether a profile is about the held-out data and metrics of a job, as they are now."""
    return profile.evaluation_key in {None, evaluation_key(spec)}


def metrics_warning(spec: JobSpec, profile: Profile) -> str:
    """A warning if metrics depend on the size of micro-batches; empty if none is known to."""
    names = profile.uneven_metrics
    if not names or not _is_of_evaluation(profile, spec):
        return ""
    keys = ", ".join(f"evaluation.metrics.{name}" for name in names)
    is_are, it_they = ("is", "it depends") if len(names) == 1 else ("are", "they depend")
    return (
        f"{keys} {is_are} averaged over micro-batches, but no mean over samples (such as a root of "
        f"a mean, a maximum or a count), so {it_they} on their size; a class with update(outputs, "
        "targets) and compute() gets all held-out samples, as those of torchmetrics do"
    )


def loss_warning(spec: JobSpec, profile: Profile) -> str:
    """A warning if the loss depends on the number of micro-batches, or if that is unknown and the
    planner chooses their number; empty if it does not.
    """
    loss = profile.halved_loss
    if loss is None and profile.loss_unknown and spec.pipeline.micro_batches is None:
        return (
            "it is not known whether the loss depends on the number of micro-batches, which `auto` "
            "leaves to the planner: the loss of a batch could not be compared with that of its "
            f"halves ({profile.loss_unknown}); pipeline.micro_batches sets the number"
        )
    if spec.pipeline.micro_batches == 1 or loss is None or not loss.depends:
        return ""
    return f"{loss}: the loss, and in effect the learning rate, depend on pipeline.micro_batches"


def coupling_warning(spec: JobSpec, profile: Profile) -> str:
    """A warning if the plan can change the results of training; empty if it cannot."""
    names = profile.coupled
    if spec.pipeline.micro_batches is not None or not (names or profile.carried):
        return ""
    more = "computes" if len(names) == 1 else f"and {len(names) - 1} more compute"
    why = f"{names[0]} {more} over all samples of a micro-batch" if names else _carried(profile)
    return (
        f"{why}: results depend on the number of "
        "micro-batches, which `auto` leaves to the planner; pipeline.micro_batches sets it"
    )


def delay_warning(spec: JobSpec, _: Profile) -> str:
    """A warning if the optimizer does not bear the age of the gradients; empty if it does."""
    training, schedule = spec.training, spec.pipeline.schedule
    name = spec.optimizer.factory.rpartition(":")[2]
    if schedule != "pipedream-2bw" or training.correct_delay or name not in _SENSITIVE:
        return ""
    return (
        f"{name} loses quality by the gradients of {schedule}, which are one update old: "
        "training.correct_delay: true makes up for a part of it, and Muon needs it less"
    )


def replicas_warning(spec: JobSpec, profile: Profile) -> str:
    """A warning if replicas change the results of training, or are left out for that."""
    replicas = spec.pipeline.replicas
    if replicas in (None, 1) or not profile.carried:
        return ""
    if spec.training.reproducible and replicas != "any":  # forwards read what was before the step
        return ""
    if replicas == "any":
        return f"{_carried(profile)}, so the stage that does so has no replicas"
    return (
        f"{_carried(profile)}, and each of {replicas} replicas has values of its own until the end "
        "of a step: results differ from those of one rank; pipeline.replicas: any leaves that "
        "stage out"
    )


def _carried(profile: Profile) -> str:
    """The buffers that carry values between micro-batches."""
    names = list(dict.fromkeys(repr(name) for name, _ in profile.carried))
    return f"in training, forwards write and read {', '.join(shorten(names, _MAX_NAMED))}"
