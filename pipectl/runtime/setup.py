"""From a captured job and a plan to a rank that can train: cuts, stages, transports, engines."""

from __future__ import annotations

import os
from collections.abc import Collection, Container, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from mpi4py import MPI
from torch import Tensor, nn

from pipectl.capture import CapturedJob, Cut, evaluation_stages
from pipectl.capture.model_with_loss import own_name
from pipectl.capture.norms import refuse_single_values
from pipectl.capture.python_state import preserve_state
from pipectl.capture.refusals import place_of_node
from pipectl.capture.slices import Span
from pipectl.errors import MismatchError
from pipectl.lanes import Lane
from pipectl.plan import Plan, Replication
from pipectl.runtime.agreement import check_initial
from pipectl.runtime.checkpoint import Stored
from pipectl.runtime.device import Device
from pipectl.runtime.division import Batches, Division
from pipectl.runtime.engine import Engine
from pipectl.runtime.evaluation import Evaluator
from pipectl.runtime.gradients import SharedGradients, shared_uses
from pipectl.runtime.offload import mover_of, offload_directory
from pipectl.runtime.pipefb import add_lanes, make_half
from pipectl.runtime.replicas import Replicas
from pipectl.runtime.stage import Key, Stage
from pipectl.runtime.step import narrowed, parts_of
from pipectl.runtime.transport import CHECK_VARIABLE, Progress, Transport, Wire
from pipectl.runtime.waiting import barrier, broadcast
from pipectl.schedule import channels, is_unflushed, plan_of_trial, splits_backwards
from pipectl.schedule.one_f_one_b import ONE_F_ONE_B
from pipectl.watch.board import Board


class Setup:
    """Everything that a rank needs for training and evaluation under one plan.

    Args:
        stored: the checkpoint from which the run resumes.
        once: whether one rank reads the data for all.

    Attributes:
        stages: of this rank, by index.
        training: the engine for training.
        evaluator: None without evaluation data.
        batches: this rank's parts of the training data.
        written: the buffers of this rank that forwards write, by full name.
        replicas: the joint work of the replicas of its stages.
        shared_gradients: the joint work of all uses of a parameter.
        saved: the parameters and buffers that this rank saves, by full name in model order.
    """

    def __init__(
        self,
        communicator: MPI.Comm,
        job: CapturedJob,
        plan: Plan,
        device: Device,
        board: Board,
        progress: Progress | None = None,
        stored: Stored | None = None,
        *,
        once: bool = False,
    ) -> None:
        self._progress = progress or Progress()
        self.job, self.plan, self.communicator, self.device = job, plan, communicator, device
        self.board = board
        self._division = Division.of(job, plan, communicator)
        cuts = self._cuts()
        written = _written_buffers(cuts, training=False) | _written_buffers(cuts, training=True)
        saved = self._load_states(cuts, written, stored)
        self._mover = mover_of(plan, communicator.rank, device.torch_device, offload_directory())
        self.stages = self._build_stages(cuts, written)
        board.phase("connecting to the other ranks")
        barrier(communicator)  # ranks that made more weights arrive later; MPI would spin
        cut = cuts[True, self._division.planned]
        buffers = {n: t for stage in self.stages.values() for n, t in stage.buffers.items()}
        self.written = {name: tensor for name, tensor in buffers.items() if name in written}
        self.replicas = Replicas(communicator, plan, self.stages, device, self._progress, written)
        is_mine = self.replicas.sharded
        self.saved = {n: t for n, t in job.states.items() if is_mine.get(n, n in saved)}
        add_lanes(cut, job.states, self._planned_lanes(cut))
        self._checks = broadcast(communicator, CHECK_VARIABLE in os.environ)
        self.training = self._engine(cut, cuts)
        self.batches = Batches(communicator, job, plan, self.stages, cut, once=once)
        self.evaluator = None if job.evaluation_loader is None else self._make_evaluator(cuts)
        updated = self.updated_stages.values()
        self.shared_gradients = SharedGradients(
            Wire(communicator.Dup(), device, self._progress),
            shared_uses(cut),
            [stage.updating_ranks for stage in plan.stages],
            {slot: leaf for stage in updated for slot, leaf in stage.uses.items()},
            {name: each for stage in updated for name, each in stage.parameters.items()},
        )
        self._release()

    def close(self) -> None:
        """Release threads, files and gradients, so that another setup of the job can be made."""
        if self._mover is not None:
            self._mover.close()
        self.replicas.close()
        for stage in self.stages.values():
            stage.forget()

    def learn_layouts(self) -> None:
        """Send micro-batches of every shape over every channel, so that both ends know all layouts.

        It leaves no trace: buffers and Python state of modules are restored, gradients are dropped.
        """
        plan = self.plan
        if is_unflushed(plan):  # the same messages, in steps that do not overlap
            plan = replace(plan, schedule=ONE_F_ONE_B.name)
        with preserve_state(self.job.wrapper, self.written.values()):
            for span in self._division.sizes:
                trial = self.batches.step_of(plan_of_trial(plan, span.whole), span.length)
                example = partial(self.job.loader.example, span.whole, length=span.length)
                whole: Any = example() if self.batches.loader is not None else None
                batches = (narrowed(whole, load, span) for load in trial.loads.values())
                self.training.run(self.batches.make_run(trial, batches, "layouts"))
                for stage in self.stages.values():
                    stage.forget()
            if self.evaluator is not None:
                self.evaluator.learn()

    @property
    def updated_stages(self) -> dict[int, Stage]:
        """The stages whose backwards run on this rank, by index."""
        me, plan = self.communicator.rank, self.plan.stages
        return {i: stage for i, stage in self.stages.items() if me in plan[i].updating_ranks}

    def _load_states(
        self, cuts: Mapping[Key, Cut], written: Container[str], stored: Stored | None
    ) -> set[str]:
        """Make the parameters and buffers that this rank holds, and restore them. Collective.

        Args:
            written: full names of the buffers that forwards write.

        Returns:
            Those that this rank saves, unless they are sharded.

        Raises:
            MismatchError: states that several ranks hold begin with other values on some, or
                constants of the graphs, which no checkpoint contains, are others.
        """
        job, stages_of = self.job, _stages_of_states(cuts)
        saved, held = self._saved_and_held(stages_of)
        job.materialize(held)
        values, words = self._shared_constants(cuts)
        if stored is not None:
            stored.restore_states({name: job.states[name] for name in held})
        else:
            several = self._held_by_several(stages_of)
            compared = [n for n in held if n in several and n not in written]
            values |= {name: job.states[name] for name in compared}
        check_initial(self.communicator, values, words)
        return saved

    def _shared_constants(
        self, cuts: Mapping[Key, Cut]
    ) -> tuple[dict[str, Tensor], dict[str, str]]:
        """The constants of this rank's stages that other ranks have, too, and words for each."""
        values, words, stages = dict[str, Tensor](), dict[str, str](), self.plan.stages
        for number, cut in enumerate(cuts.values()):
            graph = cut.graph
            for placeholder, tensor in graph.used_constants.items():
                users = graph.users[placeholder]
                using = {cut.stage_of[user] for user in users}
                ranks = {rank for i in using for rank in stages[i].ranks}
                if len(ranks) > 1 and self.communicator.rank in ranks:
                    key = f"{number} {placeholder}"  # names count the constants of one graph
                    place = place_of_node(graph.operators[graph.position[users[0]]])
                    name = own_name(graph.states[placeholder].name)
                    values[key], words[key] = tensor, f"the tensor {name!r}{place}"
        return values, words

    def _build_stages(self, cuts: Mapping[Key, Cut], written: Container[str]) -> dict[int, Stage]:
        """The stages of this rank by index, and what the plan changes in their code.

        Args:
            written: full names of the buffers that forwards write.
        """
        plan, own = self.plan, self.communicator
        if any(stage.backward_ranks for stage in plan.stages):
            own = own.Dup()  # not for all plans: MPI has few thousand
        wire = Wire(own, self.device, self._progress)
        stages = {i: self._stage(i, cuts, wire) for i in plan.stages_of_rank(own.rank)}
        compiles = self.job.spec.training.compile
        for stage in stages.values():
            if plan.reproducible:
                stage.reproduce(written)
            if splits_backwards(plan):
                stage.split_backwards()
            if compiles:
                stage.compile(compiles)
        return stages

    def _planned_lanes(self, cut: Cut) -> list[Lane]:
        """The lanes of the plan's channels, each as often as it has channels.

        Raises:
            MismatchError: the model needs another one.
        """
        lanes = [Lane(c.kind, c.source_stage, c.target_stage) for c in channels(self.plan)]
        if missing := set(cut.lanes) - set(lanes):
            raise MismatchError(
                f"plan.json lacks a message that the model needs: {sorted(missing)[0]}",
                hint="profile and plan the job again",
            )
        return lanes

    def _make_evaluator(self, cuts: Mapping[Key, Cut]) -> Evaluator:
        return Evaluator(
            self.communicator,
            self.job,
            self._division,
            self._engine(cuts[False, self._division.evaluation_sizes[0]], cuts),
            [stage.ranks[0] for stage in self.plan.stages],
            _written_buffers(cuts, training=False),
            self.batches.reader,
        )

    def _stage(self, index: int, cuts: Mapping[Key, Cut], wire: Wire) -> Stage:
        stage, rank = self.plan.stages[index], self.communicator.rank
        shared = self.job.states, self.device, self.job.spec.training.precision
        mover = self._mover if stage.offload else None
        if stage.updating_ranks != stage.ranks:
            compiles = bool(self.job.spec.training.compile)
            return make_half(stage, index, rank, wire, cuts, *shared, mover, compiles=compiles)
        own: dict[Key, Cut] = {}
        for (training, span), cut in cuts.items():  # by the samples that a stage computes together
            parts: dict[int, Span] = {}
            if training:
                parts = parts_of(plan_of_trial(self.plan, span.whole), rank, index, span.length)
                mine = [name for name, stage in cut.stage_of.items() if stage == index]
                for part in parts.values():  # a whole micro-batch was checked with its graph
                    if not part.is_whole:
                        refuse_single_values(cut.graph, part.size, part.length, mine)
            if parts or not training or self.plan.replication is Replication.WHOLE:
                own[training, parts.get(0, span)] = cut
        firsts = () if stage.segments is None else stage.segments.firsts
        return Stage(index, own, *shared, recompute=stage.recompute, firsts=firsts, mover=mover)

    def _cuts(self) -> dict[Key, Cut]:
        """A cut for micro-batches of every shape; they share the graph if its sizes are dynamic."""
        plan_stages = dict(self.plan.stage_of)
        cuts: dict[Key, Cut] = {}
        for span in self._division.sizes:
            graph = self.job.training_graph(*span.shape)
            cuts[True, span] = Cut(graph, plan_stages, training=True)
        training = cuts[True, self._division.planned].graph
        for span in self._division.evaluation_sizes:
            graph = self.job.evaluation_graph(*span.shape)
            stages = evaluation_stages(graph, training, plan_stages)
            cuts[False, span] = Cut(graph, stages, training=False)
        return cuts

    def _engine(self, cut: Cut, cuts: Mapping[Key, Cut]) -> Engine:
        """An engine with its own messages, for one cut or for cuts of all sizes like it."""
        group = self.communicator.Dup()
        transport = Transport(group, self.device, cut.lanes, self._progress, check=self._checks)
        alike = {span: each for (kind, span), each in cuts.items() if kind is cut.training}
        graphs = {span.shape: each.graph for span, each in alike.items()}
        reductions = self.replicas.reductions
        return Engine(self.stages, cut, transport, self.device, self.board, reductions, graphs)

    def _held_by_several(self, stages_of: Mapping[str, Container[int]]) -> set[str]:
        """The states that several ranks hold: replicas, or stages that use the same."""
        ranks_of: dict[str, set[int]] = {}
        for name, users in stages_of.items():
            for index, stage in enumerate(self.plan.stages):
                if index in users:
                    ranks_of.setdefault(name, set()).update(stage.ranks, stage.updating_ranks)
        return {name for name, ranks in ranks_of.items() if len(ranks) > 1}

    def _saved_and_held(
        self, stages_of: Mapping[str, Collection[int]]
    ) -> tuple[set[str], list[str]]:
        """The states that this rank saves unless they are sharded, and those that it holds.

        Parameters are saved on the rank that updates them, buffers on the rank whose forwards write
        them: that of the lowest stage that uses them; unused ones are saved by the first.
        """
        stages = self.plan.stages
        ranks = {
            True: [stage.updating_ranks[0] for stage in stages],
            False: [stage.ranks[0] for stage in stages],
        }
        me, mine = self.communicator.rank, self.plan.stages_of_rank(self.communicator.rank)
        saved = {
            name
            for name, tensor in self.job.states.items()
            if ranks[isinstance(tensor, nn.Parameter)][min(stages_of.get(name) or (0,))] == me
        }
        held = saved | {n for n, users in stages_of.items() if not set(mine).isdisjoint(users)}
        return saved, [name for name in self.job.states if name in held]

    def _release(self) -> None:
        """Free the parameters and buffers that other ranks hold."""
        mine = {n for s in self.stages.values() for n in (*s.parameters, *s.buffers)}
        self.job.release(n for n in self.job.states if n not in mine and n not in self.saved)


def _stages_of_states(cuts: Mapping[Key, Cut]) -> dict[str, set[int]]:
    """The stages that use each parameter and buffer, by full name."""
    stages_of: dict[str, set[int]] = {}
    for cut in cuts.values():
        for placeholder, state in cut.graph.states.items():
            users = cut.graph.users.get(placeholder, ())
            stages_of.setdefault(state.name, set()).update(cut.stage_of[u] for u in users)
    return stages_of


def _written_buffers(cuts: Mapping[Key, Cut], *, training: bool) -> set[str]:
    graphs = {cut.graph for (kind, _), cut in cuts.items() if kind is training}
    return set().union(*(graph.written_buffers for graph in graphs))
