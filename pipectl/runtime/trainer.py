"""The training loop of one rank: the warm-up before the first step, steps, and checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import islice, pairwise
from typing import Any

import torch

from pipectl import torch_api
from pipectl.cluster import Cluster
from pipectl.errors import PipectlError, UsageError
from pipectl.files import write_text
from pipectl.runs import StartDirectory, read_metrics
from pipectl.runs.phases import DONE, TRAINS, evaluates, saves
from pipectl.runtime.alarm import Alarm, OtherRankError
from pipectl.runtime.asynchronous import AsynchronousSteps
from pipectl.runtime.changed_optimizer import restore_optimizer
from pipectl.runtime.checkpoint import Keep, Saver, Stored, saved_names, take_snapshot
from pipectl.runtime.manifest import Manifest
from pipectl.runtime.rank_process import say, warn
from pipectl.runtime.rebalancing import Rebalancing
from pipectl.runtime.setup import Setup
from pipectl.runtime.step import Step, StepRun
from pipectl.runtime.step_end import StepEnd
from pipectl.runtime.steps import Steps, SynchronousSteps
from pipectl.runtime.stopping import GO_ON, MOVE, STOP, EarlyStopping, StopRequest
from pipectl.runtime.telemetry import Telemetry
from pipectl.runtime.tracing import PlannedBatches, Tracing
from pipectl.runtime.waiting import broadcast, gather_all
from pipectl.schedule import channels, is_unflushed, lower, lower_renewal
from pipectl.simulate.memory import room_bytes

_CHECK_REPLICAS_EVERY = 100
"""In steps."""


class Trainer:
    """Trains the stages of one rank, step by step, together with all other ranks.

    Args:
        setup: the rank's stages, engines and data.
        start: the start of the run that this process is part of.
        cluster: for which the plan was made, whose memory limits copies for checkpoints; None if
            unknown.
        messages: how they are sent, for the heartbeat.
        stored: the checkpoint from which the run resumes.
        tell: called with every line of the metrics, on rank 0.
        rebalancing: on rank 0, looks for a better plan; None if the plan stays.
    """

    def __init__(
        self,
        setup: Setup,
        start: StartDirectory,
        cluster: Cluster | None = None,
        messages: Mapping[str, str] | None = None,
        stored: Stored | None = None,
        tell: Callable[[dict[str, Any]], object] | None = None,
        rebalancing: Rebalancing | None = None,
    ) -> None:
        self._setup = setup
        self._spec = setup.job.spec
        self._start = start
        self._rank = setup.communicator.rank
        self._rebalancing = rebalancing
        steps = self._spec.training.steps
        self._telemetry = Telemetry(
            setup.communicator.Dup(),
            start,
            steps,
            tuple(setup.stages),
            messages,
            setup.plan.stages[setup.training.cut.loss_stage].ranks,
            tell or (lambda _: None),
            (lambda *_: None) if rebalancing is None else rebalancing.look,
        )
        rows = len(lower(setup.plan, self._rank))
        planned = PlannedBatches(setup.job.loader, setup.plan)
        self._tracing = Tracing(
            setup.communicator, start.run, self._spec.trace, steps, rows, planned
        )
        setup.board.phase("making the optimizer")
        self._step_end = self._make_step_end()
        evaluation = self._spec.evaluation
        early_stopping = None if evaluation is None else evaluation.early_stopping
        keeps_best = self._spec.keeps_best
        self._early_stopping = EarlyStopping(early_stopping, keeps_best=keeps_best)
        watching = gather_all(setup.communicator, self._step_end.updater.watches)
        self._keeps_evaluations = self._early_stopping.watches or any(watching)
        self._room_bytes = self._room_for_copies(cluster)
        persistent = torch_api.persistent_names(setup.job.wrapper)
        self._names, self._aliases = saved_names(persistent, setup.job.tied)
        self._saver = self._make_saver()
        kind = AsynchronousSteps if is_unflushed(setup.plan) else SynchronousSteps
        self._steps: Steps = kind(
            setup.plan,
            setup.batches,
            setup.training,
            self._step_end,
            self._telemetry,
            self._tracing,
            self._saver.poll,
        )
        self._alarm = Alarm(setup.communicator.Dup())
        self._stopped = self._moves = False
        self._steps_done = self._save_begun_after = 0
        self._unevaluated = False
        if stored is not None:
            self._restore(stored)

    def _make_step_end(self) -> StepEnd:
        moving = self._rebalancing
        moves = (lambda: False) if moving is None else (lambda: moving.found is not None)
        request = StopRequest(self._start.stop_request, moves)
        step_end = StepEnd(self._setup, request, self._telemetry.fault, self._finish_saving)
        if step_end.looks:
            self._setup.training.on_results = step_end.origins.note
        return step_end

    def _make_saver(self) -> Saver:
        checkpoint = self._spec.checkpoint
        return Saver(
            self._setup.communicator.Dup(),
            self._start.run.checkpoints,
            Keep(checkpoint.keep, checkpoint.keep_every, self._spec.keeps_best),
            self._start.number,
            warn,
            self._telemetry.has_written,
        )

    def train(self) -> bool:
        """Run all steps, evaluations and checkpoints.

        Returns:
            Whether the training is to go on under another plan, from the newest checkpoint.
        """
        self._begin("warming up")
        self._setup.learn_layouts()
        self._begin(TRAINS)
        if self._rebalancing is not None:
            self._rebalancing.begin()
        self._train_steps()
        self._setup.board.phase("finishing")
        self._step_end.settle()
        self._setup.batches.feed.finish()
        self._tracing.finish()  # even if the last checkpoint cannot be written
        self._saver.finish()
        phase = "stopped" if self._stopped else "moving to another plan" if self._moves else DONE
        self._telemetry.finish(phase)
        if self._stopped and self._rank == 0:
            write_text(self._start.stopped_marker, "")
        return self._moves

    def _train_steps(self) -> None:
        """Train one step at a time.

        If steps overlap, train up to the next step after which the pipeline is empty.
        """
        if self._ends_early():  # a resumed run that had ended
            return
        setup, steps, board = self._setup, self._steps, self._setup.board
        loader, count = setup.job.loader, self._spec.training.steps
        if self._unevaluated and self._evaluates_after(self._steps_done):
            self._evaluate(self._steps_done)  # the run ended before it or in it
            if self._is_best(self._steps_done):
                self._save(self._steps_done)
            if self._ends_early():
                return
        self._open_data()
        batches = islice(loader.batches(), self._steps_done, None)
        left = range(self._steps_done + 1, count + 1)
        drains = [step for step in left if not steps.overlap or self._drains_after(step)]
        for before, step in pairwise([self._steps_done, *drains]):
            board.step(before + 1)
            steps.train(before + 1, list(islice(batches, step - before)))
            self._between_steps(step)
            early = self._ends_early()
            answer = GO_ON if early else self._step_end.answer(votes_again=steps.overlap)
            if answer == MOVE and step < count and self._save_for_move(step):
                self._moves = True
                if self._rebalancing is not None and (move := self._rebalancing.found) is not None:
                    balance = move.balance
                    self._telemetry.rebalanced(step, move.why, balance.before_s, balance.after_s)
                return
            if (early or answer == STOP) and step < count:
                self._stopped = answer == STOP
                self._step_end.settle()
                if self._save_begun_after != step:
                    setup.replicas.check_weights(step)
                    self._save(step)
                return

    def _open_data(self) -> None:
        loader, done, board = self._setup.job.loader, self._steps_done, self._setup.board
        reads_again = done > 0 and loader.samples is None
        if reads_again:
            # A phase of its own, so that no rank counts as lost: it may take very long.
            board.phase("reading the samples of earlier steps")
            if self._rank == 0:
                say(f"iterable data are read again up to step {done}")
        self._steps.begin(loader, self._spec.training.steps, done)
        if reads_again:
            board.phase(TRAINS)

    def _save_for_move(self, step: int) -> bool:
        """Save the state after a step, from which another plan goes on. If that fails, the present
        plan stays.

        Returns:
            Whether it was saved.
        """
        if self._save_begun_after != step:
            self._setup.replicas.check_weights(step)
            self._save(step)
        is_saved = self._saver.wait_saved()
        if self._rebalancing is not None and not is_saved:
            self._rebalancing.drop()
        self._begin(TRAINS)
        return is_saved

    def _ends_early(self) -> bool:
        return bool(self._early_stopping.reason)

    def _between_steps(self, step: int) -> None:
        saves, saves_first = self._saves_after(step), self._saves_first(step)
        if self._drains_after(step):
            self._step_end.settle()
        checks = saves or step % _CHECK_REPLICAS_EVERY == 0
        if checks:
            self._setup.replicas.check_weights(step)
        if saves_first:
            self._save(step, unevaluated=True)
            self._saver.wait()
        if self._evaluates_after(step):
            self._evaluate(step)
        saves_best = self._is_best(step)
        if saves_best and not checks:
            self._setup.replicas.check_weights(step)
        if (saves or saves_best) and not saves_first:
            self._save(step)
            self._begin(TRAINS)
        self._saver.poll()
        if not self._saver.is_writing:
            self._setup.device.end_copy()

    def _evaluate(self, step: int) -> None:
        setup, plan = self._setup, self._setup.plan
        self._begin("evaluating", evaluates(step))
        # Send weights to ranks that run only forwards, as the next step would.
        renewal = lower_renewal(plan, self._rank)
        setup.training.run(StepRun(Step(renewal, channels(plan), self._rank, ())))
        result = self._result_of_evaluation(step)
        self._early_stopping.watch(step, result, recurs=self._recurs(step))
        if self._rank == 0:
            self._telemetry.evaluation(step, result, self._early_stopping.reason)
        self._begin(TRAINS)

    def _result_of_evaluation(self, step: int) -> dict[str, float]:
        """Evaluate; the learning rate may follow if the evaluation recurs.

        An evaluation that fails on any rank costs no training: all ranks save their state as it was
        before it, and the run ends.
        """
        setup, updater = self._setup, self._step_end.updater
        evaluator = setup.evaluator
        assert evaluator is not None
        count, written = len(updater.losses), setup.written.items()
        buffers = {n: each.clone() for n, each in written if n in evaluator.writes}

        def evaluate() -> dict[str, float]:
            result = evaluator.evaluate(step)
            if self._recurs(step):
                setup.replicas.take_evaluated(evaluator.writes)
                updater.watch(result["loss"])
            else:
                self._reset_buffers(buffers)
            return result

        try:
            return self._alarm.guard(evaluate)
        except Exception as error:  # on all ranks
            where = setup.board.read()
            updater.forget_losses(count)
            self._reset_buffers(buffers)
            try:
                self._save_unevaluated(step, error)
            except Exception as failure:  # of a device that has failed, say
                raise failure if isinstance(error, OtherRankError) else error from failure
            setup.board.return_to(where)
            self._alarm.end(error)

    def _reset_buffers(self, values: Mapping[str, torch.Tensor]) -> None:
        with torch.no_grad():
            for name, value in values.items():
                self._setup.written[name].copy_(value)

    def _save_unevaluated(self, step: int, error: Exception) -> None:
        """Save the state before an evaluation that has failed, and add to the error that it is."""
        if self._save_begun_after != step:
            self._save(step, unevaluated=True)
        try:
            self._saver.finish()
        except UsageError:  # rank 0 has warned that it cannot be written
            return
        saved = f"the training is saved up to step {step}, where `pipectl resume RUN` goes on"
        if isinstance(error, PipectlError):
            resumed = f"{saved} (after a change, --with-changed-code)"
            error.hint = resumed if error.hint is None else f"{error.hint}; {resumed}"
        if self._rank == 0:
            say(f"the evaluation has failed; {saved}")

    def _begin(self, phase: str, words: str = "") -> None:
        """Begin a phase.

        Args:
            words: for the heartbeat, if they say more.
        """
        self._telemetry.begin(words or phase)
        self._setup.board.phase(phase)

    def _room_for_copies(self, cluster: Cluster | None) -> int | None:
        """Bytes available for copies of the state; None if memory is not limited.

        Host memory of accelerator ranks is not limited: the plan counts the accelerator's memory.
        """
        setup = self._setup
        if setup.device.torch_device.type != "cpu":
            return None
        limit_bytes: float | None = setup.plan.memory_limit_bytes
        if cluster is not None:
            limit_bytes = cluster.memory_of(self._rank, limit_bytes)
        return room_bytes(setup.plan, self._rank, limit_bytes)

    def _restore(self, stored: Stored) -> None:
        """Restore all state outside the model.

        The position in the data and the random numbers follow from the number of steps.
        """
        manifest, step_end = stored.manifest, self._step_end
        updater, scale = step_end.updater, step_end.loss_scale
        told = set[str]()
        if updater.optimizer is not None:
            told = restore_optimizer(stored, self._setup.job, updater, step_end.updated)
        everyone = set[str]().union(*gather_all(self._setup.communicator, told))
        for words in sorted(everyone) if self._rank == 0 else ():
            warn(words)
        updater.restore(manifest.updates, manifest.losses)
        self._early_stopping.restore(manifest.metric_values, manifest.best)
        if scale is not None and manifest.loss_scale is not None:
            scale.restore(manifest.loss_scale)
        self._steps_done = self._save_begun_after = manifest.step
        self._unevaluated = self._lacks_evaluation(manifest)
        self._telemetry.restore(self._steps_done)

    def _lacks_evaluation(self, manifest: Manifest) -> bool:
        """Whether the evaluation after the step of a checkpoint is still to be made; collective.

        The checkpoint after the last step may be older than its evaluation, and a run may end at a
        step that was not its last one. Whether it was made is known from the metrics; what follows
        from it may have to be a part of the state, too.
        """
        step, setup = manifest.step, self._setup
        if not (manifest.unevaluated or step == self._spec.training.steps):
            return False
        evaluator = setup.evaluator
        is_state = self._keeps_evaluations or (evaluator is not None and bool(evaluator.writes))
        if manifest.unevaluated and is_state:
            return True
        made = False
        if self._rank == 0:
            lines = read_metrics(self._start.run)
            made = any(line.step == step and line.evaluation is not None for line in lines)
        return not broadcast(setup.communicator, made)

    def _save(self, step: int, *, unevaluated: bool = False) -> None:
        """Begin to save the state after a step.

        Args:
            unevaluated: whether an evaluation is due that has not been made.
        """
        self._begin("saving", saves(step))
        self._save_begun_after = step
        step_end, setup = self._step_end, self._setup
        updater = step_end.updater
        with setup.device.copying() as leave_out:
            snapshot = take_snapshot(
                setup.saved,
                self._names,
                updater,
                step_end.owned_parameters,
                self._room_bytes,
            )
            if snapshot.is_copy:
                leave_out(snapshot.size_bytes)
        manifest = Manifest(
            step,
            setup.plan.micro_batch_size,
            self._aliases,
            updates=updater.updates,
            losses=tuple(updater.losses),
            metric_values=tuple(self._early_stopping.metric_values),
            best=self._early_stopping.best,
            loss_scale=None if step_end.loss_scale is None else step_end.loss_scale.state,
            unevaluated=unevaluated,
        )
        self._saver.start(manifest, snapshot)

    def _finish_saving(self) -> None:
        """Finish as a phase of its own, so that no rank counts as lost if the disk is slow."""
        board = self._setup.board
        before = board.read()
        board.phase("saving")
        try:
            self._saver.finish()
        finally:  # error reports name the row
            board.return_to(before)

    def _drains_after(self, step: int) -> bool:
        """Whether the pipeline is empty after a step."""
        return self._evaluates_after(step) or self._saves_after(step)

    def _evaluates_after(self, step: int) -> bool:
        evaluation = self._spec.evaluation
        return evaluation is not None and self._is_due(step, evaluation.every)

    def _recurs(self, step: int) -> bool:
        """Whether the evaluation after a step is made however many steps there are.

        One that is made only because the training ends leaves no trace in the state, so that a run
        that gets more steps is as one that had them from the start.
        """
        evaluation = self._spec.evaluation
        return evaluation is not None and _is_multiple(step, evaluation.every)

    def _saves_after(self, step: int) -> bool:
        return self._is_due(step, self._spec.checkpoint.every)

    def _saves_first(self, step: int) -> bool:
        """Whether the checkpoint of a step is complete before the evaluation begins.

        It is after the last step, so that an evaluation that fails costs no training, unless the
        evaluation changes what a checkpoint holds.
        """
        evaluator = self._setup.evaluator
        return (
            evaluator is not None
            and step == self._spec.training.steps
            and not (self._keeps_evaluations or evaluator.writes)
        )

    def _is_best(self, step: int) -> bool:
        """Whether the evaluation after a step is the best so far, and its weights are kept."""
        best = self._early_stopping.best
        return self._spec.keeps_best and best is not None and best.step == step

    def _is_due(self, step: int, every: int | None) -> bool:
        """Whether something happens after a step: every ``every`` steps, and after the last."""
        return step == self._spec.training.steps or _is_multiple(step, every)


def _is_multiple(step: int, every: int | None) -> bool:
    return every is not None and step % every == 0
