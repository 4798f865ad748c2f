"""The process of one rank: ``python -m mpi4py -m pipectl.runtime.worker --run DIRECTORY``.

Under ``-m mpi4py`` an exception on one rank aborts all; before that, the rank writes the error and
its place to a file of its own in the run directory.
"""

from __future__ import annotations

import gc
from contextlib import closing, nullcontext, suppress
from itertools import permutations

import pipectl.runtime.before_mpi  # noqa: F401

# isort: split
import psutil
import torch
from mpi4py import MPI

from pipectl.capture import CapturedJob
from pipectl.capture.digests import sample_digests
from pipectl.capture.regions import accelerator_in_use
from pipectl.cluster import Cluster
from pipectl.errors import PipectlError, UsageError, lacks_memory
from pipectl.files import read_json, write_json, write_text
from pipectl.plan import Plan
from pipectl.profile import Profile
from pipectl.profile_parts import Readings
from pipectl.runs import Heartbeat, RunDirectory, StartDirectory, start_of_job
from pipectl.runs.code import keep_loaded, loaded_here, using_code_of
from pipectl.runs.kept_code import changed_modules, read_code, without_copies
from pipectl.runtime.agreement import (
    check_accelerators,
    check_alike,
    check_data,
    check_graph,
    check_unshared,
    misplaced,
    neighbours_of,
)
from pipectl.runtime.callbacks import Callbacks
from pipectl.runtime.checkpoint import Stored, newest
from pipectl.runtime.device import (
    Device,
    choose_device,
    keep_freed_memory,
    return_freed_memory,
    set_arithmetic,
)
from pipectl.runtime.feed import reads_once
from pipectl.runtime.nodes import check_supported, check_world, node_name
from pipectl.runtime.offload import check_space, offload_directory
from pipectl.runtime.optimizer import divides
from pipectl.runtime.option_trials import refuse_options
from pipectl.runtime.rank_process import run_rank, say, warn
from pipectl.runtime.rebalancing import Rebalancing, can_move
from pipectl.runtime.setup import Setup
from pipectl.runtime.stopping import stop_on_signals
from pipectl.runtime.trainer import Trainer
from pipectl.runtime.transport import Circumstances, choose_progress, gpu_aware
from pipectl.runtime.update_trials import (
    loses_state,
    refuse_coupled_updates,
    refuse_outer_state,
    refuse_own_memory,
)
from pipectl.runtime.waiting import broadcast, choose_spin
from pipectl.runtime.watching import watched
from pipectl.schedule import channels, is_unflushed
from pipectl.spec import JobSpec, load
from pipectl.torch_api import dump_memory
from pipectl.units import plural
from pipectl.watch.board import Board


def run(directory: RunDirectory, communicator: MPI.Comm, board: Board) -> None:
    """Train the job of a run directory on this rank.

    Raises:
        PipectlError: the files or the processes do not match, or user code fails.
    """
    board.phase("reading the plan")
    try:
        with using_code_of(directory):
            _run(directory, communicator, board)
    except Exception as error:
        if lacks_memory(error) and accelerator_in_use() is not None:
            with suppress(Exception):  # the error is what matters
                dump_memory(str(start_of_job(directory).memory_of(communicator.rank)))
        raise


def _run(directory: RunDirectory, communicator: MPI.Comm, board: Board) -> None:
    spec, plan = load(directory.job), Plan.load(directory.plan)
    profile = Profile.load(directory.profile)
    board.phase("meeting the other ranks")
    check_alike(communicator, spec, plan)
    check_world(communicator, plan)
    check_supported(plan, spec=spec)
    with (
        watched(communicator, directory, spec, plan, board),
        stop_on_signals(start_of_job(directory).stop_request),
    ):
        _train(directory, communicator, board, spec, plan, profile)


def _train(
    directory: RunDirectory,
    communicator: MPI.Comm,
    board: Board,
    spec: JobSpec,
    plan: Plan,
    profile: Profile,
) -> None:
    check_space(communicator, plan, node_name(), offload_directory())
    rank = communicator.rank
    start = directory.start_of(broadcast(communicator, start_of_job(directory).number))
    board.phase("looking for a checkpoint")
    stored = newest(communicator, directory.checkpoints, warn)
    if stored is not None:
        stored.check(plan.micro_batch_size)
    if rank == 0:
        Heartbeat("capturing", 0, spec.training.steps, start.number).save(start.heartbeat)
    torch.set_num_threads(spec.threads)
    set_arithmetic(spec.training)
    return_freed_memory()  # until other ranks' parameters are dropped
    board.phase("choosing the device")
    nodes = neighbours_of(communicator)
    choose_spin(communicator, node_name())
    local_rank = next(ranks.index(rank) for ranks in nodes if rank in ranks)
    device = _device(communicator, spec, plan, local_rank)
    job = _capture(directory, communicator, board, spec, plan, profile, begins=stored is None)
    if rank == 0 and (fault := misplaced(nodes, plan.node_of_rank)):
        warn(fault)
    board.phase("choosing how messages travel")
    cluster = Cluster.load(directory.cluster) if directory.cluster.exists() else None
    sizes = [len(ranks) for ranks in nodes]
    circumstances = Circumstances(sizes, plan.most_sent_bytes, cluster)
    choice = choose_progress(communicator, spec.launch.progress, circumstances)
    loses = _check_updates(job, plan, device, asks=rank == 0)
    messages = {"route": device.route, "progress": choice.mode, "why": choice.why}
    if rank == 0:
        _say_what_begins(job, plan, stored)
    once = reads_once(job, profile)
    rebalancing = None
    if rank == 0:
        repeats = profile.readings is Readings.SAME and not loses
        rebalancing = _rebalancing(directory, spec, plan, device) if repeats else None
        _report_changed_code(start, spec)
    with (
        choice.progress(staged=device.staged, enter_thread=device.enter_thread) as progress,
        nullcontext() if rank else Callbacks(spec, directory, warn) as tell,
        nullcontext() if rebalancing is None else closing(rebalancing),
    ):

        def train_under(plan: Plan, stored: Stored | None) -> bool:
            """Train from a checkpoint; return whether to go on under another plan."""
            board.phase("building the stages")
            setup = Setup(communicator, job, plan, device, board, progress, stored, once=once)
            with closing(setup):
                keep_freed_memory()
                return Trainer(
                    setup, start, cluster, messages, stored, tell=tell, rebalancing=rebalancing
                ).train()

        while train_under(plan, stored):
            gc.collect()  # the stages of the plan before
            return_freed_memory()
            stored = newest(communicator, directory.checkpoints, warn)
            assert stored is not None
            other = plan if rebalancing is None else rebalancing.adopt(stored.manifest.step)
            plan = broadcast(communicator, other)


def _capture(
    directory: RunDirectory,
    communicator: MPI.Comm,
    board: Board,
    spec: JobSpec,
    plan: Plan,
    profile: Profile,
    *,
    begins: bool,
) -> CapturedJob:
    """The job, captured on this rank and compared with those of the other ranks. Collective.

    Args:
        begins: whether the training begins, and does not go on.
    """
    board.phase("building the model and the data")
    job = CapturedJob(spec)
    board.phase("capturing the model")
    check_graph(communicator, job, plan, profile)
    digests = check_data(communicator, job, profile)
    if communicator.rank == 0:
        _compare_samples(directory, job, profile, digests, begins=begins)
    return job


def _check_updates(job: CapturedJob, plan: Plan, device: Device, *, asks: bool) -> bool:
    """Refuse an optimizer that the plan's ranks cannot share, or that trials leave in another
    state.

    Args:
        asks: whether to find out whether it loses state, and to warn then.

    Returns:
        Whether it loses state.
    """
    spec = job.spec
    refuse_outer_state(job, device.torch_device)  # first: all trials leave it changed
    loses = asks and loses_state(job, device.torch_device)
    if loses:
        warn(
            f"optimizer: {spec.optimizer.factory} keeps something outside of `self.state`, which "
            "no checkpoint has: a resumed run goes on in another way than one that never ended"
        )
    is_divided = divides(plan)
    refuse_options(job, device.torch_device, divides=is_divided)
    if is_divided:
        refuse_coupled_updates(job, device.torch_device)
    if is_unflushed(plan):
        refuse_own_memory(job, device.torch_device)
    return loses


def _say_what_begins(job: CapturedJob, plan: Plan, stored: Stored | None) -> None:
    spec = job.spec
    batch = spec.training.batch_size
    samples = min(batch, job.loader.samples or batch)
    since = f"continues after step {stored.manifest.step}" if stored else "begins"
    of = plural(samples, "sample") + " (all data, not training.batch_size)" * (samples < batch)
    steps, ranks = plural(spec.training.steps, "step"), plural(plan.ranks, "rank")
    say(f"training {since}: {steps} of {of} on {ranks}")


def _rebalancing(
    directory: RunDirectory, spec: JobSpec, plan: Plan, device: Device
) -> Rebalancing | None:
    """What looks for a better plan, in a training that a resume would not change; None if the job
    or the plan does not move."""
    if not (spec.training.rebalance and can_move(plan)):
        return None
    pairs = _pairs(plan)  # between which messages were tried

    def accepts(other: Plan) -> bool:
        return device.staged or device.torch_device.type == "cpu" or _pairs(other) <= pairs

    return Rebalancing(directory, plan, spec.training.steps, accepts)


def _report_changed_code(start: StartDirectory, spec: JobSpec) -> None:
    """Say which files of the user have changed since the submission, for the log and `status`.

    What is known only now, because no import names it, is kept for later starts.
    """
    directory = start.run
    kept = read_code(directory)
    if kept is None:
        return
    used = changed_modules(kept, psutil.Process().create_time())
    with suppress(PipectlError):  # the training does not need it
        keep_loaded(directory, spec, loaded_here())
        kept = read_code(directory) or kept
    changed = kept.changed()
    used = [*without_copies(changed), *used]
    with suppress(OSError, UsageError):
        if used:
            write_text(start.changed_code, "".join(f"{path}\n" for path in used))
    for file in changed:
        if file.copy is not None:
            copy = directory.code / file.copy
            say(f"{file.path} has changed since the submission; the job uses its copy {copy}")
    for path in used:
        warn(f"{path} has changed since the submission, and the job uses it as it is now")


def _compare_samples(
    directory: RunDirectory,
    job: CapturedJob,
    profile: Profile,
    digests: list[list[int]] | None,
    *,
    begins: bool,
) -> None:
    """Warn if samples differ from those at the first start; keep them for a later one.

    Args:
        digests: of a few samples of the training data; None if there are none to compare.
        begins: whether the training begins, and does not go on.
    """
    if profile.redrawn_samples and not begins:
        warn(
            "evaluation.data: this start holds out other samples than those before (they are drawn "
            "by a generator without a seed), so evaluations measure what was trained on"
        )
    if digests is None:
        return
    try:
        found = {"digests": [*digests, *sample_digests(job.evaluation_loader)]}
    except PipectlError:  # training may never come to this sample
        return
    if not directory.samples.exists():
        write_json(directory.samples, found)
    elif read_json(directory.samples, hint="remove it") != found:
        warn(
            "the data have changed since the run began (samples that were read then are others "
            "now): from here on it trains on the new ones"
        )


def _device(communicator: MPI.Comm, spec: JobSpec, plan: Plan, local_rank: int) -> Device:
    accelerators = spec.resources.gpus_per_node
    if not accelerators:
        return choose_device(0, local_rank)
    check_accelerators(communicator)
    finding = gpu_aware.find(communicator, spec.launch.gpu_aware, asks=local_rank == 0)
    device = choose_device(accelerators, local_rank, in_place=finding.able)
    if finding.able:
        finding = gpu_aware.confirm(communicator, finding, _pairs(plan), device.torch_device)
        if not finding.able:
            device = choose_device(accelerators, local_rank)
    if communicator.rank == 0:
        say(f"MPI and accelerators: {finding.why}")
    if accelerators >= spec.resources.tasks_per_node:
        check_unshared(communicator, device.torch_device)
    return device


def _pairs(plan: Plan) -> set[tuple[int, int]]:
    """The ranks that send to each other in a step."""
    ends = {(channel.source_rank, channel.target_rank) for channel in channels(plan)}
    ends |= {pair for stage in plan.stages for pair in permutations(stage.ranks, 2)}
    return {(source, target) for source, target in ends if source != target}


if __name__ == "__main__":
    run_rank(run, __doc__)
