"""Random plans of the whole search space: what is proved of their programs, and what is found."""

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from pipectl.cluster import assumed_cluster
from pipectl.lanes import TransferKind
from pipectl.schedule import Action, Actions, Kind, channels, lower, messages
from pipectl.simulate import simulate
from pipectl.simulate.memory import host_bytes, stage_peaks_in_flight
from tests.schedule.random_plans import RANKS, overlapping_plans, plans
from tests.schedule.validator import InvalidError, validate

pytestmark = pytest.mark.slow


def programs_of(plan):
    return [lower(plan, rank) for rank in range(plan.ranks)]


@settings(max_examples=100, deadline=None)
@given(plan=plans(), fewer=st.integers(0, 2))
def test_programs_of_any_plan_are_proved(plan, fewer):
    validate(plan, programs_of(plan))
    in_flight = stage_peaks_in_flight(plan)
    for stage, depth, most in zip(plan.stages, plan.warm_up, in_flight, strict=True):
        if plan.schedule == "1f1b" and stage.updating_ranks == stage.ranks[:1]:
            assert most == min(depth, plan.micro_batches)
    assert_forwards_ascend(plan)
    count = max(1, plan.micro_batches - fewer)
    validate(plan, [lower(plan, rank, count) for rank in range(plan.ranks)], count)


@settings(deadline=None)
@given(plan=overlapping_plans())
def test_forwards_ascend_where_steps_overlap(plan):
    assert_forwards_ascend(plan)


def assert_forwards_ascend(plan):
    """A stage reads the buffers that its forward of the micro-batch before has written."""
    for program in programs_of(plan):
        forwards = [(row.stage, row.micro_batch) for row in program if row.kind is Kind.FORWARD]
        for stage in {stage for stage, _ in forwards}:
            mine = [micro_batch for other, micro_batch in forwards if other == stage]
            assert mine == sorted(mine)


def taken_out(rows, position, data):
    rows.pop(position)


def doubled(rows, position, data):
    rows.insert(position, rows[position])


def put_first(rows, position, data):
    rows.insert(0, rows.pop(position))


def may_not_be_first(row, position):
    waits = row.kind.name.endswith("_WAIT") or row.kind.name.startswith("BACKWARD")
    return position and (waits or (row.kind is Kind.UPDATE and row.stage >= 0))


def about_something_else(rows, position, data):
    fields = ["kind", "stage", "micro_batch", "start", "stop", "weight_version"]
    field = data.draw(st.sampled_from(fields))
    values = list(rows[position])
    values[Action._fields.index(field)] += 1
    rows[position] = Action(Kind(values[0] % len(Kind)), *values[1:])


@pytest.mark.parametrize("damage", [taken_out, doubled, put_first, about_something_else])
@settings(max_examples=50, deadline=None)
@given(plan=plans() | overlapping_plans(), data=st.data())
def test_no_row_can_be_otherwise(damage, plan, data):
    programs = [list(program) for program in programs_of(plan)]
    places = [
        (rows, position)
        for rows in programs
        for position, row in enumerate(rows)
        if damage is not put_first or may_not_be_first(row, position)
    ]
    assume(places)
    damage(*data.draw(st.sampled_from(places)), data)
    with pytest.raises(InvalidError):
        validate(plan, list(map(Actions.of, programs)))


@settings(deadline=None)
@given(plan=plans())
def test_peaks_are_those_of_a_ledger_of_buffers(plan):
    peaks = simulate(plan, assumed_cluster("c", [RANKS], 1, None)).peak_memory_bytes
    for rank, program in enumerate(programs_of(plan)):
        device, host = ledger(plan, rank, program)
        assert peaks[rank] == round(max(device))
        assert host_bytes(plan, program).tolist() == pytest.approx(host)


def ledger(plan, rank, program):
    """Bytes on the device and on the host in every row, by keeping every buffer by name."""
    book = Ledger(plan, rank)
    device, host = [], []
    for action in program:
        book.done, book.afterwards = [], {}
        book.enter(action)
        device.append(book.resident + float(sum(book.held.values())))
        host.append(float(sum(book.host.values())))
        for name in book.done:
            book.held.pop(name, None)
        book.held.update(book.afterwards)
        if action.kind is Kind.FETCH_WAIT:
            del book.host[action.stage, action.micro_batch]
    assert not book.held
    assert not book.host
    return device, host


class Ledger:
    def __init__(self, plan, rank):
        self.plan, self.rank, self.held, self.host, self.done = plan, rank, {}, {}, []
        self.afterwards = {}
        self.channels = dict(enumerate(channels(plan)))
        updated = sum(150 for stage in plan.stages if rank in stage.updating_ranks)
        apart = (rank in s.ranks and rank not in s.updating_ranks for s in plan.stages)
        self.resident = updated + 100 * sum(apart)
        self.moved = {}
        for c, item in self.channels.items():
            if item.source_rank == rank and item.kind is not TransferKind.WEIGHT:
                columns = np.broadcast_arrays(*messages(plan, item, plan.micro_batches))
                for index, *span in np.stack(columns, axis=1).tolist():
                    self.moved[c, index] = Action(Kind.SEND_START, -1, index, c, *span)

    def size(self, full, action):
        size = self.plan.micro_batch_size
        samples = round(self.plan.micro_batch_shares[action.micro_batch] * size)
        if action.start >= 0:
            samples = action.stop - action.start
        return Fraction(full * samples, size)

    def mine(self, kind, stage, end):
        """Channels of a kind at one end of which is this stage on this rank."""
        return [
            index
            for index, item in self.channels.items()
            if item.kind is kind
            and getattr(item, f"{end}_stage") == stage
            and getattr(item, f"{end}_rank") == self.rank
        ]

    def make(self, kind, stage, index):
        """Buffers of what is sent, or stays on the rank for another stage's backward."""
        for c in self.mine(kind, stage, "source"):
            local = self.channels[c].is_local
            if (c, index) in self.moved and (kind is TransferKind.GRADIENT or not local):
                size = self.size(self.channels[c].size_bytes, self.moved[c, index])
                self.held["in" if local else "out", c, index] = size

    def read(self, kind, stage, index):
        """What was received ends with the action that reads it."""
        self.done += [("in", c, index) for c in self.mine(kind, stage, "target")]

    def enter(self, action):  # noqa: C901 - a case for every kind
        stage, index, c = action.stage, action.micro_batch, action.channel
        held = self.plan.stages[stage]
        kept, running = self.size(held.kept_bytes, action), held.running
        match action.kind:
            case Kind.FORWARD:
                apart = self.mine(TransferKind.SAVED, stage, "source")
                if not apart:
                    self.held["kept", stage, index] = kept
                self.make(TransferKind.SAVED, stage, index)
                if apart or held.recompute or held.offload:
                    self.make(TransferKind.ACTIVATION, stage, index)
                self.read(TransferKind.ACTIVATION, stage, index)
            case Kind.RECOMPUTE:
                self.held["rest", stage, index] = self.size(running.saved_bytes, action) - kept
            case Kind.BACKWARD | Kind.BACKWARD_INPUT:
                self.held["gradients", stage] = 100
                self.make(TransferKind.GRADIENT, stage, index)
                self.read(TransferKind.GRADIENT, stage, index)
                self.read(TransferKind.SAVED, stage, index)
                self.done += [("kept", stage, index), ("rest", stage, index)]
                if action.kind is Kind.BACKWARD_INPUT:
                    name = "between", stage, index
                    self.held[name] = self.size(running.grown_bytes, action)
                    self.afterwards[name] = self.size(running.between_bytes, action)
            case Kind.BACKWARD_WEIGHT:
                self.done.append(("between", stage, index))
            case Kind.REDUCE_START:
                self.held["copies", stage] = 100
                self.held["arriving", stage] = 100 * (held.replicas - 1) // held.replicas
            case Kind.REDUCE_WAIT:
                self.done += [("copies", stage), ("arriving", stage)]
            case Kind.UPDATE:
                self.done += [name for name in self.held if name[0] == "gradients"]
            case Kind.RECEIVE_START if index < 0:
                self.held["weights", c] = self.channels[c].size_bytes
            case Kind.RECEIVE_START:
                self.held["in", c, index] = self.size(self.channels[c].size_bytes, action)
            case Kind.RECEIVE_WAIT:
                self.done.append(("weights", c))
            case Kind.SEND_WAIT:
                self.done.append(("out", c, index))
            case Kind.OFFLOAD_START:
                self.host[stage, index] = kept
            case Kind.OFFLOAD_WAIT:
                self.done.append(("kept", stage, index))
                self.read(TransferKind.SAVED, stage, index)
            case Kind.FETCH_START:
                self.held["kept", stage, index] = kept
