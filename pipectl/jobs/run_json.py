"""The state of runs for programs: what `status --json` prints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

from pipectl.fields import write_value
from pipectl.jobs.state import RunStatus, find_best
from pipectl.runs import RunDirectory, SweepDirectory, best_checkpoint, best_evaluation
from pipectl.runs.kept_code import read_changed_code

Subject = RunDirectory | SweepDirectory | None
"""One run, a sweep, or a list of runs."""


class RunJson(TypedDict):
    """A run. Figures are null if they are not known.

    Args:
        run, directory: its name, and the path of its directory.
        kind: ``training``, ``profile`` or ``rehearsal``.
        sweep: ``name`` of its sweep and the run's ``values``; null outside a sweep.
        scheduler, job_id, submitted_at: its batch system, and the job there.
        hash_seed: ``PYTHONHASHSEED`` of its processes.
        state: such as ``RUNNING`` or ``FAILED``.
        reason: why it is in this state.
        hint: what to do about that, or null.
        source: where the state comes from: the batch system (``queue``, ``accounting``), a
            ``process`` of this machine, ``run directory``, ``heartbeat``, ``record`` or ``none``.
        nodes: names of its nodes as the batch system writes them, one text.
        exit_code: exit code of the job.
        expected_start: when a waiting job is expected to start.
        after: names of the runs and sweeps that must complete before it starts.
        waited_s, run_s: time in the queue, and since the last start; to its end if it is over.
        walltime_left_s: what is left of its walltime while it runs.
        node_hours: nodes times ``run_s``; null on this machine.
        last_step: step after which its walltime is over, at the measured step time; null if it is
            done by then.
        phase: what the ranks do.
        stalled: who waits for whom, if no rank moves on; else null.
        restarts: how often the job was started again.
        step, steps: steps done, and steps of the run.
        first_loss, last_loss: losses of the first and the last step.
        samples_per_s, tokens_per_s: median throughput.
        step_time_s, predicted_step_time_s, measured_over_predicted: median measured step, the
            prediction, and their ratio.
        timed_steps: number of steps of which these are medians: the last ones under the present
            plan; of a run that is over, all under it (some hundred of them, if they are many).
        processor: if ranks did not get all of their cores' time while they computed: the ``share``
            that they got, the number of ``ranks``, the ``rank`` that lost most, and to whom
            (``lost_to``); else null.
        efficiency: time in which ranks compute in the predicted step, updates and recomputations
            included, divided by ranks times measured step time; above 1 if they were faster.
        remaining_s: time that the remaining steps take.
        not_finite_steps: steps whose loss, gradients or buffers were not finite.
        rebalanced: steps after which the training went on under another plan.
        evaluation_step, evaluation: the last evaluation: its step, and its metrics by name.
        early_stop: why training ended early, or null.
        best: the best evaluation up to the last checkpoint, if the job compares them: its ``step``,
            ``metric``, ``mode`` and ``value`` (null if infinite); else null.
        best_checkpoint: path of the best checkpoint that is there, or null.
        waits_for: ``rank`` and ``node`` that the others wait for, the ``share`` of its time that it
            waits, and that of the ``others``; null if there is none.
        ranks: of each rank, what the heartbeat says.
        peaks: of each ``rank``, ``measured_bytes`` and ``predicted_bytes``.
        error: ``where`` the first failure was, and its ``message``; null if there was none.
        warning: what failed after all work was done, or null.
        commit, uncommitted: git commit of the code at submission, and files that differed from it;
            null if it was in no repository.
        changed_files: files of the job that have changed since the submission; empty once the run
            is complete.
        used_changed_files: those of which the run has no copy, as they were when it started.
    """

    run: str
    directory: str
    kind: str | None
    sweep: dict[str, Any] | None
    scheduler: str | None
    job_id: str | None
    submitted_at: float | None
    hash_seed: int | None
    state: str
    reason: str
    hint: str | None
    source: str
    nodes: str
    exit_code: int | None
    expected_start: float | None
    after: list[str]
    waited_s: float | None
    run_s: float | None
    walltime_left_s: float | None
    node_hours: float | None
    last_step: int | None
    phase: str
    stalled: str | None
    restarts: int
    step: int
    steps: int | None
    first_loss: float | None
    last_loss: float | None
    samples_per_s: float | None
    tokens_per_s: float | None
    step_time_s: float | None
    timed_steps: int
    predicted_step_time_s: float | None
    measured_over_predicted: float | None
    processor: dict[str, Any] | None
    efficiency: float | None
    remaining_s: float | None
    not_finite_steps: list[int]
    rebalanced: list[int]
    evaluation_step: int | None
    evaluation: Mapping[str, float | None]
    early_stop: str | None
    best: dict[str, Any] | None
    best_checkpoint: str | None
    waits_for: dict[str, Any] | None
    ranks: list[dict[str, Any]]
    peaks: list[dict[str, Any]]
    error: dict[str, str] | None
    warning: str | None
    commit: str | None
    uncommitted: list[str] | None
    changed_files: list[str]
    used_changed_files: list[str]


def run_json(status: RunStatus) -> RunJson:
    """Everything about one run, for ``--json``."""
    so_far, job, record, failure = status.measured, status.job, status.record, status.failure
    sweep = None if record is None else record.sweep
    code = status.code
    repository = None if code is None else code.repository
    best = best_evaluation(status.run.checkpoints)
    kept = best_checkpoint(status.run.checkpoints)
    return {
        "run": status.run.name,
        "directory": str(status.run.path),
        "kind": None if record is None else record.kind,
        "scheduler": None if record is None else record.scheduler,
        "job_id": None if record is None else record.job_id,
        "submitted_at": None if record is None else record.submitted_at,
        "hash_seed": None if record is None else record.hash_seed,
        "sweep": None if sweep is None else {"name": sweep.name, "values": dict(sweep.values)},
        "state": job.state.value,
        "reason": job.reason,
        "hint": job.hint or None,
        "source": job.source,
        "nodes": job.nodes,
        "exit_code": job.exit_code,
        "expected_start": job.start if job.state.waits else None,
        "after": [] if record is None else list(record.after),
        "waited_s": status.times.waited_s,
        "run_s": status.times.run_s,
        "walltime_left_s": status.times.left_s,
        "node_hours": status.times.node_hours,
        "last_step": status.last_step,
        "phase": status.phase,
        "stalled": status.stalled or None,
        "restarts": status.restarts,
        "step": status.step,
        "steps": status.steps,
        "first_loss": so_far.first_loss,
        "last_loss": so_far.last_loss,
        "samples_per_s": so_far.samples_per_s,
        "tokens_per_s": so_far.tokens_per_s,
        "step_time_s": so_far.step_time_s,
        "timed_steps": so_far.timed_steps,
        "remaining_s": so_far.remaining_s,
        "evaluation_step": so_far.evaluation_step,
        "evaluation": so_far.evaluation,
        "predicted_step_time_s": status.predicted_step_s,
        "measured_over_predicted": status.prediction_ratio,
        "processor": None if so_far.processor is None else write_value(so_far.processor),
        "efficiency": status.efficiency,
        "not_finite_steps": list(so_far.not_finite),
        "rebalanced": list(so_far.rebalanced),
        "early_stop": so_far.early_stop or None,
        "best": None if best is None else best.to_json(),
        "best_checkpoint": None if kept is None else str(kept.path),
        "waits_for": None if status.laggard is None else status.laggard._asdict(),
        "ranks": [vars(rank) for rank in status.ranks],
        "peaks": [peak._asdict() for peak in status.peaks],
        "error": None if failure is None else {"where": failure.where, "message": failure.what},
        "warning": status.warning or None,
        "commit": None if repository is None else repository.commit,
        "uncommitted": None if repository is None else list(repository.changed),
        "changed_files": [file.path for file in status.changed_files],
        "used_changed_files": read_changed_code(status.start),
    }


class SweepJson(TypedDict):
    """A sweep.

    Args:
        sweep, directory: its name, and the path of its directory.
        best: name of the best completed run; null if there is none.
        runs: its runs.
    """

    sweep: str
    directory: str
    best: str | None
    runs: list[RunJson]


def runs_json(
    subject: Subject, statuses: Sequence[RunStatus]
) -> RunJson | SweepJson | list[RunJson]:
    """Return everything about one run, a sweep and its runs, or a list of runs."""
    runs = [run_json(status) for status in statuses]
    if subject is None:
        return runs
    if isinstance(subject, RunDirectory):
        return runs[0]
    best = find_best(statuses)
    return {
        "sweep": subject.name,
        "directory": str(subject.path),
        "best": None if best is None else best.run.name,
        "runs": runs,
    }
