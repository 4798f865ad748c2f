"""Checks across fields, each as soon as the sections it needs are valid; and foreign keys."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from importlib.machinery import PathFinder
from importlib.util import find_spec
from inspect import signature
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipectl.cluster import MAX_RANKS, TOO_MANY_RANKS
from pipectl.hash_seed import MAX_SEED, RANDOM, VARIABLE, is_seed
from pipectl.spec import code_sections, models
from pipectl.spec.batch_checks import (
    check_options,
    check_pbs_gpus,
    check_select,
    check_slurm_gpus,
)
from pipectl.spec.code import is_source
from pipectl.spec.document import MAX_DEPTH, Finding, KeyPath, escape, parse_scalar, resolve
from pipectl.spec.launch import Container, Environment, Launch, Resources, Slurm
from pipectl.spec.places import factories_in, files_in, is_within
from pipectl.spec.references import (
    Reference,
    faults_of_use,
    missing_imports,
    parse,
    types_taken,
)
from pipectl.spec.types import SCHEDULE_SUFFIX, WithoutUnit

if TYPE_CHECKING:
    from pipectl.schedule.combinations import Feature
    from pipectl.schedule.order import Schedule

_SBATCH = (
    "qos", "constraint", "reservation", "gres", "licenses", "nodelist", "exclude", "exclusive",
    "mail_type", "mail_user",
)  # fmt: skip
_FOREIGN_KEYS = {
    **dict.fromkeys(
        ("training.epochs", "training.num_epochs", "training.max_epochs"),
        "give training.steps: epochs times samples, divided by training.batch_size",
    ),
    **{f"slurm.{x}": f"write slurm.options: {{{x.replace('_', '-')}: ...}}" for x in _SBATCH},
}
"""Keys that users of other programs write, and what to write."""
MAX_POINTS = 1000
"""Slurm allows arrays of 1,001 jobs unless a site says otherwise (``MaxArraySize``)."""
_SHARED = (
    "version", "name", "resources", "launch.scheduler", "launch.options",
    "output", "slurm", "pbs", "checkpoint.lead_time", "checkpoint.max_requeues", "site_defaults",
    "sweep",
)  # fmt: skip
"""Keys that all runs share, because the directives of a job array apply to all its jobs."""
_POSITIONAL = {"optimizer": 1, "lr_scheduler": 1, "callbacks": 2}
"""Arguments that pipectl gives before the ``kwargs``, by section."""
_HOUR_S = 3600
_STAGES = ("pipeline", "stages")
_MICRO_BATCHES = ("pipeline", "micro_batches")
_WARM_UP = ("pipeline", "warm_up")
_BACKWARD = ("pipeline", "backward")
_DELAYED = "pipedream-2bw"
"""The schedule whose gradients are one update old in all stages."""
_TRACKERS = frozenset({"tensorboard", "wandb", "mlflow"})
"""Keys of ``tracking``, which are the names of packages."""
_PLACEHOLDER = "/path/to/"
"""Prefix of paths in recipes that users have to replace."""


def fault_of_foreign_key(path: Sequence[str | int]) -> str:
    """The message for a key of other programs; empty for any other key."""
    advice = _FOREIGN_KEYS.get(".".join(map(str, path)))
    return f"unknown key; {advice}" if advice else ""


def cross_check(sections: Mapping[str, Any]) -> Iterator[Finding]:
    """Faults across fields of valid sections."""
    for check in _CHECKS:
        names = signature(check).parameters
        if sections.keys() >= names.keys():
            yield from check(**{name: sections[name] for name in names})


def check_code(
    data: Mapping[str, Any], base: Path, environment: Environment | None, *, names: bool
) -> Iterator[Finding]:
    """Files that do not exist, and placeholders of recipes.

    Args:
        data: of a spec, valid or not.
        base: directory of the spec.
        environment: of the spec; None if it is not valid.
        names: whether to check also that functions and classes exist and take their ``kwargs``,
            those of installed packages only if the job runs with this Python.
    """
    elsewhere = environment is None or _is_elsewhere(environment)
    files = [(path, base / text) for path, text in files_in(data)]
    factories = dict[Reference, tuple[str | int, ...]]()
    for path, text, kwargs in factories_in(data):
        placeholders = ((x, y) for x, y in kwargs.items() if str(y).startswith(_PLACEHOLDER))
        for name, value in placeholders:
            if not Path(value).exists():
                fault = f"{value!r} is the placeholder of the recipe; write your own path"
                yield (*path[:-1], "kwargs", name), fault
        try:
            reference = parse(text, base)
        except (OSError, ValueError):
            continue
        factories.setdefault(reference, path)
        if reference.file is not None:
            files.append((path, reference.file))
        if not names or (elsewhere and reference.is_installed):
            continue
        positional = _POSITIONAL.get(str(path[0]), 0)
        is_complete = positional > 0 or path[:-1] in (("model",), ("data",), ("evaluation", "data"))
        is_complete &= not data.get("sweep")  # a sweep may add arguments
        for wrong, fault in faults_of_use(
            reference, list(kwargs), is_complete=is_complete, positional=positional
        ):
            yield (path if wrong is None else (*path[:-1], "kwargs", wrong)), fault
        yield from _texts_for_numbers(data, path, reference, positional)
    yield from _ambiguous_time(data)
    if names and not elsewhere:
        yield from _missing_trackers(data.get("tracking"), base)
        yield from _missing_imports(factories)
    yield from _missing_files(files)
    if names and environment is not None:
        yield from _missing_image(environment.container)


def _texts_for_numbers(
    data: Mapping[str, Any], path: KeyPath, reference: Reference, positional: int
) -> Iterator[Finding]:
    """Arguments of a factory that are texts in quotes where it takes numbers, or true and false."""
    taken = types_taken(reference, positional)
    called = reference.attribute.rpartition(".")[2]
    for place, name, given in _arguments(data, path) if taken else ():
        wanted, given = taken.get(name), resolve(given)
        items = enumerate(given) if isinstance(given, list) else [(None, given)]
        for index, item in items:
            meant = parse_scalar(item) if isinstance(item, str) else None
            kind = bool if isinstance(meant, bool) else float
            if isinstance(meant, int | float) and wanted is kind:
                what = "true or false" if wanted is bool else "a number"
                fault = f"is the text {item!r}, but {called} takes {what}"
                yield (
                    place if index is None else (*place, index),
                    (f"{fault}; write {item} without quotes"),
                )


def _arguments(data: Mapping[str, Any], path: KeyPath) -> Iterator[tuple[KeyPath, str, Any]]:
    """Arguments of the factory at a path: places, names and values; those of groups of parameters
    and of a sweep, too."""
    section = path[:-1] if path[-1] == "factory" else path
    at: list[tuple[KeyPath, Any]] = [((*section, "kwargs"), _value_at(data, (*section, "kwargs")))]
    if section == ("optimizer",):
        groups = _value_at(data, ("optimizer", "groups"))
        each = enumerate(groups if isinstance(groups, list) else ())
        at += [(("optimizer", "groups", index), group) for index, group in each]
    for place, arguments in at:
        for name, value in arguments.items() if isinstance(arguments, Mapping) else ():
            yield (*place, name), name, value
    grid, points = (_value_at(data, ("sweep", key)) for key in ("grid", "points"))
    swept = [
        (("sweep", "grid", key, index), key, value)
        for key, values in (grid.items() if isinstance(grid, Mapping) else ())
        for index, value in enumerate(values if isinstance(values, list) else ())
    ]
    swept += [
        (("sweep", "points", index, key), key, value)
        for index, point in enumerate(points if isinstance(points, list) else ())
        for key, value in (point.items() if isinstance(point, Mapping) else ())
    ]
    prefix = f"{'.'.join(map(str, section))}.kwargs."
    for place, key, value in swept:
        name = str(key).removeprefix(prefix)
        if name != key and "." not in name:
            yield place, name, value


def _value_at(data: Any, path: Sequence[str | int]) -> Any:
    for key in path:
        data = data.get(key) if isinstance(data, Mapping) else None
    return data


def _ambiguous_time(data: Mapping[str, Any]) -> Iterator[Finding]:
    """A walltime without a unit, in a job that is for PBS, as far as the spec tells, or of whole
    hours in seconds."""
    scheduler = _value_at(data, ("launch", "scheduler")) or "auto"
    only_pbs = bool(data.get("pbs")) and not data.get("slurm")
    is_pbs = scheduler == "pbs" or (scheduler == "auto" and only_pbs)
    walltime = _value_at(data, ("resources", "walltime"))
    if not isinstance(walltime, str) or not walltime.strip().isdecimal():
        return
    if is_pbs or (int(walltime) and int(walltime) % _HOUR_S == 0):
        yield ("resources", "walltime"), WithoutUnit(60 * int(walltime)).ambiguity


def _missing_files(files: Iterable[tuple[tuple[str | int, ...], Path]]) -> Iterator[Finding]:
    """Files and directories that a job names and that do not exist."""
    for path, file in files:
        or_directory = path in {("model", "weights"), ("script", "directory")}
        with suppress(OSError):  # a name that no file can have
            if is_source(file) or (or_directory and file.is_dir()):
                continue
        yield path, f"no such file{' or directory' * or_directory}: {file}"


def _missing_image(container: Container | None) -> Iterator[Finding]:
    """A container's image that is not in its directory, unless that may be one of compute nodes."""
    image = Path("" if container is None else container.image)
    if image.is_absolute() and image.parent.is_dir() and not image.exists():
        yield ("environment", "container", "image"), f"no such file or directory: {image}"


def _missing_trackers(trackers: Any, base: Path) -> Iterator[Finding]:
    """Trackers that a job names and that are neither installed nor beside the spec."""
    for name, options in trackers.items() if isinstance(trackers, Mapping) else ():
        is_named = name in _TRACKERS and options is not None
        if is_named and find_spec(name) is None and not PathFinder.find_spec(name, [str(base)]):
            yield ("tracking", name), f"{name} is not installed; pip install {name}"


def _missing_imports(factories: Mapping[Reference, tuple[str | int, ...]]) -> Iterator[Finding]:
    """Imports of user code that this Python, with which the job runs, does not have."""
    for reference, file, line, name in missing_imports(factories):
        fault = f"{file.name}:{line} imports {name}, which {sys.executable} does not have"
        hint = f"install it there (pip install {name}), or set environment.modules or container"
        yield factories[reference], f"{fault}; {hint}"


def _is_elsewhere(environment: Environment) -> bool:
    """Whether the job may run with another Python than this, or with other packages."""
    more = environment.container, environment.modules, environment.setup
    return any(more) or "PYTHONPATH" in environment.variables


def _built_in(pipeline: models.Pipeline) -> Schedule | None:
    """The schedule that a job names; None if it names none, or the user's own."""
    if pipeline.schedule is None:
        return None
    from pipectl.schedule import SCHEDULES

    return SCHEDULES.get(pipeline.schedule)


def _check_ranks(pipeline: models.Pipeline, resources: Resources) -> Iterator[Finding]:
    """Faults of the numbers of stages and ranks, and of memory."""
    stages, name, ranks = pipeline.stages, pipeline.schedule, resources.ranks
    min_ranks = resources.min_nodes * resources.tasks_per_node
    if pipeline.offload == "host" and not resources.gpus_per_node:
        fault = "frees nothing on ranks that compute on the CPU; write disk"
        yield ("pipeline", "offload"), fault
    if ranks > MAX_RANKS:
        yield ("resources",), f"nodes x tasks_per_node = {TOO_MANY_RANKS.format(ranks)}"
    schedule = _built_in(pipeline)
    if stages is None or (schedule is None and (name is not None or stages <= min_ranks)):
        return
    from pipectl.schedule.order import Placement

    placement = Placement.STRAIGHT if schedule is None else schedule.placement
    copies = pipeline.replicas if isinstance(pipeline.replicas, int) else 1
    shared = f" for each of {copies} replicas" if copies > 1 else ""
    for count in sorted({ranks // copies, min_ranks // copies}):
        if not count or placement.fit(stages, count):  # planning refuses too many replicas
            continue
        hints = {
            Placement.STRAIGHT: "resources give nodes x tasks_per_node = "
            f"{resources.nodes} x {resources.tasks_per_node}",
            Placement.ROUND: f"schedule {name} takes a multiple of them",
            Placement.V_SHAPED: f"schedule {name} takes two per rank",
        }
        yield _STAGES, f"{placement.misfit(stages, count)}{shared}; {hints[placement]}"


def _check_range(pipeline: models.Pipeline, resources: Resources) -> Iterator[Finding]:
    """Faults of schedules whose results, or whose actions, depend on the number of nodes."""
    if resources.node_range is None or pipeline.schedule is None:
        return
    name, key = Path(pipeline.schedule).name, ("resources", "nodes")
    if pipeline.schedule.endswith(SCHEDULE_SUFFIX):
        yield key, f"must be a number, since {name} is for a number of ranks"
    elif name == "pipedream":
        yield key, f"must be a number: the results of {name} depend on the number of stages"


def _check_combinations(pipeline: models.Pipeline, training: models.Training) -> Iterator[Finding]:
    """Faults of settings that do not go together, or not with the schedule."""
    present = features_of(pipeline, training)
    if not present or (len(present) == 1 and pipeline.schedule is None):
        return
    from pipectl.schedule.combinations import clashes, traits_of

    schedule, name = _built_in(pipeline), pipeline.schedule
    traits = traits_of(schedule) if name is not None else ()
    for clash in clashes({*present, *traits}):
        fault = clash.fault(Path(name or "").name)
        yield tuple(clash.feature.key.split(".")), f"{fault}; {clash.hint()}"


def features_of(pipeline: models.Pipeline, training: models.Training) -> set[Feature]:
    """What a job asks for; choices of the planner are left out."""
    from pipectl.schedule import combinations as known

    asked = {
        known.APART: pipeline.backward == "apart",
        known.RECOMPUTE: pipeline.recompute == "all",
        known.SEGMENTS: pipeline.recompute == "blocks",
        known.OFFLOAD: pipeline.offload in ("host", "disk"),
        known.WARM_UP: pipeline.warm_up is not None,
        known.REPLICAS: pipeline.replicas not in (None, 1, "any"),
        known.SHARD: pipeline.shard_optimizer,
        known.MICRO_BATCHES: (pipeline.micro_batches or 1) > 1,
        known.COMPILE: bool(training.compile),
        known.CLIP: training.clip_grad_norm is not None,
        known.FLOAT16: training.precision == "float16",
        known.BF16_WEIGHTS: training.precision == "bf16-weights",
        known.REPRODUCIBLE: training.reproducible,
        known.SKIP: training.on_nonfinite == "skip",
    }
    return {feature for feature, is_asked in asked.items() if is_asked}


def _check_reproducible(pipeline: models.Pipeline, training: models.Training) -> Iterator[Finding]:
    is_own = (
        pipeline.schedule is not None and _built_in(pipeline) is None
    )  # with a number of its own
    if training.reproducible and pipeline.micro_batches is None and not is_own:
        fault = "needs pipeline.micro_batches: results depend on how a batch is divided, and the "
        fault += "planner divides it in another way for other ranks"
        yield ("training", "reproducible"), f"{fault}; set their number"


def _check_correction(pipeline: models.Pipeline, training: models.Training) -> Iterator[Finding]:
    if training.correct_delay and pipeline.schedule != _DELAYED:
        fault = "goes only with gradients that are one update old"
        hint = f"write pipeline.schedule: {_DELAYED}, or leave training.correct_delay out"
        yield ("training", "correct_delay"), f"{fault}; {hint}"


def _check_warm_up(pipeline: models.Pipeline) -> Iterator[Finding]:
    warm_up = pipeline.warm_up
    if warm_up is None:
        return
    if pipeline.stages is None:
        yield _WARM_UP, f"needs pipeline.stages: {len(warm_up)} as well"
    elif len(warm_up) != pipeline.stages:
        yield _WARM_UP, f"has length {len(warm_up)}, but pipeline.stages is {pipeline.stages}"
    if any(early < late for early, late in pairwise(warm_up)):
        yield _WARM_UP, f"{list(warm_up)} must not increase from one stage to the next"
    largest, micro_batches = max(warm_up, default=0), pipeline.micro_batches
    if micro_batches is not None and largest > micro_batches:
        yield _WARM_UP, f"{largest} forwards, but there are {micro_batches} micro-batches"


def _check_backward(pipeline: models.Pipeline, resources: Resources) -> Iterator[Finding]:
    """``backward: apart`` needs two ranks per stage."""
    ranks = 2 * (pipeline.stages or 1)
    if pipeline.backward == "apart" and ranks > resources.ranks:
        fault = f"apart takes 2 ranks per stage: {ranks}"
        yield _BACKWARD, f"{fault}; resources give {resources.ranks}"


def _check_batch(pipeline: models.Pipeline, training: models.Training) -> Iterator[Finding]:
    micro_batches = pipeline.micro_batches or 1
    if micro_batches > training.batch_size:
        fault = f"a batch of {training.batch_size} cannot be divided into {micro_batches}"
        yield _MICRO_BATCHES, f"{fault}; lower it or raise training.batch_size"


def _check_buckets(data: code_sections.Data) -> Iterator[Finding]:
    buckets = data.buckets
    if any(short >= long for short, long in pairwise(buckets)):
        yield ("data", "buckets"), f"{list(buckets)} must rise from one length to the next"
    if buckets and not data.pad:
        fault = "needs data.pad: the fields to pad, with their values, such as "
        yield ("data", "buckets"), fault + "{input_ids: 0, labels: -100}"
    if data.pad and not buckets:
        yield ("data", "pad"), "needs data.buckets: the lengths to pad to, such as [128, 512]"


def _check_container(environment: Environment, launch: Launch, slurm: Slurm) -> Iterator[Finding]:
    """Options of srun and sbatch that start only a part of a job in a container, or set what
    ``environment.container`` sets."""
    for index, word in enumerate(launch.args if launch.launcher in {"auto", "srun"} else ()):
        if word.startswith(("--container-", "--environment")):
            fault = "starts the ranks in a container, but not what measures and plans"
            hint = "write environment.container: {image: ...}, with further options in its args"
            yield ("launch", "args", index), f"{word} {fault}; {hint}"
    if environment.container is None:
        return
    for name in slurm.options:
        if name.startswith("container-") or name == "environment":
            fault = "is given twice: environment.container is for each command of the job"
            yield ("slurm", "options", name), f"{fault}; remove one of the two"


def _check_progress(launch: Launch, resources: Resources) -> Iterator[Finding]:
    if not launch.threads(resources.cpus_per_task):
        fault = "core leaves no core to compute with: resources.cpus_per_task is 1"
        yield ("launch", "progress"), f"{fault}; set it to 2 or more"


def _check_loss(loss: code_sections.Loss) -> Iterator[Finding]:
    if loss.factory == "model" and loss.kwargs:
        yield ("loss", "kwargs"), "has no meaning if the model returns its loss"


def _check_script(
    script: code_sections.Script | None,
    model: code_sections.Model,
    loss: code_sections.Loss,
    data: code_sections.Data,
    optimizer: code_sections.Optimizer,
    lr_scheduler: code_sections.Part | None,
    evaluation: models.Evaluation | None,
) -> Iterator[Finding]:
    parts = {"model": model, "loss": loss, "data": data, "optimizer": optimizer}
    if lr_scheduler is not None:
        parts["lr_scheduler"] = lr_scheduler
    for name, part in parts.items():
        if part.is_of_script and script is None:
            yield (name,), "is script, but the job has none; write script: {file: train.py}"
        if part.is_of_script and part.kwargs:
            arguments = json.dumps(script.arguments if script else [])
            fault = f"has no meaning if the script makes it; change script.arguments: {arguments}"
            yield (name, "kwargs"), f"{fault}, or name {name}.factory"
    if loss.is_of_script and not (model.is_of_script and data.is_of_script):
        fault = "the script computes it from its own model and data; name a loss for yours"
        yield ("loss",), fault
    if optimizer.is_of_script and not model.is_of_script:
        yield ("optimizer",), "the script's is for its own model; name one for yours"
    if evaluation is not None and evaluation.data.is_of_script:
        yield from _check_held_out(evaluation.data, loss)
    if lr_scheduler is not None and lr_scheduler.is_of_script and not optimizer.is_of_script:
        yield ("lr_scheduler",), "the script's is for its own optimizer; name one for yours"


def _check_held_out(held_out: code_sections.HeldOut, loss: code_sections.Loss) -> Iterator[Finding]:
    """Faults of held-out data that the script makes."""
    key = ("evaluation", "data")
    if not loss.is_of_script:
        yield key, "the script's are for its own loss; name a function that returns yours"
    loader = held_out.kwargs.get("loader")
    if set(held_out.kwargs) != {"loader"} or not isinstance(loader, str):
        fault = "of the script need the name of a DataLoader in it"
        yield key, f"{fault}; write {{factory: script, kwargs: {{loader: val_loader}}}}"


def _check_evaluation(evaluation: models.Evaluation | None) -> Iterator[Finding]:
    if evaluation is None:
        return
    if "loss" in evaluation.metrics:
        yield ("evaluation", "metrics", "loss"), "is the name of the loss; give the metric another"
    if (stopping := evaluation.early_stopping) is None:
        return
    key = ("evaluation", "early_stopping")
    if evaluation.every is None:
        yield key, "needs evaluation.every; without it there is only one evaluation, at the end"
    metrics = ["loss", *evaluation.metrics]
    if stopping.metric not in metrics:
        yield (*key, "metric"), f"{stopping.metric!r} is not one of {', '.join(metrics)}"


def _check_best(
    checkpoint: models.Checkpoint, evaluation: models.Evaluation | None
) -> Iterator[Finding]:
    if checkpoint.keep_best and (evaluation is None or evaluation.every is None):
        fault = "needs evaluation.every: without it no two evaluations are compared"
        yield ("checkpoint", "keep_best"), fault


def _check_hash_seed(environment: Environment) -> Iterator[Finding]:
    seed = environment.variables.get(VARIABLE, RANDOM)
    if seed != RANDOM and not is_seed(seed):
        fault = f"must be a number from 0 to {MAX_SEED}, or random: Python starts with no other"
        yield ("environment", "variables", VARIABLE), fault


def _check_sweep(sweep: models.Sweep | None) -> Iterator[Finding]:
    """Faults of a sweep: runs without values, keys that cannot be swept, equal runs."""
    if sweep is None:
        return
    lengths = [len(values) for values in sweep.grid.values()]
    count = (prod(lengths) if lengths else 0) + len(sweep.points)
    if count > MAX_POINTS:
        yield ("sweep",), f"has {count} points; {MAX_POINTS} are allowed"
        return
    if not count and not lengths:
        yield ("sweep",), "has no points; give it a grid, or points"
    points = [(("sweep", "points", index), point) for index, point in enumerate(sweep.points)]
    for path, together in ((("sweep", "grid"), sweep.grid), *points):
        for key in together:
            if fault := _fault_of_swept_key(key, together):
                yield (*path, key), fault
    empty = [("sweep", "grid", key) for key, values in sweep.grid.items() if not values]
    yield from ((path, "has no values") for path in empty)
    yield from ((path, "a point without a key") for path, point in points if not point)
    seen: dict[object, int] = {}
    for number, run in enumerate(sweep.runs()):
        values = tuple(sorted((key, repr(value)) for key, (_, value) in run.items()))
        if run and seen.setdefault(values, number) != number:
            path, _ = list(run.values())[-1]
            yield path, f"a point with the same values as number {seen[values]}"


def _fault_of_swept_key(key: str, together: Iterable[str]) -> str:
    """Why no sweep can set a key together with others; empty if it can."""
    if not all(key.split(".")) or key.count(".") > MAX_DEPTH:
        return "must be a key such as training.seed"
    if any(is_within(key, shared) or is_within(shared, key) for shared in _SHARED):
        return (
            "cannot differ between the runs of a sweep, which are one job array; instead, "
            f"submit several times with --set {escape(key)}=..."
        )
    if fault := fault_of_foreign_key(key.split(".")):
        return fault
    around = next((other for other in together if other != key and is_within(key, other)), None)
    return "" if around is None else f"is a part of {escape(around)}, which is set as well"


_CHECKS: tuple[Callable[..., Iterator[Finding]], ...] = (
    _check_ranks, _check_range, _check_combinations, _check_reproducible, _check_correction,
    _check_batch, _check_buckets,
    _check_warm_up, _check_backward, _check_container, _check_progress, _check_loss, _check_script,
    _check_evaluation, _check_best, check_options,
    check_slurm_gpus, check_select, check_pbs_gpus, _check_hash_seed, _check_sweep,
)  # fmt: skip
"""Checks; the names of their parameters are the sections they need."""
